"""Boundaries at which all ranks do the same thing, agreed on without a message between them.

Rank 0 decides. Alone, it acts at once. With others, it publishes the boundary after the next step before it does that step:
in synchronous training nobody can complete a step without rank 0, so everybody has read of it when it comes.
"""

from collections.abc import Callable

from poise.worker.protocol import Surroundings, Watched, replace_json, say, step_in


class Appointment:
    """One thing that all ranks are to do at the same boundary. Steps never go back."""

    def __init__(self, where: Surroundings, name: str) -> None:
        self._where, self._name = where, name
        self._watched = Watched(where.run_dir, name)
        self._at: int | None = None
        self._kept: int | None = None

    def due(self, step: int, is_wanted: Callable[[int], bool]) -> bool:
        """Whether the boundary has come. `is_wanted` is asked on rank 0 alone, until it is."""
        if self._where.rank:
            at = step_in(self._watched.fields())
            self._at = None if at == self._kept else at
        elif self._at is None and is_wanted(step):
            self._at = self._decided(step)
        return self._at is not None and step >= self._at

    def keep(self) -> None:
        """It was done; there may be another."""
        self._kept, self._at = self._at, None

    def _decided(self, step: int) -> int | None:
        if self._where.world_size == 1 or self._where.run_dir is None:
            return step
        try:
            replace_json(self._where.run_dir, self._name, {"step": step + 1})
        except OSError as error:
            say(f"the other ranks cannot be told to stop or save, so this one goes on: {error}")
            return None
        return step + 1
