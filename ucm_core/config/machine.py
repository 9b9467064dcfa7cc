"""What this machine has to give: the measures from which sizes are chosen."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """``available_memory_bytes`` is what can be allocated without swapping, inside this process's
    cgroup; ``shm_free_bytes`` is what ``/dev/shm`` can still hold."""

    total_memory_bytes: int
    available_memory_bytes: int
    shm_free_bytes: int
    cpus: int

    @classmethod
    def measure(cls, root: Path = Path("/")) -> Machine:
        """Read ``/proc`` and the cgroup. ``root`` is another file system root in tests."""
        meminfo = _meminfo(root / "proc/meminfo")
        total = meminfo.get("MemTotal", 0)
        available = meminfo.get("MemAvailable", total // 2)
        limit, used = _cgroup(root)
        if limit is not None:
            total = min(total, limit)
            available = max(0, min(available, limit - used))
        return cls(
            total_memory_bytes=total,
            available_memory_bytes=available,
            shm_free_bytes=free_bytes(root / "dev/shm"),
            cpus=len(os.sched_getaffinity(0)),
        )


def free_bytes(path: Path) -> int:
    """Free bytes of the file system that holds ``path`` or would hold it; 0 when that is unknown."""
    for candidate in (path, *path.parents):
        try:
            stat = os.statvfs(candidate)
        except FileNotFoundError:
            continue
        except OSError:
            return 0
        return stat.f_bavail * stat.f_frsize
    return 0


def _meminfo(path: Path) -> dict[str, int]:
    found = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if fields and fields[0].isdigit():
            found[name] = int(fields[0]) * 1024
    return found


def _cgroup(root: Path) -> tuple[int | None, int]:
    """(limit, used) in bytes of this process's cgroup, version 2 then 1; limit None: no limit."""
    for limit_name, used_name in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        (
            "sys/fs/cgroup/memory/memory.limit_in_bytes",
            "sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            limit = (root / limit_name).read_text().strip()
            used = (root / used_name).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:
            return int(limit), int(used)
    return None, 0
