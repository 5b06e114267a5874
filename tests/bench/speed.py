"""`make bench`: the simulator's speed as jobs per CPU-second and as growth, and what its idle rounds cost.

Bars (issue "The core, the simulator and the queue policies"): at least 10,000 jobs per CPU-second each for fifo, srtf and
tiresias on all ten ITP clusters as one trace, `gpu:2048@8`, placement consolidate; cost growing no faster than N^1.15 from
8,000 to 64,000 jobs; peak memory under 1 GiB; rounds in which nothing changes cost nothing. CPU seconds are those of the
whole simulation: events, decisions, journal in memory and metrics. Without ../shared/data a synthetic trace of the same
size stands in, and the output says so.
"""

import math
import resource
import sys
from dataclasses import replace
from pathlib import Path

from poise.lab.experiment import Experiment, scaled, simulate
from poise.lab.traces.reader import read_trace
from poise.lab.traces.schema import Trace
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.cluster import parse_cluster

ITP = Path(__file__).resolve().parents[3] / "shared/data/microsoft-itp/raw-traces.tar.gz"
POLICIES = ("fifo", "srtf", "tiresias")
SIZES = (8_000, 16_000, 32_000, 64_000)
LEAST_RATE, MOST_GROWTH, MOST_MEMORY = 10_000, 1.15, 1 << 30


def main() -> int:
    """Measure, print, and say by the exit code whether all bars hold."""
    trace = large_trace()
    base = Experiment(parse_cluster("gpu:2048@8"))
    held = [_rate(trace, replace(base, policy=policy)) for policy in POLICIES]
    held += [_growth(trace, replace(base, policy=policy)) for policy in POLICIES]
    held.append(_idle_rounds(base))
    held.append(_memory())
    return 0 if all(held) else 1


def large_trace() -> Trace:
    """The ten ITP clusters as one trace, or one as large that is drawn; says which."""
    trace = read_trace(str(ITP)) if ITP.exists() else read_trace("synthetic:jobs=69351,seed=0,rate=90")
    print(f"trace: {trace.name}, {len(trace.jobs):,} jobs" + ("" if ITP.exists() else " (ITP traces are not here)"))
    return trace


def _cpu_seconds(trace: Trace, experiment: Experiment, *, times: int) -> float:
    """The least of several runs: what else the machine does only ever adds."""
    return min(simulate(trace, experiment).summary.cpu_seconds for _ in range(times))


def _rate(trace: Trace, experiment: Experiment) -> bool:
    rate = len(trace.jobs) / _cpu_seconds(trace, experiment, times=3)
    return say(f"{experiment.policy}: {rate:,.0f} jobs per CPU-second", rate >= LEAST_RATE, f"at least {LEAST_RATE:,}")


def _growth(trace: Trace, experiment: Experiment) -> bool:
    """The exponent between the smallest and the largest size, in the trace's own load."""
    seconds = [_cpu_seconds(scaled(trace, load=1.0, most=size), experiment, times=2) for size in SIZES]
    growth = math.log(seconds[-1] / seconds[0]) / math.log(SIZES[-1] / SIZES[0])
    costs = ", ".join(f"{size:,}: {each:.2f} s" for size, each in zip(SIZES, seconds, strict=True))
    return say(f"{experiment.policy}: cost grows as N^{growth:.3f} ({costs})", growth <= MOST_GROWTH, f"N^{MOST_GROWTH}")


def _idle_rounds(base: Experiment) -> bool:
    """Two jobs a thousand days apart: the rounds between them are skipped, not stepped through."""
    rounds = Settings(cadence=Cadence.ROUNDS)
    lonely = read_trace("synthetic:jobs=2,durations=fixed:1000,sizes=1:1,arrivals=at-once")
    far = replace(lonely.jobs[1], job=replace(lonely.jobs[1].job, submitted=86_400_000.0))
    trace = replace(lonely, jobs=(lonely.jobs[0], far))
    summary = simulate(trace, replace(base, policy="las", settings=rounds)).summary
    text = f"{summary.rounds:,} rounds, {summary.decisions} decisions"
    return say(text, summary.decisions <= 4, "decisions do not grow with idle rounds")


def _memory() -> bool:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return say(f"peak memory {peak / (1 << 20):,.0f} MiB", peak < MOST_MEMORY, "under 1 GiB")


def say(text: str, held: bool, bar: str) -> bool:
    """Print how a measurement stands to its bar; returns whether it holds."""
    print(f"{'ok  ' if held else 'MISS'}  {text}  [{bar}]", flush=True)
    return held


if __name__ == "__main__":
    sys.exit(main())
