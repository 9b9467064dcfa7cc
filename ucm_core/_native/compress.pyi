from ucm_core._native.stages import Stage

class CompressSetupError(RuntimeError): ...

def compress_stage(
    below: Stage,
    *,
    codec: str,
    level: int = 1,
    element_bytes: int = 0,
    threads: int = 0,
    buffer_bytes: int = ...,
) -> Stage: ...
