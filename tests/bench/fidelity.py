"""`make bench`: the same workloads live on a Ray cluster and in the simulator.

Bar (issue "Several machines"): makespan and average completion time within 5 %, as the mean of five runs. The cluster is a
head and four nodes of three GPU types: real daemons on loopback addresses (`tests/ray_cluster.py`). Jobs are real processes
that sleep for each step. Starting many of them at once takes the cores of this machine some seconds, so jobs and rounds are
long enough for starts to be a part of the time and not most of it. The fastest type is four times as fast as the slowest, so
that one long job, which comes to be on another type in the end, can move a makespan by a tenth or more: jobs are many, and
none is longer than twice the median.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from unittest import mock

from tests.bench.speed import say
from tests.ray_cluster import NODES, PretendedNode, RayDaemons, ray_daemons
from tests.ray_stage import release

from poise.scheduler.model.cluster import parse_cluster
from poise.service.client import Client
from poise.service.fidelity.comparison import compare, mean_of
from poise.service.fidelity.live_run import FidelitySetup, ServedBy, client_of, draw_workload, started
from poise.service.wire.views import NodeCondition

CLUSTER = "v100:8@4,p100:2@2,k80:4@4"
JOBS, ROUND, MEDIAN, LONGEST, LOAD = 40, 20.0, 24.0, 2.0, 1.5
MOST = 0.05


def on_ray(daemons: RayDaemons) -> ServedBy:
    """Serve on this Ray cluster, and let go of it afterwards."""

    @contextmanager
    def served(folder: Path, setup: FidelitySetup) -> Iterator[Client]:
        options = ("--backend", "ray", "--address", daemons.address, "--agents", "127.0.0.1:0", "--allow-root")
        with mock.patch.dict(os.environ, daemons.environment):
            with (
                started(folder, setup, *options, "--agent-state", str(folder / "agents"), "--cluster", CLUSTER) as said,
                client_of(said) as client,
            ):
                while any(node.state is not NodeCondition.UP for node in client.nodes().nodes):
                    sleep(0.1)
                yield client
            release(daemons)

    return served


def main() -> int:
    """Measure, print, and say by the exit code whether the bar holds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--policy", default="max-min")
    parser.add_argument("--seed", type=int, default=0, help="of the first workload")
    given = parser.parse_args()
    cluster = parse_cluster(CLUSTER)
    # Without labels of racks, nodes are as the cluster has them from the start: none joins later, and rounds begin at once.
    nodes = [PretendedNode(each.name, each.address, each.gpu_type, each.gpus) for each in NODES]
    print(f"{JOBS} jobs on {cluster}, rounds of {ROUND:g} s, median duration {MEDIAN:g} s, {given.policy}", flush=True)
    found = []
    with ray_daemons(nodes) as daemons:
        for seed in range(given.seed, given.seed + given.runs):
            jobs = draw_workload(JOBS, seed, cluster, LOAD, MEDIAN, LONGEST)
            setup = FidelitySetup(cluster, given.policy, ROUND)
            found.append(each := compare(jobs, setup, lambda _ended: None, on_ray(daemons)))
            say(
                f"seed {seed}: makespan {each.live.makespan:.1f} s live, {each.makespan_error:+.1%} simulated; average JCT"
                f" {each.live.avg_jct:.1f} s, {each.jct_error:+.1%}; {each.live.preemptions} preemptions,"
                f" {each.simulated.preemptions} simulated; a start {each.overhead:.2f} s",
                True, "no bar",
            )  # fmt: skip
    mean = mean_of(found)
    text = f"mean of {len(found)} runs: makespan {mean.makespan_error:+.1%}, average JCT {mean.jct_error:+.1%}"
    return 0 if say(text, mean.worst <= MOST, f"within {MOST:.0%}") else 1


if __name__ == "__main__":
    sys.exit(main())
