"""A back end without processes, for load tests of the service: each job takes its time and ends.

A job takes `duration` seconds, or one second per step; with neither it runs until it is stopped. Its progress survives
preemption and is forgotten with the service. One thread for all runs, O(log n) per run.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from time import monotonic, time  # noqa: TID251 - events carry the time at which things happened

from poise.service.backends import api
from poise.service.wire.request import MOST_STEPS, JobRequest


@dataclass(frozen=True, slots=True)
class _NullRun:
    """A run under way: when it began (monotonic), and the seconds that its job had done before."""

    order: api.RunOrder
    since: float
    done: float


class NullBackend:
    """A `LiveBackend` in which nothing runs."""

    def __init__(self, on_event: api.OnEvent, *, clock: Callable[[], float] = monotonic) -> None:
        self._on_event = on_event
        self._clock = clock
        self._runs: dict[str, _NullRun] = {}  # by job: a job has one run at a time
        self._done: dict[str, float] = {}  # seconds done by jobs that were stopped
        self._ends: list[tuple[float, str, int]] = []  # heap; entries of runs that were stopped are skipped when due
        self._changed = threading.Condition()  # guards all of the above
        self._is_closing = False
        self._thread = threading.Thread(target=self._end_due_runs, name="null-backend", daemon=True)
        self._thread.start()

    def adopt(self, runs: Sequence[tuple[api.RunOrder, api.DesiredState]]) -> None:
        """Begin wanted runs anew; the others have yielded."""
        for order, desired in runs:
            if desired is api.DesiredState.RUN:
                self.launch(order)
            else:
                self._on_event(api.RunEnded(order.job, order.epoch, time(), api.RunEnding.YIELDED, None, None, ()))

    def launch(self, order: api.RunOrder) -> None:
        """Begin a run, and report at once that it can be stopped without loss."""
        request = order.request
        with self._changed:
            if order.job in self._runs:
                return
            run = _NullRun(order, self._clock(), self._done.get(order.job, 0.0))
            self._runs[order.job] = run
            self._on_event(api.RunBegan(order.job, order.epoch, time()))
            steps, speed = _steps(request, run.done), 1.0
            if request.steps and request.duration:
                speed = min(request.steps / request.duration, MOST_STEPS)  # a duration next to 0 is not endless speed
            self._on_event(api.RunProgressed(order.job, order.epoch, time(), steps, request.steps, steps, speed, None))
            end = run.since + _seconds(request) - run.done
            if end < inf:
                heappush(self._ends, (end, order.job, order.epoch))
                self._changed.notify()

    def stop(self, job: str, epoch: int, notice: api.RunNotice) -> None:
        """End a run, with all its work kept."""
        with self._changed:
            run = self._remove(job, epoch)
            if run is not None:
                self._done[job] = self._seconds_done(run)
                self._report_end(run, api.RunEnding.YIELDED)

    def kill(self, job: str, epoch: int, reason: str) -> None:
        """End a run and forget its work."""
        with self._changed:
            run = self._remove(job, epoch)
            if run is not None:
                self._report_end(run, api.RunEnding.YIELDED)
            self._done.pop(job, None)

    def log(self, job: str, replica: int, offset: int, limit: int) -> api.LogPart:
        """Return nothing: no process has written anything."""
        return api.LogPart(b"", 0, 0)

    def close(self) -> None:
        """Stop reporting."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _end_due_runs(self) -> None:
        """Body of the thread: finish each run when its time has come."""
        with self._changed:
            while not self._is_closing:
                while self._ends and self._ends[0][0] <= self._clock():
                    _, job, epoch = heappop(self._ends)
                    run = self._remove(job, epoch)
                    if run is not None:
                        self._done.pop(job, None)
                        self._report_end(run, api.RunEnding.FINISHED)
                self._changed.wait(max(0.0, self._ends[0][0] - self._clock()) if self._ends else None)

    def _remove(self, job: str, epoch: int) -> _NullRun | None:
        run = self._runs.get(job)
        return self._runs.pop(job) if run is not None and run.order.epoch == epoch else None

    def _seconds_done(self, run: _NullRun) -> float:
        return min(_seconds(run.order.request), run.done + self._clock() - run.since)

    def _report_end(self, run: _NullRun, how: api.RunEnding) -> None:
        order = run.order
        steps = _steps(order.request, self._seconds_done(run))
        codes = (0,) if how is api.RunEnding.FINISHED else ()
        self._on_event(api.RunEnded(order.job, order.epoch, time(), how, steps, None, codes))


def _seconds(request: JobRequest) -> float:
    """How long a job takes in all."""
    return request.duration or request.steps or inf


def _steps(request: JobRequest, done: float) -> float:
    """Steps that a job has completed after `done` seconds of running."""
    return request.steps * (done / request.duration) if request.steps and request.duration else done
