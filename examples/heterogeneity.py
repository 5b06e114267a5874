"""What it is worth to know that GPU types differ: agnostic ÷ aware over load, and for a batch of jobs.

python examples/heterogeneity.py [FILE] [--jobs N] [--seeds N] [--loads LOAD ...] [--policies NAME ...]

The cluster has 12 V100, 12 P100 and 12 K80. Jobs take one GPU each; their models are those that the shipped table of
throughputs has on all three types. Their durations on a V100 are Gavel's (30 minutes to a week, log-uniform in two parts)
without the longer part, a fifth of the jobs, so that a trace of a few hundred jobs gets past its beginning. Load 1 is the
work that the cluster can just do if every job spends equal time on all GPUs: what a policy does that cannot tell them apart.

A short sweep by default, in seconds; docs/explanation/heterogeneity.md has the long one.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from pathlib import Path

import numpy as np

from poise.lab.analysis.summary import Summary
from poise.lab.experiment import Experiment, scaled, simulate
from poise.lab.report.figures import Series, lines, standalone
from poise.lab.simulator.world import Truth
from poise.lab.traces.reader import read_trace
from poise.lab.traces.schema import Trace
from poise.scheduler.model.cluster import parse_cluster
from poise.scheduler.throughput.speeds import Speeds
from poise.scheduler.throughput.table import shipped

CLUSTER = parse_cluster("v100:12,p100:12,k80:12")
MODELS = "VAE/SuperResolution/DCGAN/GRU/LSTM/ResNet50/ResNeXt50/ResNet-18/LM/Recommendation/A3C/CycleGAN"
TRACE = "synthetic:jobs={jobs},seed={seed},sizes=1,durations=gavel,models=" + MODELS
LONGEST = 60_000.0  # seconds on a V100: where the shorter four fifths of Gavel's durations end
BATCH = inf  # the load of jobs that are all there at the start

Measure = Callable[[Summary], float]


@dataclass(frozen=True)
class Contest:
    """A policy that knows GPU types, and one that does not; overhead in seconds at each start of a job."""

    aware: str
    other: str
    overhead: float = 0.0

    def __str__(self) -> str:
        told = f", {self.overhead:g} s a restart" if self.overhead else ""
        blind = self.other == f"{self.aware}+agnostic"
        return (self.aware if blind else f"{self.other} ÷ {self.aware}") + told


MAX_MIN = Contest("max-min", "max-min+agnostic")
SWEEP = (MAX_MIN, replace(MAX_MIN, overhead=30.0), Contest("finish-time", "finish-time+agnostic"))
AT_ONCE = (
    MAX_MIN,
    replace(MAX_MIN, overhead=30.0),
    Contest("finish-time", "finish-time+agnostic"),
    Contest("makespan", "makespan+agnostic"),
    Contest("makespan", "makespan+agnostic", overhead=30.0),
    Contest("max-min", "isolated"),
    Contest("makespan", "isolated"),
)


def average_jct(summary: Summary) -> float:
    """Seconds from submission to the end, on average."""
    return summary.avg_jct or 0.0


def makespan(summary: Summary) -> float:
    """Seconds from the first submission to the last end."""
    return summary.makespan or 0.0


@cache
def drawn(jobs: int, seed: int) -> Trace:
    """Gavel's jobs without the longest; they arrive so that load is 1."""
    trace = read_trace(TRACE.format(jobs=jobs, seed=seed))
    kept = replace(trace, jobs=tuple(each for each in trace.jobs if (each.job.duration or 0.0) <= LONGEST))
    span = kept.jobs[-1].job.submitted - kept.jobs[0].job.submitted
    return scaled(kept, load=span * CLUSTER.gpus / blind_work(kept), most=None)


def blind_work(trace: Trace) -> float:
    """GPU-seconds of all jobs if each spends equal time on every GPU."""
    speeds = Speeds(shipped(), CLUSTER)
    counts = np.array([CLUSTER.gpus_of(each) for each in CLUSTER.gpu_types])
    work = 0.0
    for each in trace.jobs:
        packed = np.array([rates[0] for rates in speeds.estimate(each.job).rates])
        work += each.job.gpus * speeds.steps(each.job) / (packed @ counts / CLUSTER.gpus)
    return work


@cache
def ran(jobs: int, seed: int, load: float, policy: str, overhead: float) -> Summary:
    """How a trace went under a policy."""
    trace = scaled(drawn(jobs, seed), load=load, most=None)
    return simulate(trace, Experiment(CLUSTER, policy, truth=Truth(restart_overhead=overhead))).summary


def ratios(contest: Contest, measure: Measure, load: float, asked: argparse.Namespace) -> list[float]:
    """What the policy that does not know GPU types takes ÷ what the other takes, seed by seed."""
    both = [
        [measure(ran(asked.jobs, seed, load, policy, contest.overhead)) for policy in (contest.other, contest.aware)]
        for seed in range(asked.seeds)
    ]
    return [other / aware for other, aware in both]


def mean(values: Iterable[float]) -> float:
    """Geometric, as is right for ratios."""
    return float(np.exp(np.log([*values]).mean()))


def swept(contest: Contest, measure: Measure, label: str, asked: argparse.Namespace) -> Series:
    """The mean ratio at each load; printed with the least and the greatest of the seeds."""
    found = [ratios(contest, measure, load, asked) for load in asked.loads]
    cells = "".join(f"  {mean(each):.2f} ({min(each):.2f}-{max(each):.2f})" for each in found)
    sys.stdout.write(f"{label:40}{cells}\n")
    return Series(label, np.array(asked.loads), np.array([mean(each) for each in found]))


def chosen(contests: Iterable[Contest], asked: argparse.Namespace) -> list[Contest]:
    """Those of the policies asked for."""
    return [each for each in contests if each.aware in asked.policies]


def batch(asked: argparse.Namespace) -> None:
    """The same jobs, all there at the start."""
    sys.stdout.write(f"\n{'agnostic ÷ aware, all jobs at the start':40}  average JCT       makespan\n")
    for contest in chosen(AT_ONCE, asked):
        found = [ratios(contest, measure, BATCH, asked) for measure in (average_jct, makespan)]
        cells = "".join(f"  {mean(each):.2f} ({min(each):.2f}-{max(each):.2f})" for each in found)
        sys.stdout.write(f"{contest!s:40}{cells}\n")


def main(asked: argparse.Namespace) -> None:
    """Simulate, print, draw, and say where."""
    sys.stdout.write(f"{'agnostic ÷ aware at a load of':40}" + "".join(f"  {load:<16g}" for load in asked.loads) + "\n")
    series = [swept(contest, average_jct, f"JCT, {contest}", asked) for contest in chosen(SWEEP, asked)]
    series += [swept(contest, makespan, f"makespan, {contest}", asked) for contest in chosen([MAX_MIN], asked)]
    batch(asked)
    title = "Without knowing GPU types"
    figure = lines(series, title=title, x_label="load", y_label="time taken, agnostic ÷ aware")
    asked.file.write_text(standalone(figure), encoding="utf-8")
    sys.stdout.write(f"\nfigure: {asked.file}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", nargs="?", type=Path, default=Path("heterogeneity.svg"))
    parser.add_argument("--jobs", type=int, default=40, help="before the longest are left out")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 2.0])
    parser.add_argument("--policies", nargs="+", default=["max-min"], help="max-min finish-time makespan")
    main(parser.parse_args())
