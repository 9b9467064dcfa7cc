"""Loads and saves layer by layer, through the core's pipeline and under the engine's own assertions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from campaigns import compare, serve
from ucm_core.errors import UnsupportedError
from ucm_reference import MODELS, Limits, Model, Request, Sizes, Topology
from ucm_reference.cache.deployment import Deployment
from ucm_reference.cache.worker import Worker
from ucm_reference.cached import cached_engine
from ucm_reference.topology import Rank
from workloads import results, run

COUNT = 15
ONE_ROW = ["gqa-4", "mla-4", "shared-6"]
SEVERAL = ["windows-6", "deltanet-8", "x-hybrid-96"]


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "store_pipeline": "Posix",
        "storage_backends": str(folder),
        "staging_buffer_gb": "16 MiB",
        **more,
    }


@pytest.mark.parametrize("name", ONE_ROW)
@pytest.mark.parametrize(
    "fields",
    [{"tp": 2}, {"pp": 2, "cuts": (3, 3)}, {"tp": 2, "cp": 2}],
    ids=["tp2", "pp2", "tp2cp2"],
)
def test_loads_by_layer_change_nothing(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    if name != "shared-6":
        fields = {k: v for k, v in fields.items() if k != "cuts"}
    outcome = serve(tmp_path, name, COUNT, Topology(**fields), use_layerwise=True)
    assert compare(outcome, name, COUNT) == []
    assert outcome.hits >= 10
    assert outcome.failed_loads == 0


@pytest.mark.parametrize("name", ONE_ROW)
def test_loads_by_layer_with_drafts_preemption_and_aborts(name: str, tmp_path: Path) -> None:
    outcome = serve(
        tmp_path,
        name,
        COUNT,
        Topology(tp=2),
        use_layerwise=True,
        drafts=True,
        aborts=(2, 6, 9),
        sizes=Sizes(pages=14, slots=64),
        limits=Limits(tokens=70),
    )
    assert compare(outcome, name, COUNT) == []
    assert outcome.hits >= 5
    assert outcome.preemptions > 0


@pytest.mark.parametrize("name", SEVERAL)
def test_saves_by_layer_change_nothing(name: str, tmp_path: Path) -> None:
    outcome = serve(tmp_path, name, 10, Topology(tp=2, pp=2), use_layerwise="save")
    assert compare(outcome, name, 10) == []
    assert outcome.hits >= 5
    assert outcome.failed_loads == 0


@pytest.mark.parametrize("name", SEVERAL)
def test_loads_by_layer_of_several_rows_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="one stored row without a window"):
        cached_engine(MODELS[name], options=options(tmp_path, use_layerwise=True))


class Recorder:
    """A store that notes which shards are moved, among the layer calls that its rank gets."""

    def __init__(self, inner: Any, log: list[Any]) -> None:
        self._inner, self._log = inner, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def dump(self, ids: Any, shards: Any, *rest: Any, **more: Any) -> Any:
        self._log.append(("dump", tuple(sorted(set(shards.tolist())))))
        return self._inner.dump(ids, shards, *rest, **more)

    def load(self, ids: Any, shards: Any, *rest: Any, **more: Any) -> Any:
        self._log.append(("load", tuple(sorted(set(shards.tolist())))))
        return self._inner.load(ids, shards, *rest, **more)


def recorded(
    monkeypatch: pytest.MonkeyPatch, model: Model, given: list[Request], row: str, **chosen: Any
) -> list[Any]:
    """Layer calls of one rank, and what moved of ``row`` between them."""
    log: list[Any] = []
    whole, wait = Deployment.worker, Worker.wait_for_layer

    def worker(deployment: Deployment, rank: Rank) -> Worker:
        made = whole(deployment, rank)
        made._stores = {  # type: ignore[misc]
            name: Recorder(store, log) if f"/{row}/" in name else store
            for name, store in made._stores.items()
        }
        return made

    def wait_for_layer(self: Worker, layer: int) -> None:
        wait(self, layer)
        log.append(layer)

    with monkeypatch.context() as patch:
        patch.setattr(Deployment, "worker", worker)
        patch.setattr(Worker, "wait_for_layer", wait_for_layer)
        with cached_engine(
            model, options=chosen, sizes=Sizes(slots=32), limits=Limits(tokens=256)
        ) as engine:
            engine.run(given)
            engine.drain()
    return log


def test_a_row_in_one_tensor_moves_after_its_last_layer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Six state layers in two tensors, a shard each: the first is saved when its third layer has run, before
    the model is through; nothing twice."""
    model = MODELS["deltanet-8"]
    numbers = model.numbers("gdn")
    tokens = [i % 500 for i in range(256)]
    given = options(tmp_path, use_layerwise="save")
    log = recorded(monkeypatch, model, [Request("r", tokens, 1)], "gdn", **given)
    dumps = [at for at, event in enumerate(log) if isinstance(event, tuple)]
    assert [log[at] for at in dumps] == [("dump", (0,)), ("dump", (1,))]
    # The call of the layer after the tensor's last one is the first that knows it complete.
    assert log[dumps[0] - 1] == numbers[2]
    assert log[dumps[0] + 1] == numbers[2] + 1


