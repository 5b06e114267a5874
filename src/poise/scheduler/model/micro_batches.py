"""Rounds of training that divide into tasks: K micro-batches, each computed on any one GPU (docs/algorithms/hare.md).

The gradients of all K micro-batches are averaged before the next step begins, so it does not matter on which GPUs, or on
how many at once, they are computed. Such a job has a speed on any set of GPUs: mixed types, fewer or more than K.

    split        n_g tasks on GPU g, Σ n_g = K; a step takes max n_g · t_g to compute, plus the synchronisation
    best split   the shortest T with Σ_g floor(T / t_g) >= K
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

ROUNDING = 1e-12
"""Relative error that a quotient may have from rounding."""
MOST_REMEMBERED = 20_000
"""Splits cached per kind of job."""

Mix = tuple[int, ...]
"""Number of GPUs of each type, in the cluster's order."""


class Split(NamedTuple):
    """A best split: seconds to compute a step, and by GPU type the tasks that one GPU can do in that time."""

    seconds: float
    quota: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tasks:
    """The tasks of one step.

    count     K, the micro-batches of a step
    seconds   to compute one of them, by GPU type; 0 where it cannot be computed
    sync      seconds of synchronisation after a step, by GPU type and Locality; the longest of a mix counts
    gang      GPUs of one type that gang-scheduling policies ask for
    """

    count: int
    seconds: tuple[float, ...]
    sync: tuple[tuple[float, float, float], ...]
    gang: int = 1
    types: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Indices of the types on which tasks can be computed."""
    suffers_from_distance: bool = field(init=False, repr=False, compare=False)
    """Whether synchronisation takes longer where GPUs are far apart."""
    _splits: dict[Mix, Split | None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        usable = tuple(kind for kind, each in enumerate(self.seconds) if each > 0)
        object.__setattr__(self, "types", usable)
        object.__setattr__(self, "suffers_from_distance", any(near < far for near, _, far in self.sync))
        object.__setattr__(self, "_splits", {})

    @property
    def best(self) -> float:
        """Seconds per task on the fastest type; 0 if it can be computed nowhere."""
        return min((self.seconds[kind] for kind in self.types), default=0.0)

    def split(self, mix: Sequence[int]) -> Split | None:
        """The best split over these GPUs; None if the job can use none of them."""
        key = tuple(mix)
        if key not in self._splits:
            if len(self._splits) > MOST_REMEMBERED:
                self._splits.clear()
            self._splits[key] = self._best_split(key)
        return self._splits[key]

    def _best_split(self, mix: Mix) -> Split | None:
        """Start from the quotas of the shortest conceivable step, in which all GPUs finish at once; then, while tasks are

        left, give one more to each GPU of the type that would finish first.
        """
        kinds = [kind for kind in self.types if mix[kind] > 0]
        if not kinds:
            return None
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
        for kind in kinds:  # types that can do one more task in the same time
            quota[kind] += (quota[kind] + 1) * seconds[kind] <= length * (1.0 + ROUNDING)
        return Split(length, tuple(quota))

    def fewest(self, mix: Sequence[int]) -> Mix | None:
        """The fewest of these GPUs on which a step is as short as on all of them; the last is no faster than it must be."""
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
            if chosen[kind] < mix[kind]:  # one more GPU is enough: the slowest type that can take the rest
                able = (each for each in reversed(kinds[place:]) if quota[each] >= left and chosen[each] < mix[each])
                chosen[next(able)] += 1
                break
        return tuple(chosen)

    def step_seconds(self, mix: Sequence[int], locality: int) -> float | None:
        """Seconds of a whole step on these GPUs; None if the job can use none of them."""
        split = self.split(mix)
        if split is None:
            return None
        return split.seconds + max([self.sync[kind][locality] for kind in self.types if split.quota[kind] and mix[kind]])
