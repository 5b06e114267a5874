"""How long waiting jobs insist on being close together (Philly's first guideline: locality first, relaxed by waiting)."""

from dataclasses import dataclass

from poise.scheduler.model.speed import Locality


@dataclass(frozen=True, slots=True)
class DelayScheduling:
    """Seconds of waiting for which a job insists on as few nodes as possible, and on one rack; 0: not at all."""

    packed: float
    rack: float

    def at(self, since: float, now: float) -> Locality:
        """What a job insists on now that waits since some moment; less, and no later, from each of its `moments` on."""
        if now < since + self.packed:
            return Locality.PACKED
        return Locality.RACK if now < since + self.rack else Locality.CLUSTER

    def moments(self, since: float) -> list[float]:
        """When a job that waits since some moment insists on less."""
        return [since + each for each in (self.packed, self.rack) if each > 0]
