"""Every line of the sharing matrix names a test, and the test exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/sharing.md").read_text()
#: Where the tests of a section lie.
FOLDERS = {"Engines": "tests/cross_engine", "SGLang among itself": "plugins/sglang/tests"}


def lines() -> list[tuple[str, str, str]]:
    """(folder, shared, test) of every line of the tables."""
    found = []
    for section, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S):
        for row in re.findall(r"^\| (?!saved by|one server|---)(.*) \|$", text, re.M):
            *_, shared, test = row.split(" | ")
            found.append((FOLDERS[section], shared, test))
    return found


def test_the_page_has_lines_of_both_kinds() -> None:
    answers = [shared.split(",")[0].split(" ")[0] for _, shared, _ in lines()]
    assert answers.count("yes") >= 8
    assert answers.count("no") >= 6
    assert set(answers) == {"yes", "no"}


@pytest.mark.parametrize(("folder", "shared", "test"), lines())
def test_a_line_names_a_test_that_exists(folder: str, shared: str, test: str) -> None:
    match = re.fullmatch(r"`([\w/]+\.py)::(test_\w+)`", test)
    assert match is not None, f"{test!r} names no test ({shared})"
    assert f"def {match[2]}(" in (ROOT / folder / match[1]).read_text()
