"""What it is worth that steps divide into tasks for any GPUs: `hlas` against schedulers of gangs (Hare, HPDC'22, TCC'24).

python examples/micro_batches.py [FILE] [--cluster SPEC] [--jobs N] [--sizes KNOB] [--seeds N] [--loads X ...] [--closely X]

Jobs are of Philly's shape, without those of more than a day; their models are those that the shipped table of throughputs
has on V100, P100 and K80. Rivals run them as gangs of one GPU type. For `hlas` each divides into one task a GPU that it asks
for, so that it never uses more GPUs than the gang does. Load 1 is the work that the cluster can just do if every job spends
equal time on all GPUs. One load is looked at closely: costs of starting, and what each part of the idea is worth by itself.

A short sweep by default, in seconds; docs/explanation/micro-batches.md has the long one.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from poise.lab.analysis.summary import Summary
from poise.lab.experiment import Experiment, divided, scaled, simulate
from poise.lab.report.figures import Series, lines, standalone
from poise.lab.simulator.tasks import FREE, Switching
from poise.lab.simulator.world import Truth
from poise.lab.traces.reader import read_trace
from poise.lab.traces.schema import Trace, TraceJob
from poise.scheduler.model.cluster import Cluster, parse_cluster
from poise.scheduler.throughput.speeds import Speeds
from poise.scheduler.throughput.table import shipped

MODELS = "VAE/SuperResolution/DCGAN/GRU/LSTM/ResNet50/ResNeXt50/ResNet-18/LM/Recommendation/A3C/CycleGAN"
TRACE = "synthetic:jobs={jobs},seed={seed},sizes={sizes},models=" + MODELS
LONGEST = 86_400.0  # seconds on a V100; the 3 % of jobs beyond it are most of the work, and outlast any trace of this length
HOUR = 3600.0

NO_COSTS = Truth(restart_overhead=0.0, switching=FREE)
RESTARTS = Truth(restart_overhead=30.0, switching=Switching())  # of gangs; tasks switch as Hare does
ALL_RESTART = Truth(restart_overhead=30.0, switching=None)


@dataclass(frozen=True)
class Contender:
    """A policy, and the tasks that a job divides into for each GPU it asks for; 0: jobs are gangs."""

    policy: str
    tasks: int = 0

    def __str__(self) -> str:
        told = {0: "gangs", 1: "1 task a GPU"}
        return f"{self.policy}, {told.get(self.tasks, f'{self.tasks} tasks a GPU')}"


@dataclass(frozen=True)
class Setting:
    """All that decides a run but the contender."""

    cluster: str
    jobs: int
    sizes: str
    load: float
    truth: Truth = NO_COSTS


HLAS = Contender("hlas", 1)
RIVALS = tuple(map(Contender, ("las", "tiresias", "max-min", "srtf")))
KNOWN = (Contender("srtf", 1), Contender("srsf", 1))
PARTS = (Contender("hlas"), Contender("las", 1), *KNOWN, Contender("hlas", 2), Contender("hlas", 4))
COSTS = {"without costs": NO_COSTS, "30 s a restart of gangs": RESTARTS, "30 s a restart of everybody": ALL_RESTART}


@cache
def drawn(spec: str, jobs: int, sizes: str, seed: int) -> Trace:
    """Jobs of Philly's shape that can run at all as gangs, without the longest; they arrive so that load is 1."""
    cluster, trace = parse_cluster(spec), read_trace(TRACE.format(jobs=jobs, seed=seed, sizes=sizes))
    widest = max(map(cluster.gpus_of, cluster.gpu_types))
    kept = [each for each in trace.jobs if each.job.gpus <= widest and (each.job.duration or 0.0) <= LONGEST]
    span = kept[-1].job.submitted - kept[0].job.submitted
    return scaled(replace(trace, jobs=tuple(kept)), load=span * cluster.gpus / blind_work(kept, cluster), most=None)


def blind_work(jobs: Sequence[TraceJob], cluster: Cluster) -> float:
    """GPU-seconds of all jobs if each spends equal time on every GPU."""
    speeds = Speeds(shipped(), cluster)
    counts = np.array([cluster.gpus_of(each) for each in cluster.gpu_types])
    work = 0.0
    for each in jobs:
        packed = np.array([rates[0] for rates in speeds.estimate(each.job).rates])
        work += each.job.gpus * speeds.steps(each.job) / (packed @ counts / cluster.gpus)
    return work


