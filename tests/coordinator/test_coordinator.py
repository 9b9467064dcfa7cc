"""The whole life of checkpoints over real snapshot stores: made, found cold, evicted, given up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ucm_core import _native
from ucm_core.coordinator import Computation, Coordinator, Positions
from ucm_core.spec import KeySpace, Retention, SpecTable
from ucm_core.store.contract import Status
from ucm_core.store.native_store import NativeBlockStore, native_geometry
from ucm_core.testing.small_store import small_store

from .host import GEOMETRY, GRAIN, MODEL, Host, hybrid, prompt
from .tables import chain, state, table


class Media:
    """What survives a restart, and is shared by machines: one medium per row."""

    def __init__(self, rows: SpecTable) -> None:
        self.of = {row.name: _native.FakeMedium() for row in rows.rows}

    def __call__(self, name: str) -> NativeBlockStore:
        stage = _native.FakeStage(native_geometry(GEOMETRY), self.of[name])
        return small_store(stage, GEOMETRY, load_reserve=4, shared=60, waiting_depth=1000)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    opened: list[Host] = []
    yield opened
    for host in opened:
        host.close()


def test_c_a_conversation(hosts: list[Host]) -> None:
    """Interval 64, grid 32: made once, served after, branches get one at their shared boundary."""
    rows = hybrid(interval=64)
    host = Host(rows, Media(rows))
    hosts.append(host)
    first = prompt(range(330))
    assert host.serve(first) == (0, [64, 128, 192, 256, 320])
    again, keep = host.serve(first)
    assert (again, keep) == (320, [])
    branch, keep = host.serve(prompt(range(200), range(1000, 1150)))
    assert (branch, keep) == (192, [256, 320])


def test_second_unserved_appearance_of_a_prefix(hosts: list[Host]) -> None:
    """Three users of one system prompt of 200 tokens, only ends are kept: the second makes the
    checkpoint at 192 and the third is served from it."""
    rows = hybrid()
    host = Host(rows, Media(rows))
    hosts.append(host)
    users = [prompt(range(200), range(1000 * n, 1000 * n + 100)) for n in (1, 2, 3, 4)]
    assert host.serve(users[0]) == (0, [288])
    assert host.serve(users[1]) == (0, [192, 288])
    assert host.serve(users[2]) == (192, [288])
    assert host.serve(users[3]) == (192, [288])


def test_reuse_survives_a_restart_and_crosses_machines(hosts: list[Host]) -> None:
    """The other host has no directory entry at all: positions on the grid are asked in the store."""
    rows = hybrid(interval=64)
    media = Media(rows)
    first, second = Host(rows, media), Host(rows, media)
    hosts += [first, second]
    chain_ = prompt(range(330))
    first.serve(chain_)
    assert all(len(d) == 0 for d in second.coordinator.directories.values())
    assert second.serve(chain_) == (320, [])
    assert second.hit(prompt(range(150), range(900, 950))).p_star == 128
    assert second.hit(prompt(range(1, 331))).p_star == 0
    # without grid lookups a cold directory finds nothing, a warm one everything
    cold = Host(rows, media, grid_lookups=0)
    hosts.append(cold)
    assert cold.hit(chain_).p_star == 0
    for key in first.coordinator.snapshots_at(chain_, 256):
        cold.coordinator.stored(key)
    assert cold.hit(chain_).p_star == 256


def test_a_directory_saves_lookups_but_is_never_believed(hosts: list[Host]) -> None:
    """Eviction notifies nobody: the entry stays, the store says no, and the hit is shorter."""
    rows = hybrid(interval=64)
    host = Host(rows, Media(rows), grid_lookups=0)
    hosts.append(host)
    chain_ = prompt(range(330))
    host.serve(chain_)
    assert host.asked == 20  # chain blocks alone: the directory was empty
    host.hit(chain_)
    assert host.asked == 20 + 2 * 5
    key_a, _ = host.coordinator.snapshots_at(chain_, 320)
    host.remove(key_a)
    assert host.hit(chain_).p_star == 256  # b still has 320, which is of no use


def test_a_get_that_misses_removes_the_entry_and_recomputes(hosts: list[Host]) -> None:
    rows = hybrid(interval=64)
    host = Host(rows, Media(rows))
    hosts.append(host)
    chain_ = prompt(range(330))
    host.serve(chain_)
    plan = host.coordinator.plan(chain_)
    answers = {name: host.blocks[name].lookup(ids) for name, ids in plan.ids.items()}
    hit = host.coordinator.decide(chain_, plan, answers)
    assert hit.p_star == 320
    key, _ = host.coordinator.snapshots_at(chain_, 320)
    host.remove(key)  # between decision and load
    assert host.load(key) is Status.MISS
    host.coordinator.missed(key)
    assert host.coordinator.directories["a"].positions(chain_).tolist() == [64, 128, 192, 256]
    assert host.coordinator.stats()["checkpoints_missed_total"] == 1
    assert host.hit(chain_).p_star == 256
    assert host.serve(chain_) == (256, [320])  # computed again, kept again
    assert host.hit(chain_).p_star == 320


def test_evicted_chain_puts_checkpoints_out_of_reach(hosts: list[Host]) -> None:
    rows = hybrid(interval=64)
    host = Host(rows, Media(rows))
    hosts.append(host)
    chain_ = prompt(range(330))
    host.serve(chain_)
    (at,) = host.keys.of("kv")
    host.blocks["kv"].remove(host.keys.block_ids(at, chain_, 9, 10))
    hit = host.hit(chain_)
    assert (hit.l, hit.p_star) == (144, 128)


def test_a_budget_keeps_what_is_used(hosts: list[Host]) -> None:
    """Room for three checkpoints (of 8 bytes; the other row has no budget). The one that requests
    continue from stays, through ten one-off prompts; what is given up is gone from every store."""
    rows = hybrid(budget_bytes=24)
    media = Media(rows)
    host = Host(rows, media)
    hosts.append(host)
    system = prompt(range(100))
    host.serve(system)
    for n in range(1, 11):
        continued, _ = host.serve(prompt(range(100), range(1000 * n, 1000 * n + 60)))
        assert continued == 96
        assert len(media.of["a"]) <= 3 and len(media.of["b"]) <= 3
    assert host.coordinator.stats()["checkpoints_evicted_total"] == 8
    assert host.coordinator.stats()["checkpoint_directory_entries"] == 6


def test_local_hits_and_finish(hosts: list[Host]) -> None:
    """Nothing below what the engine has is asked for; generated tokens move the end on."""
    rows = hybrid()
    host = Host(rows, Media(rows))
    hosts.append(host)
    chain_ = prompt(range(330))
    host.serve(chain_)
    hit = host.hit(chain_, local=200)
    assert (hit.p_star, hit.external) == (320, 120)
    assert host.asked == 8 + 2 * 4  # blocks from 192 on, positions 224 .. 320
    assert host.hit(chain_, local=325).external == 0
    chain_.extend(np.arange(5000, 5100, dtype=np.uint32))
    assert host.coordinator.finish(chain_, 320).tolist() == [416]


def test_heat_names_what_a_hit_uses(hosts: list[Host]) -> None:
    rows = hybrid(interval=64)
    host = Host(rows, Media(rows))
    hosts.append(host)
    chain_ = prompt(range(330))
    host.serve(chain_)
    hit = host.hit(chain_)
    used = host.coordinator.heat(chain_, hit)
    assert {name: len(ids) for name, ids in used.items()} == {"kv": 20, "a": 1, "b": 1}
    assert all(host.blocks[name].lookup(ids).all() for name, ids in used.items())
    nothing = host.coordinator.heat(chain_, host.hit(prompt(range(7000, 7100))))
    assert {name: len(ids) for name, ids in nothing.items()} == {"kv": 0}


def test_lookups_are_bounded_whatever_the_placement() -> None:
    """A prompt of 64,000 tokens has 4,000 grid positions; 16 slices of heads do not make 64,000 lookups."""
    rows = table(
        chain("kv", 16), state("a", 16, heads=16, retention=Retention(interval=2048)), grain=GRAIN
    )
    for slices, positions in ((1, 1024), (16, 256)):
        coordinator = Coordinator(KeySpace(rows, MODEL, slices=slices))
        asked = coordinator.plan(prompt(range(64_000)))
        assert len(asked.ids["a"]) <= slices * positions
        assert len(asked.ids["a"]) >= slices * positions * 0.6
        spots = asked.segments[-1].positions
        assert spots is not None
        if slices == 16:  # every checkpoint of the interval is among them
            assert set(range(2048, 64_000, 2048)) <= set(spots.tolist())


def test_a_policy_of_ones_own() -> None:
    class Never:
        def positions(self, table: SpecTable, work: Computation) -> Positions:
            return np.empty(0, np.int64)

    coordinator = Coordinator(KeySpace(hybrid(interval=16), MODEL), policy=Never())
    plan = coordinator.plan(prompt(range(100)))
    answers = {name: np.zeros(len(ids), np.bool_) for name, ids in plan.ids.items()}
    hit = coordinator.decide(prompt(range(100)), plan, answers)
    assert coordinator.admit(prompt(range(100)), hit).tolist() == []


def test_positions_off_the_grain_are_refused() -> None:
    coordinator = Coordinator(KeySpace(hybrid(), MODEL))
    for position in (0, 17):
        with pytest.raises(ValueError, match="grain"):
            coordinator.snapshots_at(prompt(range(100)), position)


def test_models_without_states_cost_nothing() -> None:
    coordinator = Coordinator(KeySpace(table(chain("kv", 16), grain=GRAIN), MODEL))
    chain_ = prompt(range(100))
    plan = coordinator.plan(chain_)
    hit = coordinator.decide(chain_, plan, {"kv": 4})
    assert hit.p_star == 64
    assert coordinator.admit(chain_, hit).tolist() == []
    assert coordinator.finish(chain_, 64).tolist() == []


# -- real processes over files ---------------------------------------------------------------------

SCRIPT = Path(__file__).parent / "hybrid_process.py"


def process(root: Path, *requests: list[int]) -> list[list[object]]:
    """A fresh interpreter serves prompts; returns [continued at, states left] of each."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(root), json.dumps(requests)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_processes_share_states_through_files(tmp_path: Path) -> None:
    """Nothing but the directory is common: the second process finds positions on the grid and loads the
    right states; one damaged state costs a shorter hit, and is healed by the request that computed it."""
    first = process(tmp_path, [330, 0], [200, 9000])
    assert first == [[0, [64, 128, 192, 256, 320]], [192, [256, 320]]]
    assert process(tmp_path, [330, 0], [100, 5000]) == [[320, []], [64, [96, 128, 192, 256, 320]]]
    files = sorted((tmp_path / "a").rglob("*"), key=lambda p: p.stat().st_mtime)
    stored = [path for path in files if path.is_file() and len(path.name) == 32]
    assert len(stored) == 12
    for path in stored:  # every state of one row, of every prompt
        raw = bytearray(path.read_bytes())
        raw[-4096] ^= 1  # the one shard lies on the last page
        path.write_bytes(raw)
    assert process(tmp_path, [330, 0], [330, 0]) == [[0, [64, 128, 192, 256, 320]], [320, []]]
