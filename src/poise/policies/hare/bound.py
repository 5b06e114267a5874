"""How far Hare's list may be from the optimum (ALGORITHMS §5.2): Σ w C <= α (2 + α) times the least possible.

α = max over jobs of T_max / T_min       over the types of the cluster that the job can use; compute and synchronisation
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from poise.policies.hare.schedule import Work


@dataclass(frozen=True, slots=True)
class Guarantee:
    """`alpha` says how unlike the GPUs are to the jobs, 1 if they are all alike to each."""

    alpha: float

    @property
    def factor(self) -> float:
        """How many times the optimum the list's Σ w C is at most."""
        return self.alpha * (2.0 + self.alpha)


def guarantee(jobs: Iterable[Work], kinds: Sequence[int]) -> Guarantee:
    """Of these jobs on GPUs of these types."""
    return Guarantee(max((_alpha(job, sorted(set(kinds))) for job in jobs), default=1.0))


def _alpha(job: Work, kinds: Sequence[int]) -> float:
    """The largest of three ratios: compute, sync where there is any, and both together.

    The third is never the largest, unless some types need no synchronisation and others do.
    """
    able = [kind for kind in kinds if job.seconds[kind] > 0]
    compute = [job.seconds[kind] for kind in able]
    sync = [job.sync[kind] for kind in able]
    both = (max(compute) + max(sync)) / (min(compute) + min(sync)) if able else 1.0
    return max(_ratio(compute), _ratio([each for each in sync if each > 0]), both)


def _ratio(times: Sequence[float]) -> float:
    return max(times) / min(times) if times else 1.0
