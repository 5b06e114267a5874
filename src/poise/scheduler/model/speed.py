"""The speed of a job, by GPU type and by how far apart its GPUs are."""

from dataclasses import dataclass
from enum import IntEnum

from poise.scheduler.model.micro_batches import Mix, Tasks


class Locality(IntEnum):
    """How far apart a gang's GPUs are. Speed depends on it, and a claim may require a level.

    PACKED    as few nodes as the gang needs in an empty cluster, in one rack
    RACK      more nodes than needed, in one rack
    CLUSTER   across racks; as a requirement: anywhere
    """

    PACKED = 0
    RACK = 1
    CLUSTER = 2


Rates = tuple[tuple[float, float, float], ...]
"""Steps per second of a whole gang: one row per GPU type in the cluster's order, one column per Locality. 0: cannot run."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The speed of one kind of job, as believed or as it is.

    rates    of the gang that the job asks for
    skew     size of the model's largest tensor ÷ size of the model (Tiresias §3.3); None if not known
    others   (GPUs, rates) for the other numbers of GPUs that the job can use, ascending
    tasks    what a round of training divides into; None if it does not divide: the job needs a gang of one type
    """

    rates: Rates
    skew: float | None = None
    others: tuple[tuple[int, Rates], ...] = ()
    tasks: Tasks | None = None

    @property
    def packed(self) -> tuple[float, ...]:
        """Steps per second of the gang by GPU type, packed."""
        return tuple(row[Locality.PACKED] for row in self.rates)

    def best(self) -> float:
        """Steps per second on the fastest type, packed; 0 if it can run nowhere."""
        return max(self.packed, default=0.0)

    def at(self, gpus: int) -> Rates:
        """Rates with this number of GPUs; those of the gang if nothing else is known.

        A job whose rounds divide is as fast as with the next smaller number that makes a difference.
        """
        if self.tasks is not None:
            known = [each for each in ((self.tasks.gang, self.rates), *self.others) if each[0] <= gpus]
            return max(known, key=lambda each: each[0], default=(0, self.rates))[1]
        return next((rates for count, rates in self.others if count == gpus), self.rates)

    def on(self, mix: Mix, locality: Locality) -> float:
        """Steps per second, on any mix of GPUs, of a job whose rounds divide; 0 if it can use none of them."""
        seconds = None if self.tasks is None else self.tasks.step_seconds(mix, locality)
        return 1.0 / seconds if seconds else 0.0
