"""A hybrid model's cache, drawn: which groups hit how far, where the checkpoint lies, what was skipped.

The reference engine serves a conversation with the 96-layer model over 16 ranks (TP 8, PP 2). A second
engine, which shares nothing with the first but a directory, serves the next turn and a branch of it. Then
some files are deleted, and the picture shows what that costs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from ucm_core.coordinator import HitPlan, Votes
from ucm_core.spec import Kind, SpecTable
from ucm_reference import MODELS, Engine, Limits, LockstepExecutor, Request, Sizes, Topology
from ucm_reference.cached import CachedEngine, cached_engine

MODEL = MODELS["x-hybrid-96"]
TOPOLOGY, SIZES, LIMITS = Topology(tp=8, pp=2), Sizes(), Limits(tokens=512)
#: Tokens per column of the picture.
COLUMN = 32


def picture(table: SpecTable, tokens: int, hit: HitPlan, votes: Votes) -> list[str]:
    """One line a row of the table, then what the engine does."""
    width = -(-tokens // COLUMN)
    lines = []
    for row in table.rows:
        text = " " * width
        note = ""
        if row.kind is Kind.CHAIN or row.kind is Kind.SIDECAR:
            source = row.follows or row.name if row.kind is Kind.SIDECAR else row.name
            there = np.repeat(np.asarray(votes.present[source], np.bool_), row.block_tokens)
            first, stop = hit.load.get(row.name, (0, 0))
            loaded = range(first * row.block_tokens, stop * row.block_tokens)
            text = "".join(
                "#"
                if at in loaded and at < hit.p_star
                else "-"
                if at < len(there) and there[at]
                else " "
                for at in range(0, width * COLUMN, COLUMN)
            )
            run = there.argmin() if not there.all() else len(there)
            note = f"stored up to {run}"
            if row.kind is Kind.SIDECAR:
                note = f"follows {row.follows}, has no say"
            elif row.window is not None:
                note += f", a window of {row.window} is read"
        elif row.kind is Kind.SNAPSHOT:
            marks = list(text)
            for position in votes.checkpoints.get(row.name, ()):
                marks[int(position) // COLUMN - 1] = "@" if position == hit.p_star else "o"
            text = "".join(marks)
            known = [int(p) for p in votes.checkpoints.get(row.name, ())]
            note = f"states at {known}" if known else "no state"
        else:
            note = "nothing is kept"
        lines.append(f"  {row.name:10}|{text}| {note}")
    skipped = "=" * (hit.p_star // COLUMN)
    lines.append(f"  {'skipped':10}|{skipped:{width}}| {hit.p_star} of {tokens} tokens")
    lines.append(f"  l = {hit.l}, p* = {hit.p_star}: {hit.reason.value}")
    return lines


def serve(engine: CachedEngine, request: Request) -> None:
    engine.run([request])
    hit, votes = engine.side.decisions[request.request_id]
    print(f"{request.request_id}: {len(request.prompt)} tokens")
    if engine.side.stats.failed_loads:
        print(f"  a load failed; the request went on from {request.reused} tokens")
    print("\n".join(picture(engine.deployment.placement.table, len(request.prompt), hit, votes)))


def plain(request: Request) -> tuple[list[int], list[str], float]:
    """Tokens, activations and seconds to the first token without a cache."""
    with Engine(MODEL, LockstepExecutor(MODEL, TOPOLOGY, SIZES), sizes=SIZES, limits=LIMITS) as e:
        (done,) = e.run([Request("plain", request.prompt, request.max_tokens)])
    return done.output, done.digests, done.first_token_s or 0.0


def check(request: Request) -> None:
    tokens, digests, seconds = plain(request)
    same = (request.output, request.digests) == (tokens, digests)
    print(
        f"  first token after {request.first_token_s:.2f} s, {seconds:.2f} s without a cache; "
        f"tokens and activations {'identical' if same else 'DIFFERENT'}\n"
    )
    if not same:
        raise SystemExit(1)


def main() -> int:
    rng = np.random.default_rng(7)
    text = rng.integers(0, MODEL.vocabulary, 1400).tolist()
    branch = text[:1100] + rng.integers(0, MODEL.vocabulary, 200).tolist()
    with tempfile.TemporaryDirectory(prefix="ucm-demo-") as folder:
        options = {"store_pipeline": "Posix", "storage_backends": folder}
        common = {"options": options, "sizes": SIZES, "limits": LIMITS}
        print("first engine\n")
        with cached_engine(MODEL, TOPOLOGY, **common) as engine:
            first = Request("first turn", text[:1200], 4)
            serve(engine, first)
            check(first)
        print("second engine, same directory\n")
        with cached_engine(MODEL, TOPOLOGY, **common) as engine:
            for request in (Request("next turn", text, 4), Request("another branch", branch, 4)):
                serve(engine, request)
                check(request)
        files = sorted(p for p in Path(folder).rglob("*") if p.is_file() and len(p.name) == 32)
        for path in files[::9]:
            path.unlink()
        print(f"{len(files[::9])} of {len(files)} stored objects are deleted behind its back\n")
        with cached_engine(MODEL, TOPOLOGY, **common) as engine:
            again = Request("next turn", text, 4)
            serve(engine, again)
            check(again)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
