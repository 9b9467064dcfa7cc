"""Fixtures of the stub's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from stub_world import World


@pytest.fixture(params=["old home", "new home"])
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Both homes of the interface."""
    return World(tmp_path, monkeypatch, new=request.param == "new home")


@pytest.fixture
def new_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """The home of 1.3, for what only that generation has."""
    return World(tmp_path, monkeypatch, new=True)
