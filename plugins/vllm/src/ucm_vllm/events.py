"""KV events of the store, in the form that vLLM's own consumers (routers, indexers) read.

``BlockStored`` when blocks became durable on every worker, with the hashes, parents, tokens and extra
keys that vLLM publishes for its own blocks and the medium ``STORAGE``; ``BlockRemoved`` when a block
that was announced failed to load or is not found any more. Eviction notifies nobody, so a removal is
told late, by the request that meets it. Nothing is kept unless the operator turned KV events on.

An event speaks of vLLM's blocks: of stored blocks smaller than one, those that became durable together
and fill it are announced.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_events import (
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import (
    ExternalBlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import (
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from ucm_vllm.keys import Prints
from ucm_vllm.messages import RowBlocks, TransferOp
from ucm_vllm.placement import RowPlace
from ucm_vllm.row_blocks import row_prints

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

#: Announced blocks remembered, to tell their removal. The oldest is forgotten: consumers then learn of
#: its absence from a miss.
ANNOUNCED_LIMIT = 65_536
#: Events kept for the scheduler's next collection, which comes with every step.
QUEUE_LIMIT = 65_536


class KvEvents:
    """What one scheduler has to tell. ``rows``: what is stored; ``hash_tokens``: tokens of one of
    vLLM's block hashes; ``groups``: (kind, window) of each of vLLM's groups. Scheduler's thread only.
    """

    def __init__(
        self, rows: Sequence[RowPlace], hash_tokens: int, groups: Sequence[tuple[str, int | None]]
    ) -> None:
        self._rows, self._hash, self._groups = rows, hash_tokens, groups
        self._events: list[KVCacheEvent] = []
        #: Fingerprint of a stored block -> vLLM's groups and the hashes of its blocks it is part of.
        self._announced: OrderedDict[int, tuple[tuple[int, ...], list[ExternalBlockHash]]]
        self._announced = OrderedDict()
        #: Events that nobody collected in time.
        self.dropped = 0

    @classmethod
    def wanted(
        cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, rows: Sequence[RowPlace]
    ) -> KvEvents | None:
        """None: the operator did not turn KV events on."""
        config = vllm_config.kv_events_config
        if config is None or not config.enable_kv_cache_events:
            return None
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        groups = [
            (get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec))
            for spec in specs
        ]
        return cls(rows, kv_cache_config.hash_block_size or specs[0].block_size, groups)

    def stored(self, request: Request, op: TransferOp, durable: npt.NDArray[np.bool_]) -> None:
        """A save has ended on every worker; ``durable``: by number, which of its blocks are stored."""
        for part, offset in zip(op.parts, op.offsets, strict=True):
            if part.row >= len(self._rows):
                continue  # a state: vLLM has no event for what is no block of tokens
            mine = np.flatnonzero(durable[offset : offset + len(part)])
            self._stored_of_row(request, self._rows[part.row], part.only(mine))

    def _stored_of_row(self, request: Request, place: RowPlace, part: RowBlocks) -> None:
        size, hashed = place.row.block_tokens, self._hash
        prints = row_prints(place, part.links).tolist()
        for low, high in _runs(part.blocks):
            first, last = int(part.blocks[low]), int(part.blocks[high - 1]) + 1
            begin, end = -(-first * size // hashed), last * size // hashed
            if begin >= end:
                continue
            hashes: list[ExternalBlockHash] = []
            for group in place.tables:
                hashes = self._event(request, group, begin, end)
            for block, key in enumerate(prints[low:high], first):
                covered = slice(
                    max(block * size // hashed - begin, 0), -(-(block + 1) * size // hashed) - begin
                )
                self._announced[key] = (place.tables, hashes[covered])
                self._announced.move_to_end(key)
        while len(self._announced) > ANNOUNCED_LIMIT:
            self._announced.popitem(last=False)

    def gone(self, prints: Prints) -> None:
        """These blocks are not offered any more; those announced before are told."""
        if not self._announced or not len(prints):
            return
        self._remove(self._announced.keys() & set(prints.tolist()))

    def clear(self) -> None:
        """Nothing announced so far is offered by this process any more."""
        self._remove(set(self._announced))

    def _remove(self, keys: set[int]) -> None:
        lost: dict[int, dict[ExternalBlockHash, None]] = {}
        for key in keys:
            groups, hashes = self._announced.pop(key)
            for group in groups:
                lost.setdefault(group, {}).update(dict.fromkeys(hashes))
        for group, told in sorted(lost.items()):
            if told:
                self._add(BlockRemoved(list(told), medium=MEDIUM_STORAGE, group_idx=group))

    def take(self) -> list[KVCacheEvent]:
        """Events since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def _add(self, event: KVCacheEvent) -> None:
        if len(self._events) < QUEUE_LIMIT:
            self._events.append(event)
        else:
            self.dropped += 1

    def _event(self, request: Request, group: int, begin: int, end: int) -> list[ExternalBlockHash]:
        """Tell vLLM's blocks ``[begin, end)`` of a request as vLLM tells its own; returns their hashes."""
        size, hashes = self._hash, request.block_hashes
        extras: list[tuple[Any, ...] | None] = []
        item = 0
        for index in range(begin, end):
            keys, item = generate_block_hash_extra_keys(
                request, index * size, (index + 1) * size, item
            )
            extras.append(keys)
        lora = request.lora_request
        kind, window = self._groups[group]
        told = [maybe_convert_block_hash(h) for h in hashes[begin:end]]
        self._add(
            BlockStored(
                block_hashes=told,
                parent_block_hash=maybe_convert_block_hash(hashes[begin - 1]) if begin else None,
                token_ids=list(request.all_token_ids[begin * size : end * size]),
                block_size=size,
                lora_id=lora.adapter_id if lora else None,
                medium=MEDIUM_STORAGE,
                lora_name=lora.name if lora else None,
                extra_keys=to_event_extra_keys(extras),
                group_idx=group,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
                session_id=request.session_id,
            )
        )
        return told


def _runs(blocks: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Half-open index ranges of ascending block numbers without a gap."""
    if not len(blocks):
        return []
    cuts = [0, *(np.flatnonzero(np.diff(blocks) != 1) + 1).tolist(), len(blocks)]
    return list(itertools.pairwise(cuts))
