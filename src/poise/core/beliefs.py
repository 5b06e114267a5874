"""What the core believes of speeds, as the policy perceives it, and what follows: on which types a job runs best."""

from collections.abc import Sequence
from dataclasses import replace

from poise.core.waiting import Shape
from poise.model.cluster import Holding, gpu_count
from poise.model.job import Job
from poise.model.speed import Estimate, Locality, Rates
from poise.model.tasks import Mix
from poise.model.topology import Topology
from poise.model.units import counted


class Belief:
    """One kind of job: rates as the policy perceives them, types by falling speed, and the best speed.

    index        place among all beliefs
    impossible   why no job of this kind can ever run here; None if it can
    shapes       shapes of its jobs' claims, by GPUs, types and locality
    """

    __slots__ = ("_mixed", "_others", "best", "estimate", "impossible", "index", "rates", "shapes", "skew", "tasks", "types")

    def __init__(self, index: int, perceived: Estimate) -> None:
        self.index = index
        self.estimate = perceived
        self.rates: Rates = perceived.rates
        self.skew = perceived.skew
        usable = [index for index, row in enumerate(self.rates) if row[Locality.PACKED] > 0]
        self.types = tuple(sorted(usable, key=lambda index: -self.rates[index][Locality.PACKED]))
        self.best = perceived.best()
        self.impossible: str | None = None
        self.shapes: dict[tuple[int, tuple[int, ...] | None, Locality], Shape] = {}
        self.tasks = perceived.tasks
        self._others = dict(perceived.others)
        self._mixed: dict[tuple[Mix, Locality], float] = {}

    def rates_with(self, gpus: int) -> Rates:
        """Rates with so many GPUs, be they the gang or another number that jobs of this kind can do with."""
        return self._others.get(gpus, self.rates)

    def rate_on(self, holding: Holding, topology: Topology) -> float:
        """Steps per second on these GPUs, of one type or, where rounds divide, of several."""
        locality = topology.locality(holding)
        if self.tasks is None:
            return self.rates_with(gpu_count(holding))[topology.type_of[holding[0].node]][locality]
        key = (topology.mix(holding), locality)
        rate = self._mixed.get(key)
        if rate is None:
            rate = self._mixed[key] = self.estimate.on(*key)
        return rate


def within(estimate: Estimate, gpus: Sequence[int]) -> Estimate:
    """What holds of a job whose rounds divide where only so many GPUs of each type are to be had.

    Policies that think in gangs ask for no more than there are of one type.
    """
    tasks = estimate.tasks
    most = max((gpus[kind] for kind in tasks.types), default=0) if tasks else 0
    if tasks is None or tasks.gang <= most:
        return estimate
    fewer = {count: rates for count, rates in estimate.others if count <= most}
    if not fewer:
        return estimate
    gang = max(fewer)
    others = tuple((count, rates) for count, rates in fewer.items() if count != gang)
    return replace(estimate, rates=fewer[gang], others=others, tasks=replace(tasks, gang=gang))


NO_BELIEF = Belief(0, Estimate(rates=()))
"""Of a job that runs nowhere."""


def why_impossible(job: Job, belief: Belief, topology: Topology, reserved: list[int]) -> str | None:
    """The constraint that the whole cluster cannot meet for this job, and the nearest that it can; None if there is none.

    reserved   GPUs of each type that no job gets
    """
    allowed = [index for index, name in enumerate(topology.types) if not job.gpu_types or name in job.gpu_types]
    if not allowed:
        return f"asks for {' or '.join(job.gpu_types)}; the cluster has {', '.join(topology.types)}"
    usable = [index for index in allowed if index in belief.types]
    if not usable:
        names = ", ".join(topology.types[index] for index in allowed)
        return f"cannot run as model {job.model!r} on {names} with {counted(job.gpus, 'GPU')} (throughput 0)"
    totals = [total - kept for total, kept in zip(topology.totals, reserved, strict=True)]
    most = max(usable, key=totals.__getitem__)
    if belief.tasks is not None and totals[most] > 0:
        return None  # any GPU will do
    if job.gpus > totals[most]:
        gang = counted(job.gpus, "GPU")
        return f"needs {gang} of one type; the cluster has at most {totals[most]} ({topology.types[most]})"
    return None
