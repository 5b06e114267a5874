"""Runs that were preempted and have not left yet: what is said of them later still counts."""


class Leaving:
    """By job: runs that nobody has told the end of. A run takes a while to leave, and may do all its work before it does."""

    def __init__(self) -> None:
        self._runs: dict[int, set[int]] = {}
        self._carried: dict[int, int] = {}

    def add(self, row: int, epoch: int) -> None:
        """This run was preempted."""
        self._runs.setdefault(row, set()).add(epoch)

    def carry(self, row: int, epoch: int) -> None:
        """Runs of the job up to this one belong to an earlier journal: which of them are over is not known here."""
        self._carried[row] = epoch

    def has(self, row: int, epoch: int) -> bool:
        """The end of this run may still be told."""
        return epoch in self._runs.get(row, ()) or epoch <= self._carried.get(row, -1)

    def drop(self, row: int, epoch: int) -> None:
        """This run is over."""
        runs = self._runs.get(row)
        if runs is not None:
            runs.discard(epoch)
            if not runs:
                del self._runs[row]

    def forget(self, row: int) -> None:
        """The job has come to its end."""
        self._runs.pop(row, None)
        self._carried.pop(row, None)
