"""`poise bench solve`: what one allocation costs."""

import json
from math import isfinite

import click

from poise.bench import Draw, Timing, allocator_of, drawn_for, settled, time_allocation
from poise.cli.progress import Bar
from poise.model.workload import Workload
from poise.policies.catalogue import policy_named

MOST_JOBS, MOST_TYPES = 1_000_000, 64
EPILOG = """\b
Examples:
  poise bench solve --policy max-min --jobs 2048
  poise bench solve --policy max-min+packed --jobs 512 --classes 26 --seed 1 --json
"""


@click.group(epilog=EPILOG)
def bench() -> None:
    """Measure what Poise itself costs."""


@bench.command(epilog=EPILOG)
@click.option(
    "--policy", "spec", required=True, help="NAME, NAME:key=value,..., NAME+COMBINATOR; one that answers with shares."
)
@click.option("--jobs", required=True, type=click.IntRange(1, MOST_JOBS), help="Active jobs.")
@click.option("--types", default=3, show_default=True, type=click.IntRange(1, MOST_TYPES), help="GPU types.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of what is drawn.")
@click.option(
    "--classes",
    type=click.IntRange(1, MOST_JOBS),
    help="Classes of equally fast jobs.  [default: each job its own; 26 with +packed]",
)
@click.option("--gpus", type=click.IntRange(1), help="GPUs in all.  [default: one for every 4 that the jobs want]")
@click.option("--gangs", help="gavel, or SIZE:SHARE/SIZE:SHARE/...  [default: gavel; 1:1 for allox]")
@click.option("--repeat", "repeats", default=3, show_default=True, type=click.IntRange(1), help="Runs; the fastest counts.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def solve(*, spec: str, repeats: int, as_json: bool, **drawing: int | str | None) -> None:
    """Time one allocation of a share policy, in CPU seconds, on jobs that are drawn at random.

    Gangs and lengths are drawn as by Gavel's generator; speeds so that GPU types differ, and jobs in what they gain from a
    fast one. The same options draw the same jobs everywhere.
    """
    policy = policy_named(spec)
    allocator = allocator_of(policy)
    draw = settled(policy, Draw(**drawing))  # type: ignore[arg-type]  # click has seen to the types
    workload = drawn_for(policy, draw)
    bar = Bar(spec, repeats, quiet=as_json)
    try:
        timing = time_allocation(allocator, workload, repeats, bar.update)
    finally:
        bar.close()
    click.echo(json.dumps(document(spec, draw, workload, timing)) if as_json else line(spec, workload, timing))


def document(spec: str, draw: Draw, workload: Workload, timing: Timing) -> dict[str, object]:
    """The result as JSON; an objective that is none is null."""
    objective = timing.allocation.objective
    return {
        "policy": spec,
        "jobs": draw.jobs,
        "seconds": timing.best,
        "objective": objective if isfinite(objective) else None,
        "types": draw.types,
        "seed": draw.seed,
        "classes": draw.classes,
        "gpus": int(workload.gpus.sum()),
        "repeats": len(timing.seconds),
    }


def line(spec: str, workload: Workload, timing: Timing) -> str:
    """The result for a person."""
    objective = timing.allocation.objective
    where = f"{workload.gpus.sum():,.0f} GPUs of {workload.types} type{'s' if workload.types > 1 else ''}"
    aim = f"; objective {objective:.6g}" if isfinite(objective) else ""
    return f"{spec}: {workload.jobs:,} jobs on {where}: {timing.best:.4f} CPU seconds, best of {len(timing.seconds)}{aim}"
