"""Run real vLLM engines as cheap processes: one warm import, one fork per engine.

=============  ===================================================================================
`job.py`       what to run and what came back; plain data that crosses processes as JSON
`engine.py`    runs one job in the current process; the only file that imports vLLM
`zygote.py`    the warm process: imports vLLM once, forks a child per job, ends it at its deadline
`client.py`    what tests use: `EnginePool.run(job) -> EngineResult`, warm or in a fresh interpreter
`tamper.py`    helpers that damage stored files
=============  ===================================================================================
"""

from engine_harness.client import EngineHandle, EnginePool
from engine_harness.job import EngineJob, EngineResult, Output, Round, prompt

__all__ = [
    "EngineHandle",
    "EngineJob",
    "EnginePool",
    "EngineResult",
    "Output",
    "Round",
    "prompt",
]
