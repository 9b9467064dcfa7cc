"""Build an engine's Python environment from its lock files into the user's cache, and print its path.

usage: engine_env.py ENGINE [--path-only]

The environment lives in ``${XDG_CACHE_HOME:-~/.cache}/ucm/engines/<engine>-<hash>``; the hash covers
the lock files, the Python version and the machine type, so a changed lock is another environment and
an unchanged one is reused by every checkout. Builders take a lock (flock), so two checkouts never
build the same one at once; an environment without its ``.complete`` marker was left half-built and
is built again.

``plugins/<engine>/env`` holds the steps, in name order: ``*.txt`` are installed with their
dependencies, ``*.lock`` without (they are complete), ``remove.names`` lists what is removed at the
end, and ``check.py`` must run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARKER = ".complete"


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "ucm" / "engines"


def steps(engine: str) -> list[Path]:
    folder = ROOT / "plugins" / engine / "env"
    found = sorted(p for p in folder.iterdir() if p.suffix in (".txt", ".lock", ".names", ".py"))
    if not found:
        raise SystemExit(f"{folder}: no lock files")
    return found


def environment_path(engine: str) -> Path:
    digest = hashlib.sha256()
    for part in (platform.python_version(), platform.machine(), *platform.libc_ver()):
        digest.update(part.encode() + b"\0")
    for step in steps(engine):
        if step.suffix == ".py":
            continue  # a check changes nothing in the environment
        digest.update(step.name.encode() + b"\0" + step.read_bytes() + b"\0")
    return cache_root() / f"{engine}-{digest.hexdigest()[:16]}"


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold ``path`` as a lock file; the kernel releases it when the holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another builder of {path.stem}", file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def run(*command: str | Path) -> None:
    # stdout carries the path alone; what the tools print goes to stderr.
    subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)


def build(engine: str, path: Path) -> None:
    if path.exists():
        print(f"{path} is half-built: building it again", file=sys.stderr)
        shutil.rmtree(path)
    print(f"building {path} (2-3 GB, once)", file=sys.stderr)
    venv.create(path, with_pip=True, symlinks=True)
    python = path / "bin" / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check", "--no-input")
    removals: list[str] = []
    check: Path | None = None
    for step in steps(engine):
        if step.suffix == ".py":
            check = step
        elif step.suffix == ".names":
            removals = step.read_text().split()
        else:
            no_deps = ["--no-deps"] if step.suffix == ".lock" else []
            run(*pip, "install", "--quiet", *no_deps, "-r", step)
    if removals:
        run(*pip, "uninstall", "--quiet", "--yes", *removals)
    if check is not None:
        run(python, check)
    (path / MARKER).touch()


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    engine = sys.argv[1]
    path = environment_path(engine)
    if "--path-only" not in sys.argv[2:] and not (path / MARKER).exists():
        with exclusive(path.with_suffix(".lock")):
            if not (path / MARKER).exists():
                build(engine, path)
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
