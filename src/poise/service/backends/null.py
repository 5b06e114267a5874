"""Live jobs without processes: each takes its time and ends.

A job takes `duration` seconds, or a second a step; one that says neither goes on until it is asked to leave. What it has
done survives preemption and is forgotten with the service. One thread for all, O(log n) a run.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from time import (
    monotonic,
    time,  # noqa: TID251 - news carries the moment at which things happened
)

from poise.service.backends.api import (
    DesiredState,
    LogPart,
    OnEvent,
    RunBegan,
    RunEnded,
    RunEnding,
    RunNotice,
    RunOrder,
    RunProgressed,
)
from poise.service.wire.request import MOST_STEPS, JobRequest


@dataclass(frozen=True, slots=True)
class _NullRun:
    """A run under way: since when (monotonic), and where its job stood then, in seconds of its own."""

    order: RunOrder
    since: float
    done: float


class NullBackend:
    """A World (poise.service.backends.api) in which nothing runs."""

    def __init__(self, tell: OnEvent, *, clock: Callable[[], float] = monotonic) -> None:
        self._tell = tell
        self._clock = clock
        self._runs: dict[str, _NullRun] = {}
        self._done: dict[str, float] = {}
        self._ends: list[tuple[float, str, int]] = []
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name="null-world", daemon=True)
        self._thread.start()

    def adopt(self, runs: Sequence[tuple[RunOrder, DesiredState]]) -> None:
        """Runs that are wanted begin anew; the others have yielded."""
        for order, grip in runs:
            if grip is DesiredState.RUN:
                self.launch(order)
            else:
                self._tell(RunEnded(order.job, order.epoch, time(), RunEnding.YIELDED, None, None, ()))

    def launch(self, order: RunOrder) -> None:
        """It runs from now on."""
        with self._changed:
            if order.job in self._runs:
                return
            run = _NullRun(order, self._clock(), self._done.get(order.job, 0.0))
            self._runs[order.job] = run
            self._tell(RunBegan(order.job, order.epoch, time()))
            self._report(run)
            end = run.since + _seconds(order.request) - run.done
            if end < inf:
                heappush(self._ends, (end, order.job, order.epoch))
                self._changed.notify()

    def stop(self, job: str, epoch: int, notice: RunNotice) -> None:
        """It has left, with all its work."""
        with self._changed:
            run = self._taken(job, epoch)
            if run is not None:
                self._done[job] = self._seconds_done(run)
                self._end(run, RunEnding.YIELDED)

    def kill(self, job: str, epoch: int, reason: str) -> None:
        """It is gone."""
        with self._changed:
            run = self._taken(job, epoch)
            if run is not None:
                self._end(run, RunEnding.YIELDED)
            self._done.pop(job, None)

    def log(self, job: str, replica: int, offset: int, limit: int) -> LogPart:
        """Nothing has written anything."""
        return LogPart(b"", 0, 0)

    def close(self) -> None:
        """Nothing more is told."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _taken(self, job: str, epoch: int) -> _NullRun | None:
        run = self._runs.get(job)
        if run is None or run.order.epoch != epoch:
            return None
        return self._runs.pop(job)

    def _seconds_done(self, run: _NullRun) -> float:
        return min(_seconds(run.order.request), run.done + self._clock() - run.since)

    def _end(self, run: _NullRun, how: RunEnding) -> None:
        order = run.order
        steps = _steps(order.request, self._seconds_done(run))
        codes = (0,) if how is RunEnding.FINISHED else ()
        self._tell(RunEnded(order.job, order.epoch, time(), how, steps, None, codes))

    def _report(self, run: _NullRun) -> None:
        """It can leave at any time: nothing of it is ever lost."""
        order = run.order
        steps, speed, total = _steps(order.request, run.done), _steps_a_second(order.request), order.request.steps
        self._tell(RunProgressed(order.job, order.epoch, time(), steps, total, steps, speed, None))

    def _work(self) -> None:
        with self._changed:
            while not self._is_closing:
                self._end_due()
                wait = None if not self._ends else max(0.0, self._ends[0][0] - self._clock())
                self._changed.wait(wait)

    def _end_due(self) -> None:
        while self._ends and self._ends[0][0] <= self._clock():
            _, job, epoch = heappop(self._ends)
            run = self._taken(job, epoch)
            if run is not None:
                self._done.pop(job, None)
                self._end(run, RunEnding.FINISHED)


def _seconds(request: JobRequest) -> float:
    """How long a job takes in all."""
    return request.duration or request.steps or inf


def _steps(request: JobRequest, done: float) -> float:
    """What a job has done after so many seconds of its own."""
    return request.steps * (done / request.duration) if request.steps and request.duration else done


def _steps_a_second(request: JobRequest) -> float:
    """Bounded: what takes next to no time is not endlessly fast."""
    return min(request.steps / request.duration, MOST_STEPS) if request.steps and request.duration else 1.0
