"""The baselines of the hybrid's dialogues give right answers too; they only reuse less."""

from __future__ import annotations

import json

from benchmarks.hybrid import FROZEN, cached, dialogues, recompute
from ucm_reference import Request


def test_contestants_agree_and_reuse_as_they_should() -> None:
    def work() -> list[Request]:
        return dialogues(3, 300, users=1)

    base = recompute(work())
    folded = cached(work(), folding=True)
    ours = cached(work(), folding=False)
    assert base.tokens == folded.tokens == ours.tokens
    assert base.hits == [0, 0, 0]
    # 360 and 420 tokens; the third turn edits the second one's message: 390 tokens, 330 of them shared
    assert ours.hits == [0, 256, 256]
    assert folded.hits == [0, 256, 0]  # taken by the second turn, which ended at 384


def test_frozen_baselines_are_whole() -> None:
    kept = json.loads(FROZEN.read_text())
    counts = {
        name: {what: len(kept[name][what]) for what in ("tokens", "hits", "ttft_s")}
        for name in ("recompute", "hash folding")
    }
    requests = len(dialogues(**kept["settings"]))
    assert all(n == requests for entry in counts.values() for n in entry.values())
    assert kept["recompute"]["tokens"] == kept["hash folding"]["tokens"]
    assert not any(kept["recompute"]["hits"])
