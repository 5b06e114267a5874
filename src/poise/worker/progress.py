"""What a run reports of itself: progress.json, written by rank 0 at most twice a second, and at each checkpoint.

steps        done in all, by this run and those before it
total        steps of the job; null: not known, or exceeded
checkpoint   steps that would survive now; null: this script saves nothing
throughput   steps per second over about the last minute, without the time that saving took; null: no step was done yet
loss         as the script reported it last; null: never, or not a finite number
first        when this run's first step began, in seconds since 1970
left         true: this run leaves, with its work saved, whatever its exit codes turn out to be
at           when this was written, in seconds since 1970
"""

import math
from collections import deque
from time import monotonic, time  # noqa: TID251  the report says when it was written

from poise.worker.protocol import PROGRESS, replace_json, say

SECONDS_BETWEEN = 0.5
_WINDOW = 120


class Progress:
    """The reports of one run; without a directory it writes none."""

    def __init__(self, run_dir: str | None) -> None:
        self._run_dir = run_dir
        self._total: int | None = None
        self._first: float | None = None
        self._speed: Speed | None = None
        self._paused = 0.0
        self._next = 0.0
        self._complained = False
        self._left = False
        self.loss: float | None = None  # set by the lease, as is `checkpoint`; part of the next report
        self.checkpoint: int | None = None

    def begin(self, step: int, total: int | None) -> None:
        """Report that the first step of this run begins now."""
        self._total, self._first = total, time()
        self._speed = Speed(step, monotonic() - self._paused)
        self.write(step)

    def reached(self, step: int) -> None:
        """Note the steps done so far; report them unless the last report is recent."""
        if monotonic() >= self._next:
            self.write(step)
        elif self._speed is not None and self._speed.steps_per_second is None:
            self._mark(step)

    def paused(self, seconds: float) -> None:
        """Leave out time in which nothing was trained."""
        self._paused += seconds

    def left(self, step: int) -> None:
        """Report that this run leaves. A script may catch the exception that ends it, and exit with another code."""
        self._left = True
        self.write(step)

    def write(self, step: int) -> None:
        """Report now. A full disk must not end a training that needs no disk: it is logged once."""
        self._mark(step)
        self._next = monotonic() + SECONDS_BETWEEN
        if self._run_dir is None:
            return
        fields = {
            "steps": step,
            "total": self._total if self._total is None or step <= self._total else None,
            "checkpoint": self.checkpoint,
            "throughput": None if self._speed is None else self._speed.steps_per_second,
            "loss": self.loss if self.loss is not None and math.isfinite(self.loss) else None,
            "first": self._first,
            "left": self._left,
            "at": time(),
        }
        try:
            # Not forced to the disk: a report means nothing after a power failure, and this is between training steps.
            replace_json(self._run_dir, PROGRESS, fields, flush=lambda _: None)
        except OSError as error:
            if not self._complained:
                say(f"progress cannot be reported: {error}")
            self._complained = True

    def _mark(self, step: int) -> None:
        if self._speed is not None:
            self._speed.mark(step, monotonic() - self._paused)


class Speed:
    """Steps per second over the last reports. The first step, which warms up, counts only until there is another."""

    def __init__(self, step: int, now: float) -> None:
        self._marks = deque([(now, step)], maxlen=_WINDOW)
        self._warm = False

    def mark(self, step: int, now: float) -> None:
        """Note that `step` steps are done at this time, in seconds of training."""
        if step > self._marks[-1][1]:
            self._marks.append((now, step))
            if not self._warm and len(self._marks) > 2:
                self._marks.popleft()
                self._warm = True

    @property
    def steps_per_second(self) -> float | None:
        """Steps per second; None: no step was done yet."""
        (since, before), (until, after) = self._marks[0], self._marks[-1]
        return (after - before) / (until - since) if until > since else None
