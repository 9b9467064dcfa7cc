"""Reuse on small models: every kind of row, every way of splitting them, and what goes wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from campaigns import compare, serve
from ucm_core.errors import UnsupportedError
from ucm_core.plugins import PluginHost
from ucm_reference import MODELS, Limits, Request, Sizes, Topology
from ucm_reference.cached import cached_engine
from workloads import results, run

SMALL = [name for name in MODELS if len(MODELS[name].layers) < 20]
COUNT = 15


def topology_of(name: str, **fields: Any) -> Topology:
    if name == "shared-6" and fields.get("pp") == 2:
        fields["cuts"] = (3, 3)
    return Topology(**fields)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(
    "fields",
    [{}, {"tp": 4}, {"pp": 2}, {"tp": 2, "cp": 2}, {"tp": 4, "pp": 2, "cp": 2}],
    ids=["tp1", "tp4", "pp2", "tp2cp2", "all"],
)
def test_reuse_changes_nothing(name: str, fields: dict[str, int], tmp_path: Path) -> None:
    outcome = serve(tmp_path, name, COUNT, topology_of(name, **fields))
    assert compare(outcome, name, COUNT) == []
    assert outcome.hits >= 10
    assert outcome.failed_loads == 0


@pytest.mark.parametrize("name", SMALL)
def test_drafts_preemption_and_aborts_change_nothing(name: str, tmp_path: Path) -> None:
    outcome = serve(
        tmp_path,
        name,
        COUNT,
        topology_of(name, tp=2, pp=2),
        drafts=True,
        aborts=(2, 6, 9),
        sizes=Sizes(pages=22, slots=64),
        limits=Limits(tokens=70),
    )
    assert compare(outcome, name, COUNT) == []
    assert outcome.hits >= 5
    assert outcome.preemptions > 0
    assert outcome.rejected > 0
    assert outcome.aborted == 3


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("windows-6", Topology(tp=2, pp=2)),
        ("deltanet-8", Topology(tp=2, pp=2)),
        ("windows-6", Topology(tp=2, cp=2)),
        ("deltanet-8", Topology(cp=2)),
    ],
    ids=["windows-tp2pp2", "deltanet-tp2pp2", "windows-tp2cp2", "deltanet-cp2"],
)
def test_ranks_as_processes_share_one_directory(
    name: str, topology: Topology, tmp_path: Path
) -> None:
    outcome = serve(tmp_path, name, COUNT, topology, processes=True)
    assert compare(outcome, name, COUNT) == []
    assert outcome.hits >= 10
    assert outcome.failed_loads == 0


def options(folder: Path) -> dict[str, Any]:
    return {
        "store_pipeline": "Posix",
        "storage_backends": str(folder),
        "staging_buffer_gb": "16 MiB",
    }


def once(folder: Path, model: str, request: Request, topology: Topology | None = None) -> Any:
    """Serve one request in an engine of its own; returns (result, statistics)."""
    with cached_engine(
        MODELS[model], topology, options=options(folder), sizes=Sizes(slots=32), poison=True
    ) as engine:
        engine.run([request])
        return results([request])["r"], engine.side.stats


def prompt(length: int = 300, shift: int = 0) -> list[int]:
    return [(7 * i + i * i // 3 + shift) % 509 for i in range(length)]


@pytest.mark.parametrize("name", ["windows-6", "deltanet-8", "mla-4"])
def test_a_damaged_object_of_any_row_is_recomputed_and_healed(name: str, tmp_path: Path) -> None:
    """One file after the other is damaged: never a wrong token, and the next request hits again."""
    base, _ = run(MODELS[name], [Request("r", prompt(), 3)])
    once(tmp_path, name, Request("r", prompt(), 3), Topology(tp=2))
    assert once(tmp_path, name, Request("r", prompt(), 3), Topology(tp=2))[1].hit_tokens == 256
    files = sorted(p for p in tmp_path.rglob("*") if p.is_file() and len(p.name) == 32)
    assert len(files) >= 2
    failed = 0
    for path in files:
        raw = bytearray(path.read_bytes())
        raw[4096 + 5] ^= 1
        path.write_bytes(raw)
        found, stats = once(tmp_path, name, Request("r", prompt(), 3), Topology(tp=2))
        assert found == base["r"], path
        failed += stats.failed_loads
        found, stats = once(tmp_path, name, Request("r", prompt(), 3), Topology(tp=2))
        assert found == base["r"], path
        assert (stats.hit_tokens, stats.failed_loads) == (256, 0), path
    assert failed >= len(files) // 2  # what a window or an older state no longer needs is not read


def test_media_and_other_models_do_not_hit(tmp_path: Path) -> None:
    once(tmp_path, "gqa-4", Request("r", prompt(), 2))
    assert once(tmp_path, "gqa-4", Request("r", prompt(), 2))[1].hit_tokens == 256
    assert once(tmp_path, "gqa-4", Request("r", prompt(), 2, media=1))[1].hit_tokens == 0
    assert once(tmp_path, "gqa-4", Request("r", prompt(shift=1), 2))[1].hit_tokens == 0
    assert once(tmp_path, "mla-4", Request("r", prompt(), 2))[1].hit_tokens == 0


def test_pipeline_stages_and_context_ranks_are_coordinates(tmp_path: Path) -> None:
    """Another context-parallel size finds everything; other stages are other objects: a clean miss."""
    base, _ = run(MODELS["deltanet-8"], [Request("r", prompt(), 2)])
    once(tmp_path, "deltanet-8", Request("r", prompt(), 2), Topology(tp=2))
    for topology, hit in ((Topology(tp=2, cp=2), 256), (Topology(tp=2, pp=2), 0)):
        found, stats = once(tmp_path, "deltanet-8", Request("r", prompt(), 2), topology)
        assert found == base["r"]
        assert stats.hit_tokens == hit


def test_checkpoints_lie_where_retention_says(tmp_path: Path) -> None:
    """Interval 1024 and the end: a long prompt, the same again, and one that shares its first half."""
    model = MODELS["deltanet-8"]
    rows = tuple(replace(row, interval=256) if row.kind == "gdn" else row for row in model.rows)
    model = replace(model, rows=rows)
    text = prompt(1000)
    base, _ = run(model, [Request("r", text, 1)])

    def serve_one(tokens: list[int]) -> tuple[Any, Any]:
        with cached_engine(
            model, options=options(tmp_path), sizes=Sizes(slots=32), limits=Limits(tokens=200)
        ) as engine:
            request = Request("r", tokens, 1)
            engine.run([request])
            return results([request])["r"], engine.side.stats

    found, stats = serve_one(text)
    assert found == base["r"]
    assert stats.saved_states == 4  # 256, 512, 768 and 896, the last whole block
    found, stats = serve_one(text)
    assert found == base["r"]
    assert (stats.hit_tokens, stats.saved_states) == (896, 0)
    other = text[:600] + prompt(300, shift=3)
    _, stats = serve_one(other)
    assert (stats.hit_tokens, stats.saved_states) == (512, 2)  # 768 and 896 of the new branch


def test_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="whole pages of 48"):
        cached_engine(MODELS["gqa-4"], options=options(tmp_path), sizes=Sizes(page_tokens=48))
    with pytest.raises(UnsupportedError, match="within a segment of 64"):
        cached_engine(MODELS["gqa-4"], Topology(cp=2, segment=64), options=options(tmp_path))
    named = {**options(tmp_path), "namespace": "n", "head_slices": 2}
    with pytest.raises(UnsupportedError, match="cuts heads differently than tp=1"):
        cached_engine(MODELS["gqa-4"], options=named)


def test_it_registers_as_any_engine() -> None:
    host = PluginHost().load()
    assert host.engines["reference"].distribution == "ucm-reference"
