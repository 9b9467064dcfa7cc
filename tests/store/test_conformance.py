"""The conformance suite passes on Fake, and fails on every planted bug."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from ucm_core.testing.canary import PLANTED_BUGS, FakeConformance

CANARIES = """
from ucm_core.testing.canary import PLANTED_BUGS, FakeConformance
for bug in (0, *PLANTED_BUGS):
    globals()[f"TestBug{bug}"] = type(f"TestBug{bug}", (FakeConformance,), {"bug": bug})
"""


class TestFake(FakeConformance):
    pass


def test_every_planted_bug_is_found(tmp_path: Path) -> None:
    (tmp_path / "test_canaries.py").write_text(CANARIES)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no"]
    command += ["--timeout=60", f"--rootdir={tmp_path}", f"--junitxml={report}", str(tmp_path)]
    env_path = [p for p in sys.path if p]
    subprocess.run(command, env={"PYTHONPATH": ":".join(env_path)}, timeout=110, check=False)
    failures: dict[str, int] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.attrib["classname"].split(".")[-1]
        failed = case.find("failure") is not None or case.find("error") is not None
        failures[name] = failures.get(name, 0) + failed
    assert failures.pop("TestBug0") == 0
    assert sorted(failures) == sorted(f"TestBug{bug}" for bug in PLANTED_BUGS)
    missed = [name for name, count in failures.items() if count == 0]
    assert not missed, f"planted bugs that the suite did not find: {missed}"
