"""What runs inside an engine process besides its rounds: faults, aborts, checks of inner state.

Every function takes the engine (``vllm.LLM``, in-process core) and JSON arguments, and returns JSON.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from engine_harness.engine import scheduler_connector, worker_connector
from engine_harness.tamper import DAMAGES, damage, objects
from ucm_core.errors import FullError
from ucm_core.identity import ContentChain, chain_root
from ucm_core.store.contract import Status, TaskState

# -- before an engine is built -----------------------------------------------------------------------


def allow_local_prefix_cache() -> None:
    """Let vLLM's own prefix cache run for MLA on the CPU, where the platform switches it off.

    It is the reference for external hits: a continuation computes differently from one pass there.
    """
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        wanted = vllm_config.cache_config.enable_prefix_caching
        original(cls, vllm_config)
        vllm_config.cache_config.enable_prefix_caching = wanted

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def forget_page_orders() -> None:
    """Nobody has described how this machine's kernels pack a page."""
    from ucm_vllm import facts

    facts.find_order = lambda *_: None  # type: ignore[assignment]


def claim_pages_of_32() -> None:
    """Write and expect the descriptor of pages of 32 tokens, whatever the pages are."""
    from dataclasses import replace

    from ucm_vllm import placement

    original = placement.object_layout

    def object_layout(kind: Any, order: str, grid: Any, *rest: Any) -> Any:
        return original(kind, order, replace(grid, engine_block=32), *rest)

    placement.object_layout = object_layout


# -- before a round ------------------------------------------------------------------------------------


def damage_before_load(llm: Any, root: str, kind: str, count: int | None = None) -> None:
    """Damage files after the next lookup has promised them, before that load is submitted."""
    settle(llm)  # what earlier rounds save must be there to be damaged
    connector = scheduler_connector(llm)
    original = type(connector).update_state_after_alloc

    def update_state_after_alloc(request: Any, blocks: Any, external: int) -> None:
        if external:
            assert damage(Path(root), kind, count), f"nothing to damage below {root}"
            del connector.update_state_after_alloc  # once
        original(connector, request, blocks, external)

    connector.update_state_after_alloc = update_state_after_alloc


def damage_blocks(
    llm: Any, root: str, tokens: list[int], window: int | None, blocks: list[int], kind: str
) -> None:
    """Damage the files of some blocks of a prompt, of the store group with this window."""
    settle(llm)
    for at in scheduler_connector(llm)._deployment.placement.all():
        if at.row.window == window:
            _damage(llm, root, tokens, at.seed, blocks, kind)


def damage_at_boundary(
    llm: Any, root: str, tokens: list[int], what: str, position: int, kind: str, parts: int = -1
) -> None:
    """Damage the state at a position of a prompt, or the block of KV that ends there; ``parts``: the
    first so many of its coordinates."""
    settle(llm)
    placement = scheduler_connector(llm)._deployment.placement
    chain = ContentChain(placement.grain, chain_root(None, None))
    chain.extend(np.array(tokens, dtype=np.int64))
    (place,) = placement.states if what == "state" else placement.rows
    for at in placement.keys.of(place.row.name)[: parts if parts > 0 else None]:
        if what == "state":
            (key,) = chain.snapshot_ids(at.seed, [position])
        else:
            key = chain.object_ids(at.seed)[position // place.row.block_tokens - 1]
        (path,) = [p for p in objects(Path(root)) if p.name == bytes(key).hex()]
        DAMAGES[kind](path)


def damage_second_slice(llm: Any, root: str, tokens: list[int], block: int) -> None:
    """Corrupt the file of one block that holds the upper half of the heads."""
    lower, upper = scheduler_connector(llm)._deployment.placement.all()
    assert lower.coordinate.heads[0] == 0 < upper.coordinate.heads[0]
    _damage(llm, root, tokens, upper.seed, [block], "negate_floats")


def _damage(
    llm: Any, root: str, tokens: list[int], seed: bytes, blocks: list[int], kind: str
) -> None:
    settle(llm)
    deployment = scheduler_connector(llm)._deployment
    chain = ContentChain(deployment.manifest.block_tokens, chain_root(None, None))
    chain.extend(np.array(tokens, dtype=np.int64))
    names = {bytes(key).hex() for key in chain.object_ids(seed)[blocks]}
    found = [path for path in objects(Path(root)) if path.name in names]
    assert len(found) == len(blocks), f"{len(found)} of the files {names} are there"
    for path in found:
        DAMAGES[kind](path)


def settle(llm: Any, timeout_s: float = 20.0) -> None:
    """Run short steps until both sides of the connector have nothing under way."""
    deadline = time.monotonic() + timeout_s
    while any(pending().values()) or any(scheduler_connector(llm).pending().values()):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"still under way: {pending()}, {scheduler_connector(llm).pending()}"
            )
        time.sleep(0.01)
        step_with_noise(llm)


