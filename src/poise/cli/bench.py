"""`poise bench solve`: what one allocation costs."""

import json
from math import isfinite

import click

from poise.bench import Draw, Figures, measured, settled
from poise.cli.bench_fidelity import fidelity
from poise.cli.progress import Bar
from poise.model.units import counted
from poise.policies.catalogue import policy_named

MOST_JOBS, MOST_TYPES = 1_000_000, 64
EPILOG = """\b
Examples:
  poise bench solve --policy max-min --jobs 2048
  poise bench solve --policy max-min+packed --jobs 512 --classes 26 --seed 1 --json
  poise bench solve --policy themis --jobs 1000
  poise bench solve --policy hare --jobs 1000
"""


@click.group(epilog=EPILOG + "  poise bench fidelity\n")
def bench() -> None:
    """Measure what Poise itself costs, and how far its simulator is from the real thing."""


bench.add_command(fidelity)


@bench.command(epilog=EPILOG)
@click.option(
    "--policy",
    "spec",
    required=True,
    help="NAME, NAME:key=value,..., NAME+COMBINATOR; one that answers with shares, themis, or hare.",
)
@click.option("--jobs", required=True, type=click.IntRange(1, MOST_JOBS), help="Active jobs; with themis apps.")
@click.option(
    "--types", default=3, show_default=True, type=click.IntRange(1, MOST_TYPES), help="GPU types; 1 with themis in any case."
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of what is drawn.")
@click.option(
    "--classes",
    type=click.IntRange(1, MOST_JOBS),
    help="Classes of equally fast jobs.  [default: each job its own; 26 with +packed]",
)
@click.option(
    "--gpus", type=click.IntRange(1), help="GPUs in all.  [default: 1 for every 4 wanted; 1 for 2 apps with themis]"
)
@click.option("--gangs", help="gavel, or SIZE:SHARE/SIZE:SHARE/...  [default: gavel; 1:1 for allox]")
@click.option("--repeat", "repeats", default=3, show_default=True, type=click.IntRange(1), help="Runs; the fastest counts.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def solve(*, spec: str, repeats: int, as_json: bool, **drawing: int | str | None) -> None:
    """Time one allocation of a share policy, one auction, or one plan, in CPU seconds, on jobs that are drawn at random.

    Gangs and lengths are drawn as by Gavel's generator; speeds so that GPU types differ, and jobs in what they gain from a
    fast one. The same options draw the same jobs everywhere. In an auction each app is a sweep of up to 8 jobs, and all bid.
    A plan of hare places all tasks of jobs of up to 100 rounds; its objective is the sum of weighted completion times.
    """
    policy = policy_named(spec)
    draw = settled(policy, Draw(**drawing))  # type: ignore[arg-type]  # click has seen to the types
    bar = Bar(spec, repeats, quiet=as_json)
    try:
        figures = measured(policy, draw, repeats, bar.update)
    finally:
        bar.close()
    click.echo(json.dumps(document(spec, draw, figures)) if as_json else line(spec, draw, figures))


def document(spec: str, draw: Draw, figures: Figures) -> dict[str, object]:
    """The result as JSON; an objective that is none is null."""
    return {
        "policy": spec,
        "jobs": draw.jobs,
        "seconds": figures.best,
        "objective": figures.objective if isfinite(figures.objective) else None,
        "types": draw.types,
        "seed": draw.seed,
        "classes": draw.classes,
        "gpus": figures.gpus,
        "repeats": len(figures.seconds),
        "bound": figures.bound if isfinite(figures.bound) else None,
    }


def line(spec: str, draw: Draw, figures: Figures) -> str:
    """The result for a person."""
    where = f"{counted(draw.jobs, 'job')} on {counted(figures.gpus, 'GPU')} of {counted(figures.types, 'type')}"
    aim = f"; objective {figures.objective:.6g}" if isfinite(figures.objective) else ""
    aim += f", none below {figures.bound:.6g} is possible" if isfinite(figures.bound) else ""
    return f"{spec}: {where}: {figures.best:.4f} CPU seconds, best of {len(figures.seconds)}{aim}"
