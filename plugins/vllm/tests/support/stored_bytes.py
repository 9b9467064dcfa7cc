"""What the store must hold after scripted requests: computed from tokens alone, not from an engine."""

from __future__ import annotations

import numpy as np

from scripted_engine import ScriptedEngine, expand, prefix_values


def expected_objects(
    engine: ScriptedEngine, tokens: list[int], salt: str = ""
) -> dict[bytes, list[bytes]]:
    """Object id -> bytes per layer of every whole stored block of ``tokens``, for one rank."""
    placement = engine.connector._deployment.placement
    chain = engine.chain_of(tokens, cache_salt=salt or None)
    values = np.array(prefix_values(tokens, salt), dtype=np.float32)
    objects = {}
    for at in placement.all():
        size = at.row.block_tokens
        for block, key in enumerate(placement.keys.block_ids(at, chain)):
            mine = values[block * size : (block + 1) * size]
            objects[bytes(key)] = [_shard(engine, i, mine) for i in at.coordinate.layers]
    return objects


def _shard(engine: ScriptedEngine, index: int, values: np.ndarray) -> bytes:
    """A layer's bytes of one stored block: page after page, heads before tokens."""
    layer = engine.layers[index]
    cells = expand(values, layer, engine.memory.numpy()[layer.slot])
    pages = cells.reshape(-1, engine.block, *cells.shape[1:])
    return np.ascontiguousarray(pages.transpose(0, 2, 1, 3)).tobytes()


def check_stored(engine: ScriptedEngine, requests: dict[str, list[int]]) -> int:
    """Every stored object belongs to one of the requests and has its bytes. Returns how many.

    ``requests``: name -> every token that the request was given or answered.
    """
    wanted: dict[bytes, list[bytes]] = {}
    for name, tokens in requests.items():
        wanted |= expected_objects(engine, tokens, engine.salts.get(name, ""))
    for key, parts in engine.world.objects.items():
        assert key in wanted, "an object that no request computed"
        assert parts == wanted[key], "stored bytes differ from what was computed"
    return len(engine.world.objects)
