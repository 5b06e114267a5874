"""Stints: who held which GPUs from when to when, and how that ended. Timelines, failures and locality are read off them."""

from enum import StrEnum

from poise.model.cluster import Holding


class End(StrEnum):
    """How a stint ended."""

    FINISHED = "finished"
    FAILED = "failed"
    LOST = "node lost"
    PREEMPTED = "preempted"
    TRIED = "trial over"
    CANCELLED = "cancelled"
    COMPUTED = "task computed"
    OPEN = "still under way"


class Stint:
    """One job's hold of some GPUs, from `start` to `end`.

    begun   steps that the job had done before;  kept: steps that were left of its work afterwards. Of tasks both are 0:
            they make progress as rounds, not one by one
    cause   of a failure, in the words of the journal
    """

    __slots__ = ("begun", "cause", "end", "ended", "gpus", "job", "kept", "start")

    def __init__(  # noqa: PLR0913, PLR0917 - who, when, where, how it ended, and two counts of steps
        self,
        job: str,
        start: float,
        end: float,
        gpus: Holding,
        ended: End,
        cause: str = "",
        begun: float = 0.0,
        kept: float = 0.0,
    ) -> None:
        self.job = job
        self.start = start
        self.end = end
        self.gpus = gpus
        self.ended = ended
        self.cause = cause
        self.begun = begun
        self.kept = kept
