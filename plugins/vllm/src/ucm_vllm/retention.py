"""Scheduler side: which of the states that vLLM offers are kept, and which of the stored are given up.

vLLM decides first (``prefix_cache_retention_interval``): what it did not keep nobody can conjure. Of the
rest the retention rule takes some positions of each prompt, and the budget bounds what stays. States
behind the prompt are all kept: which of them is the last one, the end of the request, only time tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ucm_core.coordinator import Coordinator, HitPlan, RetentionPolicy
from ucm_core.identity import ContentChain, Ids
from ucm_core.spec import SeededCoordinate, SnapshotKey
from ucm_vllm.messages import Rows, TransferOp
from ucm_vllm.placement import Placement
from ucm_vllm.records import Record
from ucm_vllm.states import Offers
from ucm_vllm.stats import UcmStats

#: Ids of objects to remove, by the name of their store.
Remove = Callable[[Mapping[str, Ids]], None]


class StateRetention:
    """See the module text; for a model with states. ``remove``: takes objects out of the stores, later and
    elsewhere. Scheduler's thread only."""

    def __init__(
        self,
        placement: Placement,
        *,
        policy: RetentionPolicy | None,
        store_of: Callable[[SeededCoordinate], str],
        remove: Remove,
        stats: UcmStats,
    ) -> None:
        self._places = placement.places
        self._keys = placement.keys
        self._store_of, self._remove, self._stats = store_of, remove, stats
        self._coordinator = Coordinator(
            placement.keys, policy=policy, alignment=placement.facts.alignment
        )
        self._counted: dict[str, int] = {}

    def known(self, chain: ContentChain) -> npt.NDArray[np.int64]:
        """Ascending positions of this prefix at which this process had a state stored."""
        found = [d.positions(chain) for d in self._coordinator.directories.values()]
        positions: npt.NDArray[np.int64] = np.unique(np.concatenate(found))
        return positions

    def admitted(self, record: Record, hit: HitPlan) -> None:
        """vLLM computes the request from the hit on. Call once a request, and again after a failed load."""
        assert record.chain is not None
        tokens = record.request.num_tokens
        record.keep = frozenset(self._coordinator.admit(record.chain, hit, tokens).tolist())
        record.decided = tokens

    def wanted(self, record: Record, offers: Offers) -> Offers:
        """Those of the offered states that are to be kept."""
        kept = [each for each in offers if each[2] > record.decided or each[2] in record.keep]
        left = {position for _, _, position in offers} - {position for _, _, position in kept}
        self._stats.add("states_not_kept", len(left))
        return kept

    def stored(self, op: TransferOp, durable: npt.NDArray[np.bool_]) -> None:
        """A save has ended on every worker; ``durable``: by number, which of its blocks are stored."""
        gone: list[SnapshotKey] = []
        for key in self._keys_of(op, np.flatnonzero(durable)):
            gone += self._coordinator.stored(key)
        if gone:
            self._remove(self._ids(gone))

    def missed(self, op: TransferOp, numbers: Rows) -> None:
        """These blocks of a load did not arrive."""
        for key in self._keys_of(op, numbers):
            self._coordinator.missed(key)

    def _keys_of(self, op: TransferOp, numbers: Rows) -> list[SnapshotKey]:
        """The states among some blocks of an operation: one a row as a rule."""
        found = []
        for part in op.only(numbers, op.op_id, op.attempt).parts:
            row = self._places[part.row].row
            if row.name in self._coordinator.directories:
                for block, link in zip(part.blocks.tolist(), part.links, strict=True):
                    position = (block + 1) * row.block_tokens
                    found.append(SnapshotKey(row.name, position, link.tobytes()))
        return found

    def _ids(self, keys: Sequence[SnapshotKey]) -> dict[str, Ids]:
        by_store: dict[str, list[Ids]] = {}
        for key in keys:
            ids = self._keys.snapshot_ids(key)
            for at, one in zip(self._keys.of(key.group), ids, strict=True):
                by_store.setdefault(self._store_of(at), []).append(one[None])
        return {store: np.concatenate(parts) for store, parts in by_store.items()}

    def count(self) -> None:
        """Add what the coordinator counted since the last call, and its gauges where they moved."""
        for key, value in self._coordinator.stats().items():
            name, before = key.removesuffix("_total"), self._counted.get(key, 0)
            if name != key:
                self._stats.add(name, value - before)
            elif value != before:
                self._stats.level(name, value)
            self._counted[key] = value
