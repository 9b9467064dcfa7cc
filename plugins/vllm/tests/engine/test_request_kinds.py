"""Requests whose KV depends on more than tokens, and drafts: on the real engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_cases import ANSWER, BLOCK, CORPUS, PREFIX, Truth, answers, checkpoint, corpus_job, ucm
from engine_harness import EngineJob, EnginePool, Round, prompt
from engine_harness.tamper import objects
from tiny_adapter import RANK, write_adapter

LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}


def test_adapters_share_by_content_alone(
    engines: EnginePool, kv_dir: Path, truth: Callable[[str], Truth], tmp_path: Path
) -> None:
    """B02: one name and other weights never share; the same weights under another name and number do."""
    model = checkpoint("qwen3")
    x = str(write_adapter(tmp_path / "x", model, 1))
    y = str(write_adapter(tmp_path / "y", model, 2))

    def ask(name: str = "", number: int = 0, path: str = "") -> Round:
        lora = {"lora_name": name, "lora_int_id": number, "lora_path": path} if name else None
        return Round([CORPUS[0]], max_tokens=ANSWER, lora=lora, reset_local=True)

    first = corpus_job(connector=ucm(kv_dir), engine=dict(LORA), rounds=[ask("bot", 1, x)])
    saved = engines.run(first).require_ok()
    assert saved.external_hits() == 0
    second = corpus_job(connector=ucm(kv_dir), engine=dict(LORA))
    second.rounds = [ask("bot", 1, y), ask(), ask("other", 7, x)]
    result = engines.run(second).require_ok()
    assert [result.external_hits(i) for i in range(3)] == [0, 0, PREFIX]
    with_y, plain, with_x = answers(result)
    assert plain == truth("qwen3").cold[0]
    assert with_x == answers(saved)[0]
    assert len({tuple(a) for a in (with_x, with_y, plain)}) == 3, "the adapters do something"


def test_prompt_embeddings_are_never_hit_nor_saved(engines: EnginePool, kv_dir: Path) -> None:
    """B04: an embeddings request has no tokens; a negative hit, or placeholders saved, would show."""
    job = EngineJob(checkpoint("qwen3"), connector=ucm(kv_dir), name="embeds")
    job.engine = {"enable_prompt_embeds": True}
    job.scenario = "engine_scenarios:prompt_embeddings"
    job.scenario_args = {"tokens": 200, "hidden": 128}
    result = engines.run(job).require_ok()
    first, second = result.extra["answers"]
    assert first != second, "the embeddings do something"
    assert result.extra["hits"] == 0
    assert objects(kv_dir) == []
    assert result.prometheus["ucm:ucm_uncacheable_requests_total"] == 3


def test_draft_tokens_are_never_saved(engines: EnginePool, kv_dir: Path) -> None:
    """Speculation writes KV of tokens that are then rejected; what is stored is the accepted text."""
    pattern = prompt(77, 12)
    tokens = (pattern * 20)[: 3 * BLOCK + 20]
    job = EngineJob(checkpoint("qwen3"), [Round([tokens], max_tokens=150)], name="drafts")
    plain = engines.run(job).require_ok()
    drafting = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
    job.connector, job.engine = ucm(kv_dir), {"speculative_config": drafting}
    drafted = engines.run(job).require_ok()
    assert answers(drafted) == answers(plain)
    counts = drafted.metrics_by_round[-1]
    proposed = counts["vllm:spec_decode_num_draft_tokens"]
    accepted = counts["vllm:spec_decode_num_accepted_tokens"]
    assert 0 < accepted < proposed, "drafts must be taken and refused"
    whole = (len(tokens) + 150 - 1) // BLOCK
    assert len(objects(kv_dir)) == whole

    later = [*tokens, *answers(plain)[0], *prompt(78, 9)]
    job = EngineJob(job.model, [Round([later], max_tokens=ANSWER)], name="after-drafts")
    cold = engines.run(job).require_ok()
    job.connector = ucm(kv_dir)
    warm = engines.run(job).require_ok()
    assert warm.external_hits() == whole * BLOCK
    assert answers(warm) == answers(cold)
