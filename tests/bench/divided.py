"""`make bench`: what jobs cost whose rounds divide into micro-batches.

Bars (issue "Hare: use any GPUs, of any mix, for one job"): 5,000 jobs of mixed K on 256 mixed GPUs simulate in under a
minute of one core; Hare's offline plan for 1,000 jobs takes under 30 seconds.
"""

import sys
from dataclasses import replace

from tests.bench.speed import say

from poise.lab.bench import WorkloadDraw, time_plan
from poise.lab.experiment import Experiment, simulate
from poise.lab.traces.schema import Trace
from poise.lab.traces.synthetic import generate
from poise.scheduler.model.cluster import parse_cluster

CLUSTER = "v100:96,p100:80,k80:80"
POLICIES = ("hlas", "hare", "las", "srtf", "max-min")
LOADS = (1.0, 4.0)
SIMULATION_SECONDS, PLAN_SECONDS = 60, 30
PER_GPU = (1, 2, 4)
"""Micro-batches for each GPU that a job asks for, in turn; every fourth job is a gang."""


def main() -> int:
    """Measure, print, and say by the exit code whether all bars hold."""
    held = [_plan()]
    for load in LOADS:
        trace = mixed(generate("synthetic:jobs=5000,seed=1"), load)
        for policy in POLICIES:
            summary = simulate(trace, Experiment(parse_cluster(CLUSTER), policy)).summary
            text = f"{policy}, load {load:g}: {summary.cpu_seconds:.1f} CPU seconds, {summary.decisions:,} decisions"
            held.append(say(text, summary.cpu_seconds < SIMULATION_SECONDS, f"under {SIMULATION_SECONDS}"))
    return 0 if all(held) else 1


def mixed(trace: Trace, load: float) -> Trace:
    """The same jobs, so many times as fast, with mixed numbers of micro-batches."""
    jobs = []
    for index, each in enumerate(trace.jobs):
        per_gpu = (*PER_GPU, None)[index % 4]
        tasks = None if per_gpu is None else per_gpu * each.job.gpus
        jobs.append(replace(each, job=replace(each.job, submitted=each.job.submitted / load, micro_batches=tasks)))
    return Trace(trace.name, tuple(jobs))


def _plan() -> bool:
    figures = time_plan(WorkloadDraw(1_000, gpus=256), 1, lambda _done: None)
    text = (
        f"hare: plan for 1,000 jobs on 256 GPUs: {figures.best:.1f} CPU s, {figures.objective / figures.bound:.2f} x bound"
    )
    return say(text, figures.best < PLAN_SECONDS, f"under {PLAN_SECONDS}")


if __name__ == "__main__":
    sys.exit(main())
