"""Where a spec table contradicts itself, and where it costs hits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ucm_core.spec.group import GroupSpec
from ucm_core.spec.kinds import STORED, Kind, Unit


def problems(rows: Sequence[GroupSpec], grain: int, num_layers: Mapping[str, int]) -> Iterator[str]:
    """Every contradiction, each with the row's name and what to do."""
    if grain < 1:
        yield f"block_tokens must be at least 1, got {grain}"
        return
    for name, n in Counter(row.name for row in rows).items():
        if n > 1 or not name:
            yield f"{n} rows are named {name!r}; row names must be unique and not empty"
    by_name = {row.name: row for row in rows}
    for row in rows:
        yield from _row(row, grain)
        yield from _follows(row, by_name)
    for part, count in num_layers.items():
        yield from _coverage([r for r in rows if r.part == part], part, count)
    for row in rows:
        if row.part not in num_layers:
            yield f"row {row.name!r}: part {row.part!r} has no layer count"


def _row(row: GroupSpec, grain: int) -> Iterator[str]:
    where = f"row {row.name!r}"
    if not row.layers:
        yield f"{where}: has no layers; leave the row out"
    if row.heads < 1 or row.head_size < 1 or row.compression < 1:
        yield f"{where}: heads, head_size and compression must be at least 1"
        return
    if row.window is not None and (row.window < 1 or row.kind not in (Kind.CHAIN, Kind.SIDECAR)):
        yield f"{where}: window {row.window} fits no {row.kind.value} row"
    if row.unit is Unit.WINDOW and row.window is None:
        yield f"{where}: unit 'window' needs a window"
    if row.kind not in STORED:
        if row.entry_bytes:
            yield f"{where}: kind {row.kind.value!r} stores nothing but has {row.entry_bytes} bytes"
        return
    if row.entry_bytes < 1:
        yield f"{where}: kind {row.kind.value!r} needs the bytes of an entry, got {row.entry_bytes}"
    if row.block_tokens < 1:
        yield f"{where}: block_tokens must be at least 1, got {row.block_tokens}"
    elif row.kind is Kind.SNAPSHOT:
        if row.compression != 1:
            yield f"{where}: a snapshot has no compression, got {row.compression}"
    elif row.block_tokens % grain:
        yield (
            f"{where}: its block of {row.block_tokens} tokens is no multiple of the namespace's "
            f"block_tokens {grain}; use a multiple"
        )
    elif row.block_tokens % row.compression:
        yield (
            f"{where}: its block of {row.block_tokens} tokens is no multiple of its compression "
            f"{row.compression}:1, so a block would end inside an entry; use a multiple of both"
        )


def _follows(row: GroupSpec, by_name: Mapping[str, GroupSpec]) -> Iterator[str]:
    where = f"row {row.name!r}"
    needs_source = row.kind in (Kind.SIDECAR, Kind.FOLLOWER)
    if (row.unit is Unit.FOLLOWER) is not needs_source and row.kind is not Kind.NONE:
        yield (
            f"{where}: unit 'follower' is for sidecars and followers, and they have no other; "
            f"got kind {row.kind.value!r} with unit {row.unit.value!r}"
        )
    if not needs_source:
        if row.follows is not None:
            yield f"{where}: kind {row.kind.value!r} follows nothing, but follows {row.follows!r}"
        return
    source = by_name.get(row.follows or "")
    if source is None:
        yield f"{where}: follows {row.follows!r}, which is no row; name the row it belongs to"
    elif source.kind not in (Kind.CHAIN, Kind.SNAPSHOT):
        yield (
            f"{where}: follows {source.name!r} of kind {source.kind.value!r}, which has no data of "
            "its own to follow"
        )
    elif row.kind is Kind.SIDECAR and row.block_tokens != source.block_tokens:
        yield (
            f"{where}: a sidecar uses its source's blocks, but has {row.block_tokens} tokens a "
            f"block and {source.name!r} has {source.block_tokens}"
        )


def _coverage(rows: Sequence[GroupSpec], part: str, count: int) -> Iterator[str]:
    """Each layer is in some row, and nothing of it in two: a second row must keep something else of the
    layer (a state beside KV, or data of another role), or be a sidecar."""
    owners: dict[tuple[int, bool, str], list[str]] = {}
    sidecars: set[int] = set()
    for row in rows:
        for layer in row.layers:
            if row.kind is Kind.SIDECAR:
                sidecars.add(layer)
            else:
                what = (layer, row.kind is Kind.SNAPSHOT, row.role)
                owners.setdefault(what, []).append(row.name)
        if len(set(row.layers)) != len(row.layers):
            yield f"row {row.name!r}: names a layer twice"
    for (layer, _, _), names in sorted(owners.items()):
        if len(names) > 1 and len(set(names)) == len(names):
            yield f"layer {layer} of {part!r} is in the rows {', '.join(names)}; it must be in one"
    present = {layer for layer, _, _ in owners} | sidecars
    missing = [i for i in range(count) if i not in present]
    if missing:
        yield (
            f"layers {_some(missing)} of {part!r} are in no row; give them a row, of kind 'none' if "
            "nothing of them is kept"
        )
    beyond = sorted(i for i in present if not 0 <= i < count)
    if beyond:
        yield (
            f"layers {_some(beyond)} of {part!r} do not exist ({count} layers); are they draft "
            "layers, which are a part of their own?"
        )


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


def warnings(rows: Sequence[GroupSpec]) -> Iterator[str]:
    """What is legal but costs hits."""
    for snapshot in rows:
        for chain in rows:
            if (
                snapshot.kind is Kind.SNAPSHOT
                and chain.kind is Kind.CHAIN
                and snapshot.block_tokens % chain.block_tokens
            ):
                yield (
                    f"the block of {chain.name!r} ({chain.block_tokens} tokens) does not divide the "
                    f"checkpoint grid of {snapshot.name!r} ({snapshot.block_tokens}): a checkpoint "
                    "past the chain's last whole block cannot be used"
                )
