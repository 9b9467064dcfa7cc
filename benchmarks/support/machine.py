"""Names the machine that figures were taken on, and tells whether it is quiet."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

#: One-minute load average above which figures are noise.
QUIET_LOAD = 0.7


def load_average() -> float:
    """The one-minute load average."""
    return os.getloadavg()[0]


def describe(directory: Path, packages: tuple[str, ...]) -> list[tuple[str, str]]:
    """(what, value) lines: CPU, memory, kernel, disk under ``directory``, versions, date."""
    versions = [f"Python {platform.python_version()}"]
    for name in packages:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return [
        ("date", datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")),
        ("CPU", f"{_cpu_model()}, {os.cpu_count()} cores, {_vector_unit()}"),
        ("memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"),
        ("kernel", platform.release()),
        ("disk", _disk(directory)),
        ("versions", ", ".join(versions)),
        ("revision", _revision()),
    ]


def _cpu_lines(key: str) -> list[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return [line.split(":", 1)[1].strip() for line in lines if line.split("\t")[0] == key]


def _cpu_model() -> str:
    return (_cpu_lines("model name") or [platform.machine()])[0]


def _vector_unit() -> str:
    flags = set((_cpu_lines("flags") or [""])[0].split())
    best = next((f for f in ("avx512f", "avx2", "sse2") if f in flags), "no vector unit")
    return best + (" + SHA extensions" if "sha_ni" in flags else "")


def _disk(directory: Path) -> str:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    path = str(directory.resolve())
    holds = [m for m in mounts if path == m[1] or path.startswith(m[1].rstrip("/") + "/")]
    device, _, kind = max(holds, key=lambda m: len(m[1]))[:3]
    name = Path(device).name
    if name.startswith(("vd", "xvd")):
        return f"{kind} on {device} (virtual disk)"
    queue = Path("/sys/block") / name / "queue" / "rotational"
    if not queue.exists():
        return f"{kind} on {device}"
    return f"{kind} on {device} ({'rotational' if queue.read_text().strip() == '1' else 'SSD'})"


def _revision() -> str:
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout.strip() or "unknown"
