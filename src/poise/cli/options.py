"""The options that `simulate` and `compare` share, and the experiment that they describe."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from typing import Any

import click

from poise.analysis.fairness import Fairness
from poise.assembly import PRESETS, Experiment, check, divided, elastic, preset_named, scaled, speeds_of
from poise.backends.simulator.switching import parse_switching
from poise.backends.simulator.world import Truth
from poise.cli.inputs import read_cluster
from poise.core.settings import Cadence, Retry
from poise.model.errors import RequestError
from poise.model.job import Job
from poise.model.units import parse_seconds
from poise.placement.strategies import PLACEMENTS, placement_named
from poise.throughput.estimation import estimated, parse_profile
from poise.throughput.speeds import Speeds
from poise.throughput.table import Throughputs, read_throughputs, shipped
from poise.traces.failing import Failing, parse_failing, with_failures
from poise.traces.fields import FieldError
from poise.traces.reading import read_trace
from poise.traces.registry import format_names
from poise.traces.schema import Trace

CADENCES = [each.value for each in Cadence]
RETRIES = [each.value for each in Retry]
FAIRNESSES = [each.value for each in Fairness]
SHORTEST_ROUND = 0.001
"""Seconds; on the clock of a calendar, shorter rounds fall together."""


class Duration(click.ParamType[float]):
    """Seconds, or `90s`, `15m`, `1h30m`."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401
        """The duration in seconds."""
        if isinstance(value, float):
            return value
        try:
            return parse_seconds(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


DURATION = Duration()

_OPTIONS = (
    click.option("--format", "trace_format", default="auto", show_default=True, help=f"One of {', '.join(format_names())}."),
    click.option(
        "--cluster",
        default="gpu:64",
        show_default=True,
        metavar="SPEC",
        help="v100:12,k80:8@4 (GPUs of each type, 4 a node unless @n), or a YAML or TOML file.",
    ),
    click.option("--throughputs", metavar="FILE", help="Believed speeds: our CSV or Gavel's JSON.  [default: shipped]"),
    click.option("--true-throughputs", metavar="FILE", help="The world's speeds where they differ from the believed ones."),
    click.option(
        "--estimate",
        metavar="SPEC",
        help="Believe speeds estimated from a short profile, profiled:types=1,pairs=0.2,...; the world keeps the true ones.",
    ),
    click.option("--preset", default="none", show_default=True, help=f"Set-up of a published system: {', '.join(PRESETS)}."),
    click.option("--round", "round_", type=DURATION, help="Length of a round.  [default: 360, or the preset's]"),
    click.option("--cadence", type=click.Choice(CADENCES), help="When to decide.  [default: both, or the preset's]"),
    click.option(
        "--recompute",
        type=DURATION,
        help="Least time between two solves of a share policy; others ignore it.  [default: 0, or the preset's]",
    ),
    click.option(
        "--patience",
        type=click.FloatRange(min=0),
        help="Rounds that a job may run ahead of its share; share policies.  [default: 1, or the preset's]",
    ),
    click.option("--backfill/--no-backfill", default=None, help="Use GPUs that become free inside a round at once."),
    click.option("--placement", metavar="NAME", help=f"One of {', '.join(PLACEMENTS)}.  [default: consolidate]"),
    click.option("--restart-overhead", type=DURATION, help="Time without progress at each start.  [default: 0]"),
    click.option("--minimum-run", type=DURATION, help="A job that just started is not preempted for this long."),
    click.option(
        "--checkpoint-every", type=DURATION, default=600.0, help="Running time between checkpoints.  [default: 600]"
    ),
    click.option("--retries", type=click.IntRange(0), help="Failed runs of a job that are forgiven.  [default: 4]"),
    click.option(
        "--retry", type=click.Choice(RETRIES), help="Forgive failed runs by their count or by their cause.  [default: count]"
    ),
    click.option(
        "--backoff", type=DURATION, help="Before a first retry after a cause that passes; doubled each time.  [default: 60]"
    ),
    click.option(
        "--packed-wait", type=DURATION, help="A waiting job insists on the fewest nodes for this long.  [default: 0]"
    ),
    click.option("--rack-wait", type=DURATION, help="A waiting job insists on one rack for this long.  [default: 0]"),
    click.option(
        "--defragment",
        type=DURATION,
        help="Move small jobs, at most this often each, to make room on one node; 0: never.  [default: 0]",
    ),
    click.option(
        "--validation-pool",
        type=click.IntRange(0),
        metavar="GPUS",
        help="GPUs set aside on which jobs of several GPUs are tried first: broken ones fail cheaply.  [default: 0]",
    ),
    click.option("--validation-time", type=DURATION, help="How long such a trial takes.  [default: 300]"),
    click.option(
        "--elastic", is_flag=True, help="Jobs that state no bounds may run on 1 GPU up to as many as they ask for."
    ),
    click.option(
        "--micro-batches",
        type=click.IntRange(1),
        metavar="N",
        help="Steps of jobs that state none divide into N tasks a GPU that the job asks for; any mix of GPUs will do.",
    ),
    click.option(
        "--switching",
        metavar="SPEC",
        default="resident=0.003",
        help="What turning a GPU to another job costs where steps divide into tasks: "
        "resident=SECONDS,bandwidth=BYTES,size=BYTES,keep=JOBS; naive (the restart overhead); or free.  "
        "[default: 3 ms if its model is resident, else model size / 12 GB/s]",
    ),
    click.option("--faults", metavar="SPEC", help="Outages of nodes: mtbf=30d,repair=4h, or a JSON-lines file."),
    click.option(
        "--failures",
        metavar="SPEC",
        default="none",
        help="Failures of jobs, for traces that have none: philly (as published), philly:rate=FRACTION,heal=FRACTION,"
        "killed=FRACTION, or a fraction of jobs, all of which pass in the end.  [default: none]",
    ),
    click.option("--fairness", type=click.Choice(FAIRNESSES), default="job", show_default=True, help="N of the 1/N slice."),
    click.option(
        "--seed",
        type=click.IntRange(0),
        default=0,
        show_default=True,
        help="Of drawn outages and failures, and of the order of GPU types under policies that do not tell them apart; "
        "a synthetic trace has its own.",
    ),
    click.option("--jobs", type=click.IntRange(1), help="Only the first N jobs of the trace."),
    click.option("--load", type=float, default=1.0, show_default=True, help="Jobs arrive this many times as fast."),
    click.option("--until", type=DURATION, help="Stop this long after the first submission."),
    click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else there."),
    click.option("--quiet", is_flag=True, help="No progress and no notes on stderr."),
)


def experiment_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the shared options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for: a trace, an experiment, what to say about the two beforehand, and how to answer."""

    trace: Trace
    experiment: Experiment
    notes: tuple[str, ...]
    as_json: bool
    quiet: bool


def request_of(source: str, options: dict[str, Any], policy: str) -> Request:
    """Read what the options name; raises RequestError for anything wrong, cheap checks first."""
    preset = preset_named(options["preset"])
    placement = options["placement"] or preset.placement
    placement_named(placement)
    load = options["load"]
    if not (isfinite(load) and load > 0):
        raise RequestError(f"--load: expected a finite number above 0, got {load}")
    if options["elastic"] and options["micro_batches"] is not None:
        raise RequestError("--elastic and --micro-batches say different things of the same jobs; give one of the two")
    failing = _failing(options["failures"])
    cluster = read_cluster(options["cluster"])
    believed, true, notes = _tables(options)
    settings = replace(preset.settings, **_given_settings(options))
    if settings.round < SHORTEST_ROUND:
        raise RequestError(f"--round: expected at least {SHORTEST_ROUND} seconds, got {settings.round}")
    experiment = Experiment(
        cluster,
        policy,
        placement=placement,
        combinators=preset.combinators,
        settings=settings,
        throughputs=believed,
        truths=true,
        truth=Truth(settings.restart_overhead, options["checkpoint_every"], switching=parse_switching(options["switching"])),
        faults=options["faults"],
        fairness=Fairness(options["fairness"]),
        seed=options["seed"],
        until=float("inf") if options["until"] is None else options["until"],
    )
    experiment.effective_policy()
    speeds_of(experiment)
    trace = scaled(read_trace(source, format=options["trace_format"]), load=load, most=options["jobs"])
    if options["elastic"]:
        trace = elastic(trace)
    if options["micro_batches"] is not None:
        trace = divided(trace, options["micro_batches"])
    if failing:
        trace = with_failures(trace, failing, experiment.seed, partial(_fastest, speeds_of(experiment)[1]))
    check(trace, experiment)
    return Request(trace, experiment, (*trace.notes, *notes), options["as_json"], options["quiet"])


def _failing(spec: str) -> Failing:
    try:
        return parse_failing(spec)
    except FieldError as refused:
        raise RequestError(f"--failures: {refused.problem}") from None


def _fastest(speeds: Speeds, job: Job) -> float:
    """Seconds that a job takes on the fastest type that is there; inf if it can run nowhere."""
    _, estimate, steps = speeds.resolve(job)
    best = estimate.best()
    return steps / best if best > 0 else inf


def _given_settings(options: dict[str, Any]) -> dict[str, Any]:
    names = {"round_": "round", "backfill": "backfill", "restart_overhead": "restart_overhead"}
    same = ("minimum_run", "retries", "recompute", "patience", "packed_wait", "rack_wait", "defragment", "backoff")
    names |= {name: name for name in (*same, "validation_time")} | {"validation_pool": "validation_gpus"}
    given = {name: options[option] for option, name in names.items() if options[option] is not None}
    given |= {"retry": Retry(options["retry"])} if options["retry"] else {}
    return given | ({"cadence": Cadence(options["cadence"])} if options["cadence"] else {})


def _tables(options: dict[str, Any]) -> tuple[Throughputs, Throughputs | None, tuple[str, ...]]:
    """The believed speeds, the true ones if they differ, and what there is to say of estimates."""
    profile = None if options["estimate"] is None else parse_profile(options["estimate"])
    table, true = _table(options["throughputs"]) or shipped(), _table(options["true_throughputs"])
    if profile is None:
        return table, true, ()
    believed, report = estimated(table, profile)
    return believed, true or table, (str(report),)


def _table(path: str | None) -> Throughputs | None:
    return None if path is None else read_throughputs(path)
