"""Every command that the operators' pages show in a block is run by a test, or is named here with the
reason why not. A command that is added or changed without one fails."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / page
    for page in (
        "README.md",
        "docs/operator-vllm.md",
        "plugins/vllm/README.md",
        "docs/operator-sglang.md",
        "plugins/sglang/README.md",
    )
]

SERVER = "plugins/vllm/tests/engine/test_server.py"
HERE = "tests/docs/test_commands.py"
#: Beginning of a command -> (the file that runs it, words of that file which show it).
RUN_BY = {
    "make demo": ("plugins/vllm/tests/engine/test_demo.py", '"demo.py"'),
    "make demo MODEL=hybrid": (HERE, '"hybrid_demo.py"'),
    "pip install --find-links build/wheels": ("tests/packaging/test_wheels.py", '"--find-links"'),
    "vllm serve MODEL --kv-transfer-config": (SERVER, "documented_options"),
    # An engine of the tests is a fork that takes the same options, with the layout a CPU can copy.
    "python -m sglang.launch_server --model-path MODEL": (
        "plugins/sglang/tests/support/sglang_engine.py",
        '"class_name": "UCMStorage"',
    ),
    "ucm check --file /etc/ucm.yaml": ("tests/cli/test_check.py", '"check", "--file"'),
    "ucm config --file /etc/ucm.yaml --ranks 8": (HERE, '"--ranks", "8"'),
}
#: Commands that no test runs.
NOT_RUN = {"make test": "it is what runs the tests (.ci/run)"}


def blocks(page: Path, language: str) -> list[str]:
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)
    return found


def commands() -> list[str]:
    lines = [
        line.split("  #")[0].strip()
        for page in PAGES
        for block in blocks(page, "bash")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return sorted({re.sub(r"\s+", " ", line) for line in lines if line})


@pytest.mark.parametrize("command", commands())
def test_command_is_run_by_a_test(command: str) -> None:
    if command in NOT_RUN:
        return
    fitting = [start for start in RUN_BY if command.startswith(start)]
    assert fitting, f"no test runs `{command}`: write one, or say in NOT_RUN why there is none"
    path, words = RUN_BY[max(fitting, key=len)]
    assert words in (ROOT / path).read_text(), f"{path} does not run `{command}` any more"


def test_nothing_is_listed_that_no_page_shows() -> None:
    shown = commands()
    assert set(NOT_RUN) <= set(shown)
    stale = [start for start in RUN_BY if not any(one.startswith(start) for one in shown)]
    assert not stale


def test_the_configuration_of_the_operators_page_is_accepted(tmp_path: Path) -> None:
    (text,) = blocks(ROOT / "docs/operator-vllm.md", "yaml")
    file = tmp_path / "ucm.yaml"
    file.write_text(text)
    command = [str(Path(sys.executable).parent / "ucm"), "config", "--file", str(file)]
    done = subprocess.run([*command, "--ranks", "8"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("/mnt/kv-a", "/mnt/kv-b", "64 GiB per node", "8 worker(s) on this node"):
        assert words in done.stdout
    assert re.search(r"posix_capacity_gb +2 TiB +\S*ucm.yaml:7", done.stdout)
    file.write_text(text.replace("posix_capacity_gb", "posix_capacity"))
    wrong = subprocess.run([*command, "--ranks", "8"], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert "posix_capacity_gb" in wrong.stdout + wrong.stderr, "the name that was meant is offered"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_hybrid_demo_draws_what_hits() -> None:
    command = [sys.executable, "-P", str(ROOT / "examples" / "hybrid_demo.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mamba2" in done.stdout
