"""Deciding about a prompt costs the same Python whatever its length: nothing is a loop over blocks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

from ucm_core.coordinator import Coordinator
from ucm_core.identity import ContentChain, ModelIdentity
from ucm_core.spec import KeySpace, Retention

from .tables import chain, state, table

GRAIN = 16


def lines(work: Callable[[], object]) -> int:
    """Python lines executed in this package while ``work`` runs."""
    count = 0

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return local

    def entered(frame: FrameType, event: str, arg: Any) -> Any:
        return local if "ucm_core" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def cost(tokens: int) -> int:
    rows = table(
        chain("kv", 16),
        chain("swa", 16, window=100),
        state("a", 16, retention=Retention(256, budget_bytes=1 << 20)),
        state("b", 16),
        grain=GRAIN,
    )
    coordinator = Coordinator(KeySpace(rows, ModelIdentity("id", "bf16")))
    chain_ = ContentChain(GRAIN)
    chain_.extend(np.arange(tokens, dtype=np.uint32))

    def request() -> None:
        plan = coordinator.plan(chain_)
        answers = {name: np.ones(len(ids), np.bool_) for name, ids in plan.ids.items()}
        hit = coordinator.decide(chain_, plan, answers)
        coordinator.admit(chain_, hit)
        coordinator.heat(chain_, hit)
        coordinator.finish(chain_, 0)

    return lines(request)


def test_python_per_request_not_per_block() -> None:
    """1,000 and 64,000 tokens: 64 times the blocks, a few lines more (halvings of the grid)."""
    short, long = cost(1000), cost(64_000)
    assert short > 100  # it does count
    assert long - short < 30, (short, long)
