"""Ways to damage stored files, as a failing disk or a careless administrator would."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

#: An object's file: 32 hex digits, its id.
_OBJECT = re.compile(r"[0-9a-f]{32}$")
#: Headers lie below this offset; what follows is KV.
DATA_OFFSET = 4096


def objects(root: Path) -> list[Path]:
    """Files of stored objects below ``root``, sorted by name; manifests and temporaries are not."""
    return sorted(p for p in root.rglob("*") if _OBJECT.match(p.name) and p.is_file())


def stray_files(root: Path) -> list[Path]:
    """Temporaries that writers left behind."""
    return sorted(p for p in root.rglob(".tmp-*") if p.is_file())


def flip_byte(path: Path) -> None:
    """One wrong bit in the middle of the data."""
    with path.open("r+b") as file:
        at = DATA_OFFSET + (path.stat().st_size - DATA_OFFSET) // 2
        file.seek(at)
        value = file.read(1)[0]
        file.seek(at)
        file.write(bytes([value ^ 0x10]))


def negate_floats(path: Path) -> None:
    """Flip the sign of every 32-bit float of the data: plausible numbers, and all wrong."""
    data = np.fromfile(path, np.uint8)
    data[DATA_OFFSET + 3 :: 4] ^= 0x80
    data.tofile(path)


def truncate(path: Path) -> None:
    """A file cut in the middle, as a power cut or a full disk leaves it."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def empty(path: Path) -> None:
    """A zero-length file."""
    path.write_bytes(b"")


def delete(path: Path) -> None:
    """The file is gone."""
    path.unlink()


def zero_data(path: Path) -> None:
    """Right size and header, nothing but zeros behind it."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(DATA_OFFSET)
        file.write(bytes(size - DATA_OFFSET))


def swap_with_next(path: Path) -> None:
    """Exchange a file's content with that of another object."""
    others = objects(path.parents[1])
    other = others[(others.index(path) + 1) % len(others)]
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flip_byte": flip_byte,
    "negate_floats": negate_floats,
    "truncate": truncate,
    "empty": empty,
    "delete": delete,
    "zero_data": zero_data,
    "swap_with_next": swap_with_next,
}


def damage(root: Path, kind: str, count: int | None = None) -> int:
    """Damage the first ``count`` objects below ``root`` (None: all); returns how many there were."""
    found = objects(root)[:count]
    for path in found:
        DAMAGES[kind](path)
    return len(found)
