import numpy as np
import numpy.typing as npt

_U8 = npt.NDArray[np.uint8]
_U32 = npt.NDArray[np.uint32]
_U64 = npt.NDArray[np.uint64]

def extend_chain_u32(
    previous: bytes,
    pending: _U64,
    tokens: _U32,
    block: int,
    extra_links: _U64,
    extra_digests: _U8,
    out: _U8,
) -> None: ...
def extend_chain_u64(
    previous: bytes,
    pending: _U64,
    tokens: _U64,
    block: int,
    extra_links: _U64,
    extra_digests: _U8,
    out: _U8,
) -> None: ...
def object_ids(seed: bytes, links: _U8, out: _U8) -> None: ...
def snapshot_ids(seed: bytes, links: _U8, positions: _U64, out: _U8) -> None: ...