@cache
def ran(contender: Contender, setting: Setting, seed: int) -> Summary:
    """How a trace went."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[Kload {setting.load:g}, seed {seed}: {contender}")
    trace = scaled(drawn(setting.cluster, setting.jobs, setting.sizes, seed), load=setting.load, most=None)
    trace = divided(trace, contender.tasks) if contender.tasks else trace
    return simulate(trace, Experiment(parse_cluster(setting.cluster), contender.policy, truth=setting.truth)).summary


def average_jct(summary: Summary) -> float:
    """Seconds from submission to the end, on average."""
    return summary.avg_jct or 0.0


def ratios(contender: Contender, setting: Setting, seeds: int) -> list[float]:
    """Average JCT ÷ that under hlas, seed by seed."""
    return [average_jct(ran(contender, setting, seed)) / average_jct(ran(HLAS, setting, seed)) for seed in range(seeds)]


def mean(values: Iterable[float]) -> float:
    """Geometric, as is right for ratios."""
    return float(np.exp(np.log([*values]).mean()))


def spread(values: Sequence[float]) -> str:
    """The mean, the least and the greatest of ratios."""
    return f"{mean(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def swept(contender: Contender, settings: Sequence[Setting], seeds: int) -> Series:
    """Average JCT at each load, in seconds; printed in hours, and as a ratio with the spread over seeds."""
    found = [float(np.mean([average_jct(ran(contender, each, seed)) for seed in range(seeds)])) for each in settings]
    cells = "".join(
        f"  {jct / HOUR:5.2f} h {spread(ratios(contender, each, seeds)):17}"
        for jct, each in zip(found, settings, strict=True)
    )
    say(f"{contender!s:20}{cells}")
    return Series(str(contender), np.array([each.load for each in settings]), np.array(found))


def looked_at(contenders: Iterable[Contender], setting: Setting, seeds: int) -> None:
    """More of each than its average, means over seeds."""
    say(f"{'':20}  JCT/hlas           average  median     p99  worst rho  preemptions  in use")
    for each in contenders:
        runs = [ran(each, setting, seed) for seed in range(seeds)]
        hours = "".join(f"{over(runs, take) / HOUR:6.2f} h" for take in (average_jct, median_jct, p99_jct))
        rest = f"{over(runs, worst_rho):11.1f}{over(runs, preemptions):13,.0f}{over(runs, in_use):8.0%}"
        say(f"{each!s:20}  {spread(ratios(each, setting, seeds)):17}{hours}{rest}")


def over(runs: Iterable[Summary], take: Callable[[Summary], float]) -> float:
    """The mean of a measure."""
    return float(np.mean([take(each) for each in runs]))


def median_jct(summary: Summary) -> float:
    """In seconds."""
    return summary.median_jct or 0.0


def p99_jct(summary: Summary) -> float:
    """In seconds."""
    return summary.p99_jct or 0.0


def worst_rho(summary: Summary) -> float:
    """Of any job: its time ÷ that on its slice of the cluster."""
    return summary.worst_rho or 0.0


def preemptions(summary: Summary) -> float:
    """Of all jobs, moves included."""
    return float(summary.preemptions)


def in_use(summary: Summary) -> float:
    """The part of all GPU time that jobs held."""
    return summary.utilisation


def say(line: str) -> None:
    """On a line of its own, in place of what was said of progress."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    sys.stdout.write(f"{line}\n")


def main(asked: argparse.Namespace) -> None:
    """Simulate, print, draw, and say where."""
    at_load = Setting(asked.cluster, asked.jobs, asked.sizes, asked.closely)
    say(f"{'average JCT':20}" + "".join(f"  {f'at load {load:g}: JCT, JCT/hlas':25}" for load in asked.loads))
    settings = [replace(at_load, load=load) for load in asked.loads]
    series = [swept(each, settings, asked.seeds) for each in (HLAS, *RIVALS)]
    for told, truth in COSTS.items():
        say(f"\nload {asked.closely:g}, {told}")
        contenders = (HLAS, *RIVALS, *PARTS) if truth is NO_COSTS else (HLAS, *RIVALS)
        looked_at(contenders, replace(at_load, truth=truth), asked.seeds)
    title = "Jobs as gangs, and the same jobs in tasks"
    figure = lines(series, title=title, x_label="load", y_label="average completion time", y_unit="seconds")
    asked.file.write_text(standalone(figure), encoding="utf-8")
    say(f"\nfigure: {asked.file}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", nargs="?", type=Path, default=Path("micro-batches.svg"))
    parser.add_argument("--cluster", default="v100:24,p100:20,k80:20")
    parser.add_argument("--jobs", type=int, default=150, help="before the longest are left out")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--loads", type=float, nargs="+", default=[1.0, 2.0])
    parser.add_argument("--closely", type=float, default=1.0, help="the load that is looked at closely")
    parser.add_argument("--sizes", default="philly", help="of gangs, as synthetic:help says")
    main(parser.parse_args())
