"""Run in the finished environment: what needs no kernel must import. The rest needs the tests' stand-ins."""

import importlib.util

import sglang
import torch

assert importlib.util.find_spec("sgl_kernel") is None, "the tests bring a stand-in for sgl_kernel"
print(f"sglang {sglang.__version__}, torch {torch.__version__}")
