"""Speed of a job: on which GPU type, and how far apart its GPUs are."""

from dataclasses import dataclass
from enum import IntEnum


class Locality(IntEnum):
    """How far apart a gang's GPUs are; a claim may insist on a level, and speed depends on it.

    PACKED    as few nodes as the gang can do with, in one rack
    RACK      more nodes than needed, in one rack
    CLUSTER   across racks; as something asked for: anywhere
    """

    PACKED = 0
    RACK = 1
    CLUSTER = 2


Rates = tuple[tuple[float, float, float], ...]
"""Steps per second of a whole gang: one row a GPU type (in the cluster's order), one column a Locality. 0: cannot run."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is believed, or true, of the speed of one kind of job.

    rates    of the gang that the job asks for
    skew     size of the model's largest tensor ÷ size of the model (Tiresias §3.3); None if not known
    others   rates with other numbers of GPUs, ascending, for jobs that can do with them
    """

    rates: Rates
    skew: float | None = None
    others: tuple[tuple[int, Rates], ...] = ()

    def best(self) -> float:
        """Steps per second on the fastest type, packed; 0 if it can run nowhere."""
        return max((row[Locality.PACKED] for row in self.rates), default=0.0)

    def at(self, gpus: int) -> Rates:
        """Rates with so many GPUs: of the gang, unless it is another number that the job can do with."""
        return next((rates for count, rates in self.others if count == gpus), self.rates)
