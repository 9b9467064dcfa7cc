"""How many tokens of a real multi-turn workload continue from a state: ours beside hash folding.

usage: python -m benchmarks.states [--requests N]

**Mapping.** A row of the trace is a prompt of 512-token blocks; its last block counts as partial (it is in
511 of 512 cases), so a prompt of n blocks has n - 1 whole ones. A block is one link of the chain (two
"tokens" here, and one for the partial block, so that hashing costs nothing). The model has one full
attention row and one state row, both with a block of 512 tokens; checkpoints every 1024 tokens, at the end
of a prompt, and where a prefix is shared for the second time. Nothing is evicted. The multi-turn workload
is every row that shares more than the common system prompt with another row: those of the tree's branches
in which at least two rows agree beyond their first block.

**Bound.** Whole leading blocks of a row that an earlier row of the workload had too: nobody can continue
deeper. *State hit rate*: blocks skipped because a request continued from a state, over all whole blocks.

**Hash folding.** The state is part of what the hash of the *whole* prefix names: there is one state per
request, at its end, asked for by the hash of the whole new prefix (whole-prefix hits only: no positions to
ask at); and since it is not copied on use, whoever continues from it takes it away. *Searched* is a kinder
form that no longer fits the name: it asks at every block whether an earlier request ended there.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from benchmarks.support.trace import REQUESTS, requests
from ucm_core.coordinator import Coordinator
from ucm_core.identity import ContentChain, ModelIdentity
from ucm_core.spec import GroupSpec, KeySpace, Kind, Retention, SpecTable

LINK = 2
INTERVAL = 1024 // 512 * LINK

Rows = Sequence[Sequence[int]]


def multi_turn(rows: Rows) -> list[Sequence[int]]:
    """Rows that agree with another row beyond their first block."""
    second = Counter(tuple(row[:2]) for row in rows if len(row) > 2)
    return [row for row in rows if len(row) > 2 and second[tuple(row[:2])] > 1]


def bound(rows: Rows) -> list[int]:
    """Per row, whole leading blocks that an earlier row had."""
    seen: set[int] = set()
    depths = []
    for row in rows:
        whole = row[:-1]
        depths.append(next((i for i, block in enumerate(whole) if block not in seen), len(whole)))
        seen.update(whole)
    return depths


def folded(rows: Rows, *, searched: bool = False) -> list[int]:
    """Per row, the depth that hash folding continues from. A block number names its whole prefix."""
    ends: set[int] = set()
    depths = []
    for row in rows:
        whole = row[:-1]
        first = 0 if searched else max(0, len(whole) - 1)
        depth = next((i + 1 for i in range(len(whole) - 1, first - 1, -1) if whole[i] in ends), 0)
        if depth:
            ends.discard(whole[depth - 1])
        depths.append(depth)
        if whole:
            ends.add(whole[-1])
    return depths


def ours(rows: Rows) -> list[int]:
    """Per row, the depth that the coordinator decides, with stores that never forget."""
    table = SpecTable(
        [
            GroupSpec("attention", Kind.CHAIN, (0,), LINK, 8),
            GroupSpec("state", Kind.SNAPSHOT, (1,), LINK, 8, retention=Retention(INTERVAL)),
        ],
        grain=LINK,
        num_layers=2,
    )
    keys = KeySpace(table, ModelIdentity("id:trace", "bf16"))
    coordinator = Coordinator(keys)
    (attention,) = keys.of("attention")
    stored: set[bytes] = set()
    depths = []
    for row in rows:
        chain = ContentChain(LINK)
        tokens = np.repeat(np.array(row, np.uint32), LINK)[: LINK * len(row) - 1]
        chain.extend(tokens)
        plan = coordinator.plan(chain)
        answers = {
            name: np.array([i.tobytes() in stored for i in ids], np.bool_)
            for name, ids in plan.ids.items()
        }
        hit = coordinator.decide(chain, plan, answers)
        depths.append(hit.p_star // LINK)
        keep = coordinator.admit(chain, hit)
        stored.update(i.tobytes() for i in keys.block_ids(attention, chain))
        for position in keep:
            for key in coordinator.snapshots_at(chain, int(position)):
                stored.update(i.tobytes() for i in keys.snapshot_ids(key))
    return depths


def rates(rows: Rows) -> dict[str, float]:
    """Share of the workload's whole blocks, in percent, per method."""
    total = sum(len(row) - 1 for row in rows)
    methods: dict[str, Callable[[Rows], Iterable[int]]] = {
        "bound": bound,
        "ours": ours,
        "hash folding": folded,
        "searched": partial(folded, searched=True),
    }
    return {name: 100 * sum(method(rows)) / total for name, method in methods.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=REQUESTS, help="leading rows of the trace")
    rows = list(requests(parser.parse_args().requests))
    for label, chosen in (("all rows", rows), ("multi-turn rows", multi_turn(rows))):
        blocks = sum(len(row) - 1 for row in chosen)
        print(f"{label}: {len(chosen)} requests, {blocks} whole blocks of 512 tokens")
        for name, rate in rates([row for row in chosen if len(row) > 1]).items():
            print(f"  {name:14}{rate:6.1f} %")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
