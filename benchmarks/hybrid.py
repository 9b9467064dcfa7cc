"""Dialogues on the hybrid model: recompute, hash folding, and checkpoints by position.

usage: python -m benchmarks.hybrid [--freeze] [--small]

Every contestant serves the same dialogues on the reference engine (16 ranks, TP 8 and PP 2): one long system
prompt, several users, several turns each; every turn by a new engine on the same directory, so that
each hit is *persistent*. Two thirds of the turns continue a conversation where it ended; in the others a user
edits an earlier message, so that the conversation branches at a place where no request ended.

``--freeze`` writes tokens, hit lengths and times of the two baselines to ``benchmarks/frozen/hybrid.json``;
without it they are run again, and tokens and hit lengths must be those that are frozen. ``--small``: the size
that every run of the tests repeats; the full one is among the long tests.

*Hash folding*: the state belongs to the hash of the whole prefix. One state a request, at its end, found
only by a prompt that begins with all of it; used in place, so the first to continue from it takes it.
*TTFT*: from adding the request to its first token, alone in the engine; in CPU time of all threads, which a
busy machine does not disturb, and as wall time beside it. Compare within one run only.
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
#: What is frozen: name -> turns, tokens of the system prompt, users.
WORKLOADS = {"full": (3, 4096, 2), "small": (3, 300, 1)}


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
    cpu: list[float] = field(default_factory=list)


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
    run.cpu.append(request.first_token_cpu_s or 0.0)


def frozen(baselines: Mapping[str, Run]) -> dict[str, Any]:
    return {
        name: {"tokens": run.tokens, "hits": run.hits, "ttft_s": [round(s, 3) for s in run.seconds]}
        for name, run in baselines.items()
    }


def check_frozen(baselines: Mapping[str, Run], workload: str) -> None:
    """Tokens and hit lengths must be the frozen ones; SystemExit says which are not."""
    kept = json.loads(FROZEN.read_text())[workload]
    for name, run in baselines.items():
        for what, found in (("tokens", run.tokens), ("hits", run.hits)):
            if kept[name][what] != found:
                raise SystemExit(f"{name}: {what} of {workload!r} differ from {FROZEN}")
    print(f"tokens and hit lengths of the baselines are those of {FROZEN.name} ({workload})")


def freeze(baselines: Mapping[str, Run], workload: str) -> None:
    kept = json.loads(FROZEN.read_text()) if FROZEN.exists() else {}
    kept[workload] = frozen(baselines)
    FROZEN.parent.mkdir(exist_ok=True)
    FROZEN.write_text(json.dumps(kept) + "\n")
    print(f"wrote {workload!r} of {FROZEN}")


def hit_rate(run: Run, requests: Sequence[Request]) -> float:
    """Percent of the tokens of all requests but the first that came from what an earlier engine stored."""
    return 100 * sum(run.hits[1:]) / sum(len(request.prompt) for request in requests[1:])


def below(ours: Sequence[float], other: Sequence[float]) -> float:
    """By how many percent our mean over all requests but the first is below another's."""
    return 100 * (1 - sum(ours[1:]) / sum(other[1:]))


def report(requests: Sequence[Request], runs: Mapping[str, Run], history: int) -> None:
    ours, base = runs["ours"], runs["recompute"]
    print(
        f"{len(requests)} requests, system prompt of {history} tokens, each in an engine of its own"
    )
    for name, run in runs.items():
        wrong = sum(a != b for a, b in zip(run.tokens, base.tokens, strict=True))
        print(
            f"  {name:14} persistent hit rate {hit_rate(run, requests):5.1f} %   median TTFT "
            f"{statistics.median(run.cpu[1:]):6.2f} CPU s, {statistics.median(run.seconds[1:]):6.2f} s   "
            f"{wrong} requests differ"
        )
    for name, limit in (("recompute", 40), ("hash folding", 20)):
        other = runs[name]
        print(
            f"  TTFT with {min(ours.hits[1:])} or more tokens reused: {below(ours.cpu, other.cpu):.0f} % "
            f"below {name} in CPU time ({below(ours.seconds, other.seconds):.0f} % in wall time), at least "
            f"{limit} % wanted"
        )


def measure(workload: str, *, keep: bool = False) -> tuple[list[Request], dict[str, Run]]:
    """Run the three contestants; the baselines are compared with the frozen ones, or (``keep``) frozen."""
    turns, history, users = WORKLOADS[workload]

    def work() -> list[Request]:
        return dialogues(turns, history, users)

    baselines = {"recompute": recompute(work()), "hash folding": cached(work(), folding=True)}
    if keep:
        freeze(baselines, workload)
    else:
        check_frozen(baselines, workload)
    return work(), {**baselines, "ours": cached(work(), folding=False)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--freeze", action="store_true", help="write the baselines")
    parser.add_argument("--small", action="store_true", help="the size of the tests")
    given = parser.parse_args()
    workload = "small" if given.small else "full"
    requests, runs = measure(workload, keep=given.freeze)
    report(requests, runs, WORKLOADS[workload][1])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
