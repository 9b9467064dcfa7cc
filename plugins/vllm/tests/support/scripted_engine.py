"""vLLM's real scheduler and block pool with a scripted worker instead of a model.

The "model" writes into every page a value that depends on the whole prefix of a token (and on layer,
head and salt), and checks before each step that every position already computed holds the right
value. So a byte loaded into the wrong place, too early, or from another prefix is found at once. The
connector on both sides is the real one; only its store is a dictionary with completion by hand.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_groups,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from memory_store import MemoryStore, MemoryTask
from scripted_runners import RUNNERS, RunnerV1
from ucm_core.identity import ContentChain
from ucm_core.store.contract import Geometry
from ucm_vllm.connector import UCMConnector
from ucm_vllm.deployment import Deployment, Settings
from ucm_vllm.devices import HOST, KvDevice
from ucm_vllm.identity import AdapterKeys, request_chain
from ucm_vllm.messages import UcmMetadata

HEADS, HEAD_SIZE = 2, 4
#: In place of a window: the layer keeps a recurrent state instead of KV.
STATE = "state"
#: Floats of one layer's state: convolution and recurrence, packed one after the other.
STATE_SHAPES = ((3, 4), (2, 4))
STATE_SIZE = 20
#: What the model answers when it has read wrong bytes.
WRONG_TOKEN = 2


class World:
    """What outlives an engine: the model, the directory of the namespace and the stored objects.

    ``windows``: per layer of the model the length of its sliding window, None for full attention, or
    ``STATE``. ``state_mode``, ``interval``: vLLM's mamba_cache_mode and prefix_cache_retention_interval.
    """

    def __init__(
        self,
        folder: Path,
        *,
        auto: bool = True,
        windows: Sequence[int | str | None] = (None, None),
        state_mode: str = "align",
        interval: int | None = None,
    ) -> None:
        self.state_mode, self.interval = state_mode, interval
        self.folder = folder
        self.auto = auto
        self.windows = tuple(windows)
        self.objects: dict[bytes, list[bytes | None]] = {}
        self.faults: dict[bytes, Any] = {}
        self.stores: list[MemoryStore] = []
        self.settings: dict[str, Any] = {"model_id": "scripted"}
        self.model = folder / "model"
        self.model.mkdir(exist_ok=True)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": len(self.windows),
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "head_dim": HEAD_SIZE,
            "vocab_size": 1024,
            "max_position_embeddings": 4096,
        }
        (self.model / "config.json").write_text(json.dumps(config))

    def opener(self, role: str) -> Any:
        """What opens the stores of one side, "scheduler" or "worker"."""
        return self.open_store

    def open_store(self, geometry: Geometry, manifest: Any, device: KvDevice = HOST) -> MemoryStore:
        del device
        store = MemoryStore(geometry, auto=self.auto)
        store.objects, store.faults = self.objects, self.faults
        self.stores.append(store)
        return store


_world: World | None = None


class ScriptedConnector(UCMConnector):
    """The real connector over the current world's store."""

    @classmethod
    def _open(
        cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, role: Any
    ) -> Deployment:
        assert _world is not None
        settings = Settings(roots=(_world.folder / "cache",), **_world.settings)
        opener = _world.opener(role.name.lower())
        return Deployment(vllm_config, kv_cache_config, settings, opener)

    tp_rank = 0

    def _ranks(self) -> tuple[int, int]:
        return 0, self.tp_rank

    def deployment_store(self) -> MemoryStore:
        """The store of a one-group model."""
        (store,) = self._deployment._stores.values()
        assert isinstance(store, MemoryStore)
        return store


def vllm_config(world: World, **overrides: Any) -> VllmConfig:
    kv = KVTransferConfig(
        kv_connector="ScriptedConnector",
        kv_role=overrides.pop("kv_role", "kv_both"),
        kv_connector_module_path="scripted_engine",
        kv_load_failure_policy=overrides.pop("policy", "recompute"),
    )
    args: dict[str, Any] = {
        "model": str(world.model),
        "skip_tokenizer_init": True,
        "block_size": 32,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": True,
        "dtype": "float32",
        "enforce_eager": True,
        "kv_transfer_config": kv,
    }
    args.update(overrides)
    return EngineArgs(**args).create_engine_config()


