"""A worker in a process of its own: ``cache_process.py COMMAND ROOT CAPACITY RANK``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from posix_store import PosixStore

from ucm_core.errors import ConfigError


def main() -> None:
    command, root, capacity, rank = sys.argv[1:]
    try:
        store = PosixStore(
            [Path(root)],
            cache={
                "cache_buffer_capacity_gb": capacity,
                "cache_load_exclusive_buffer_number": 0,
                "cache_quarantine_sec": "1 ms",
            },
            rank=int(rank),
            ranks=2,
        )
    except ConfigError as error:
        print(error, flush=True)
        return
    if command == "dump":
        store.dump(range(4))
        print("done", flush=True)
    elif command == "busy":
        store.dump(range(8))
        print("done", flush=True)
        while True:
            store.dump(range(64))
            store.load(range(64))
    elif command == "load-when-told":
        print("ready", flush=True)
        sys.stdin.readline()
        store.load(range(16))
        print(store.stat("read_bytes_total"), flush=True)
    else:
        print("open", flush=True)
    time.sleep(60)


main()
