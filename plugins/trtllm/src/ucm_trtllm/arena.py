"""Verified blocks in host memory that all ranks of a node can read, and what ranks say of their work.

The file has no name: ranks open it through the scheduler's process, and it is gone with the last of them,
however they end. The head holds a byte per rank (it has attached) and, per *cell*, what each rank has
finished of one request: there is no other way up in this engine.
"""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np
import numpy.typing as npt

from ucm_core.config.units import format_size
from ucm_core.errors import ConfigError
from ucm_trtllm.messages import ArenaName

#: Requests that may have transfers at one time.
CELLS = 4096
#: Columns of a cell.
LOADS, SAVES = 0, 1
_PAGE = 4096


class Arena:
    """``data``: per row ``uint8[slots, bytes of a block with all its coordinates]``. ``cells`` is
    ``uint32[CELLS, ranks, 2]``; a rank writes its own column only."""

    def __init__(self, name: ArenaName, memory: mmap.mmap) -> None:
        self.name = name
        self._memory = memory
        ranks, whole = name.ranks, np.frombuffer(memory, np.uint8)
        self.whole = whole
        self.attached = whole[:ranks]
        begin = _up(ranks)
        end = begin + CELLS * ranks * 8
        self.cells: npt.NDArray[np.uint32] = (
            whole[begin:end].view(np.uint32).reshape(CELLS, ranks, 2)
        )
        self.data: list[npt.NDArray[np.uint8]] = []
        at = _up(end)
        for nbytes, slots in zip(name.row_bytes, name.row_slots, strict=True):
            self.data.append(whole[at : at + nbytes * slots].reshape(slots, nbytes))
            at = _up(at + nbytes * slots)

    @classmethod
    def create(cls, budget_bytes: int, ranks: int, row_bytes: tuple[int, ...]) -> Arena:
        """Raises ConfigError when the budget does not hold a block of every row."""
        # As many blocks of every row: what is promised needs all rows.
        slots = budget_bytes // max(1, sum(row_bytes))
        if slots < 1:
            raise ConfigError(
                f"promise_buffer_gb is {format_size(budget_bytes)}, but one block of this model is "
                f"{format_size(sum(row_bytes))}: set a multiple of that"
            )
        counts = (slots,) * len(row_bytes)
        fd = os.memfd_create("ucm-trtllm", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _total(ranks, row_bytes, counts))
            memory = mmap.mmap(fd, 0)
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"no memory for promise_buffer_gb {format_size(budget_bytes)}: {error}"
            ) from error
        # The descriptor stays open as long as the arena: its path is how others attach.
        arena = cls(ArenaName(f"/proc/{os.getpid()}/fd/{fd}", ranks, row_bytes, counts), memory)
        weakref.finalize(arena, os.close, fd)
        return arena

    @classmethod
    def attach(cls, name: ArenaName) -> Arena:
        """Map an arena of another process. Raises OSError when it is out of reach."""
        fd = os.open(name.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            expected = _total(name.ranks, name.row_bytes, name.row_slots)
            if os.fstat(fd).st_size != expected:
                raise OSError(f"{name.path} has not the {expected} bytes of the arena")
            return cls(name, mmap.mmap(fd, 0))
        finally:
            os.close(fd)

    def address(self, row: int) -> int:
        """Where slot 0 of a row lies in this process."""
        return int(self.data[row].ctypes.data)

    def finished(self, cell: int, rank: int, column: int) -> None:
        """A rank has finished a load (its bytes are in place) or a save (its source is free)."""
        self.cells[cell, rank, column] += 1

    def least(self, cell: int, column: int) -> int:
        """How many every rank has finished."""
        return int(self.cells[cell, :, column].min())


def _total(ranks: int, row_bytes: tuple[int, ...], counts: tuple[int, ...]) -> int:
    at = _up(_up(ranks) + CELLS * ranks * 8)
    for nbytes, slots in zip(row_bytes, counts, strict=True):
        at = _up(at + nbytes * slots)
    return at


def _up(n: int) -> int:
    return -(-n // _PAGE) * _PAGE