def test_a_layer_is_saved_when_its_last_micro_batch_has_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One request completes a block by decoding while another one's prompt runs: two passes through each
    layer in one step, and the block's last token is of the second."""
    model, short = MODELS["gqa-4"], [i % 500 for i in range(126)]
    both = [Request("short", short, 6), Request("long", [i * i % 500 for i in range(900)], 1)]
    given = options(tmp_path, use_layerwise="save")
    log = recorded(monkeypatch, model, both, "full", **given)
    twice = ["".join(map(str, log[i : i + 2])) for i in range(len(log)) if log[i : i + 2] == [0, 0]]
    assert twice, "no step had two micro-batches"
    for at, event in enumerate(log):
        if isinstance(event, tuple) and len(event[1]) == 1:
            (shard,) = event[1]
            ran = [e for e in log[:at] if isinstance(e, int)][-1]
            runs = next((e for e in log[at:] if isinstance(e, int)), None)
            assert ran == shard, "saved while another layer ran"
            assert runs != shard, "saved before the layer's last pass"
    again = Request("again", [*short, *both[0].output, 1, 2], 2)
    base, _ = run(model, [Request("again", again.prompt, 2)])
    with cached_engine(model, options=given) as engine:
        engine.run([again])
    assert (results([again]), again.reused) == (base, 128)


def test_loads_run_ahead_of_the_layers_and_not_further(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, tokens = MODELS["gqa-4"], [i % 500 for i in range(300)]
    given = options(tmp_path, use_layerwise=True, layerwise_look_ahead=1)
    recorded(monkeypatch, model, [Request("a", tokens, 1)], "full", **given)
    log = recorded(monkeypatch, model, [Request("b", tokens, 1)], "full", **given)
    begin = [("load", (0,)), ("load", (1,)), 0, ("load", (2,)), 1, ("load", (3,)), 2, 3]
    assert log[: len(begin)] == begin


@pytest.mark.parametrize("name", ["gqa-4", "mla-4"])
def test_nothing_computed_on_a_bad_load_is_published(name: str, tmp_path: Path) -> None:
    """TP 2: only a file that rank 1 reads is bad. Rank 0 computes on good bytes, but the sums of both are
    wrong: what either saved in that step must not be seen by a third engine."""
    model, topology = MODELS[name], Topology(tp=2)
    text = [(5 * i + i * i // 7) % 509 for i in range(520)]

    def one(tokens: list[int]) -> tuple[Any, int, Any]:
        with cached_engine(
            model,
            topology,
            options=options(tmp_path, use_layerwise=True),
            sizes=Sizes(slots=32),
        ) as engine:
            request = Request("r", tokens, 3)
            engine.run([request])
            engine.drain()
            assert not any(engine.side.pending().values())
            return results([request])["r"], request.reused, engine.side.stats

    base, _ = run(model, [Request("r", text, 3)])
    one(text[:300])
    files = sorted(p for p in tmp_path.rglob("*") if p.is_file() and len(p.name) == 32)
    assert len(files) == (4 if name == "gqa-4" else 2)  # two blocks, of two halves or of one
    for path in files[1:]:
        later = [p for p in tmp_path.rglob("*") if p.is_file() and len(p.name) == 32]
        for each in set(later) - set(files):
            each.unlink()
        raw = bytearray(path.read_bytes())
        raw[4096 + 5] ^= 1  # of the first layer: what all later ones compute and save is wrong
        path.write_bytes(raw)
        found, reused, stats = one(text)
        assert found == base["r"], path
        assert (stats.failed_loads, reused) in [(1, 0), (1, 128)]
        found, reused, stats = one(text)
        assert (found, stats.failed_loads) == (base["r"], 0), "a wrong block was published"
        assert reused == 512
