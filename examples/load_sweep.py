"""How average completion time grows with load, under four policies, with confidence intervals: a figure in a few seconds.

python examples/load_sweep.py [FILE]

Load is the work that arrives ÷ the work that the cluster can do meanwhile. For every seed a trace is drawn; `scaled` lets
the same jobs arrive faster or slower, and all policies see the same traces, so that nothing else differs along the axis or
between the lines. `poise compare TRACE --loads LIST --seeds N` does the like from the command line; a load of 1 is there
the trace as it stands.
"""

import sys
from pathlib import Path

from poise.lab.analysis.statistics import Grid, averaged
from poise.lab.experiment import Experiment, scaled, simulate
from poise.lab.report.figures import standalone
from poise.lab.report.sweep import over_load
from poise.lab.traces.reader import read_trace
from poise.lab.traces.schema import Trace
from poise.scheduler.model.cluster import Cluster, parse_cluster

TRACE = "synthetic:jobs=200,seed={seed},sizes=1:0.6/2:0.2/4:0.15/8:0.05,durations=lognormal:1800:1.2"
GRID = Grid(policies=("fifo", "fifo-skip", "srtf", "tiresias"), loads=(0.4, 0.6, 0.8, 1.0, 1.2), seeds=(11, 12, 13, 14))


def natural_load(trace: Trace, cluster: Cluster) -> float:
    """The load of a trace as it stands; durations are on the cluster's one type."""
    work = sum(each.job.gpus * (each.job.duration or 0.0) for each in trace.jobs)
    return work / (cluster.gpus * (trace.jobs[-1].job.submitted - trace.jobs[0].job.submitted))


def at_load(seed: int, load: float, cluster: Cluster) -> Trace:
    """The trace of a seed, arriving so fast that it makes this load."""
    trace = read_trace(TRACE.format(seed=seed))
    return scaled(trace, load=load / natural_load(trace, cluster), most=None)


def main(target: Path) -> None:
    """Simulate, draw, and say where."""
    cluster = parse_cluster("gpu:32")
    traces = {(seed, load): at_load(seed, load, cluster) for seed in GRID.seeds for load in GRID.loads}
    runs = {cell: simulate(traces[cell.seed, cell.load], Experiment(cluster, cell.policy)).summary for cell in GRID.cells()}
    rows = averaged(runs, GRID)
    drawn = over_load(rows, "avg_jct", title="Completion times under load", y_label="average completion time")
    target.write_text(standalone(drawn), encoding="utf-8")
    for row in rows:
        mean = row.means["avg_jct"]
        sys.stdout.write(
            f"load {row.load}  {row.policy:10}{(mean.value or 0) / 3600:7.2f} ± {(mean.margin or 0) / 3600:.2f} h\n"
        )
    sys.stdout.write(f"figure: {target}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("load-sweep.svg"))
