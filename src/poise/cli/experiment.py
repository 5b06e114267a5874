"""The options that `simulate`, `compare` and `audit` share, and the trace and experiment that they describe."""

from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from typing import Any

import click

from poise.cli.options import DURATION, check_round, choice_of, only_json_option, read_cluster, with_options
from poise.cli.outside import find_policy
from poise.engine.assembly import PRESETS, preset_named
from poise.lab.analysis.fairness import Fairness
from poise.lab.experiment import Experiment, check, divided, elastic, scaled, speeds_of
from poise.lab.simulator.tasks import parse_switching
from poise.lab.simulator.world import Truth
from poise.lab.traces.failure_model import parse_failure_model, with_failures
from poise.lab.traces.parsing import FieldError
from poise.lab.traces.reader import read_trace
from poise.lab.traces.registry import format_names
from poise.lab.traces.schema import Trace
from poise.scheduler.core.settings import Cadence, RetryRule, Settings
from poise.scheduler.model.errors import RequestError
from poise.scheduler.model.job import Job
from poise.scheduler.placement.strategies import PLACEMENTS, placement_named
from poise.scheduler.throughput.estimation import estimated, parse_profile
from poise.scheduler.throughput.speeds import Speeds
from poise.scheduler.throughput.table import Throughputs, read_throughputs, shipped

_OPTIONS = (
    click.option("--format", "trace_format", default="auto", show_default=True, help=f"One of {', '.join(format_names())}."),
    click.option("--cluster", default="gpu:64", show_default=True, metavar="SPEC",
        help="v100:12,k80:8@4 (GPUs of each type, 4 a node unless @n), or a YAML or TOML file."),
    click.option("--throughputs", metavar="FILE", help="Believed speeds: our CSV or Gavel's JSON.  [default: shipped]"),
    click.option("--true-throughputs", metavar="FILE", help="The world's speeds where they differ from the believed ones."),
    click.option("--estimate", metavar="SPEC",
        help="Believe speeds estimated from a short profile, profiled:types=1,pairs=0.2,...; "
        "the world keeps the true ones."),
    click.option("--preset", default="none", show_default=True, help=f"Set-up of a published system: {', '.join(PRESETS)}."),
    click.option("--round", "round_", type=DURATION, help="Length of a round.  [default: 360, or the preset's]"),
    click.option("--cadence", type=choice_of(Cadence), help="When to decide.  [default: both, or the preset's]"),
    click.option("--recompute", type=DURATION,
        help="Least time between two solves of a share policy; others ignore it.  [default: 0, or the preset's]"),
    click.option("--patience", type=click.FloatRange(min=0),
        help="Rounds that a job may run ahead of its share; share policies.  [default: 1, or the preset's]"),
    click.option("--backfill/--no-backfill", default=None, help="Use GPUs that become free inside a round at once."),
    click.option("--placement", metavar="NAME", help=f"One of {', '.join(PLACEMENTS)}.  [default: consolidate]"),
    click.option("--restart-overhead", type=DURATION, help="Time without progress at each start.  [default: 0]"),
    click.option("--minimum-run", type=DURATION, help="A job that just started is not preempted for this long."),
    click.option("--checkpoint-every", type=DURATION, default=600.0,
        help="Running time between checkpoints.  [default: 600]"),
    click.option("--retries", type=click.IntRange(0), help="Failed runs of a job that are forgiven.  [default: 4]"),
    click.option("--retry", type=choice_of(RetryRule),
        help="Forgive failed runs by their count or by their cause.  [default: count]"),
    click.option("--backoff", type=DURATION,
        help="Before a first retry after a cause that passes; doubled each time.  [default: 60]"),
    click.option("--packed-wait", type=DURATION,
        help="A waiting job insists on the fewest nodes for this long.  [default: 0]"),
    click.option("--rack-wait", type=DURATION, help="A waiting job insists on one rack for this long.  [default: 0]"),
    click.option("--defragment", type=DURATION,
        help="Move small jobs, at most this often each, to make room on one node; 0: never.  [default: 0]"),
    click.option("--validation-pool", type=click.IntRange(0), metavar="GPUS",
        help="GPUs set aside on which jobs of several GPUs are tried first: broken ones fail cheaply.  [default: 0]"),
    click.option("--validation-time", type=DURATION, help="How long such a trial takes.  [default: 300]"),
    click.option("--elastic", is_flag=True,
        help="Jobs that state no bounds may run on 1 GPU up to as many as they ask for."),
    click.option("--micro-batches", type=click.IntRange(1), metavar="N",
        help="Steps of jobs that state none divide into N tasks a GPU that the job asks for; any mix of GPUs will do."),
    click.option("--switching", metavar="SPEC", default="resident=0.003",
        help="What turning a GPU to another job costs where steps divide into tasks: "
        "resident=SECONDS,bandwidth=BYTES,size=BYTES,keep=JOBS; naive (the restart overhead); or free.  "
        "[default: 3 ms if its model is resident, else model size / 12 GB/s]"),
    click.option("--faults", metavar="SPEC", help="Outages of nodes: mtbf=30d,repair=4h, or a JSON-lines file."),
    click.option("--drain", "drains", multiple=True, metavar="NODE@FROM..UNTIL",
        help="Drain a node, p100-0@1h..3h, or some of its GPUs, p100-0:0,1@1h..3h; times count from the first submission. "
        "May be given more than once."),
    click.option("--failures", metavar="SPEC", default="none",
        help="Failures of jobs, for traces that have none: philly (as published), philly:rate=FRACTION,heal=FRACTION,"
        "killed=FRACTION, or a fraction of jobs, all of which pass in the end.  [default: none]"),
    click.option("--fairness", type=choice_of(Fairness), default="job", show_default=True, help="N of the 1/N slice."),
    click.option("--seed", type=click.IntRange(0), default=0, show_default=True,
        help="Of drawn outages and failures, and of the order of GPU types under policies that do not tell them apart; "
        "a synthetic trace has its own."),
    click.option("--jobs", type=click.IntRange(1), help="Only the first N jobs of the trace."),
    click.option("--load", type=float, default=1.0, show_default=True, help="Jobs arrive this many times as fast."),
    click.option("--until", type=DURATION, help="Stop this long after the first submission."),
    only_json_option,
    click.option("--quiet", is_flag=True, help="No progress and no notes on stderr."),
)  # fmt: skip
experiment_options = with_options(_OPTIONS)
"""The options that describe a trace, a cluster and a simulation of the two."""

