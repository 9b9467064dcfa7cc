import numpy as np
import numpy.typing as npt

_U8 = npt.NDArray[np.uint8]
_U64 = npt.NDArray[np.uint64]

class Converter:
    @staticmethod
    def make(
        shape: _U64,
        source_strides: _U64,
        target_strides: _U64,
        run_bytes: int,
        source_offset: int,
        target_offset: int,
        source_bytes: int,
        target_bytes: int,
    ) -> Converter: ...
    def run(self, source: _U8, target: _U8) -> None: ...
