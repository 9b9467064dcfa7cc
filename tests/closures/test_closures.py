"""The five closures: what must hold for the design to be closed under new models.

1. Every row is chain, snapshot or none. 2. No two things share a key. 3. One decision function, one
lookup per store. 4. What was loaded stays right when the store evicts at once. 5. A new model changes
rows only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ucm_core import _native
from ucm_core.coordinator import Coordinator, plan_lookup
from ucm_core.errors import ConfigError, UnsupportedError
from ucm_core.identity import ContentChain, ModelIdentity
from ucm_core.spec import (
    STORED,
    GroupSpec,
    KeySpace,
    Kind,
    LayerSpec,
    SnapshotKey,
    SpecTable,
)
from ucm_core.spec.from_config import read_model_config
from ucm_core.spec.sizes import even_stages
from ucm_core.store.contract import Status
from ucm_core.store.native_store import native_geometry
from ucm_core.store.snapshot import SnapshotStore
from ucm_core.testing.blocks import EngineMemory, geometry_of, id_array
from ucm_core.testing.small_store import small_store

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "tests/spec/model_configs").glob("*.json"))
TABLES = {path.name.split("_config")[0]: path for path in CONFIGS}


def table_of(name: str) -> SpecTable:
    return read_model_config(TABLES[name]).table(64)


# -- 1: every row is chain, snapshot or none -------------------------------------------------------


def addressed_as(table: SpecTable, row: GroupSpec) -> str:
    """How the bytes of ``row`` are found; a sidecar is found where its source is."""
    if row.kind is Kind.SIDECAR:
        assert row.follows is not None
        return addressed_as(table, table[row.follows])
    if row.kind in (Kind.NONE, Kind.FOLLOWER):
        return "none"
    return row.kind.value


@pytest.mark.parametrize("name", TABLES)
def test_1_every_row_is_chain_snapshot_or_none(name: str) -> None:
    table = table_of(name)
    for row in table.rows:
        how = addressed_as(table, row)
        assert how in ("chain", "snapshot", "none")
        assert (how == "none") == (row.kind not in STORED) == (row.entry_bytes == 0)
        assert (row in table.chains) == (row.kind is Kind.CHAIN)
        assert (row in table.snapshots) == (row.kind is Kind.SNAPSHOT)


def test_1_there_is_no_fourth_kind() -> None:
    """Two more words name relations, not addresses, and anything else is refused."""
    assert {kind.value for kind in Kind} == {"chain", "snapshot", "none", "sidecar", "follower"}
    for invented in ("ring", "hybrid", "", "CHAIN"):
        with pytest.raises(ConfigError, match="unknown kind"):
            LayerSpec(0, "x", invented)  # type: ignore[arg-type]


# -- 2: no two things share a key ------------------------------------------------------------------


def keyspaces() -> Iterator[tuple[str, KeySpace]]:
    for name in TABLES:
        table = table_of(name)
        identity = ModelIdentity(f"id:{name}", "bf16")
        for pp in (1, 2, 3):
            for slices in (1, 2):
                yield name, KeySpace(table, identity, stages=even_stages(table, pp), slices=slices)


def test_2_seeds_tell_apart_whatever_differs() -> None:
    """Over all models, placements and slices: one seed, one (model, row, layers, heads)."""
    owner: dict[bytes, tuple[object, ...]] = {}
    for name, keys in keyspaces():
        for row in keys.table.rows:
            if row.kind not in STORED:
                continue
            for at in keys.of(row.name):
                what = (name, row.part, row.name, at.coordinate.layers, at.coordinate.heads)
                assert owner.setdefault(at.seed, what) == what
    assert len(owner) > 300


def test_2_ids_of_blocks_states_rows_and_positions_are_all_different() -> None:
    """Every block and every state of one prefix, of every row and coordinate of the models with the
    most rows, and of another prefix: no id twice."""
    seen: dict[bytes, tuple[object, ...]] = {}
    total = 0
    chains = {salt: ContentChain(64) for salt in (0, 1)}
    for salt, chain in chains.items():
        chain.extend(np.arange(salt, 1024 + salt, dtype=np.uint32))
    for name, keys in keyspaces():
        for row in (r for r in keys.table.rows if r.kind in STORED):
            for at in keys.of(row.name):
                for salt, chain in chains.items():
                    if row.kind is Kind.SNAPSHOT:
                        ids = chain.snapshot_ids(at.seed, np.arange(64, 1025, 64, dtype=np.uint64))
                    else:
                        ids = keys.block_ids(at, chain)
                    for i, raw in enumerate(ids):
                        what = (name, row.name, at.coordinate, salt, i)
                        assert seen.setdefault(raw.tobytes(), what) == what
                        total += 1
    assert len(seen) > 9_000 and total > len(seen)  # equal placements name equal objects


def test_2_a_state_is_keyed_by_group_position_and_prefix() -> None:
    keys = KeySpace(table_of("Qwen--Qwen3.5-35B-A3B"), ModelIdentity("id", "bf16"))
    (row,) = keys.table.snapshots
    chain = ContentChain(64)
    chain.extend(np.arange(640, dtype=np.uint32))
    link = chain.links[4].tobytes()
    same = keys.snapshot_ids(SnapshotKey(row.name, 320, link))
    (at,) = keys.of(row.name)
    assert (same == chain.snapshot_ids(at.seed, [320])).all()
    assert (same != keys.snapshot_ids(SnapshotKey(row.name, 321, link))).any()
    assert (same != keys.snapshot_ids(SnapshotKey(row.name, 320, chain.links[5].tobytes()))).any()


# -- 3: one decision function, one lookup per store ------------------------------------------------


def sources(*patterns: str) -> Iterator[Path]:
    for pattern in patterns:
        yield from (p for p in ROOT.glob(pattern) if "/tests/" not in f"/{p.relative_to(ROOT)}")


def test_3_one_function_makes_hit_plans() -> None:
    makers = []
    for path in sources("ucm_core/**/*.py", "plugins/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "HitPlan":
                makers.append(path.relative_to(ROOT).as_posix())
    assert makers == ["ucm_core/coordinator/resolve.py"]


@pytest.mark.parametrize("name", TABLES)
def test_3_one_lookup_per_store(name: str) -> None:
    """However many rows, stages and slices: each id is asked for once, in one batch a store."""
    table = table_of(name)
    keys = KeySpace(table, ModelIdentity("id", "bf16"), stages=even_stages(table, 2), slices=2)
    chain = ContentChain(64)
    chain.extend(np.arange(2000, dtype=np.uint32))
    voting = {row.store for row in (*table.chains, *table.snapshots)}
    for stores in (voting, {"one"}):
        plan = plan_lookup(
            keys, chain, store_of=lambda at, all_=stores: "one" if "one" in all_ else at.row.store
        )
        asked = [row.tobytes() for ids in plan.ids.values() for row in ids]
        assert len(asked) == len(set(asked))
        assert set(plan.ids) == stores
        coordinator = Coordinator(keys)
        answers = {store: np.ones(len(ids), np.bool_) for store, ids in plan.ids.items()}
        hit = coordinator.decide(chain, plan, answers)
        grid = table.common_grid
        assert hit.l == 2000 // grid * grid and hit.p_star == min(hit.l, 1984)


# -- 4: what was loaded stays right when the store evicts at once ----------------------------------


@pytest.mark.parametrize("cache_slots", [0, 2], ids=["files", "cache"])
def test_4_loaded_bytes_outlive_their_object(cache_slots: int) -> None:
    """Blocks and a state are loaded; before anybody computes, the store loses everything, and other
    objects take the slots that they came through."""
    geometry = geometry_of()
    stage = _native.FakeStage(native_geometry(geometry), _native.FakeMedium())
    with small_store(stage, geometry, cache_slots=cache_slots) as store:
        source = EngineMemory.whole(geometry, range(6)).fill()
        task = store.dump(source.ids, source.shards, source.addresses)
        assert (task.wait_durable() == Status.OK).all()
        blocks = EngineMemory.whole(geometry, [0, 1])
        assert (store.load(blocks.ids, blocks.shards, blocks.addresses).wait() == Status.OK).all()
        state = EngineMemory.whole(geometry, [2])
        where = state.addresses.reshape(1, geometry.shard_count, -1)
        assert SnapshotStore(store).get(id_array([2]), where).wait().tolist() == [Status.OK]
        store.remove(id_array(range(3)))
        other = EngineMemory.whole(geometry, range(10, 16)).fill()
        task = store.dump(other.ids, other.shards, other.addresses)
        assert (task.wait_durable() == Status.OK).all()
        assert not store.lookup(id_array(range(3))).any()
        assert all(blocks.right(i) for i in range(len(blocks.rows)))
        assert all(state.right(i) for i in range(len(state.rows)))


# -- 5: a new model changes rows only --------------------------------------------------------------

#: Names of published families and of the stress model, wherever they would show in code.
NAMES = re.compile(
    r"llama|qwen|deepseek|gemma|gpt.?oss|kimi|nemotron|\bglm|minimax|mistral|mixtral|granite|falcon"
    r"|jamba|bamba|zamba|olmo|\bphi[-_]?\d|x.hybrid",
    re.I,
)
#: Tables, and files that define models: they may, and must, name them.
TABLES_AND_MODELS = re.compile(r"(^|/)(rules\.yaml|[^/]*models?(\.py|\.yaml|/.*))$")


def test_5_no_code_names_a_model() -> None:
    """Everything that ships: core, native code, adapters, backends."""
    named = []
    checked = 0
    patterns = ("ucm_core/**/*", "native/src/**/*", "native/include/**/*", "native/bindings/**/*")
    for path in sources(*patterns, "plugins/**/src/**/*"):
        relative = path.relative_to(ROOT).as_posix()
        text_file = path.suffix in (".py", ".pyi", ".yaml", ".h", ".cc", ".toml", ".json")
        if not text_file or TABLES_AND_MODELS.search(relative):
            continue
        checked += 1
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if NAMES.search(line):
                named.append(f"{relative}:{number}: {line.strip()}")
    assert checked > 150
    assert not named, "\n".join(named)


def test_5_the_check_would_find_one() -> None:
    assert NAMES.search("if config.model_type == 'Qwen3':")
    assert NAMES.search("class DeepseekThing:")
    assert not TABLES_AND_MODELS.search("ucm_core/spec/layer.py")
    assert not TABLES_AND_MODELS.search("ucm_core/config/model_config.py")
    assert TABLES_AND_MODELS.search("ucm_core/spec/from_config/rules.yaml")


def test_5_two_models_of_other_shapes_take_the_same_path() -> None:
    """A model that nobody wrote code for: ten made-up layers of six kinds are declared, and ids, stages,
    lookups and a decision come out."""
    layers = [
        LayerSpec(0, "l0", Kind.CHAIN, 96, heads=2, dtype="q4"),
        LayerSpec(1, "l1", Kind.CHAIN, 80, compression=8, dtype="q4"),
        LayerSpec(1, "l1.index", Kind.SIDECAR, 12, compression=8, role="index", follows="l1"),
        LayerSpec(2, "l2", Kind.SNAPSHOT, 512, heads=2, dtype="fp32", grid=32),
        LayerSpec(3, "l3", Kind.SNAPSHOT, 128, dtype="bf16", grid=16),
        LayerSpec(4, "l4", Kind.NONE),
        LayerSpec(5, "l5", Kind.CHAIN, 96, heads=2, dtype="q4", window=100),
        LayerSpec(6, "l6", Kind.FOLLOWER, follows="l0"),
        LayerSpec(0, "d0", Kind.CHAIN, 96, heads=2, dtype="q4", part="draft"),
    ]
    table = SpecTable.from_layers(layers, grain=16)
    keys = KeySpace(table, ModelIdentity("id:new", "q4"), slices=2)
    chain = ContentChain(16)
    chain.extend(np.arange(200, dtype=np.uint32))
    coordinator = Coordinator(keys)
    plan = coordinator.plan(chain)
    answers = {store: np.ones(len(ids), np.bool_) for store, ids in plan.ids.items()}
    hit = coordinator.decide(chain, plan, answers)
    assert (hit.l, hit.p_star) == (192, 192)
    assert coordinator.admit(chain, hit).tolist() == []
    with pytest.raises(UnsupportedError, match="cannot be cut into 3"):
        KeySpace(table, ModelIdentity("id:new", "q4"), slices=3)
