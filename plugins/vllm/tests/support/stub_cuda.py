"""The stub CUDA driver of the native tests, as the engine's side of it: streams, events, kernels.

Its device memory is host memory, so an ordinary tensor can stand for one on the device; what is queued on
a stream runs late, on a thread.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).resolve().parents[4] / "build/dev/native/libucm_stub_cuda.so"


class StubCuda:
    """One engine stream and its events. ``close`` gives back what it holds."""

    def __init__(self, delay_us: int = 10_000) -> None:
        self._library = ctypes.CDLL(str(LIBRARY))
        self._library.stub_set.argtypes = [ctypes.c_char_p, ctypes.c_long]
        self._library.stub_live.argtypes = [ctypes.c_char_p]
        self._library.stub_live.restype = ctypes.c_long
        self._library.stub_reset()
        self._library.stub_set(b"delay_us", delay_us)
        self._context, self._stream = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), 0)
        self._call("cuCtxPushCurrent_v2", self._context)
        self._call("cuStreamCreate", ctypes.byref(self._stream), 1)
        self._events: list[ctypes.c_void_p] = []
        self._scratch = ctypes.c_ubyte(0)

    def fill(self, address: int, nbytes: int, value: int) -> None:
        """A kernel that writes ``value`` some time after it was queued, later than one copy takes."""
        for _ in range(8):
            self._memset(ctypes.addressof(self._scratch), 0, 1)
        self._memset(address, value, nbytes)

    def _memset(self, address: int, value: int, nbytes: int) -> None:
        self._call(
            "cuMemsetD8Async",
            ctypes.c_ulonglong(address),
            ctypes.c_ubyte(value),
            ctypes.c_size_t(nbytes),
            self._stream,
        )

    def mark(self) -> tuple[int, Any]:
        """An event after what is queued, as ``KvDevice.mark`` gives one."""
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), 2)
        self._call("cuEventRecord", event, self._stream)
        self._events.append(event)
        return int(event.value or 0), event

    def live(self, what: str) -> int:
        return int(self._library.stub_live(what.encode()))

    def close(self) -> None:
        self._library.stub_reset()
        self._call("cuCtxSynchronize")
        for event in self._events:
            self._call("cuEventDestroy_v2", event)
        self._call("cuStreamDestroy_v2", self._stream)
        self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        self._call("cuDevicePrimaryCtxRelease_v2", 0)

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        assert result == 0, f"{name}: {result}"
