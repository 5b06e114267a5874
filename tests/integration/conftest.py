"""What the sweeps of these tests run in."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "poise" / "sweeps"


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process nothing forks; commands that are run apart use the cores there are."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
