"""What owners say of their jobs where that is not the truth: the scheduler believes it, the world does not."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from poise.model.cluster import Cluster
from poise.model.job import Job
from poise.model.speed import Estimate, Rates
from poise.model.tasks import Tasks
from poise.throughput.measured import Throughputs
from poise.throughput.speeds import Speeds


@dataclass(frozen=True, slots=True)
class Lie:
    """What is said is so many times what is true.

    speeds   factor on the speed, by GPU type; 0: says that it cannot run there. 1 for types not named
    size     factor on the work
    """

    speeds: tuple[tuple[str, float], ...] = ()
    size: float = 1.0

    def told(self, estimate: Estimate, gpu_types: tuple[str, ...]) -> Estimate:
        """What is said of speeds; `gpu_types` are those of the cluster."""
        factor = dict(self.speeds)
        factors = tuple(factor.get(name.lower(), 1.0) for name in gpu_types)
        others = tuple((gpus, _times(rates, factors)) for gpus, rates in estimate.others)
        tasks = None if estimate.tasks is None else _slower(estimate.tasks, factors)
        return replace(estimate, rates=_times(estimate.rates, factors), others=others, tasks=tasks)

    def __str__(self) -> str:
        """In words, as the end of `says that it`."""
        said = [_said(name, factor) for name, factor in self.speeds]
        if self.size != 1.0:
            said.append(f"has {self.size:g} times its work")
        return " and ".join(said) or "is what it is"


def _said(gpu_type: str, factor: float) -> str:
    return f"runs {factor:g} times as fast on {gpu_type} as it does" if factor else f"cannot run on {gpu_type}"


def _times(rates: Rates, factors: tuple[float, ...]) -> Rates:
    return tuple((a * factor, b * factor, c * factor) for (a, b, c), factor in zip(rates, factors, strict=True))


def _slower(tasks: Tasks, factors: tuple[float, ...]) -> Tasks:
    seconds = tuple(each / factor if factor else 0.0 for each, factor in zip(tasks.seconds, factors, strict=True))
    return replace(tasks, seconds=seconds)


class Hearsay(Speeds):
    """A throughput table bound to a cluster, and what the owners of some jobs, by id, say instead."""

    def __init__(self, table: Throughputs, cluster: Cluster, lies: Mapping[str, Lie]) -> None:
        super().__init__(table, cluster)
        self._gpu_types = cluster.gpu_types
        self._lies = lies

    def resolve(self, job: Job) -> tuple[str, Estimate, float]:
        """Kind, estimate and work of a job as its owner states them: a kind of its own where that is a lie."""
        kind, estimate, steps = super().resolve(job)
        lie = self._lies.get(job.id)
        if lie is None:
            return kind, estimate, steps
        return f"{kind}!{lie.speeds}", lie.told(estimate, self._gpu_types), steps * lie.size
