"""An event loop in which waiting takes no time, for tests of what happens over minutes."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class SimulatedTime(asyncio.SelectorEventLoop):
    """An event loop in which waiting takes no time: when nothing is ready, its clock moves to the next timer."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Skipping(self))

    def time(self) -> float:
        return self.now


class _Skipping(selectors.DefaultSelector):
    def __init__(self, loop: SimulatedTime) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self._loop.now += timeout
        return ready


def simulate(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run something in simulated time."""
    with asyncio.Runner(loop_factory=SimulatedTime) as runner:
        return runner.run(work())


def clock() -> float:
    """Return the time of the loop that runs."""
    return asyncio.get_running_loop().time()
