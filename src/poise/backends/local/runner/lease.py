"""When a run is to leave, and how it is made to: moments by the monotonic clock, which nobody can set back.

A later wish can make TERM and KILL come sooner, never later.
"""

import os
from time import monotonic

from poise.backends.local.records import LEASE, Fields, get, now

NEVER = float("inf")

CHECKPOINT, STOP = "checkpoint", "stop"
"""Two modes of leaving: asked, with TERM at the deadline; and TERM at once, as the job is no longer wanted. In any other

(`restart`) TERM comes at once, and KILL at the deadline.
"""


class Lease:
    """What the service wants of a run.

    term_at, kill_at   when to send TERM and KILL, if anything is left then
    mode               the mode of leaving that was asked for; None: nobody asked
    overdue_at         when the job has run for as long as it may
    """

    def __init__(self, folder: int, order: Fields) -> None:
        self._folder = folder
        self._term_seconds: float = order["term_seconds"]
        self._grace: float = order["deadline"]
        self._seen: tuple[int, int, int] | None = None
        left = order["seconds_left"]
        self.overdue_at = NEVER if left is None else monotonic() + left
        self.term_at = self.kill_at = NEVER
        self.mode: str | None = None
        self.soon(self.overdue_at)

    def look(self) -> None:
        """See what lease.json says now."""
        try:
            stat = os.stat(LEASE, dir_fd=self._folder)
        except OSError:
            return
        seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        fields = get(self._folder, LEASE) if seen != self._seen else None
        if fields is not None:
            self._seen = seen
            if isinstance(fields.get("ends"), int | float):
                self._end(fields)

    def soon(self, moment: float) -> None:
        """TERM at that moment, KILL not long after."""
        self._sooner(moment, moment + self._term_seconds)

    def yielded(self) -> None:
        """A replica has left although nobody asked: the others have as long as if somebody had."""
        if self.mode is None:
            self._leave(CHECKPOINT, self._grace)

    def _end(self, fields: Fields) -> None:
        mode = fields.get("mode")
        seconds = fields.get("seconds")
        most = float(seconds) if isinstance(seconds, int | float) else self._grace
        # The span bounds the moment: a clock that was set back must not give a run hours.
        left = min(max(float(fields["ends"]) - now(), 0.0), most)
        self._leave(mode if isinstance(mode, str) else CHECKPOINT, left)

    def _leave(self, mode: str, left: float) -> None:
        moment = monotonic()
        if self.mode != STOP:
            self.mode = mode
        if mode == STOP:
            self.soon(moment)
        elif mode == CHECKPOINT:
            self.soon(moment + left)
        else:
            self._sooner(moment, moment + left)

    def _sooner(self, term_at: float, kill_at: float) -> None:
        self.term_at, self.kill_at = min(self.term_at, term_at), min(self.kill_at, kill_at)
