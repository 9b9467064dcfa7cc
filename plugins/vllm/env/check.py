"""Run in the finished environment: it must import what the tests import."""

import importlib.util

import torch
import vllm
from vllm import LLM

assert importlib.util.find_spec("torchvision") is None, "torchvision breaks vLLM on a CPU torch"
print(f"vllm {vllm.__version__}, torch {torch.__version__}, {LLM.__name__} imports")
