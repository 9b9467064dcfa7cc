"""Hashing a long prompt, beside SHA-256 over the same bytes and nothing else."""

from __future__ import annotations

import numpy as np

from benchmarks.support.limits import Limits
from benchmarks.support.meter import Series, interleave, measure, wall_ratio
from benchmarks.support.report import Report, Table, Target
from ucm_core.identity.chain import ContentChain

BLOCK_TOKENS = 64
SEED = bytes(range(32))
SIZES = (65_536, 131_072)


def run(report: Report, limits: Limits, rounds: int) -> None:
    """Chain plus object ids of whole prompts, and of one new block at the end of a long one (case B46:
    the cost grows with the prompt and no faster)."""
    measured = {tokens: _measure(limits, tokens, rounds) for tokens in SIZES}
    rows = [
        [
            f"{tokens} tokens",
            f"{1e3 * series['ours'].wall_s:.3f} ms",
            f"{1e3 * series['ours'].cpu_s:.3f} ms",
            f"{1e3 * series['sha'].wall_s:.3f} ms",
            f"{wall_ratio(series['ours'], series['sha']):.2f}x",
            f"{1e6 * series['tail'].wall_s:.1f} us",
        ]
        for tokens, series in measured.items()
    ]
    report.table(
        Table(
            "Hashing",
            ("prompt", "chain + ids", "CPU", "SHA-256 of the chain", "ratio", "one more block"),
            rows,
            f"Blocks of {BLOCK_TOKENS} tokens. Ours makes the chain and every object id (a second "
            "SHA-256 a block); the limit is OpenSSL over the chain alone, from C++.",
        )
    )
    longest = measured[max(SIZES)]["ours"]
    growth = wall_ratio(longest, measured[min(SIZES)]["ours"])
    what = "hash 131,072 tokens / hash 65,536 tokens"
    report.target(Target(what, "at most", 2.3, growth))
    report.target(Target("hash 131,072 tokens", "at most", 2.0, 1e3 * longest.wall_s, "ms"))


def _measure(limits: Limits, tokens: int, rounds: int) -> dict[str, Series]:
    prompt = np.random.default_rng(1).integers(0, 100_000, tokens, dtype=np.uint32)
    long_chain = ContentChain(BLOCK_TOKENS)
    long_chain.extend(prompt)

    def whole() -> None:
        chain = ContentChain(BLOCK_TOKENS)
        chain.extend(prompt)
        chain.object_ids(SEED)

    def one_more() -> None:
        long_chain.extend(prompt[:BLOCK_TOKENS])
        long_chain.object_ids(SEED, len(long_chain) - 1)

    return interleave(
        {
            "ours": lambda: measure(whole, operations=tokens // BLOCK_TOKENS),
            "sha": lambda: limits.run("hash_chain", tokens=tokens, block_tokens=BLOCK_TOKENS),
            "tail": lambda: measure(one_more, operations=1),
        },
        rounds=3 * rounds,
        warmups=3,
    )
