"""What sweeps, local back ends and trainings run in."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.backends import LocalStage, require

from poise.service.backends.local.orders import Isolation


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


@pytest.fixture(params=[Isolation.NONE, Isolation.FULL])
def isolation(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Isolation:
    """What jobs are kept from: everything that holds of them holds with and without."""
    level: Isolation = request.param
    require(level, tmp_path_factory.mktemp("trial"))
    return level


@pytest.fixture
def stage(tmp_path: Path, isolation: Isolation) -> Iterator[LocalStage]:
    """A local back end, of which nothing is left afterwards."""
    made = LocalStage(tmp_path, isolation=isolation)
    yield made
    made.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch sums in one order, so that bits can be compared; its generators are given back as they were."""
    torch: Any = pytest.importorskip("torch", reason="torch is not installed")
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)
