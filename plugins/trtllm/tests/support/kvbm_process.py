"""Constructs KVBM's two classes against the stub's interface and prints what came of it, as JSON.

A process of its own: it binds ports and starts threads that end with the process. usage: kvbm_process.py PORT
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from types import SimpleNamespace

import stub_interface


def main() -> int:
    port = int(sys.argv[1])
    os.environ["DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR"] = "false"
    os.environ["DYN_KVBM_CPU_CACHE_GB"] = "0.01"
    os.environ["DYN_KVBM_LEADER_ZMQ_PUB_PORT"] = str(port)
    os.environ["DYN_KVBM_LEADER_ZMQ_ACK_PORT"] = str(port + 1)
    sys.modules.update(stub_interface.modules(new=True))
    module = importlib.import_module("kvbm.trtllm_integration.connector")
    mapping = SimpleNamespace(world_size=1, rank=0)
    args = SimpleNamespace(
        parallel_config=SimpleNamespace(to_mapping=lambda: mapping),
        kv_cache_config=SimpleNamespace(tokens_per_block=32),
    )
    made = {}
    for name in ("DynamoKVBMConnectorWorker", "DynamoKVBMConnectorLeader"):
        try:
            made[name] = type(getattr(module, name)(args)).__name__
        except BaseException as error:  # a panic of its native part is no Exception
            made[name] = f"failed: {error!r}"
    print("MADE " + json.dumps(made), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
