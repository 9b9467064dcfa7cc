"""The kinds of engine memory that need no plugin: the host's, and that of NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable

from ucm_core import _native
from ucm_core.errors import UnsupportedError
from ucm_core.registry import DeviceSpec


def register_devices(register: Callable[[DeviceSpec], None]) -> None:
    """Called by the core's own plugin."""
    register(DeviceSpec("cpu", "plain host memory", open_host))
    register(
        DeviceSpec("cuda", "NVIDIA GPU memory; the driver is loaded when it is needed", open_cuda)
    )


def open_host(index: int) -> _native.Device:
    """Host memory; there is one, whatever the index."""
    del index
    return _native.host_device()


def open_cuda(index: int) -> _native.Device:
    """The GPU that the driver counts as ``index``; one object per process."""
    try:
        return _native.cuda_device(index)
    except _native.DeviceSetupError as error:
        raise UnsupportedError(str(error)) from error