def _spec(
    size: int, window: int | str | None, mla: bool, heads: int = HEADS, state_mode: str = "align"
) -> KVCacheSpec:
    if isinstance(window, str):
        return MambaSpec(
            block_size=size,
            shapes=STATE_SHAPES,
            dtypes=(torch.float32, torch.float32),
            page_size_padded=2 * heads * HEAD_SIZE * size * 4,
            mamba_cache_mode=state_mode,
        )
    if mla:
        return MLAAttentionSpec(
            block_size=size,
            num_kv_heads=1,
            head_size=HEAD_SIZE,
            dtype=torch.float32,
            max_tp_shards=1,
        )
    shape: dict[str, Any] = {"num_kv_heads": heads, "head_size": HEAD_SIZE, "dtype": torch.float32}
    if window is not None:
        return SlidingWindowSpec(block_size=size, sliding_window=window, **shape)
    return FullAttentionSpec(block_size=size, **shape)


def kv_cache_config(
    config: VllmConfig,
    blocks: int,
    *,
    mla: bool = False,
    windows: Sequence[int | str | None] = (None, None),
    state_mode: str = "align",
    interval: int | None = None,
) -> KVCacheConfig:
    """As vLLM builds it: its own grouping, and groups that overlay each other in one memory."""
    size = config.cache_config.block_size
    heads = HEADS // config.parallel_config.tensor_parallel_size
    specs = {
        f"model.layers.{i}.{'mixer' if window == STATE else 'self_attn.attn'}": _spec(
            size, window, mla, heads, state_mode
        )
        for i, window in enumerate(windows)
    }
    config.cache_config.kv_cache_layout = "LBHNC"
    if STATE in windows:
        config.cache_config.mamba_cache_mode = state_mode
        config.cache_config.mamba_block_size = size
        config.cache_config.prefix_cache_retention_interval = interval
    groups = get_kv_cache_groups(config, specs)
    page = next(iter(specs.values())).page_size_bytes
    slots = max(len(group.layer_names) for group in groups)
    tensors = [
        KVCacheTensor(
            size=page * blocks * slots,
            layers=group.layer_names,
            layer_stride=page * blocks,
            block_stride=page,
        )
        for group in groups
    ]
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=groups,
        kv_cache_layout="LBHNC",
        hash_block_size=size,
        prefix_cache_retention_interval=interval if STATE in windows else None,
    )


@dataclass(frozen=True)
class Layer:
    """One layer of the scripted model. Layers of different groups share a ``slot`` of the memory."""

    index: int
    name: str
    group: int
    slot: int
    window: int | str | None

    @property
    def is_state(self) -> bool:
        return self.window == STATE

    def needed(self, start: int) -> np.ndarray:
        """Computed positions that a token at ``start`` still reads."""
        first = max(0, start - self.window + 1) if isinstance(self.window, int) else 0
        return np.arange(first, start)


@dataclass
class Rank:
    """One tensor-parallel rank: connector, pages of its heads, the number of its first head, and who calls
    the connector."""

    worker: ScriptedConnector
    memory: torch.Tensor
    first_head: int
    runner: RunnerV1