def pending() -> dict[str, int]:
    """Sizes of the worker side's maps; nothing where workers are processes of their own."""
    from vllm.distributed.kv_transfer import has_kv_transfer_group

    sizes: dict[str, int] = worker_connector().pending() if has_kv_transfer_group() else {}
    return sizes


# -- driving requests one by one -------------------------------------------------------------------------


def _params(max_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)


def step_with_noise(llm: Any) -> None:
    """One request of one token: makes the engine step, so that finished work is collected."""
    llm.generate([{"prompt_token_ids": [7]}], _params(1), use_tqdm=False)


class SlowStore:
    """A store whose loads or dumps do not report an end until `release` is called."""

    def __init__(self, store: Any, verb: str) -> None:
        self._store = store
        self._verb = verb
        self.held = True

    def release(self) -> None:
        self.held = False

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store, name)
        if name != self._verb:
            return value
        return lambda *arguments, **options: SlowTask(value(*arguments, **options), self)


class SlowTask:
    """A task that is not done while its store is held."""

    def __init__(self, task: Any, gate: SlowStore) -> None:
        self._task = task
        self._gate = gate

    def check(self, timeout_s: float = 0.0) -> bool:
        return not self._gate.held and self._task.check(timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


def slow_down(verb: str) -> list[SlowStore]:
    """Put a `SlowStore` under every lane of the worker side."""
    worker = worker_connector()._worker
    stores = [SlowStore(lane.store, verb) for lane in worker.lanes]
    worker.lanes[:] = [
        dataclasses.replace(lane, store=store)
        for lane, store in zip(worker.lanes, stores, strict=True)
    ]
    return stores


def abort_in_every_state(llm: Any, stored: list[int], fresh: list[int]) -> dict[str, Any]:
    """Abort requests in six states; ``stored`` hits in the store, ``fresh`` does not.

    Returns what the connector still holds, whether all blocks are free, and the answers of the same
    prompts afterwards.
    """
    engine = llm.llm_engine

    def steps(count: int) -> None:
        for _ in range(count):
            engine.step()

    def add(name: str, tokens: list[int], max_tokens: int = 8) -> None:
        engine.add_request(name, {"prompt_token_ids": tokens}, _params(max_tokens))

    def abort(name: str) -> None:
        engine.abort_request([name])

    add("never-scheduled", stored)
    abort("never-scheduled")
    steps(2)

    loading = slow_down("load")
    add("loading", stored)
    steps(3)
    load_seen = pending()["loads"]
    abort("loading")
    steps(3)
    for store in loading:
        store.release()
    steps(3)

    saving = slow_down("dump")
    add("saving", fresh, max_tokens=4)
    steps(2)
    save_seen = pending()["saves"]
    abort("saving")
    steps(3)
    for store in saving:
        store.release()
    steps(3)

    add("computing", fresh[:100] + stored[:100], max_tokens=50)
    steps(4)
    abort("computing")
    steps(3)

    add("finished", stored[:40], max_tokens=1)
    steps(6)
    abort("finished")
    steps(2)

    add("batch-a", stored)
    add("batch-b", fresh)
    abort("batch-a")  # looked up or not, in a batch with another one
    for _ in range(200):
        engine.step()
        if not engine.has_unfinished_requests():
            break
    settle(llm)
    free = llm.reset_prefix_cache()
    answers = [
        list(out.outputs[0].token_ids)
        for out in llm.generate(
            [{"prompt_token_ids": stored}, {"prompt_token_ids": fresh}], _params(8), use_tqdm=False
        )
    ]
    settle(llm)
    return {
        "load_seen": load_seen,
        "save_seen": save_seen,
        "scheduler": scheduler_connector(llm).pending(),
        "worker": pending(),
        "all_blocks_free": free,
        "answers": answers,
    }


def leftovers(llm: Any) -> dict[str, Any]:
    """After everything: what either side still holds, and whether vLLM has all its blocks back."""
    settle(llm)
    return {
        "scheduler": scheduler_connector(llm).pending(),
        "worker": pending(),
        "all_blocks_free": bool(llm.reset_prefix_cache()),
    }


def hang(llm: Any) -> None:
    """For the harness's own test."""
    time.sleep(600)


def die(llm: Any) -> None:
    """End the process at once, as a kill would."""
    os._exit(9)


# -- what happens to the storage while an engine runs -------------------------------------------------


def remove_objects(llm: Any, root: str) -> None:
    """Remove every directory that holds objects, as ``rm -rf`` on part of a cache does."""
    settle(llm)
    for folder in {path.parent for path in objects(Path(root))}:
        shutil.rmtree(folder)


def remove_largest_objects(llm: Any, root: str) -> None:
    """Remove what the pipeline stage with most layers has stored."""
    files = objects(Path(root))
    largest = max(path.stat().st_size for path in files)
    for path in files:
        if path.stat().st_size == largest:
            path.unlink()


def remount_read_only(llm: Any, root: str) -> None:
    """A file system turns read-only under a running engine, as after an I/O error."""
    settle(llm)
    subprocess.run(["mount", "-o", "remount,ro", root], check=True)


def lose_directory(llm: Any, root: str) -> None:
    """The storage directory is gone, as a lost mount is; returns when both sides have noticed."""
    settle(llm)
    Path(root).rename(f"{root}.away")
    _await_service(llm, is_out=True)


def find_directory(llm: Any, root: str) -> None:
    """It is back; returns when both sides use it again, and the worker has told what happened."""
    settle(llm)
    Path(f"{root}.away").rename(root)
    _await_service(llm, is_out=False)
    worker = worker_connector()._worker
    worker._watch.look_now(worker.stats)


def _await_service(llm: Any, *, is_out: bool) -> None:
    sides = (worker_connector(), scheduler_connector(llm))
    stores = [store for side in sides for store in side._deployment._stores.values()]
    deadline = time.monotonic() + 20.0
    while any(bool(store.stats()["Posix.health_open"]) is not is_out for store in stores):
        if time.monotonic() > deadline:
            raise TimeoutError(f"health: {[store.health() for store in stores]}")
        time.sleep(0.01)


def make_dumps_slow(llm: Any, seconds: float = 0.15) -> None:
    """Every dump reads its source only after ``seconds``, on a thread, as a busy store would."""
    worker = worker_connector()._worker
    worker.lanes[:] = [
        dataclasses.replace(lane, store=_LateDumps(lane.store, seconds)) for lane in worker.lanes
    ]


class _LateDumps:
    """A store whose dumps touch their source only after a while."""

    def __init__(self, store: Any, seconds: float) -> None:
        self._store = store
        self._seconds = seconds

    def dump(self, *arguments: Any, **options: Any) -> _LateTask:
        return _LateTask(lambda: self._store.dump(*arguments, **options), arguments, self._seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _LateTask:
    """Submits the real dump after ``seconds``; waited for in vain before that, it never does."""

    def __init__(self, submit: Callable[[], Any], arguments: Any, seconds: float) -> None:
        self._submit = submit
        self._rows = len(arguments[0])
        self._lock = threading.Lock()
        self._task: Any = None
        self._given_up = False
        timer = threading.Timer(seconds, self._go)
        timer.daemon = True
        timer.start()

    def _go(self) -> None:
        with self._lock:
            if not self._given_up:
                self._task = self._submit()

    def _settled(self, timeout_s: float | None) -> Any:
        """The real task; None when it was given up."""
        end = time.monotonic() + (30.0 if timeout_s is None else timeout_s)
        while self._task is None and not self._given_up and time.monotonic() < end:
            time.sleep(0.005)
        with self._lock:
            self._given_up = self._task is None
        return self._task

    def check(self, timeout_s: float = 0.0) -> bool:
        return self._given_up or (self._task is not None and self._task.check(timeout_s))

    def wait(self, timeout_s: float | None = None) -> Any:
        task = self._settled(timeout_s)
        if task is None:
            return np.full(self._rows, Status.TIMEOUT, np.uint8)
        return task.wait(timeout_s)

    def wait_durable(self, timeout_s: float | None = None) -> Any:
        task = self._settled(timeout_s)
        if task is None:
            return np.full(self._rows, Status.TIMEOUT, np.uint8)
        return task.wait_durable(timeout_s)

    def durable_results(self) -> Any:
        if self._given_up:
            return np.full(self._rows, Status.TIMEOUT, np.uint8)
        if self._task is None:
            return np.full(self._rows, Status.PENDING, np.uint8)
        return self._task.durable_results()

    def errnos(self) -> Any:
        return np.zeros(self._rows, np.int32) if self._task is None else self._task.errnos()

    def durable_errnos(self) -> Any:
        return np.zeros(self._rows, np.int32) if self._task is None else self._task.durable_errnos()

    def state(self) -> TaskState:
        if self._given_up:
            return TaskState.FAILED
        return TaskState.SUBMITTED if self._task is None else self._task.state()

    def cancel(self) -> None:
        task = self._settled(0.0)
        if task is not None:
            task.cancel()


# -- several workers ------------------------------------------------------------------------------------


def rank_one_cannot_save() -> None:
    """Before the workers are forked: every save of tensor-parallel rank 1 fails."""
    from ucm_vllm.deployment import Deployment

    original = Deployment.worker_side

    def worker_side(self: Any, caches: Any, pp_rank: int, tp_rank: int) -> Any:
        side = original(self, caches, pp_rank, tp_rank)
        if tp_rank == 1:
            side.lanes[:] = [
                dataclasses.replace(lane, store=_NoDumps(lane.store)) for lane in side.lanes
            ]
        return side

    Deployment.worker_side = worker_side  # type: ignore[method-assign]


class _NoDumps:
    """A store that refuses every dump."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def dump(self, *arguments: Any, **options: Any) -> Any:
        raise FullError("this rank's storage takes nothing")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


# -- requests without tokens ----------------------------------------------------------------------------


def prompt_embeddings(llm: Any, tokens: int, hidden: int) -> dict[str, Any]:
    """Two requests of random embeddings, each sent twice; the local cache emptied before each."""
    import torch

    from engine_harness.engine import counters
    from engine_harness.job import EXTERNAL_HITS

    said = []
    for seed in (1, 1, 2):
        settle(llm)
        assert llm.reset_prefix_cache()
        embeds = torch.randn((tokens, hidden), generator=torch.Generator().manual_seed(seed))
        (out,) = llm.generate([{"prompt_embeds": embeds}], _params(6), use_tqdm=False)
        said.append(list(out.outputs[0].token_ids))
    assert said[0] == said[1]
    return {"answers": said[1:], "hits": counters(llm).get(EXTERNAL_HITS, 0)}
