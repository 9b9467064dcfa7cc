"""Engines of one test: what they are configured with, and the storage that outlives them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import stub_interface
from stub_executor import StubExecutor
from stub_memory import Shape


class World:
    """``folder``: checkpoint, configuration and storage. ``new``: the interface's home."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, new: bool = True) -> None:
        self.folder = folder
        self.new = new
        self.kv = folder / "kv"
        self._monkeypatch = monkeypatch
        monkeypatch.delenv("UCM_CONFIG_FILE", raising=False)
        self.configure()

    def configure(self, **options: Any) -> None:
        """``options``: at the top of the configuration file; ``store``: those of the pipeline."""
        store = {
            "store_pipeline": "Posix",
            "storage_backends": str(self.kv),
            "staging_buffer_gb": "2 MiB",
            "store_health": {"enabled": False},
            **options.pop("store", {}),
        }
        file = self.folder / "ucm.yaml"
        connector = {"ucm_connector_name": "UcmPipelineStore", "ucm_connector_config": store}
        top = {
            "ucm_connectors": [connector],
            "model_id": "stub-weights",
            "promise_buffer_gb": "16 MiB",
            "promise_wait_ms": 5000,
            **options,
        }
        file.write_text(yaml.safe_dump(top))
        self._monkeypatch.setenv("TRTLLM_UCM_CONFIG_FILE", str(file))

    def checkpoint(self, shape: Shape) -> Path:
        """A folder with a ``config.json``; weights are named by ``model_id``."""
        folder = self.folder / "model"
        folder.mkdir(exist_ok=True)
        config: dict[str, Any] = {
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.heads,
            "head_dim": shape.head_size,
            "torch_dtype": shape.dtype,
        }
        if shape.latent:
            rope = shape.head_size // 2
            config |= {"kv_lora_rank": shape.head_size - rope, "qk_rope_head_dim": rope}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def args(self, shape: Shape, **changes: Any) -> SimpleNamespace:
        """The engine's arguments, as far as anybody reads them."""
        kv = {
            "tokens_per_block": shape.page_tokens,
            "dtype": "nvfp4" if shape.scales and shape.dtype == "nvfp4" else "auto",
            "enable_block_reuse": True,
            "enable_partial_reuse": False,
            **changes.pop("kv", {}),
        }
        found = {
            "model": str(self.checkpoint(shape)),
            "dtype": shape.dtype,
            "tensor_parallel_size": 1,
            "max_seq_len": 4096,
            "kv_cache_config": SimpleNamespace(**kv),
            **changes,
        }
        return SimpleNamespace(**found)

    @contextmanager
    def engine(self, shape: Shape | None = None, **options: Any) -> Iterator[StubExecutor]:
        """A running engine; ``args``: changes of its arguments."""
        shape = shape or Shape()
        with stub_interface.installed(self.new) as module:
            home = sys.modules[stub_interface.NEW_HOME if self.new else stub_interface.OLD_HOME]
            changes = dict(options.pop("args", {}))
            changes.setdefault("tensor_parallel_size", options.get("ranks", 1))
            made = StubExecutor(module, home, self.args(shape, **changes), shape, **options)
            try:
                yield made
                side = made.manager.scheduler._side
                if side is not None:
                    left = side.pending()
                    assert not any(left[name] for name in ("ending", "copying", "pinned")), (
                        f"left behind: {left}"
                    )
            finally:
                made.close()

    def empty(self) -> None:
        shutil.rmtree(self.kv, ignore_errors=True)

    def files(self) -> list[Path]:
        """Stored objects: files named by an id."""
        return [p for p in self.kv.rglob("*") if p.is_file() and len(p.stem) >= 32]
