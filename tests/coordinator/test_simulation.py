"""Random tables, requests, evictions, restarts and second hosts, against the definition of a hit."""

from __future__ import annotations

import math
import random

import numpy as np

from ucm_core.coordinator import Coordinator, HitPlan
from ucm_core.identity import ContentChain, ModelIdentity
from ucm_core.spec import KeySpace, RankRule, Retention, SnapshotKey, SpecTable

from .tables import chain, state, table

GRAIN = 4
Stored = set[bytes]


def random_table(rng: random.Random) -> SpecTable:
    rows = [
        chain(
            f"c{i}",
            GRAIN * rng.choice([1, 2, 3]),
            window=rng.choice([None, None, rng.randint(1, 30)]),
            heads=rng.choice([1, 2, 4]),
            rank_rule=rng.choice([RankRule.UNION, RankRule.INTERSECTION]),
        )
        for i in range(rng.randint(1, 3))
    ]
    kept = Retention(
        rng.choice([None, 8, 16]), at_end=rng.random() < 0.8, budget_bytes=rng.choice([None, 40])
    )
    rows += [
        state(f"s{i}", rng.choice([1, 2, 4, 8, 12]), heads=2, retention=kept)
        for i in range(rng.randint(0, 3))
    ]
    return table(*rows, grain=GRAIN)


class Host:
    """A serving process over the sets of ids that all hosts share."""

    def __init__(self, keys: KeySpace, stored: dict[str, Stored]) -> None:
        self.keys, self.stored = keys, stored
        self.coordinator = Coordinator(keys, directory_capacity=64)

    def hit(self, chain_: ContentChain, local: int) -> HitPlan:
        plan = self.coordinator.plan(chain_, local=local)
        answers = {
            name: np.array([row.tobytes() in self.stored[name] for row in ids], np.bool_)
            for name, ids in plan.ids.items()
        }
        return self.coordinator.decide(chain_, plan, answers, local=local)

    def save(self, chain_: ContentChain, keep: list[int], rng: random.Random) -> None:
        for row in self.keys.table.chains:
            for at in self.keys.of(row.name):
                for raw in self.keys.block_ids(at, chain_):
                    if rng.random() < 0.97:  # some saves fail
                        self.stored[row.store].add(raw.tobytes())
        for position in keep:
            for key in self.coordinator.snapshots_at(chain_, position):
                if rng.random() < 0.05:
                    continue
                self.stored[key.group] |= self.ids(key)
                for gone in self.coordinator.stored(key):
                    self.stored[gone.group] -= self.ids(gone)

    def ids(self, key: SnapshotKey) -> set[bytes]:
        return {raw.tobytes() for raw in self.keys.snapshot_ids(key)}


def deepest(host: Host, chain_: ContentChain, local: int) -> tuple[int, int]:
    """(l, p*) by trying every position."""
    rows, stored = host.keys.table, host.stored
    tokens = chain_.tokens

    def block_there(row: object, index: int) -> bool:
        return all(
            host.keys.block_ids(at, chain_, index, index + 1)[0].tobytes() in stored[row.store]  # type: ignore[attr-defined]
            for at in host.keys.of(row.name)  # type: ignore[attr-defined]
        )

    def chains_accept(position: int) -> bool:
        for row in rows.chains:
            oldest = 0 if row.window is None else max(position - row.window, 0)
            for b in range(oldest // row.block_tokens, math.ceil(position / row.block_tokens)):
                end = (b + 1) * row.block_tokens
                if end > local and (end > tokens or not block_there(row, b)):
                    return False
        return True

    def states_there(position: int) -> bool:
        keys = host.coordinator.snapshots_at(chain_, position)
        return all(host.ids(key) <= stored[key.group] for key in keys)

    l = max(b for b in range(0, tokens + 1, rows.common_grid) if chains_accept(b))  # noqa: E741
    on_grid = range(GRAIN, l + 1, GRAIN) if rows.snapshots else range(1, l + 1)
    usable = [
        p
        for p in on_grid
        if local < p < tokens and chains_accept(p) and (not rows.snapshots or states_there(p))
    ]
    return l, max(usable, default=local)


def test_hits_are_those_of_the_definition() -> None:
    rng = random.Random(25)
    external = checkpoints = 0
    for round_ in range(60):
        rows = random_table(rng)
        keys = KeySpace(rows, ModelIdentity(f"id:{round_}", "bf16"), slices=rng.choice([1, 2]))
        stored: dict[str, Stored] = {row.name: set() for row in rows.rows}
        hosts = [Host(keys, stored), Host(keys, stored)]
        trunk = np.array([rng.randint(0, 9) for _ in range(120)], np.uint32)
        for _ in range(12):
            host = rng.choice(hosts)
            cut, tail = rng.randint(0, 100), rng.randint(1, 20)
            fresh = np.array([rng.randint(0, 9) for _ in range(tail)], np.uint32)
            chain_ = ContentChain(GRAIN)
            chain_.extend(np.concatenate([trunk[:cut], fresh]))
            local = rng.choice([0, 0, rng.randint(0, chain_.tokens)])
            hit = host.hit(chain_, local)
            assert (hit.l, hit.p_star) == deepest(host, chain_, local)
            external += hit.external > 0
            keep = host.coordinator.admit(chain_, hit).tolist()
            assert all(hit.p_star < p <= chain_.tokens for p in keep)
            assert all(p % rows.checkpoint_grid == 0 for p in keep)
            checkpoints += len(keep)
            host.save(chain_, keep, rng)
            for ids in stored.values():  # eviction notifies nobody
                for raw in [raw for raw in ids if rng.random() < 0.03]:
                    ids.discard(raw)
            if rng.random() < 0.1:
                hosts[rng.randrange(2)] = Host(keys, stored)
    assert external > 100 and checkpoints > 300
