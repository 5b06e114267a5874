"""`poise bench fidelity`: the same workload live and simulated."""

import json
from typing import Any

import click

from poise.cli.inputs import read_cluster
from poise.cli.options import DURATION
from poise.cli.progress import Bar
from poise.cli.tables import show_table
from poise.fidelity.comparing import Comparison, compared
from poise.fidelity.living import Conditions
from poise.fidelity.workload import drawn
from poise.model.units import counted
from poise.policies.catalogue import policy_named
from poise.report.page import Table

EPILOG = """\b
Examples:
  poise bench fidelity
  poise bench fidelity --policy las --jobs 12 --json
"""
POLICIES = ("fifo", "las", "max-min")


@click.command(epilog=EPILOG)
@click.option("--policy", "policies", multiple=True, help="May be repeated.  [default: fifo, las and max-min]")
@click.option(
    "--jobs", type=click.IntRange(1, 500), default=30, show_default=True, help="Real processes, one after the other."
)
@click.option("--cluster", default="v100:6", show_default=True, metavar="SPEC", help="Virtual GPUs.")
@click.option("--round", "round_", type=DURATION, default=4.0, show_default=True, help="Length of a round.")
@click.option(
    "--load",
    type=click.FloatRange(0.1, 10.0),
    default=1.5,
    show_default=True,
    help="Work that arrives ÷ work that can be done.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the workload.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0.0, 1.0),
    default=0.05,
    show_default=True,
    help="Largest difference; beyond it, exit code 1.",
)
@click.option("--quiet", is_flag=True, help="No progress bar.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def fidelity(policies: tuple[str, ...], quiet: bool, as_json: bool, **options: Any) -> int:  # noqa: ANN401
    """Run one workload twice, under a live service and in the simulator, and compare makespan and average completion time.

    Jobs are real processes that take a few seconds each. What a start costs is measured live and told the simulator.
    """
    cluster, jobs, length = read_cluster(options["cluster"]), options["jobs"], options["round_"]
    chosen = policies or POLICIES
    for spec in chosen:
        policy_named(spec)
    works = drawn(jobs, options["seed"], cluster, options["load"])
    found = []
    for spec in chosen:
        bar = Bar(f"{spec}, live", jobs, quiet=quiet or as_json)
        try:
            found.append(compared(works, Conditions(cluster, spec, length), bar.update))
        finally:
            bar.close()
    if as_json:
        setup = {"cluster": str(cluster), "jobs": jobs, "round": length, "load": options["load"], "seed": options["seed"]}
        click.echo(json.dumps(setup | {"tolerance": options["tolerance"], "policies": [*map(_document, found)]}))
    else:
        show_table(_table(found), f"{counted(jobs, 'job')} on {cluster}, rounds of {length:g} s")
    return int(any(each.worst > options["tolerance"] for each in found))


def _table(found: list[Comparison]) -> Table:
    columns = (
        "policy",
        "makespan",
        "simulated",
        "off by",
        "average JCT",
        "simulated",
        "off by",
        "preemptions",
        "simulated",
        "a start",
    )
    rows = [
        (
            each.policy,
            f"{each.live.makespan:.2f} s", f"{each.simulated.makespan:.2f} s", f"{each.makespan_error:+.1%}",
            f"{each.live.avg_jct:.2f} s", f"{each.simulated.avg_jct:.2f} s", f"{each.jct_error:+.1%}",
            str(each.live.preemptions), str(each.simulated.preemptions), f"{each.overhead:.3f} s",
        )
        for each in found
    ]  # fmt: skip
    return Table(columns, tuple(rows), words=("policy",))


def _document(each: Comparison) -> dict[str, object]:
    return {
        "policy": each.policy,
        "overhead": each.overhead,
        "makespan": each.live.makespan,
        "simulated_makespan": each.simulated.makespan,
        "makespan_error": each.makespan_error,
        "avg_jct": each.live.avg_jct,
        "simulated_avg_jct": each.simulated.avg_jct,
        "jct_error": each.jct_error,
        "preemptions": each.live.preemptions,
        "simulated_preemptions": each.simulated.preemptions,
        "jcts": each.live.jcts,
        "simulated_jcts": each.simulated.jcts,
    }
