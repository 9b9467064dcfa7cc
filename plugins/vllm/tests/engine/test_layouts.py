"""One directory for engines whose pages lie differently: saved with one block size, read with another.

vLLM's CPU kernels keep K of a page transposed, so pages of 32, 64 and 128 tokens hold other bytes; MLA
keeps plain rows, which are the same bytes in pages of any size.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine_cases import (
    CORPUS,
    LOAD_FAILED,
    PREFIX,
    Truth,
    answers,
    corpus_job,
    engine_of,
    ucm,
)
from engine_harness import EngineJob, EnginePool, EngineResult
from engine_harness.tamper import flip_byte, objects

#: Writer and reader; vLLM's attention kernels on the CPU take multiples of 32.
PAIRS = [(32, 64), (32, 128), (64, 32), (128, 32), (128, 64)]


@pytest.fixture(scope="module")
def saved_by(engines: EnginePool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A directory filled by one engine process with the given block size. Copy it before use."""
    known: dict[tuple[str, int], Path] = {}

    def of(model: str, block: int) -> Path:
        if (model, block) not in known:
            directory = tmp_path_factory.mktemp(f"{model}-{block}")
            run = engines.run(_job(model, block, directory)).require_ok()
            assert run.external_hits(0) == 0
            known[model, block] = directory
        return known[model, block]

    return of


def _job(model: str, block: int, directory: Path, **changes: object) -> EngineJob:
    engine = {**engine_of(model), "block_size": block}
    job = corpus_job(model, connector=ucm(directory), engine=engine, **changes)
    job.scenario = "engine_scenarios:leftovers"  # every save has ended
    return job


def _whole(block: int) -> int:
    """What a reader takes of the shared prefix: whole stored blocks, then whole ones of its own."""
    return PREFIX // max(block, 64) * max(block, 64)


def _clean(result: EngineResult) -> None:
    assert result.prometheus.get(LOAD_FAILED, 0) == 0


@dataclass(frozen=True)
class Served:
    """What a process answered from a private copy of what another one with other pages had saved."""

    directory: Path
    #: The files that it found.
    before: list[Path]
    result: EngineResult


#: ``serve(model, writer's block size, reader's block size, ...)``.
Serve = Callable[..., Served]


@pytest.fixture
def serve(engines: EnginePool, saved_by: Callable[..., Path], tmp_path: Path) -> Serve:
    """Runs a reader; ``damaged``: every file it finds has a wrong bit; other words: see `EngineJob`."""

    def of(model: str, writer: int, block: int, damaged: bool = False, **job: object) -> Served:
        directory = tmp_path / "kv"
        shutil.copytree(saved_by(model, writer), directory)
        before = objects(directory)
        for path in before if damaged else ():
            flip_byte(path)
        result = engines.run(_job(model, block, directory, **job)).require_ok()
        return Served(directory, before, result)

    return of


@pytest.mark.parametrize(("writer", "block"), PAIRS)
def test_pages_of_one_size_serve_engines_of_another(
    writer: int, block: int, serve: Serve, truth: Callable[[str], Truth]
) -> None:
    served = serve("qwen3", writer, block)
    result = served.result
    _clean(result)
    assert answers(result) == truth("qwen3").cold
    assert [result.external_hits(i) for i in range(len(CORPUS))] == [_whole(block)] * len(CORPUS)
    assert objects(served.directory) == served.before, "what is there is not stored again"


@pytest.mark.parametrize(("writer", "block"), [(32, 64), (128, 32)])
def test_llama_in_both_directions(
    writer: int, block: int, serve: Serve, truth: Callable[[str], Truth]
) -> None:
    result = serve("llama", writer, block).result
    _clean(result)
    assert answers(result) == truth("llama").cold
    assert result.external_hits(0) == _whole(block)


@pytest.mark.parametrize(("writer", "block"), [(16, 64), (64, 16)])
def test_mla_rows_are_the_same_in_pages_of_any_size(
    writer: int, block: int, serve: Serve, truth: Callable[[str], Truth]
) -> None:
    """bf16: compared with vLLM's own hit at the same split."""
    result = serve("deepseek_v3", writer, block).result
    _clean(result)
    assert [result.external_hits(i) for i in range(len(CORPUS))] == [PREFIX] * len(CORPUS)
    assert answers(result)[1:] == truth("deepseek_v3").local


def test_damage_in_another_layout_is_recomputed(
    serve: Serve, truth: Callable[[str], Truth]
) -> None:
    result = serve("qwen3", 32, 128, damaged=True).result
    assert result.prometheus[LOAD_FAILED] > 0
    assert answers(result) == truth("qwen3").cold


def test_pages_that_nobody_has_described_are_a_clean_miss(
    engines: EnginePool, serve: Serve, truth: Callable[[str], Truth]
) -> None:
    """A kernel that packs in an unknown order shares with its like only, and never fails a load."""
    unknown = {"setup": "engine_scenarios:forget_page_orders"}
    first = serve("qwen3", 32, 64, **unknown)
    _clean(first.result)
    assert first.result.external_hits(0) == 0
    assert answers(first.result) == truth("qwen3").cold
    again = engines.run(_job("qwen3", 64, first.directory, **unknown)).require_ok()
    assert again.external_hits(0) == PREFIX
    assert answers(again) == truth("qwen3").cold


def test_without_conversion_the_answers_would_be_wrong(
    serve: Serve, truth: Callable[[str], Truth]
) -> None:
    """The control: an engine of 64 that calls its pages those of 32 takes the bytes as they are."""
    result = serve("qwen3", 32, 64, setup="engine_scenarios:claim_pages_of_32").result
    assert result.external_hits(0) == PREFIX
    assert answers(result) != truth("qwen3").cold
