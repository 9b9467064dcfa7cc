"""Dialogues on the hybrid model: recompute, hash folding, and checkpoints by position.

usage: python -m benchmarks.hybrid [--freeze] [--turns N] [--history N]

Every contestant serves the same dialogues on the reference engine (16 ranks, TP 8 and PP 2): one long system
prompt, several users, several turns each; every turn by a new engine on the same directory, so that
each hit is *persistent*. Two thirds of the turns continue a conversation where it ended; in the others a user
edits an earlier message, so that the conversation branches at a place where no request ended.

``--freeze`` writes tokens, hit lengths and times of the two baselines to ``benchmarks/frozen/hybrid.json``;
without it they are run again, and tokens and hit lengths must be those that are frozen.

*Hash folding*: the state belongs to the hash of the whole prefix. One state a request, at its end, found
only by a prompt that begins with all of it; used in place, so the first to continue from it takes it.
*TTFT*: from adding the request to its first token, alone in the engine. Compare within one run only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ucm_core.coordinator import HitPlan, resolve_hit
from ucm_reference import MODELS, Engine, Limits, LockstepExecutor, Request, Sizes, Topology
from ucm_reference.cache.deployment import open_deployment
from ucm_reference.cache.scheduler import SchedulerSide

FROZEN = Path(__file__).parent / "frozen" / "hybrid.json"
MODEL = MODELS["x-hybrid-96"]
TOPOLOGY = Topology(tp=8, pp=2)
SIZES, LIMITS = Sizes(pages=256, slots=24), Limits(tokens=512, requests=1)
MESSAGE = 60


class FoldedSide(SchedulerSide):
    """Hash folding on our stores: only ends of whole earlier requests count, and only once each."""

    ends: dict[bytes, int]

    def _decide(self, record: Any) -> HitPlan:
        hit = super()._decide(record)
        chain, grain = record.chain, self.placement.table.grain
        usable = [
            position
            for position in range(grain, len(record.request.tokens), grain)
            if chain.links[position // grain - 1].tobytes() in self.ends and position <= hit.l
        ]
        if usable and usable[-1] == hit.p_star:
            return hit
        return self._shorter(record, usable[-1] if usable else 0)

    def _shorter(self, record: Any, position: int) -> HitPlan:
        assert record.votes is not None
        kept = {n: p[p <= position] for n, p in record.votes.checkpoints.items()}
        record.votes = replace(record.votes, checkpoints=kept)
        return resolve_hit(
            self.placement.table,
            len(record.request.tokens),
            record.votes.present,
            kept,
            alignment=self.coordinator.alignment,
        )

    def allocated(self, request: Request, tokens: int) -> None:
        record = self._records[request.request_id]
        super().allocated(request, tokens)
        record.keep = set()
        if tokens:
            grain = self.placement.table.grain
            self.ends.pop(record.chain.links[tokens // grain - 1].tobytes(), None)

    def finished(self, request: Request) -> bool:
        record = self._records[request.request_id]
        hold = super().finished(request)
        position = request.boundary[0]
        if position:
            grain = self.placement.table.grain
            self.ends[record.chain.links[position // grain - 1].tobytes()] = position
        return hold


@dataclass
class Run:
    """What one contestant did, per request in order."""

    tokens: list[list[int]] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def dialogues(turns: int, history: int, users: int = 2) -> list[Request]:
    """Turns of all users, one after the other; every third turn edits an earlier message."""
    rng = np.random.default_rng(11)

    def words(count: int) -> list[int]:
        return [int(x) for x in rng.integers(0, MODEL.vocabulary, count)]

    system = words(history)
    texts = [list(system) for _ in range(users)]
    made = []
    for turn in range(turns):
        for user, text in enumerate(texts):
            if turn % 3 == 2:
                del text[-(MESSAGE + MESSAGE // 2) :]
            text += words(MESSAGE)
            made.append(Request(f"user{user}.turn{turn}", list(text), 4))
    return made


def recompute(requests: Sequence[Request]) -> Run:
    run = Run()
    for request in requests:
        executor = LockstepExecutor(MODEL, TOPOLOGY, SIZES)
        with Engine(MODEL, executor, sizes=SIZES, limits=LIMITS) as engine:
            engine.run([request])
        _note(run, request)
    return run


def cached(requests: Sequence[Request], *, folding: bool) -> Run:
    """Every request in an engine of its own, on one directory."""
    run = Run()
    ends: dict[bytes, int] = {}
    with tempfile.TemporaryDirectory(prefix="ucm-hybrid-") as folder:
        options = {"store_pipeline": "Posix", "storage_backends": folder}
        for request in requests:
            deployment = open_deployment(MODEL, TOPOLOGY, SIZES, options)
            side = deployment.scheduler_side(FoldedSide if folding else SchedulerSide)
            if isinstance(side, FoldedSide):
                side.ends = ends
            executor = LockstepExecutor(MODEL, TOPOLOGY, SIZES, connect=deployment.worker)
            with Engine(MODEL, executor, sizes=SIZES, limits=LIMITS, connector=side) as engine:
                engine.run([request])
            deployment.close()
            _note(run, request)
    return run


def _note(run: Run, request: Request) -> None:
    run.tokens.append(request.output)
    run.hits.append(request.reused)
    run.seconds.append(request.first_token_s or 0.0)


def frozen(baselines: Mapping[str, Run]) -> dict[str, Any]:
    return {
        name: {"tokens": run.tokens, "hits": run.hits, "ttft_s": [round(s, 3) for s in run.seconds]}
        for name, run in baselines.items()
    }


def check_frozen(baselines: Mapping[str, Run], settings: Mapping[str, int]) -> None:
    """Tokens and hit lengths must be the frozen ones; SystemExit says which are not."""
    if not FROZEN.exists():
        return
    kept = json.loads(FROZEN.read_text())
    if kept["settings"] != settings:
        print("(other sizes than the frozen ones: nothing to compare with)")
        return
    for name, run in baselines.items():
        for what, found in (("tokens", run.tokens), ("hits", run.hits)):
            if kept[name][what] != found:
                raise SystemExit(f"{name}: {what} differ from {FROZEN}")
    print(f"tokens and hit lengths of the baselines are those of {FROZEN.name}")


def report(requests: Sequence[Request], runs: Mapping[str, Run], history: int) -> None:
    ours, base, folded = runs["ours"], runs["recompute"], runs["hash folding"]
    later = [i for i, request in enumerate(requests) if i > 0]
    print(
        f"{len(requests)} requests, system prompt of {history} tokens, each in an engine of its own"
    )
    for name, run in runs.items():
        wrong = sum(a != b for a, b in zip(run.tokens, base.tokens, strict=True))
        hit = sum(run.hits[i] for i in later)
        all_ = sum(len(requests[i].prompt) for i in later)
        print(
            f"  {name:14} persistent hit rate {100 * hit / all_:5.1f} %   "
            f"median TTFT {statistics.median(run.seconds[i] for i in later):6.2f} s   "
            f"{wrong} requests differ"
        )
    for name, other, limit in (("recompute", base, 40), ("hash folding", folded, 20)):
        below = [100 * (1 - ours.seconds[i] / other.seconds[i]) for i in later]
        mean = 100 * (
            1 - sum(ours.seconds[i] for i in later) / sum(other.seconds[i] for i in later)
        )
        print(
            f"  TTFT with {min(ours.hits[i] for i in later)} or more tokens reused: mean {mean:.0f} % below "
            f"{name} (median of pairs {statistics.median(below):.0f} %), at least {limit} % wanted"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--freeze", action="store_true", help="write the baselines")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--history", type=int, default=4096)
    given = parser.parse_args()
    settings = {"turns": given.turns, "history": given.history}

    def work() -> list[Request]:
        return dialogues(given.turns, given.history)

    baselines = {"recompute": recompute(work()), "hash folding": cached(work(), folding=True)}
    if given.freeze:
        FROZEN.parent.mkdir(exist_ok=True)
        FROZEN.write_text(json.dumps({"settings": settings, **frozen(baselines)}) + "\n")
        print(f"wrote {FROZEN}")
    else:
        check_frozen(baselines, settings)
    ours = cached(work(), folding=False)
    report(work(), {**baselines, "ours": ours}, given.history)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
