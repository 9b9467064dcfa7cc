"""A store belongs to the process that set it up."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, sys, threading
from ucm_core import _native
from ucm_core.errors import ClosedError
from ucm_core.store.contract import Status
from ucm_core.store.native_store import NativeBlockStore, native_geometry
from ucm_core.testing.blocks import EngineMemory, block_id, geometry_of, id_array

g = geometry_of()
stage = _native.FakeStage(native_geometry(g), _native.FakeMedium())
tier = _native.staging_tier(native_geometry(g), load_reserve=2, shared=4)
store = NativeBlockStore(_native.Store(stage, tier, timeout_ms=20000, waiting_depth=10,
    running_depth=10, copiers=2, write_retries=0, retry_delay_ms=1, open_age_ms=0), g)
memory = EngineMemory.whole(g, [1]).fill()
assert (store.dump(memory.ids, memory.shards, memory.addresses).wait_durable() == Status.OK).all()
stage.inject(block_id(1), reads=True, fault=5)
task = store.load(memory.ids, memory.shards, memory.addresses)  # hangs, with a waiter, while we fork
waiter = threading.Thread(target=task.wait)
waiter.start()
pid = os.fork()
if pid == 0:
    for call in (lambda: store.lookup(id_array([1])), lambda: store.close(),
                 lambda: store.load(memory.ids, memory.shards, memory.addresses),
                 lambda: task.wait(1), lambda: task.check(), lambda: task.cancel(), store.stats):
        try:
            call()
        except ClosedError as error:
            assert "fork" in str(error)
        else:
            os._exit(3)
    sys.exit(0)  # destroys every object: must neither hang nor crash
_, status = os.waitpid(pid, 0)
stage.release_hung(serve=True)
waiter.join()
store.close()
print("child", os.waitstatus_to_exitcode(status))
"""


def test_use_after_fork_is_an_error_and_the_child_exits() -> None:
    command = [sys.executable, "-c", SCRIPT]
    env = {"PYTHONPATH": ":".join(p for p in sys.path if p)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "child 0", done.stderr
    assert done.returncode == 0, done.stderr
