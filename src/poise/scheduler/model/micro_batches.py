"""A training round that divides into tasks (Hare; ALGORITHMS §5): K micro-batches, each computed on one GPU, whichever.

It does not matter on which GPUs, nor on how many of them at once, the micro-batches of a round are computed: the gradients
of all K are averaged before the next round begins. So a job has a speed on any GPUs, types mixed, fewer or more than K:

    split        n_g tasks on GPU g, Σ n_g = K;   a round takes max n_g · t_g  to compute, and then the synchronisation
    best split   the shortest T with Σ_g floor(T / t_g) >= K
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

ROUNDING = 1e-12
"""By so much of it a quotient may be too large."""
MOST_REMEMBERED = 20_000
"""Splits that are kept in mind of one kind of job."""

Mix = tuple[int, ...]
"""How many GPUs of each type, in the cluster's order."""


class Split(NamedTuple):
    """A best split: seconds to compute a round, and the tasks that one GPU of each type can do in that time."""

    seconds: float
    quota: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tasks:
    """What a round is made of.

    count     K, the micro-batches of a round
    seconds   to compute one of them, by GPU type; 0: it cannot be computed there
    sync      to synchronise at the end of a round, by GPU type and Locality; of a mix the longest counts
    gang      GPUs of one type that policies ask for which think in gangs
    """

    count: int
    seconds: tuple[float, ...]
    sync: tuple[tuple[float, float, float], ...]
    gang: int = 1
    types: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Types on which tasks can be computed, by index."""
    suffers_from_distance: bool = field(init=False, repr=False, compare=False)
    """Synchronisation takes longer where GPUs are far apart."""
    _splits: dict[Mix, Split | None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        usable = tuple(kind for kind, each in enumerate(self.seconds) if each > 0)
        object.__setattr__(self, "types", usable)
        object.__setattr__(self, "suffers_from_distance", any(near < far for near, _, far in self.sync))
        object.__setattr__(self, "_splits", {})

    @property
    def best(self) -> float:
        """Seconds of a task on the fastest type; 0 if it can be computed nowhere."""
        return min((self.seconds[kind] for kind in self.types), default=0.0)

    def split(self, mix: Sequence[int]) -> Split | None:
        """The best split over these GPUs; None if none of them is of any use."""
        key = tuple(mix)
        if key not in self._splits:
            if len(self._splits) > MOST_REMEMBERED:
                self._splits.clear()
            kinds = [kind for kind in self.types if mix[kind] > 0]
            self._splits[key] = self._found(kinds, key) if kinds else None
        return self._splits[key]

    def _found(self, kinds: Sequence[int], mix: Mix) -> Split:
        """Quotas begin with what the shortest conceivable round allows; then the GPUs that would be done first take one

        more task, until all tasks have a GPU.
        """
        seconds, quota, left = self.seconds, [0] * len(mix), self.count
        shortest = left / sum([mix[kind] / seconds[kind] for kind in kinds])
        for kind in kinds:
            quota[kind] = int(shortest / seconds[kind] * (1.0 - ROUNDING))
            left -= quota[kind] * mix[kind]
        length = 0.0
        while left > 0:
            length, kind = min([((quota[kind] + 1) * seconds[kind], kind) for kind in kinds])
            quota[kind] += 1
            left -= mix[kind]
        for kind in kinds:  # who would be done at the same moment
            quota[kind] += (quota[kind] + 1) * seconds[kind] <= length * (1.0 + ROUNDING)
        return Split(length, tuple(quota))

    def fewest(self, mix: Sequence[int]) -> Mix | None:
        """Of these GPUs the fewest on which a round is as short as on all of them; the last no faster than need be."""
        split = self.split(mix)
        if split is None:
            return None
        quota, chosen, left = split.quota, [0] * len(mix), self.count
        kinds = [kind for kind in self.types if quota[kind] and mix[kind]]
        kinds.sort(key=lambda kind: (-quota[kind], -self.seconds[kind]))
        for place, kind in enumerate(kinds):
            chosen[kind] = min(mix[kind], left // quota[kind])
            left -= chosen[kind] * quota[kind]
            if left <= 0:
                break
            if chosen[kind] < mix[kind]:  # one more GPU will do: the slowest that can
                chosen[
                    next(each for each in reversed(kinds[place:]) if quota[each] >= left and chosen[each] < mix[each])
                ] += 1
                break
        return tuple(chosen)

    def round_seconds(self, mix: Sequence[int], locality: int) -> float | None:
        """Seconds of a whole round on these GPUs; None if none of them is of any use."""
        split = self.split(mix)
        if split is None:
            return None
        return split.seconds + max([self.sync[kind][locality] for kind in self.types if split.quota[kind] and mix[kind]])
