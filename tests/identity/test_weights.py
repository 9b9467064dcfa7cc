"""Weights identity: any tensor counts, places and names of files do not."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from ucm_core.errors import ConfigError
from ucm_core.identity import adapter_key, sampling, weights, weights_identity

Tensors = dict[str, np.ndarray]


def save(path: Path, tensors: Tensors) -> None:
    """A safetensors file, written by hand."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in tensors.items():
        raw = array.tobytes()
        header[name] = {  # type: ignore[assignment]
            "dtype": {"f": "F32", "i": "I32"}[array.dtype.kind],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def model(seed: int = 0) -> Tensors:
    rng = np.random.default_rng(seed)
    tensors: Tensors = {f"layer.{i}.w": rng.random((64, 1024), np.float32) for i in range(4)}
    return {**tensors, "norm": np.ones(7, np.float32), "empty": np.zeros((0, 3), np.float32)}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def identity(path: Path, cache: Path, **options: str) -> str:
    return weights_identity(path, cache_dir=cache, **options).value  # type: ignore[arg-type]


def test_every_tensor_counts(tmp_path: Path, cache: Path) -> None:
    base = model()
    save(tmp_path / "0/model.safetensors", base)
    seen = {identity(tmp_path / "0", cache)}
    for i, name in enumerate(base):
        changed = {**base, name: base[name] + 1} if base[name].size else base
        if not base[name].size:
            changed = {**base, name: np.zeros((3, 0), np.float32)}  # only its shape
        save(tmp_path / f"c{i}/model.safetensors", changed)
        seen.add(identity(tmp_path / f"c{i}", cache))
    renamed = {("x" if k == "norm" else k): v for k, v in base.items()}
    retyped = {**base, "norm": base["norm"].view(np.int32)}
    for name, tensors in (("renamed", renamed), ("retyped", retyped)):
        save(tmp_path / name / "model.safetensors", tensors)
        seen.add(identity(tmp_path / name, cache))
    assert len(seen) == 1 + len(base) + 2


def test_path_order_and_sharding_do_not_count(tmp_path: Path, cache: Path) -> None:
    base = model()
    save(tmp_path / "a/model.safetensors", base)
    save(tmp_path / "b/renamed.safetensors", dict(reversed(base.items())))
    names = list(base)
    save(tmp_path / "s/model-1.safetensors", {n: base[n] for n in names[:2]})
    save(tmp_path / "s/model-2.safetensors", {n: base[n] for n in names[2:]})
    assert len({identity(tmp_path / d, cache) for d in "abs"}) == 1


def test_index_chooses_the_files(tmp_path: Path, cache: Path) -> None:
    save(tmp_path / "a/part.safetensors", model())
    plain = identity(tmp_path / "a", cache)
    save(tmp_path / "a/consolidated.safetensors", model(1))  # the same model in another packing
    index = tmp_path / "a/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(model(), "part.safetensors")}))
    assert identity(tmp_path / "a", cache) == plain
    index.write_text(json.dumps({"weight_map": {"w": "gone.safetensors"}}))
    with pytest.raises(ConfigError, match=r"gone\.safetensors"):
        identity(tmp_path / "a", cache)


def test_sample_positions() -> None:
    assert sampling.sample_offsets(100, 100) == []
    assert sampling.sample_offsets(100, 16484) == [(100, 16384)]
    spans = sampling.sample_offsets(1000, 1000 + 100_000)
    assert spans[0] == (1000, 4096) and sum(spans[-1]) == 101_000 and len(spans) == 4


def test_full_method_sees_every_byte(tmp_path: Path, cache: Path) -> None:
    tensors = {"w": np.zeros(1 << 20, np.float32)}
    save(tmp_path / "a/m.safetensors", tensors)
    tensors["w"][5000] = 1.0  # between sampled spans
    save(tmp_path / "b/m.safetensors", tensors)
    assert identity(tmp_path / "a", cache) == identity(tmp_path / "b", cache)
    full = [identity(tmp_path / d, cache, method="full") for d in "ab"]
    assert full[0] != full[1] and all(v.startswith("full:") for v in full)


def hub(tmp_path: Path, tensors: Tensors) -> Path:
    """A hub cache: snapshots/x/model.safetensors -> ../../blobs/<sha256>."""
    save(tmp_path / "hub/blobs/tmp", tensors)
    blob = tmp_path / "hub/blobs/tmp"
    name = hashlib.sha256(blob.read_bytes()).hexdigest()
    blob.rename(blob.with_name(name))
    snapshot = tmp_path / "hub/snapshots/x"
    snapshot.mkdir(parents=True, exist_ok=True)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{name}")
    return snapshot


def test_hub_blobs_equal_plain_files(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = hub(tmp_path, model())
    save(tmp_path / "plain/model.safetensors", model())
    for method in ("sampled", "full"):
        plain = identity(tmp_path / "plain", cache, method=method)
        if method == "full":
            monkeypatch.setattr(sampling, "full_digest", None)  # the blob's name is enough
        assert identity(snapshot, cache, method=method) == plain


def test_result_is_kept_by_file_and_forgotten_on_change(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a/model.safetensors"
    save(path, model())
    first = weights_identity(tmp_path / "a", cache_dir=cache)
    with monkeypatch.context() as m:
        m.setattr(sampling, "tensor_digests", None)
        again = weights_identity(tmp_path / "a", cache_dir=cache)
    assert again.value == first.value and "kept" in again.source
    before = path.stat()
    save(path, model(1))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert identity(tmp_path / "a", cache) != first.value


def test_damaged_kept_result_is_ignored(tmp_path: Path, cache: Path) -> None:
    save(tmp_path / "a/model.safetensors", model())
    first = identity(tmp_path / "a", cache)
    (kept,) = cache.iterdir()
    kept.write_text("sampled:12")
    assert identity(tmp_path / "a", cache) == first


def test_unwritable_cache_only_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / "a/model.safetensors", model())
    (tmp_path / "file").write_text("")
    value = identity(tmp_path / "a", tmp_path / "file" / "sub")
    assert value.startswith("sampled:")
    assert "is not kept" in caplog.text


def test_raw_formats(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a").mkdir()
    content = bytearray(np.random.default_rng(0).bytes(3 << 20))
    file = tmp_path / "a/pytorch_model.bin"
    file.write_bytes(content)
    (tmp_path / "a/training_args.bin").write_bytes(b"x")
    first = identity(tmp_path / "a", cache)
    assert identity(file, cache) == first
    content[2 << 20] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))
    assert identity(tmp_path / "a", cache) != first


def test_model_id_overrides_and_reads_nothing() -> None:
    assert weights_identity(None, model_id="mine-v3").value == "id:mine-v3"
    with pytest.raises(ConfigError, match="empty"):
        weights_identity(None, model_id="")


def test_nothing_to_look_at_names_the_way_out(tmp_path: Path, cache: Path) -> None:
    for where in (None, tmp_path / "gone", tmp_path):
        with pytest.raises(ConfigError, match="model_id"):
            weights_identity(where, cache_dir=cache)


def test_damaged_files_are_refused(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "model.safetensors"
    save(path, model())
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:5], b"\xff" * 100, struct.pack("<Q", 4) + b"{}}}"):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"model\.safetensors"):
            identity(tmp_path, cache)


def test_file_changing_while_read_is_refused(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save(path, model())
    real = sampling.tensor_digests

    def slow(p: Path) -> dict[str, bytes]:
        found = real(p)
        os.utime(p, ns=(1, 1))
        return found

    monkeypatch.setattr(sampling, "tensor_digests", slow)
    with pytest.raises(ConfigError, match="changed while"):
        identity(tmp_path, cache)
    assert not list(weights.Path(cache).glob("*"))


def test_b02_adapters_by_content(tmp_path: Path, cache: Path) -> None:
    for name, seed, alpha in (("x", 0, 16), ("y", 1, 16), ("z", 0, 32)):
        save(tmp_path / name / "adapter_model.safetensors", model(seed))
        config = {"r": 8, "lora_alpha": alpha, "base_model_name_or_path": name}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
    shutil.copytree(tmp_path / "x", tmp_path / "renamed")
    keys = {n: adapter_key(tmp_path / n, cache_dir=cache) for n in ("x", "y", "z", "renamed")}
    assert keys["x"] == keys["renamed"]
    assert len(set(keys.values())) == 3
