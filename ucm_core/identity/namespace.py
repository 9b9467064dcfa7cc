"""Opening a namespace in cache directories: the manifest is written once and checked ever after."""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from ucm_core.errors import ConfigError
from ucm_core.identity.manifest import DEFAULT_BLOCK_TOKENS, DEFAULT_NAME, Manifest

MANIFEST_FILE = "manifest.json"

#: How long an opener waits for a manifest that another process is writing without hard links.
_WRITE_WAIT_S = 5.0
_POLL_S = 0.02
_NO_LINK = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EACCES)


def open_namespace(
    roots: Sequence[str | os.PathLike[str]],
    name: str = DEFAULT_NAME,
    *,
    block_tokens: int | None = None,
    head_slices: int | None = None,
    first_block_tokens: int = DEFAULT_BLOCK_TOKENS,
    first_head_slices: int = 1,
) -> Manifest:
    """Create or check namespace ``name`` below every root and return its manifest.

    ``block_tokens`` / ``head_slices``: demanded values, refused when another was written; None takes
    what is there. ``first_*``: what the first writer uses where nothing is demanded. Processes that
    race at start agree: exactly one manifest wins per root, the others read it. The first root decides
    for roots that have none yet. An existing manifest needs no write permission.

    Raises ConfigError naming path, both values and what to do; also for an unusable root, with errno.
    """
    if not roots:
        raise ConfigError("no cache directory is given for the namespace")
    found: Manifest | None = None
    where = Path(roots[0])
    for root in roots:
        path = Path(root) / name / MANIFEST_FILE
        ours = found or Manifest(
            name,
            first_block_tokens if block_tokens is None else block_tokens,
            first_head_slices if head_slices is None else head_slices,
        )
        manifest = _agree(path, ours)
        manifest.check(str(path), block_tokens=block_tokens, head_slices=head_slices)
        if manifest.name != name:
            raise ConfigError(
                f"{path}: holds the manifest of namespace {manifest.name!r}; a directory cannot be "
                "renamed into another namespace"
            )
        if found is not None and manifest != found:
            raise ConfigError(
                f"cache directories disagree: {where} has {found}, {path} has {manifest}; they "
                "belong to different caches, list only the directories of one"
            )
        found, where = manifest, path
    assert found is not None
    return found


def _agree(path: Path, ours: Manifest) -> Manifest:
    """The manifest at ``path``; ``ours`` is written if there is none."""
    try:
        written = _read(path)
        if written is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if _publish(path, ours.to_bytes()):
                return ours
            written = _read(path)
    except OSError as e:
        raise ConfigError(
            f"{e.filename or path}: cannot be used as a cache directory: {e.strerror} "
            f"(errno {e.errno}); give a directory this user may write"
        ) from e
    if written is None:
        raise ConfigError(f"{path}: vanished while it was opened; is another process clearing it?")
    return Manifest.from_bytes(written, str(path))


def _read(path: Path) -> bytes | None:
    """Whole manifest bytes, or None without a file. Waits, bounded, for one being written."""
    deadline = time.monotonic() + _WRITE_WAIT_S
    while True:
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return None
        if raw.endswith(b"\n") or time.monotonic() > deadline:
            return raw
        time.sleep(_POLL_S)


def _publish(path: Path, content: bytes) -> bool:
    """Put ``content`` at ``path`` unless something is there; True when it is ours.

    A hard link publishes a whole file or fails with EEXIST. Some mounts have none: there O_EXCL
    decides who writes, and readers wait for the final newline.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        _write(temporary, content)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as e:
            if e.errno not in _NO_LINK:
                raise
            return _write_exclusive(path, content)
        _sync_directory(path.parent)
        return True
    finally:
        temporary.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with os.fdopen(fd, "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())


def _write_exclusive(path: Path, content: bytes) -> bool:
    try:
        _write(path, content)
    except FileExistsError:
        return False
    _sync_directory(path.parent)
    return True


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):  # mounts without directory fsync
            raise
    finally:
        os.close(fd)
