"""Time for tests that would otherwise wait."""

import pytest

from poise.service.client import connection, streams


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes by itself: every pause, and every look at the clock, moves it on."""
    now = 0.0

    def pause(seconds: float) -> None:
        nonlocal now
        now += seconds

    def clock() -> float:
        pause(1e-6)
        return now

    for module in (connection, streams):
        monkeypatch.setattr(module, "sleep", pause)
        monkeypatch.setattr(module, "monotonic", clock)
    monkeypatch.setattr(streams, "monotonic", clock)
