"""What is done about one run: what goes wrong there ends that run, and no other."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Concatenate, ParamSpec

from poise.backends.local.clockwork import Clockwork
from poise.backends.local.endings import line
from poise.backends.local.occupancy import LocalRun, Phase

P = ParamSpec("P")
Deed = Callable[Concatenate[LocalRun, P], None]
LOG = logging.getLogger("poise.local")


class Deeds:
    """Does things about runs, now, later, or when a file can be read.

    A run at which something goes wrong that nobody has thought of is given up: the log says why, and so does its cause.

    give_up   ends a run whose `fault` says what went wrong; a fault in that one is let through
    """

    def __init__(self, clockwork: Clockwork, give_up: Callable[[LocalRun], None]) -> None:
        self._clockwork, self._give_up = clockwork, give_up

    def do(self, run: LocalRun, deed: Deed[P], *args: P.args, **more: P.kwargs) -> None:
        """Do something about a run now."""
        try:
            deed(run, *args, **more)
        except Exception as error:
            if run.phase is Phase.OVER or run.fault is not None:
                raise
            LOG.exception("job %s: run %d is ended by a fault of the service", *run.key)
            run.fault = line(f"fault of the service: {error!r}")
            self._give_up(run)

    def after(self, seconds: float, run: LocalRun, deed: Deed[P], *args: P.args, **more: P.kwargs) -> None:
        """Do something about a run after so many seconds."""
        self._clockwork.after(seconds, lambda: self.do(run, deed, *args, **more))

    def watch(self, handle: int, run: LocalRun, deed: Deed[[]]) -> None:
        """Do something about a run whenever a file can be read."""
        self._clockwork.watch(handle, partial(self.do, run, deed))
