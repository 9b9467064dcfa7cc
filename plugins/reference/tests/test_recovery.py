"""What a failure costs: a load that fails, and a writer that cannot write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ucm_core.errors import StoreError
from ucm_reference import MODELS, Limits, Model, Request, Sizes, Topology
from ucm_reference.cache.deployment import Deployment
from ucm_reference.cache.worker import Worker
from ucm_reference.cached import cached_engine
from ucm_reference.topology import Rank
from workloads import results, run

TOKENS = 1000


def often(name: str) -> Model:
    """The model with a state every 256 tokens."""
    model = MODELS[name]
    rows = [replace(r, interval=256) if r.kind in ("gdn", "mamba2") else r for r in model.rows]
    return replace(model, rows=tuple(rows))


def prompt(length: int = TOKENS) -> list[int]:
    return [(11 * i + i * i // 5) % 509 for i in range(length)]


def serve(folder: Path, model: Model, topology: Topology | None = None, **more: Any) -> Any:
    """Serve the prompt in an engine of its own; returns (result, tokens reused, statistics)."""
    options = {
        "store_pipeline": "Posix",
        "storage_backends": str(folder),
        "staging_buffer_gb": "16 MiB",
        **more,
    }
    with cached_engine(
        model, topology, options=options, sizes=Sizes(slots=32), limits=Limits(tokens=200)
    ) as engine:
        request = Request("r", prompt(), 2)
        engine.run([request])
        engine.drain()
        pending = engine.side.pending()
        assert not any(pending.values()), pending
        assert not any(engine.scheduler.memory_in_use().values())
        return results([request])["r"], request.reused, engine.side.stats


def objects(folder: Path, model: Model, row: str) -> list[tuple[int, Path]]:
    """(tokens at its end, file) of every object of a row that the prompt has, by position."""
    options = {"store_pipeline": "Posix", "storage_backends": str(folder)}
    with cached_engine(model, options=options, sizes=Sizes(slots=32)) as engine:
        keys, side = engine.deployment.placement.keys, engine.side
        request = Request("probe", prompt(), 2)
        side.added(request)
        record = side._records["probe"]
        side._extend(record, TOKENS)
        (at,) = keys.of(row)
        grain = side.placement.table.grain
        found = []
        for link in range(TOKENS // grain):
            position = (link + 1) * grain
            if at.row in side.placement.table.snapshots:
                ids = record.chain.snapshot_ids(at.seed, np.array([position], np.uint64))
            else:
                ids = keys.block_ids(at, record.chain, link, link + 1)
            paths = [p for p in folder.rglob(ids[0].tobytes().hex()) if p.is_file()]
            found += [(position, path) for path in paths]
        return found


def damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[4096 + 3] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("name", "row", "bad", "left"),
    [
        # states at 256, 512, 768 and the end, 896: the next common boundary below what is bad
        ("deltanet-8", "gdn", 896, 768),
        ("deltanet-8", "full", 896, 768),
        ("deltanet-8", "full", 640, 512),
        ("deltanet-8", "full", 128, 0),
        # a window of 96: no other row is needed below it, so any boundary before the bad block will do
        ("windows-6", "near", 896, 768),
        ("windows-6", "full", 512, 384),
        # one row alone: what came before the bad block stays, nothing is read twice
        ("gqa-4", "full", 512, 384),
        ("mla-4", "mla", 128, 0),
    ],
)
def test_a_failed_load_continues_from_the_deepest_boundary_valid_in_all_rows(
    name: str, row: str, bad: int, left: int, tmp_path: Path
) -> None:
    model = often(name)
    base, _ = run(model, [Request("r", prompt(), 2)])
    assert serve(tmp_path, model)[:2] == (base["r"], 0)
    assert serve(tmp_path, model)[:2] == (base["r"], 896)
    (path,) = [path for position, path in objects(tmp_path, model, row) if position == bad]
    damage(path)
    found, reused, stats = serve(tmp_path, model)
    assert (found, reused, stats.failed_loads) == (base["r"], left, 1)
    assert stats.hit_tokens == left
    assert serve(tmp_path, model)[:2] == (base["r"], 896), "what was bad was not saved anew"


def test_a_request_fails_two_loads_at_most(tmp_path: Path) -> None:
    model = often("deltanet-8")
    base, _ = run(model, [Request("r", prompt(), 2)])
    serve(tmp_path, model)
    for _, path in objects(tmp_path, model, "gdn"):
        damage(path)
    found, reused, stats = serve(tmp_path, model)
    assert (found, reused, stats.failed_loads) == (base["r"], 0, 2)


class Broken:
    """A store, or a snapshot store, of a rank that cannot write."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def dump(self, *_: Any, **__: Any) -> Any:
        raise StoreError("dump: this rank's medium is gone")

    put = dump


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Rank], bool]], None]:
    """``breaking(which)``: workers of those ranks cannot write."""

    def breaking(which: Callable[[Rank], bool]) -> None:
        def worker(deployment: Deployment, rank: Rank) -> Worker:
            made = whole(deployment, rank)
            if which(rank):
                made._stores = {k: Broken(v) for k, v in made._stores.items()}  # type: ignore[misc]
                made._states = {k: Broken(v) for k, v in made._states.items()}  # type: ignore[misc]
            return made

        monkeypatch.setattr(Deployment, "worker", worker)

    whole = Deployment.worker
    return breaking


@pytest.mark.parametrize("layerwise", ["auto", "save"])
@pytest.mark.parametrize("broken", [(0,), (1, 2), (0, 1, 2)])
def test_another_rank_takes_over_what_all_of_them_hold(
    broken: tuple[int, ...], layerwise: str, breaking: Any, tmp_path: Path
) -> None:
    """Seven latents, four ranks: as long as one of them can write, nothing is lost."""
    model, whole = MODELS["mla-4"], Topology(tp=4)
    breaking(lambda rank: rank.tp in broken)
    _, _, stats = serve(tmp_path, model, whole, use_layerwise=layerwise)
    assert stats.saved_blocks == 7
    assert stats.taken_over >= 1
    breaking(lambda rank: False)
    base, _ = run(model, [Request("r", prompt(), 2)])
    assert serve(tmp_path, model, whole)[:2] == (base["r"], 896)


def test_states_that_context_ranks_share_are_taken_over_too(breaking: Any, tmp_path: Path) -> None:
    model, whole = often("deltanet-8"), Topology(cp=2)
    breaking(lambda rank: rank.cp == 1)
    _, _, stats = serve(tmp_path, model, whole)
    assert stats.saved_states == 4
    assert stats.taken_over >= 1
    # Blocks of a segment lie on one rank alone: nobody can take those over.
    assert {at for at, _ in objects(tmp_path, model, "gdn")} == {256, 512, 768, 896}
    assert len(objects(tmp_path, model, "full")) == 4


def test_nothing_waits_for_a_writer_that_does_not_come(breaking: Any, tmp_path: Path) -> None:
    breaking(lambda rank: True)
    model = MODELS["mla-4"]
    base, _ = run(model, [Request("r", prompt(), 2)])
    found, _, stats = serve(tmp_path, model, Topology(tp=4))
    assert (found, stats.saved_blocks) == (base["r"], 0)