class ScriptedEngine:
    """One engine process's worth: scheduler, worker-side connector, page memory, scripted model.

    ``depth`` > 1: that many steps are in flight, as with asynchronous scheduling or pipeline stages.
    ``lagging``: the worker runs a step only when its result is waited for, else as soon as it is
    scheduled. ``runner``: who calls the worker's connector, one of `scripted_runners.RUNNERS`.
    ``drafts``: tokens that a scripted drafter proposes for each step, some right and some wrong.
    ``tp``: tensor-parallel ranks, each with heads and memory of its own.

    ``check_bytes``: wrong bytes are an error at once. Else the model computes wrongly on them, as a real
    one does, on all ranks from the next layer on: what it writes, and what it answers.
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
        global _world
        _world = world
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
        self.layers = sorted(
            (
                Layer(
                    extract_layer_index(name),
                    name,
                    g,
                    slot,
                    world.windows[extract_layer_index(name)],
                )
                for g, group in enumerate(groups)
                for slot, name in enumerate(group.layer_names)
            ),
            key=lambda layer: layer.index,
        )
        opened = len(world.stores)
        self.ranks: list[Rank] = []
        for rank in range(tp):
            worker = ScriptedConnector(self.config, KVConnectorRole.WORKER, self.kv)
            worker.tp_rank = rank
            memory = torch.full((slots, blocks, heads, self.block, cell), -1.0)
            caches = {
                la.name: _state_tensor(memory[la.slot]) if la.is_state else memory[la.slot]
                for la in self.layers
            }
            calls = RUNNERS[runner](self, worker, caches)
            self.ranks.append(Rank(worker, memory, rank * heads, calls))
        self.worker, self.memory = self.ranks[0].worker, self.ranks[0].memory
        self.runner = self.ranks[0].runner
        self._aggregator = KVOutputAggregator(tp)
        self.stores = world.stores[opened:]
        self.store = self.stores[-1]
        self.tables: dict[str, list[list[int]]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.salts: dict[str, str] = {}
        self._known: dict[str, tuple[list[int], list[int]]] = {}
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput | None]] = deque()
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, Any] = {}
        self.reports: list[KVConnectorOutput] = []
        #: Loads that were ordered, and requests whose blocks vLLM was told to hold, by request.
        self.loaded: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        self.steps = 0
        self.check_bytes = check_bytes
        #: Requests that read wrong bytes in this step.
        self.spoiled: set[str] = set()

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
        starts = self._update_tables(output)
        sampled: list[list[int]] = []
        reports = self._run(
            output, self.ranks, lambda: sampled.extend(self._compute(output, starts))
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
            right = expected(self.tokens[name], self.drafts, self.salts.get(name, ""))
            guesses.append([t if self._dice.random() < 0.7 else 2 for t in right])
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, guesses))

    @property
    def counted(self) -> dict[str, float]:
        return self.__dict__.setdefault("_counted", {})

    def _update_tables(self, output: SchedulerOutput) -> dict[str, int]:
        """What a model runner keeps: block tables and tokens. Returns where each request starts."""
        starts = {}
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
            # Model runner V2 gets a resumed request as a new one, with all tokens it has.
            prompt = new.prefill_token_ids or new.prompt_token_ids
            self.tokens[new.req_id] = [0] * new.prompt_len if prompt is None else list(prompt)
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[i] or ()
            starts[req_id] = cached.num_computed_tokens[i]
            if req_id in cached.resumed_req_ids:
                self.tables[req_id] = [[] for _ in self.kv.kv_cache_groups]
                self.tokens[req_id] = list(cached.all_token_ids[req_id])
            for table, new_ids in zip(self.tables[req_id], blocks, strict=False):
                table += new_ids
        return starts

    # -- the model ---------------------------------------------------------------------------------------

    def _compute(self, output: SchedulerOutput, starts: dict[str, int]) -> list[list[int]]:
        """The forward pass, layer by layer with the connector's hooks, and the sampled tokens."""
        ends = {r: starts[r] + n for r, n in output.num_scheduled_tokens.items()}
        drafts = {
            r: [max(t, 0) for t in output.scheduled_spec_decode_tokens.get(r, ())]  # -1: taken back
            for r in ends
        }
        values = {}
        for r, end in ends.items():
            inputs = [*self.tokens[r][: end - len(drafts[r])], *drafts[r]]
            values[r] = np.array(self._values(r, inputs), dtype=np.float32)
        self.spoiled.clear()
        for layer in self.layers if ends else ():
            for rank in self.ranks:
                if layer.is_state:  # vLLM calls for attention layers alone
                    for req_id, end in ends.items():
                        self._compute_state(
                            rank, layer, req_id, values[req_id], starts[req_id], end
                        )
                    continue
                rank.worker.wait_for_layer_load(layer.name)
                for req_id, end in ends.items():
                    self._compute_layer(rank, layer, req_id, values[req_id], starts[req_id], end)
                rank.worker.save_kv_layer(layer.name, rank.memory[layer.slot], None)  # type: ignore[arg-type]
        return [self._sample(r, values[r], drafts[r]) for r in ends]

    def _sample(self, req_id: str, values: np.ndarray, drafts: list[int]) -> list[int]:
        """The drafts that turn out right, and one token more; nothing within a prompt."""
        tokens, end = self.tokens[req_id], len(values)
        if end < len(tokens):
            return []
        if req_id in self.spoiled:  # vLLM must not take it
            return [WRONG_TOKEN]
        answer = []
        for value, draft in zip(values[end - len(drafts) - 1 :], [*drafts, None], strict=True):
            answer.append(next_token(int(value)))
            if answer[-1] != draft:
                break
        tokens += answer
        return answer

    def _compute_layer(
        self, rank: Rank, layer: Layer, req_id: str, values: np.ndarray, start: int, end: int
    ) -> None:
        table = np.array(self.tables[req_id][layer.group])
        memory = rank.memory.numpy()[layer.slot]
        if start:
            read = layer.needed(start)
            right = expand(values[read], layer, memory, rank.first_head)
            wrong = (memory[self._where(table, read)] != right).any(axis=(1, 2))
            if wrong.any():
                assert not self.check_bytes, (
                    f"{req_id}: wrong bytes in layer {layer.index} at position "
                    f"{int(read[wrong.argmax()])}"
                )
                self.spoiled.add(req_id)
        computed = expand(values[start:], layer, memory, rank.first_head)
        if req_id in self.spoiled:
            computed = computed * -1 - 7
        memory[self._where(table, np.arange(start, end))] = computed

    def _compute_state(
        self, rank: Rank, layer: Layer, req_id: str, values: np.ndarray, start: int, end: int
    ) -> None:
        """Continue from the state in the block of the last computed token, into that of the step's last."""
        table = self.tables[req_id][layer.group]
        pages = _state_pages(rank.memory[layer.slot]).numpy()
        if start:
            found = pages[table[(start - 1) // self.block]]
            if (found != state_of(values[start - 1], layer)).any():
                assert not self.check_bytes, (
                    f"{req_id}: wrong state in layer {layer.index} at {start}"
                )
                self.spoiled.add(req_id)
        right = state_of(values[end - 1], layer)
        target = table[(end - 1) // self.block]
        assert target, f"{req_id}: vLLM gave no block for the state at {end}"
        pages[target] = right if req_id not in self.spoiled else -right - 7

    def _values(self, req_id: str, tokens: list[int]) -> list[int]:
        """``prefix_values`` of the request, computed once per token."""
        known, values = self._known.get(req_id, ([], []))
        if tokens[: len(known)] != known[: len(tokens)] or len(tokens) > len(known):
            known, values = tokens, prefix_values(tokens, self.salts.get(req_id, ""))
            self._known[req_id] = (known, values)
        return values[: len(tokens)]

    def _where(self, table: np.ndarray, positions: np.ndarray) -> tuple[Any, ...]:
        """Index of the cells ``[positions, heads, cell]`` in a layer's memory."""
        return table[positions // self.block], slice(None), positions % self.block

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

    def close(self) -> None:
        self.connector.shutdown()
        for rank in self.ranks:
            rank.worker.shutdown()


def _state_pages(memory: torch.Tensor) -> torch.Tensor:
    """``float32[blocks, STATE_SIZE]``: a slot of the memory as a layer of states has it."""
    return memory.reshape(memory.shape[0], -1)[:, :STATE_SIZE]


def _state_tensor(memory: torch.Tensor) -> torch.Tensor:
    """``int8[blocks, 1, 1, bytes]``: the same as vLLM registers it."""
    return _state_pages(memory).view(torch.int8)[:, None, None]


def state_of(value: float, layer: Layer) -> np.ndarray:
    """``float32[STATE_SIZE]``: the state after a token with this value; other in every layer and element."""
    return np.float32(value) + (np.arange(STATE_SIZE, dtype=np.float32) + 32 * layer.index) / 1024


def prefix_values(tokens: list[int], salt: str) -> list[int]:
    """Per position a number that depends on every token up to it."""
    state, out = hashlib.sha256(salt.encode()), []
    for token in tokens:
        state.update(int(token).to_bytes(4, "little"))
        # 13 bits, and 10 for layer, head and element: all of it is exact in a float32.
        out.append(int.from_bytes(state.digest()[:2], "little") & 0x1FFF)
    return out


def next_token(value: int) -> int:
    return int(value % 1000) + 3


def expected(tokens: list[int], count: int, salt: str = "") -> list[int]:
    """What the scripted model answers."""
    known = list(tokens)
    for _ in range(count):
        known.append(next_token(prefix_values(known, salt)[-1]))
    return known[len(tokens) :]


def expand(values: np.ndarray, layer: Layer, memory: np.ndarray, first_head: int = 0) -> np.ndarray:
    """``float32[positions, heads, cell]``: different in every element, head and layer, exact."""
    _, heads, _, cell = memory.shape
    grid = np.arange(heads * cell, dtype=np.float32).reshape(heads, cell)
    before = layer.index * HEADS * cell + first_head * cell
    return values[:, None, None] + (grid + before) / 1024


def prompt(seed: int, length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 1000, length)]
