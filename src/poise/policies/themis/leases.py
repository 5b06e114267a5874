"""Leases: the right to hold GPUs until a moment. They end together, so that what comes back is worth an auction.

A lease that is granted at t ends at the first multiple of its length, counted from the first moment there was, that is at
least half a length away: after half of it to one and a half, and one on average. While nobody wants more GPUs a lease that
has ended goes on by itself; so nothing is kept of most leases but when the run began.
"""

from dataclasses import dataclass

import numpy as np

from poise.model.arrays import Bools, Floats, Ints
from poise.model.columns import Snapshot

_NONE = np.empty(0)


@dataclass(frozen=True)
class Leases:
    """Leases that did not begin with a run, or that end earlier than others: when they began and end, by ascending row."""

    length: float
    rows: Ints
    since: Floats
    until: Floats

    @staticmethod
    def of(length: float) -> "Leases":
        """None yet, of so many seconds."""
        return Leases(length, np.empty(0, dtype=np.int64), _NONE, _NONE)

    def end(self, origin: float, granted: Floats) -> Floats:
        """When leases end that are granted at these moments."""
        lengths: Floats = np.ceil((granted - origin) / self.length + 0.5)
        return origin + lengths * self.length

    def end_of_one(self, snapshot: Snapshot) -> float:
        """When a lease ends that is granted now."""
        return float(self.end(snapshot.origin, np.array([snapshot.now]))[0])

    def ends(self, snapshot: Snapshot) -> Floats:
        """When the leases of all active jobs end; of jobs that hold nothing, or keep it whoever waits, never."""
        started = snapshot.floats(snapshot.columns.started)
        until = self.end(snapshot.origin, started)
        if len(self.rows):
            at, is_there = _found(self.rows, snapshot.rows)
            counts = is_there & (self.since[at] >= started)
            until = np.where(counts, self.until[at], until)
        return np.where(snapshot.running & ~snapshot.among(snapshot.pinned), until, np.inf)

    def renewed(self, snapshot: Snapshot, until: Floats, is_noted: Bools) -> "Leases":
        """The same with what has just been granted; leases of rows that are no longer active are forgotten."""
        _, kept = _found(snapshot.rows[~is_noted], self.rows)
        rows = np.concatenate((self.rows[kept], snapshot.rows[is_noted]))
        order = np.argsort(rows, kind="stable")
        since = np.concatenate((self.since[kept], np.full(int(is_noted.sum()), snapshot.now)))
        ends = np.concatenate((self.until[kept], until[is_noted]))
        return Leases(self.length, rows[order], since[order], ends[order])


def _found(rows: Ints, wanted: Ints) -> tuple[Ints, Bools]:
    """Where each of the wanted rows would be among ascending rows, and whether it is there."""
    if not len(rows):
        return np.zeros(len(wanted), dtype=np.int64), np.zeros(len(wanted), dtype=bool)
    at = np.minimum(np.searchsorted(rows, wanted), len(rows) - 1)
    return at, rows[at] == wanted
