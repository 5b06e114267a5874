"""The options that `simulate` and `compare` share, and the experiment that they describe."""

import reprlib
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from pathlib import Path
from typing import Any

import click
import yaml

from poise.engine.assembly import PRESETS, preset_named
from poise.lab.analysis.fairness import Fairness
from poise.lab.experiment import Experiment, check, divided, elastic, scaled, speeds_of
from poise.lab.simulator.tasks import parse_switching
from poise.lab.simulator.world import Truth
from poise.lab.traces.failure_model import FailureModel, parse_failure_model, with_failures
from poise.lab.traces.parsing import FieldError
from poise.lab.traces.reader import read_trace
from poise.lab.traces.registry import format_names
from poise.lab.traces.schema import Trace
from poise.scheduler.core.settings import Cadence, RetryRule
from poise.scheduler.model.cluster import MOST_GPUS, Cluster, Node, parse_cluster
from poise.scheduler.model.errors import ClusterError, RequestError
from poise.scheduler.model.job import Job
from poise.scheduler.model.units import parse_seconds
from poise.scheduler.placement.strategies import PLACEMENTS, placement_named
from poise.scheduler.throughput.estimation import estimated, parse_profile
from poise.scheduler.throughput.speeds import Speeds
from poise.scheduler.throughput.table import Throughputs, read_throughputs, shipped
from poise.service.wire.jobfile import unreadable

# What users hand in besides traces: clusters as text or as files.

_LARGEST_FILE = 16 << 20
_LARGEST_FIGURE = 1_000_000
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_NODE_KEYS = {"name", "type", "gpus", "rack", "count"}
_TYPE_KEYS = {"speed", "price"}


def read_cluster(spec: str) -> Cluster:
    """A cluster from `v100:12,k80:8@4`, or from a YAML or TOML file.

    nodes: a list of {type, gpus, and optionally name, rack, count}; types: {name: {speed, price}}, both optional.
    """
    path = Path(spec)
    if path.suffix.lower() not in (".yaml", ".yml", ".toml"):
        if ":" not in spec and path.is_file():
            raise ClusterError(f"{path}: a file that describes a cluster ends in .yaml, .yml or .toml; rename it")
        return parse_cluster(spec)
    document = _document(path)
    if not isinstance(document, dict) or not isinstance(document.get("nodes"), list):
        raise ClusterError(f"{path}: expected a list `nodes`, e.g. nodes: [{{type: v100, gpus: 8, count: 4}}]")
    unknown = set(document) - {"nodes", "types"}
    if unknown:
        raise ClusterError(f"{path}: unknown key {min(map(str, unknown))!r}; known: nodes, types")
    nodes: list[Node] = []
    gpus = 0
    for number, entry in enumerate(document["nodes"], start=1):
        more = _nodes(entry, f"{path}: node {number}", len(nodes))
        nodes += more
        gpus += more[0].gpus * len(more)
        if gpus > MOST_GPUS:
            raise ClusterError(f"{path}: more than {MOST_GPUS:,} GPUs")
    speeds, prices = _figures(document, "speed", path), _figures(document, "price", path)
    try:
        return Cluster(tuple(nodes), speeds, prices)
    except ClusterError as error:
        raise ClusterError(f"{path}: {error}") from None


def _document(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise ClusterError(f"{path}: larger than {_LARGEST_FILE >> 20} MiB; that is no cluster")
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text) if path.suffix.lower() == ".toml" else yaml.safe_load(text)
    except OSError as error:
        raise ClusterError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ClusterError(f"{path}: not UTF-8 text") from None
    except RecursionError:
        raise ClusterError(f"{path}: nested too deeply; that is no cluster") from None
    except yaml.reader.ReaderError as error:
        raise ClusterError(f"{path}: {unreadable(error)}") from None
    except (ValueError, yaml.YAMLError) as error:  # a date that is none is a ValueError
        raise ClusterError(f"{path}: {' '.join(str(error).split())}") from None


def _nodes(entry: object, where: str, before: int) -> list[Node]:
    if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
        raise ClusterError(f"{where}: expected {{type: NAME, gpus: COUNT}}, got {_SHORT.repr(entry)}")
    unknown = set(entry) - _NODE_KEYS
    if unknown:
        raise ClusterError(f"{where}: unknown key {min(map(str, unknown))!r}; known: {', '.join(sorted(_NODE_KEYS))}")
    count, gpus = _whole(entry, "count", 1, where), _whole(entry, "gpus", None, where)
    if count * gpus > MOST_GPUS:
        raise ClusterError(f"{where}: more than {MOST_GPUS:,} GPUs")
    kind, name, rack = entry["type"].lower(), entry.get("name"), str(entry.get("rack", "rack-0"))
    if name is None:
        return [Node(f"{kind}-{before + index}", kind, gpus, rack) for index in range(count)]
    return [Node(f"{name}-{index}" if count > 1 else str(name), kind, gpus, rack) for index in range(count)]


def _whole(entry: dict[str, object], key: str, default: int | None, where: str) -> int:
    value = entry.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_GPUS:
        raise ClusterError(f"{where}: {key}: expected a whole number from 1 to {MOST_GPUS:,}, got {_SHORT.repr(value)}")
    return value


def _figures(document: dict[str, Any], key: str, path: Path) -> dict[str, float]:
    types = document.get("types") or {}
    if not isinstance(types, dict):
        raise ClusterError(f"{path}: types: expected {{NAME: {{speed: NUMBER, price: NUMBER}}}}")
    found: dict[str, float] = {}
    for name, figures in types.items():
        if not isinstance(figures, dict) or set(figures) - _TYPE_KEYS:
            known = ", ".join(sorted(_TYPE_KEYS))
            raise ClusterError(f"{path}: type {name!r}: expected some of {known}, got {_SHORT.repr(figures)}")
        value = figures.get(key)
        if value is not None:
            found[str(name).lower()] = _figure(value, f"{path}: type {name!r}: {key}")
    return found


def _figure(value: object, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _LARGEST_FIGURE:
        want = f"expected a number above 0 and at most {_LARGEST_FIGURE:,}"
        raise ClusterError(f"{where}: {want}, got {_SHORT.repr(value)}")
    return float(value)


CADENCES = [each.value for each in Cadence]
RETRIES = [each.value for each in RetryRule]
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
class ExperimentRequest:
    """What was asked for: a trace, an experiment, what to say about the two beforehand, and how to answer."""

    trace: Trace
    experiment: Experiment
    notes: tuple[str, ...]
    as_json: bool
    quiet: bool


def request_of(source: str, options: dict[str, Any], policy: str) -> ExperimentRequest:
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
    return ExperimentRequest(trace, experiment, (*trace.notes, *notes), options["as_json"], options["quiet"])


def _failing(spec: str) -> FailureModel:
    try:
        return parse_failure_model(spec)
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
    given |= {"retry": RetryRule(options["retry"])} if options["retry"] else {}
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
