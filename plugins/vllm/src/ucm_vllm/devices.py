"""Where a rank's KV cache lies, and how copies out of it are ordered after vLLM's kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucm_core.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

#: Device types whose memory is served; each is a device of the plugin host.
SERVED = ("cpu", "cuda")

#: Marks the end of what vLLM has queued so far: (name of the event for ``load`` or ``dump``, what must live
#: until the task is done). (0, None): nothing is queued, the bytes are there.
Mark = Callable[[], tuple[int, Any]]


@dataclass(frozen=True, slots=True)
class KvDevice:
    """``kind`` is torch's device type, ``index`` the device as this process counts them."""

    kind: str = "cpu"
    index: int = 0

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> KvDevice:
        """The one device of all tensors; raises ``UnsupportedError`` when it is not served."""
        found = {(tensor.device.type, tensor.device.index or 0) for tensor in tensors}
        if len(found) != 1:
            places = ", ".join(f"{kind}:{index}" for kind, index in sorted(found)) or "none"
            raise UnsupportedError(f"the layers' KV caches must lie on one device, found {places}")
        kind, index = found.pop()
        if kind not in SERVED:
            raise UnsupportedError(
                f"the KV cache is on {kind}:{index}; served are {', '.join(SERVED)}"
            )
        return cls(kind, index)

    def mark(self, event_sync: bool) -> Mark:
        """How a save learns that the step's kernels are over. Without ``event_sync`` there are no events:
        the store then waits for the whole device (``enable_event_sync``)."""
        if self.kind == "cpu" or not event_sync:
            return nothing_queued
        return self._mark_cuda

    def _mark_cuda(self) -> tuple[int, Any]:
        import torch

        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.index))
        return int(event.cuda_event), event


HOST = KvDevice()


def nothing_queued() -> tuple[int, Any]:
    """The mark of host memory: what vLLM computed is there when its call returns."""
    return 0, None
