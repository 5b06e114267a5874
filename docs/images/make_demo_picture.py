"""Draws docs/images/demo.svg: completion times of the demonstration's jobs, policy by policy.

python docs/images/make_demo_picture.py [FILE]
"""

import sys
from dataclasses import replace
from pathlib import Path

from poise.cli.compare import CLUSTER, POLICIES
from poise.lab.experiment import Experiment, simulate
from poise.lab.report.figures import cdf, standalone
from poise.lab.traces.synthetic import demo_trace
from poise.scheduler.model.cluster import parse_cluster


def picture() -> str:
    """The figure as a file of its own; the same bytes every time."""
    trace, base = demo_trace(), Experiment(parse_cluster(CLUSTER))
    times = {policy: simulate(trace, replace(base, policy=policy)).measured.jcts for policy in POLICIES}
    return standalone(cdf(times, title=f"{len(trace.jobs)} jobs on {CLUSTER}", x_label="completion time"))


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("demo.svg")
    target.write_text(picture(), encoding="utf-8")
