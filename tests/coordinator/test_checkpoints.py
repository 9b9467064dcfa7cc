"""The checkpoint directory: a bounded accelerator for exactly one prefix at a time."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from ucm_core.coordinator.checkpoints import CheckpointDirectory
from ucm_core.identity import ContentChain
from ucm_core.spec import GroupSpec, Kind

GRAIN = 16


def row(grid: int = GRAIN) -> GroupSpec:
    return GroupSpec("s", Kind.SNAPSHOT, (0,), grid, 8)


def chain(tokens: range) -> ContentChain:
    made = ContentChain(GRAIN)
    made.extend(np.array(tokens, np.uint32))
    return made


def fill(directory: CheckpointDirectory, c: ContentChain, *positions: int) -> None:
    for p in positions:
        directory.add(p, c.links[p // GRAIN - 1].tobytes())


def test_only_this_very_prefix() -> None:
    directory = CheckpointDirectory(row(), GRAIN)
    mine, other = chain(range(100)), chain(range(1, 101))
    fill(directory, mine, 32, 80)
    fill(directory, other, 48)
    assert directory.positions(mine).tolist() == [32, 80]
    assert directory.positions(other).tolist() == [48]
    assert directory.positions(chain(range(70))).tolist() == [32]
    assert directory.positions(chain(range(5))).tolist() == []


def test_a_missed_get_removes_the_entry() -> None:
    directory = CheckpointDirectory(row(), GRAIN)
    c = chain(range(100))
    fill(directory, c, 32, 80)
    directory.discard(80, c.links[4].tobytes())
    directory.discard(80, c.links[4].tobytes())
    assert directory.positions(c).tolist() == [32]
    fill(directory, c, 80, 80)
    assert directory.positions(c).tolist() == [32, 80] and len(directory) == 2


def test_bounded_and_the_least_used_leaves() -> None:
    directory = CheckpointDirectory(row(), GRAIN, capacity=3)
    a, b = chain(range(64)), chain(range(100, 164))
    fill(directory, a, 16, 32, 48)
    directory.positions(chain(range(16)))  # uses 16 only
    fill(directory, b, 16)
    assert directory.positions(a).tolist() == [16, 48]
    assert directory.positions(b).tolist() == [16]
    assert (len(directory), directory.forgotten) == (3, 1)


def test_equal_words_of_other_links_do_not_match() -> None:
    directory = CheckpointDirectory(row(), GRAIN)
    c = chain(range(32))
    link = c.links[0].tobytes()
    directory.add(16, link[:8] + bytes(24))
    directory.add(32, link)  # the right link at another position
    assert directory.positions(c).tolist() == []


def test_against_a_dict_of_entries() -> None:
    """Random adds, discards and look-ups of chains that share prefixes; least recently used leaves."""
    rng = random.Random(4)
    directory = CheckpointDirectory(row(), GRAIN, capacity=12)
    chains = [chain(range(160)), chain(range(1, 161))]
    for cut in (48, 96):
        made = ContentChain(GRAIN)
        made.extend(np.array([*range(cut), *range(500, 660 - cut)], np.uint32))
        chains.append(made)
    model: dict[tuple[int, bytes], None] = {}
    for _ in range(3000):
        c = rng.choice(chains)
        position = GRAIN * rng.randint(1, 10)
        key = (position, c.links[position // GRAIN - 1].tobytes())
        action = rng.random()
        if action < 0.4:
            if key not in model and len(model) == 12:
                del model[next(iter(model))]
            model.pop(key, None)
            model[key] = None
            directory.add(*key)
        elif action < 0.6:
            model.pop(key, None)
            directory.discard(*key)
        else:
            known = [(GRAIN * (i + 1), c.links[i].tobytes()) for i in range(len(c.links))]
            found = [k for k in known if k in model]
            for k in found:
                del model[k]
                model[k] = None
            assert directory.positions(c).tolist() == [p for p, _ in found]
        assert len(directory) == len(model)
    assert directory.forgotten > 50


def test_positions_off_the_grain_are_refused() -> None:
    directory = CheckpointDirectory(row(1), GRAIN)
    for bad in (0, 17, -16):
        with pytest.raises(ValueError, match="grain"):
            directory.add(bad, bytes(32))
    with pytest.raises(ValueError, match="capacity"):
        CheckpointDirectory(row(), GRAIN, capacity=0)


def test_callbacks_from_many_threads() -> None:
    directory = CheckpointDirectory(row(), GRAIN, capacity=64)
    chains = [chain(range(i, i + 160)) for i in range(8)]

    def work(c: ContentChain) -> None:
        for _ in range(50):
            fill(directory, c, *range(16, 161, 16))
            directory.positions(c)
            directory.discard(16, c.links[0].tobytes())

    threads = [threading.Thread(target=work, args=(c,)) for c in chains]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len(directory) <= 64
    for c in chains:
        assert 16 not in directory.positions(c)
