"""How average completion time grows with load, under four policies: a figure in a few seconds.

python examples/load_sweep.py [FILE]

Load is the work that arrives ÷ the work that the cluster can do meanwhile. The trace is synthetic; `scaled` lets the same
jobs arrive faster or slower, so that nothing but load changes along the axis.
"""

import sys
from pathlib import Path

import numpy as np

from poise.assembly import Experiment, scaled, simulate
from poise.model.cluster import Cluster, parse_cluster
from poise.report.figures import Series, lines, standalone
from poise.traces.reading import read_trace
from poise.traces.schema import Trace

TRACE = "synthetic:jobs=300,seed=11,sizes=1:0.6/2:0.2/4:0.15/8:0.05,durations=lognormal:1800:1.2"
POLICIES = ("fifo", "fifo-skip", "srtf", "tiresias")
LOADS = np.array([0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])


def natural_load(trace: Trace, cluster: Cluster) -> float:
    """The load of a trace as it stands; durations are on the cluster's one type."""
    work = sum(each.job.gpus * (each.job.duration or 0.0) for each in trace.jobs)
    return work / (cluster.gpus * (trace.jobs[-1].job.submitted - trace.jobs[0].job.submitted))


def averages(trace: Trace, cluster: Cluster, policy: str) -> Series:
    """Average completion time at each load, in seconds."""
    natural = natural_load(trace, cluster)
    traces = [scaled(trace, load=float(load) / natural, most=None) for load in LOADS]
    summaries = [simulate(each, Experiment(cluster, policy)).summary for each in traces]
    return Series(policy, LOADS, np.array([summary.avg_jct for summary in summaries], dtype=np.float64))


def main(target: Path) -> None:
    """Simulate, draw, and say where."""
    trace, cluster = read_trace(TRACE), parse_cluster("gpu:32")
    series = [averages(trace, cluster, policy) for policy in POLICIES]
    title, label = "Completion times under load", "average completion time"
    drawn = lines(series, title=title, x_label="load", y_label=label, y_unit="seconds")
    target.write_text(standalone(drawn), encoding="utf-8")
    for each in series:
        sys.stdout.write(f"{each.label:10}" + "".join(f"{value / 3600:7.2f} h" for value in each.y) + "\n")
    sys.stdout.write(f"figure: {target}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("load-sweep.svg"))
