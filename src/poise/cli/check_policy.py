"""`poise check-policy`: does a policy keep the laws that those of the catalogue keep?"""

from pathlib import Path
from shlex import quote
from typing import Any

import click

from poise.cli.experiment import experiment_options, read_experiment
from poise.cli.options import FOLDER, examples, print_json
from poise.cli.output import show_notes, show_table
from poise.cli.outside import find_policy
from poise.lab.conformance.check import SEEDS, ConformanceReport, LawVerdict
from poise.lab.conformance.check import check_policy as check
from poise.lab.conformance.worlds import World, odd_worlds, write_world
from poise.lab.experiment import outages_of
from poise.lab.progress import Bar
from poise.lab.report.page import HtmlTable
from poise.scheduler.model.errors import RequestError
from poise.scheduler.policies.catalogue import policy_named

CLAIM = "claims "
MOST_JOBS = 200
"""Jobs of a trace to check on: every law runs it several times."""


@click.command(
    epilog=examples(
        "poise check-policy edf:POLICY",
        "poise check-policy mypackage.edf:EarliestDeadline:slack=60 --seeds 500 --json",
        "poise check-policy edf:POLICY --trace jobs.jsonl --cluster v100:4,k80:8",
    )
)
@click.argument("policy")
@click.option(
    "--seeds", type=click.IntRange(0, 100_000), default=SEEDS, show_default=True, help="Random worlds, from --seed on."
)
@click.option("--trace", help="Check in one world instead: this trace, on --cluster and with the options below.")
@click.option("--out", type=FOLDER, help="Write counterexamples to a directory, each as a trace.  [default: .]")
@experiment_options
@click.pass_context
def check_policy(
    context: click.Context,
    /,
    policy: str,
    seeds: int,
    trace: str | None,
    out: Path | None,
    **options: Any,  # noqa: ANN401
) -> int:
    """Run the laws of the catalogue on POLICY, which may be of your own: `module:attribute` or a name of a plug-in.

    Small worlds are drawn that are full of ties and trouble. A law that is broken is shown with the smallest world found
    that breaks it, written as a trace, and with the command that shows it again; the exit code is then 1.
    """
    find_policy(policy)
    policy_named(policy)
    worlds = None
    if trace is None:
        _refuse(context)
    else:
        worlds = [_world(trace, options, policy)]
    quiet = options["quiet"] or options["as_json"]
    total = seeds + len(list(odd_worlds())) if worlds is None else 1
    with Bar(policy, total, quiet=quiet) as bar:
        report = check(policy, seeds=seeds, seed=options["seed"], worlds=worlds, show=bar.update)
    again = {each.law: _kept(report, each, out or Path(), trace) for each in report.broken}
    if options["as_json"]:
        rows = [each.document() | {"again": again.get(each.law)} for each in report.verdicts]
        print_json({"policy": policy, "holds": not report.broken, "laws": rows})
    else:
        _show(report, again)
    return 1 if report.broken else 0


def _refuse(context: click.Context) -> None:
    """Refuse options of a trace where there is none: worlds have their own clusters and settings."""
    own = {"policy", "seeds", "trace", "out", "seed", "as_json", "quiet"}
    for each in context.command.params:
        given = context.get_parameter_source(each.name or "")
        if each.name not in own and given is click.core.ParameterSource.COMMANDLINE:
            raise RequestError(f"{each.opts[0]} is about a trace; give one with --trace, or leave it out")


def _world(trace: str, options: dict[str, Any], policy: str) -> World:
    """The world that a trace and options describe."""
    request = read_experiment(trace, options, policy)
    show_notes(request.notes, quiet=options["quiet"])
    if len(request.trace.jobs) > MOST_JOBS:
        raise RequestError(f"{request.trace.name}: expected at most {MOST_JOBS} jobs; choose some with --jobs")
    experiment = request.experiment
    outages = tuple(outages_of(request.trace, experiment))
    return World(
        request.trace.jobs, experiment.cluster, experiment.placement, experiment.settings, outages, experiment.truth
    )


def _kept(report: ConformanceReport, verdict: LawVerdict, folder: Path, trace: str | None) -> str | None:
    """Write the world of a law that is broken; return the command that shows it again. A trace that was given is there."""
    if verdict.world is None and verdict.law.startswith(CLAIM):
        return f"poise audit --policy {quote(report.policy)}"
    if verdict.world is None or trace is not None:
        return None
    if not verdict.world.jobs:
        return f"poise check-policy {quote(report.policy)} --seeds 0"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"counterexample-{verdict.law.replace(' ', '-')}.jsonl"
    written = write_world(verdict.world, file)
    return " ".join(["poise check-policy", quote(report.policy), "--trace", quote(str(file)), *written])


def _show(report: ConformanceReport, again: dict[str, str | None]) -> None:
    told = {True: "held", False: "BROKEN", None: "–"}
    rows = [(each.law, each.statement, told[each.holds], f"{each.worlds:,}") for each in report.verdicts]
    words = ("law", "what it says", "verdict")
    show_table(HtmlTable((*words, "worlds"), tuple(rows), words=words), report.policy)
    for each in report.broken:
        click.echo(f"{each.law}: {each.problem}")
        if (command := again[each.law]) is not None:
            click.echo(f"  {command}")
