"""The baselines of the hybrid's dialogues give right answers too; they only reuse less."""

from __future__ import annotations

import json

import pytest

from benchmarks.hybrid import FROZEN, WORKLOADS, below, dialogues, hit_rate, measure, report


def test_the_frozen_baselines_run_again_and_ours_reuses_more() -> None:
    """What ``python -m benchmarks.hybrid --small`` does: other tokens or hit lengths than the frozen ones
    of a baseline end it."""
    _, runs = measure("small")
    base, folded, ours = runs["recompute"], runs["hash folding"], runs["ours"]
    assert base.tokens == folded.tokens == ours.tokens
    assert base.hits == [0, 0, 0]
    # 360 and 420 tokens; the third turn edits the second one's message: 390 tokens, 330 of them shared
    assert ours.hits == [0, 256, 256]
    assert folded.hits == [0, 256, 0]  # taken by the second turn, which ended at 384


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_persistent_hits_and_time_to_first_token() -> None:
    """The full size, as ``python -m benchmarks.hybrid`` prints it; judged by CPU time."""
    requests, runs = measure("full")
    report(requests, runs, WORKLOADS["full"][1])
    ours = runs["ours"]
    assert ours.tokens == runs["recompute"].tokens
    assert min(ours.hits[1:]) >= 4096
    assert hit_rate(ours, requests) >= 90
    assert below(ours.cpu, runs["recompute"].cpu) >= 40
    assert below(ours.cpu, runs["hash folding"].cpu) >= 20


@pytest.mark.parametrize("workload", WORKLOADS)
def test_frozen_baselines_are_whole(workload: str) -> None:
    kept = json.loads(FROZEN.read_text())[workload]
    counts = {
        name: {what: len(kept[name][what]) for what in ("tokens", "hits", "ttft_s")}
        for name in ("recompute", "hash folding")
    }
    requests = len(dialogues(*WORKLOADS[workload]))
    assert all(n == requests for entry in counts.values() for n in entry.values())
    assert kept["recompute"]["tokens"] == kept["hash folding"]["tokens"]
    assert not any(kept["recompute"]["hits"])
