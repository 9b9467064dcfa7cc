"""A stand-in for TensorRT-LLM's connector interface: its names, arguments and abstractness, in either home.

Read in the sources of TensorRT-LLM (see docs/decisions.md for the revisions); nothing of it is copied.
Installed into ``sys.modules``, because the real package has no build for this machine.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

OLD_HOME = "tensorrt_llm._torch.pyexecutor.kv_cache_connector"
NEW_HOME = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"

#: The rank of the calling thread: the stub's ranks are threads of one process.
_local = threading.local()


def mpi_rank() -> int:
    return int(getattr(_local, "rank", 0))


def set_rank(rank: int) -> None:
    _local.rank = rank


# -- what both generations have --------------------------------------------------------------------------


@dataclass
class OldRequestData:
    """1.2."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@dataclass
class NewRequestData(OldRequestData):
    """1.3."""

    block_hashes: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


@dataclass
class OldSchedulerOutput:
    new_requests: list[Any] = field(default_factory=list)
    cached_requests: list[Any] = field(default_factory=list)


@dataclass
class NewSchedulerOutput(OldSchedulerOutput):
    attention_dp_rank: int | None = None


class OldWorker(ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: object | None = None
        super().__init__()

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        return self._metadata

    def _clear_connector_meta(self) -> None:
        self._metadata = None

    def register_forward_pass_callable(self) -> Any:
        return None

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: Any) -> None: ...

    @abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...

    @abstractmethod
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]: ...


class OldScheduler(ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        super().__init__()

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> object: ...

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]: ...

    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool: ...

    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...


# -- what 1.3 added ----------------------------------------------------------------------------------------


def _grouped_stands_in(cls: type, base: type, pairs: dict[str, str]) -> None:
    """A class that has the form by layer group needs no flat one to be complete."""
    for flat, grouped in pairs.items():
        overridden = getattr(cls, grouped) is not getattr(base, grouped)
        if overridden and getattr(getattr(cls, flat), "__isabstractmethod__", False):

            def missing(self: Any, *args: Any, _name: str = flat) -> Any:
                raise NotImplementedError(f"{type(self).__name__} has no {_name}")

            setattr(cls, flat, missing)


class NewWorker(OldWorker):
    supports_attention_dp = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _grouped_stands_in(cls, NewWorker, {"register_kv_caches": "register_kv_cache_layout"})

    def register_kv_cache_layout(self, layout: Any) -> None:
        tensor = layout.as_single_pool_tensor()
        if tensor is None:
            raise NotImplementedError(f"{type(self).__name__} has no register_kv_cache_layout")
        self.register_kv_caches(tensor)


class NewScheduler(OldScheduler):
    supports_attention_dp = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        pairs = {
            "request_finished": "request_finished_by_layer_group",
            "update_state_after_alloc": "update_state_after_alloc_by_layer_group",
        }
        _grouped_stands_in(cls, NewScheduler, pairs)

    def request_finished_by_layer_group(
        self, request: Any, cache_block_ids_by_layer_group: list[list[int]]
    ) -> bool:
        if len(cache_block_ids_by_layer_group) != 1:
            raise NotImplementedError("several layer groups")
        return self.request_finished(request, cache_block_ids_by_layer_group[0])

    def update_state_after_alloc_by_layer_group(
        self, request: Any, block_ids_by_layer_group: list[list[int]]
    ) -> None:
        if len(block_ids_by_layer_group) != 1:
            raise NotImplementedError("several layer groups")
        self.update_state_after_alloc(request, block_ids_by_layer_group[0])

    def wait_for_initialization(self) -> None:
        return


@dataclass(frozen=True)
class KvCacheBufferRef:
    layer_id: int
    role: str
    expansion: int = 1


@dataclass(frozen=True)
class KvCacheRegion:
    base: int
    size: int
    stride: int
    num_slots: int
    buffers: tuple[KvCacheBufferRef, ...]


@dataclass(frozen=True)
class KvCacheLayerGroupLayout:
    layer_group_id: int
    layer_ids: tuple[int, ...]
    window_size: int | None
    regions: tuple[KvCacheRegion, ...]
    replicated_regions: tuple[KvCacheRegion, ...] = ()


@dataclass(frozen=True)
class KvCacheLayout:
    tokens_per_block: int
    groups: tuple[KvCacheLayerGroupLayout, ...]
    gpu_pool_mapping_bytes: int | None = None
    #: Set by the stub where one tensor can describe the cache.
    single: Any = None

    def as_single_pool_tensor(self) -> Any:
        return self.single


# -- homes ---------------------------------------------------------------------------------------------------


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    # Parents are packages: what lies below them is looked for in sys.modules alone.
    module.__path__ = []
    module.__spec__ = importlib.util.spec_from_loader(name, None)
    for key, value in contents.items():
        setattr(module, key, value)
    return module


class _Logger:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def modules(new: bool) -> dict[str, ModuleType]:
    home = NEW_HOME if new else OLD_HOME
    names = {
        "KvCacheConnectorWorker": NewWorker if new else OldWorker,
        "KvCacheConnectorScheduler": NewScheduler if new else OldScheduler,
        "SchedulerOutput": NewSchedulerOutput if new else OldSchedulerOutput,
        "RequestData": NewRequestData if new else OldRequestData,
    }
    found = {
        "tensorrt_llm": _module(
            "tensorrt_llm", mpi_rank=mpi_rank, logger=_Logger(), __version__="0+stub"
        ),
        "tensorrt_llm._torch": _module("tensorrt_llm._torch"),
        "tensorrt_llm._torch.pyexecutor": _module("tensorrt_llm._torch.pyexecutor"),
        "tensorrt_llm.bindings": _module("tensorrt_llm.bindings"),
        "tensorrt_llm.bindings.internal": _module("tensorrt_llm.bindings.internal"),
        "tensorrt_llm.bindings.internal.batch_manager": _module(
            "tensorrt_llm.bindings.internal.batch_manager", LlmRequest=type("LlmRequest", (), {})
        ),
        "tensorrt_llm.llmapi": _module("tensorrt_llm.llmapi"),
        "tensorrt_llm.llmapi.llm_args": _module(
            "tensorrt_llm.llmapi.llm_args", TorchLlmArgs=type("TorchLlmArgs", (), {})
        ),
        "tensorrt_llm.logger": _module("tensorrt_llm.logger", logger=_Logger()),
        home: _module(home, **names),
    }
    if new:
        parent = home.rpartition(".")[0]
        found[parent] = _module(parent)
    for name, module in found.items():
        outer, _, inner = name.rpartition(".")
        if outer:
            setattr(found[outer], inner, module)
    # The package hands on the object under the name of the module that it is in.
    found["tensorrt_llm"].logger = _Logger()  # type: ignore[attr-defined]
    return found


@contextmanager
def installed(new: bool) -> Iterator[ModuleType]:
    """The interface in its new or old home; yields ``ucm_trtllm.connector`` imported against it."""
    ours = "ucm_trtllm.connector"
    stand_ins = modules(new)
    before = {name: sys.modules.get(name) for name in (*stand_ins, ours, OLD_HOME, NEW_HOME)}
    for name in before:
        sys.modules.pop(name, None)
    sys.modules.update(stand_ins)
    try:
        yield importlib.import_module(ours)
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
