"""`poise audit`: is a policy fair? Sharing incentive, envy, Pareto efficiency, gain from lying, starvation; measured."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

from poise.cli.experiment import experiment_options, read_experiment
from poise.cli.options import DURATION, print_json
from poise.cli.output import show_notes, show_table, watching
from poise.lab.audit.audit import (
    CheckedClaim,
    Measurement,
    Task,
    built_in_tasks,
    check_claims,
    clusters,
    findings,
    trace_tasks,
)
from poise.lab.audit.findings import Finding, Property
from poise.lab.audit.instances import turn_of
from poise.lab.parallel import spread
from poise.lab.report.axes import amount
from poise.lab.report.page import HtmlTable
from poise.scheduler.model.errors import RequestError
from poise.scheduler.policies.catalogue import listing_of

OF_TRACES = ("cluster", "throughputs", "true_throughputs", "estimate", "format", "jobs", "load", "until", "elastic",
             "micro_batches", "failures")  # fmt: skip
"""Options that describe a trace, and mean nothing for built-in instances."""

MEASURED: Mapping[Property, str] = {
    Property.SHARING_INCENTIVE: "time taken ÷ time alone on an N-th of the cluster",
    Property.SHARING_INCENTIVE_OF_GANGS: "the same, of gangs of one and two GPUs",
    Property.ENVY_FREENESS: "equal slices that changing places would gain",
    Property.PARETO_EFFICIENCY: "part of their fastest speed that all could gain",
    Property.STRATEGY_PROOFNESS: "what a lie gains, in equal slices, or in time",
    Property.STARVATION_FREEDOM: "time passed over ÷ time with equal shares",
}

EPILOG = """\b
Examples:
  poise audit --policy max-min
  poise audit --policy gandiva-fair --instances 3 --json
  poise audit --policy srtf --trace jobs.jsonl --cluster v100:4,k80:8
"""


@click.command(epilog=EPILOG)
@click.option("--policy", required=True, help="NAME, NAME:key=value,..., NAME+COMBINATOR, MODULE:ATTRIBUTE.")
@click.option("--trace", help="Audit on a trace, its tenants being the agents; with one tenant, its jobs.")
@click.option(
    "--instances",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="Draw every built-in instance from this many seeds, from --seed on.",
)
@click.option(
    "--turn",
    type=DURATION,
    help="Longest time that the policy gives GPUs for before it looks again; instances and bounds are counted in it."
    "  [default: 600, or two rounds if that is more]",
)
@experiment_options
@click.pass_context
def audit(
    context: click.Context,
    /,
    policy: str,
    trace: str | None,
    instances: int,
    turn: float | None,
    **options: Any,  # noqa: ANN401
) -> int:
    """Measure what a policy does to those who share a cluster, and show a counterexample of what does not hold.

    Sharing incentive, envy, Pareto efficiency, gain from lying and starvation, on small built-in instances drawn from --seed
    or on a trace. A property that does not hold is a finding; a claim of the catalogue that does not hold is an error.
    """
    _refuse(context, trace, turn, options)
    request = read_experiment(trace or "synthetic:jobs=1", options, policy)
    usual = turn_of(request.experiment.settings)
    seconds = usual if turn is None else turn
    if trace is None:
        tasks = built_in_tasks(request.experiment, seed=options["seed"], draws=instances, turn=seconds)
    else:
        if not request.trace.jobs:
            raise RequestError(f"{request.trace.name}: there is no job to audit")
        show_notes(request.notes, quiet=options["quiet"])
        tasks = trace_tasks(request.trace, request.experiment, turn=seconds)
    found = findings(tasks, run_tasks(tasks, policy, quiet=options["quiet"]))
    claims = check_claims(request.experiment, found) if trace is None and seconds == usual else []
    about = {
        "policy": policy,
        "trace": request.trace.name if trace else None,
        "cluster": str(request.experiment.cluster) if trace else "; ".join(clusters()),
        "seed": options["seed"],
        "instances": 1 if trace else instances,
        "turn": seconds,
    }
    if options["as_json"]:
        properties = {str(name): finding.document() for name, finding in found.items()}
        print_json({**about, "properties": properties, "claims": [claim.document() for claim in claims]})
    else:
        _show(about, found, claims)
    wrong = [claim for claim in claims if not claim.holds]
    for claim in wrong:
        who = "its listing" if listing_of(policy).origin else "the catalogue"
        click.echo(f"poise: {who} claims that {claim.claim}; measured: {claim.text}", err=True)
    return 1 if wrong else 0


def _refuse(context: click.Context, trace: str | None, turn: float | None, options: Mapping[str, Any]) -> None:
    if turn is not None and not turn > 0:
        raise RequestError(f"--turn: expected more than 0 seconds, got {turn:g}")
    if options["faults"] is not None:
        raise RequestError("--faults: an audit is about the policy, on GPUs that are there; leave it out")
    if options["drain"]:
        raise RequestError("--drain: an audit is about the policy, on GPUs that are there; leave it out")
    if _is_given(context, "fairness"):
        raise RequestError("--fairness: an audit is about tenants, or about jobs if there is one tenant only; leave it out")
    if trace is not None and _is_given(context, "instances"):
        raise RequestError("--instances is about built-in instances; leave it out, or leave out --trace")
    given = [name for name in OF_TRACES if _is_given(context, name)]
    if trace is None and given:
        flag = given[0].replace("_", "-")
        raise RequestError(
            f"--{flag} is about a trace; give one with --trace, or leave it out: built-in instances have theirs"
        )


def _is_given(context: click.Context, option: str) -> bool:
    return context.get_parameter_source(option) is ParameterSource.COMMANDLINE


def run_tasks(tasks: Sequence[Task], title: str, *, quiet: bool) -> Iterator[Measurement]:
    """The measurements in the order of the tasks, which run on all cores."""
    with watching(title, len(tasks), quiet=quiet) as watch:
        done = dict(spread(_work, tasks, watch))
        if watch.interrupted:
            raise KeyboardInterrupt
    for place in range(len(tasks)):
        yield from done[place]


def _work(task: Task) -> list[Measurement]:
    return task.work()


def _show(about: Mapping[str, Any], found: Mapping[Property, Finding], claims: Sequence[CheckedClaim]) -> None:
    where = f"{about['trace']} on {about['cluster']}" if about["trace"] else f"built-in instances, seed {about['seed']}"
    rows = []
    for name, finding in found.items():
        rows.append(_row(_words(name), finding, MEASURED[name]))
        rows += (_row(f"  {_words(kind)}", part, "") for kind, part in finding.parts.items() if part.cases)
    columns = ("property", "holds", "worst", "bound", "cases", "measured as")
    table = HtmlTable(columns, tuple(rows), words=("property", "holds", "measured as"))
    show_table(table, f"{about['policy']}: {where}")
    for name, finding in found.items():
        case = finding.counterexample
        if case is not None:
            click.echo(f"{_words(name)}: {case.text}.")
    for claim in claims:
        click.echo(f"claimed and {'measured' if claim.holds else 'CONTRADICTED'}: {claim.claim}")


def _row(name: str, finding: Finding, measured: str) -> tuple[str, ...]:
    worst = finding.worst
    numbers = ("–", "–") if worst is None else (amount(worst.measured, "plain"), amount(worst.bound, "plain"))
    return (name, {True: "yes", False: "no", None: "–"}[finding.holds], *numbers, f"{finding.cases:,}", measured)


def _words(name: str) -> str:
    return str(name).replace("_", " ")
