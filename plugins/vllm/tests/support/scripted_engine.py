"""vLLM's real scheduler and block pool with a scripted worker instead of a model.

The "model" writes into every page a value that depends on the whole prefix of a token (and on layer,
head and salt), and checks before each step that every position already computed holds the right
value. So a byte loaded into the wrong place, too early, or from another prefix is found at once. The
connector on both sides is the real one; only its store is a dictionary with completion by hand.

Tests take all names from here: `scripted_world` (what outlives an engine), `scripted_caches` (pages),
`scripted_model` (values), `scripted_runners` (who calls the connector) are parts of it.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from memory_store import MemoryTask
from scripted_caches import (
    BESIDE,
    HEAD_SIZE,
    HEADS,
    STATE,
    kv_cache_config,
    layers_of,
    state_tensor,
)
from scripted_model import Rank, ScriptedModel, expand, expected, prefix_values, prompt
from scripted_runners import RUNNERS
from scripted_world import ScriptedConnector, World, vllm_config
from ucm_core.identity import ContentChain
from ucm_vllm.identity import AdapterKeys, request_chain
from ucm_vllm.messages import UcmMetadata

__all__ = [
    "BESIDE",
    "HEADS",
    "HEAD_SIZE",
    "STATE",
    "ScriptedConnector",
    "ScriptedEngine",
    "World",
    "expand",
    "expected",
    "kv_cache_config",
    "prefix_values",
    "prompt",
    "vllm_config",
]


class ScriptedEngine:
    """One engine process's worth: scheduler, worker-side connector, page memory, scripted model.

    ``depth`` > 1: that many steps are in flight, as with asynchronous scheduling or pipeline stages.
    ``lagging``: the worker runs a step only when its result is waited for, else as soon as it is
    scheduled. ``runner``: who calls the worker's connector, one of `scripted_runners.RUNNERS`.
    ``drafts``: tokens that a scripted drafter proposes for each step, some right and some wrong.
    ``tp``: tensor-parallel ranks, each with heads and memory of its own.

    ``check_bytes``: see :class:`~scripted_model.ScriptedModel`.
    """

    def __init__(
        self,
        world: World,
        *,
        blocks: int = 64,
        mla: bool = False,
        depth: int = 1,
        lagging: bool = False,
        runner: str = "v1",
        drafts: int = 0,
        tp: int = 1,
        check_bytes: bool = True,
        **overrides: Any,
    ) -> None:
        world.use()
        self.world = world
        self.depth, self.lagging = depth, lagging
        self.drafts, self._dice = drafts, random.Random(1)
        if drafts:
            overrides["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": drafts,
                "prompt_lookup_max": 2,
            }
        self.config = vllm_config(
            world, async_scheduling=depth > 1, tensor_parallel_size=tp, **overrides
        )
        self.kv = kv_cache_config(
            self.config,
            blocks,
            mla=mla,
            windows=world.windows,
            state_mode=world.state_mode,
            interval=world.interval,
        )
        self.config.cache_config.num_gpu_blocks = blocks
        self.block = self.config.cache_config.block_size
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(self.block, sha256)
        scheduler = AsyncScheduler if depth > 1 else Scheduler
        self.scheduler = scheduler(
            vllm_config=self.config,
            kv_cache_config=self.kv,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=self.block,
            log_stats=True,
        )
        self.connector: ScriptedConnector = self.scheduler.connector  # type: ignore[assignment]
        heads, cell = (1, HEAD_SIZE) if mla else (HEADS // tp, 2 * HEAD_SIZE)
        groups = self.kv.kv_cache_groups
        slots = max(len(group.layer_names) for group in groups)
        self.layers = layers_of(self.kv, world.windows)
        opened = len(world.stores)
        self.ranks: list[Rank] = []
        for rank in range(tp):
            worker = ScriptedConnector(self.config, KVConnectorRole.WORKER, self.kv)
            worker.tp_rank = rank
            memory = torch.full((slots, blocks, heads, self.block, cell), -1.0)
            caches = {
                la.name: state_tensor(memory[la.slot]) if la.is_state else memory[la.slot]
                for la in self.layers
            }
            calls = RUNNERS[runner](self, worker, caches)
            self.ranks.append(Rank(worker, memory, rank * heads, calls))
        self.worker, self.memory = self.ranks[0].worker, self.ranks[0].memory
        self.runner = self.ranks[0].runner
        self._aggregator = KVOutputAggregator(tp)
        self.stores = world.stores[opened:]
        self.store = self.stores[-1]
        self.model = ScriptedModel(self.layers, self.ranks, self.block, check_bytes=check_bytes)
        self.tables, self.salts = self.model.tables, self.model.salts
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput | None]] = deque()
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, Any] = {}
        self.reports: list[KVConnectorOutput] = []
        #: Loads that were ordered, and requests whose blocks vLLM was told to hold, by request.
        self.loaded: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        self.steps = 0

    # -- requests ------------------------------------------------------------------------------------

    def request(self, name: str, tokens: list[int] | None, **kw: Any) -> Request:
        params = SamplingParams(max_tokens=kw.pop("max_tokens", 4), ignore_eos=True)
        if (logprobs := kw.pop("prompt_logprobs", None)) is not None:
            params.prompt_logprobs = logprobs
            params.skip_reading_prefix_cache = True
        self.salts[name] = kw.get("cache_salt") or ""
        return Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hasher,
            **kw,
        )

    def add(self, name: str, tokens: list[int] | None, **kw: Any) -> Request:
        request = self.request(name, tokens, **kw)
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        self.runner.aborting(name)
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    # -- steps -----------------------------------------------------------------------------------------

    def step(self) -> None:
        """schedule -> worker -> update, as the engine core does."""
        self.steps += 1
        assert self.steps < 20_000, "the engine does not come to an end"
        self.runner.scheduling()
        output = self.scheduler.schedule()
        if not output.num_scheduled_tokens:
            time.sleep(0.0005)  # vLLM's engine core does the same when nothing was executed
        self.in_flight.append((output, None if self.lagging else self.execute(output)))
        if len(self.in_flight) >= self.depth or not output.num_scheduled_tokens:
            self.finish_oldest()

    def finish_oldest(self) -> None:
        """The result of the oldest step in flight reaches the scheduler."""
        output, result = self.in_flight.popleft()
        self._update(output, result if result is not None else self.execute(output))

    def run(self, limit: int = 500) -> None:
        """Until there is nothing left to do."""
        for _ in range(limit):
            if self.scheduler.has_requests():
                self.step()
            elif self.in_flight:
                self.finish_oldest()
            else:
                return
        raise AssertionError(f"still busy after {limit} steps: {self.pending()}")

    def generate(self, name: str, tokens: list[int], **kw: Any) -> list[int]:
        self.add(name, tokens, **kw)
        self.run()
        return self.outputs[name]

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One step on the workers."""
        meta = output.kv_connector_metadata
        assert isinstance(meta, UcmMetadata)
        self.loaded.update(op.request_id for op in meta.loads)
        self.held.update(meta.finishing)
        starts = self.model.update_tables(output)
        sampled: list[list[int]] = []
        reports = self._run(
            output, self.ranks, lambda: sampled.extend(self.model.compute(output, starts))
        )
        ids = list(output.num_scheduled_tokens)
        outputs: list[ModelRunnerOutput | None] = [
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={r: i for i, r in enumerate(ids)},
                sampled_token_ids=sampled,
                kv_connector_output=report,
            )
            for report in reports
        ]
        result = outputs[0] if len(outputs) == 1 else self._aggregator.aggregate(outputs)
        assert result is not None
        assert result.kv_connector_output is not None
        self.reports.append(result.kv_connector_output)
        return result

    def _run(
        self, output: SchedulerOutput, ranks: list[Rank], model: Callable[[], None]
    ) -> list[KVConnectorOutput]:
        """The runners of all ranks around one forward pass, in which the ranks take turns by layer."""
        if not ranks:
            model()
            return []
        others: list[KVConnectorOutput] = []
        first = ranks[0].runner.run(
            output, lambda: others.extend(self._run(output, ranks[1:], model))
        )
        return [first, *others]

    def _update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        if self.drafts:
            self._propose(result)
        for outputs in self.scheduler.update_from_output(output, result).values():
            for out in outputs.outputs:
                self.outputs.setdefault(out.request_id, []).extend(out.new_token_ids)
                if out.finish_reason is not None:
                    self.finished[out.request_id] = out.finish_reason
            if outputs.scheduler_stats and outputs.scheduler_stats.kv_connector_stats:
                for key, value in outputs.scheduler_stats.kv_connector_stats.items():
                    self.counted[key] = self.counted.get(key, 0) + value

    def _propose(self, result: ModelRunnerOutput) -> None:
        """Drafts for the next step of every request that just answered: most of them right."""
        names = [r for i, r in enumerate(result.req_ids) if result.sampled_token_ids[i]]
        guesses = []
        for name in names:
            right = expected(self.model.tokens[name], self.drafts, self.salts.get(name, ""))
            guesses.append([t if self._dice.random() < 0.7 else 2 for t in right])
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, guesses))

    @property
    def check_bytes(self) -> bool:
        return self.model.check_bytes

    @check_bytes.setter
    def check_bytes(self, check: bool) -> None:
        self.model.check_bytes = check

    @property
    def counted(self) -> dict[str, float]:
        return self.__dict__.setdefault("_counted", {})

    def all_tasks(self) -> list[MemoryTask]:
        """Every load and dump this engine's worker has submitted, in order."""
        return [task for store in self.stores for task in store.tasks]

    def grid_tokens(self) -> int:
        """Tokens of a stored block."""
        return self.connector._deployment.manifest.block_tokens

    def chain_of(self, tokens: list[int], **kw: Any) -> ContentChain:
        """The content chain of a prompt, as the connector builds it."""
        chain = request_chain(
            self.request("chain", tokens, **kw), self.grid_tokens(), AdapterKeys()
        )
        chain.extend(np.array(tokens, dtype=np.int64))
        return chain

    def pending(self) -> dict[str, int]:
        """Everything either side still remembers; without zeros."""
        both = {f"scheduler.{k}": v for k, v in self.connector.pending().items()}
        for rank in self.ranks:
            for k, v in rank.worker.pending().items():
                both[f"worker.{k}"] = both.get(f"worker.{k}", 0) + v
        return {k: v for k, v in both.items() if v}

    def check_idle(self) -> None:
        """Nothing is left: no map entry, no unexpected event, no block of vLLM, no object half written."""
        assert self.pending() == {}
        assert self.counted.get("anomalies", 0) == 0
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == self.kv.num_blocks - 1, "blocks leaked"
        for store in self.stores:
            assert not (getattr(store, "staged", None) or getattr(store, "held", None))

    def check_told_once(self) -> tuple[Counter[str], Counter[str]]:
        """Every request id was told sent at most once, and never in both directions in one step. Returns
        how often each was told (sent, received)."""
        sent: Counter[str] = Counter()
        received: Counter[str] = Counter()
        for report in self.reports:
            assert not (report.finished_sending or set()) & (report.finished_recving or set())
            sent.update(report.finished_sending or ())
            received.update(report.finished_recving or ())
        assert all(count == 1 for count in sent.values()), sent
        return sent, received

    def close(self) -> None:
        self.connector.shutdown()
        for rank in self.ranks:
            rank.worker.shutdown()