_SETTINGS = {
    "round_": "round", "validation_pool": "validation_gpus",
    **{name: name for name in (
        "backfill", "restart_overhead", "minimum_run", "retries", "recompute", "patience", "packed_wait", "rack_wait",
        "defragment", "backoff", "validation_time",
    )},
}  # fmt: skip
"""Options that are settings of the core, and the settings' names."""


@dataclass(frozen=True, slots=True)
class ExperimentRequest:
    """What was asked for: a trace, an experiment, notes about the two to show beforehand, and how to answer."""

    trace: Trace
    experiment: Experiment
    notes: tuple[str, ...]
    as_json: bool
    quiet: bool


def read_experiment(source: str, options: dict[str, Any], policy: str) -> ExperimentRequest:
    """Read what the options name; raises RequestError for anything wrong, cheap checks first."""
    find_policy(policy)
    preset = preset_named(options["preset"])
    placement = options["placement"] or preset.placement
    placement_named(placement)
    load = options["load"]
    if not (isfinite(load) and load > 0):
        raise RequestError(f"--load: expected a finite number above 0, got {load}")
    if options["elastic"] and options["micro_batches"] is not None:
        raise RequestError("--elastic and --micro-batches say different things of the same jobs; give one of the two")
    try:
        failing = parse_failure_model(options["failures"])
    except FieldError as refused:
        raise RequestError(f"--failures: {refused.problem}") from None
    cluster = read_cluster(options["cluster"])
    believed, true, notes = _throughputs(options)
    settings = _settings(preset.settings, options)
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
        drains=options["drains"],
        fairness=Fairness(options["fairness"]),
        seed=options["seed"],
        until=inf if options["until"] is None else options["until"],
    )
    experiment.effective_policy()
    speeds_of(experiment)
    trace = scaled(read_trace(source, format=options["trace_format"]), load=load, most=options["jobs"])
    if options["elastic"]:
        trace = elastic(trace)
    if options["micro_batches"] is not None:
        trace = divided(trace, options["micro_batches"])
    if failing:
        trace = with_failures(trace, failing, experiment.seed, partial(_shortest_run, speeds_of(experiment)[1]))
    check(trace, experiment)
    return ExperimentRequest(trace, experiment, (*trace.notes, *notes), options["as_json"], options["quiet"])


def _settings(preset: Settings, options: dict[str, Any]) -> Settings:
    """The settings of a preset, with those that were given on the command line instead."""
    given = {name: options[option] for option, name in _SETTINGS.items() if options[option] is not None}
    if options["retry"]:
        given["retry"] = RetryRule(options["retry"])
    if options["cadence"]:
        given["cadence"] = Cadence(options["cadence"])
    settings = replace(preset, **given)
    check_round(settings.round)
    return settings


def _throughputs(options: dict[str, Any]) -> tuple[Throughputs, Throughputs | None, tuple[str, ...]]:
    """The believed speeds, the true ones if they differ, and the notes about estimates."""
    profile = None if options["estimate"] is None else parse_profile(options["estimate"])
    table = shipped() if options["throughputs"] is None else read_throughputs(options["throughputs"])
    true = None if options["true_throughputs"] is None else read_throughputs(options["true_throughputs"])
    if profile is None:
        return table, true, ()
    believed, report = estimated(table, profile)
    return believed, true or table, (str(report),)


def _shortest_run(speeds: Speeds, job: Job) -> float:
    """Seconds that a job takes on the fastest GPU type that is there; inf if it can run nowhere."""
    _, estimate, steps = speeds.resolve(job)
    best = estimate.best()
    return steps / best if best > 0 else inf
