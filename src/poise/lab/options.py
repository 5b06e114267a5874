"""The options of a simulation, the same for the command line and for the library, and what they describe.

`ExperimentOptions` holds them by the names that users type, `read_experiment` checks them and reads what they name. A value
that an option does not take raises OptionError, which each of the two spells in its own way.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import partial
from math import inf, isfinite
from os import PathLike
from pathlib import Path
from typing import Any

from poise.engine.assembly import preset_named
from poise.lab.analysis.fairness import Fairness
from poise.lab.arguments import as_number, flag, items_of, path_of, refused, seconds, shown, whole
from poise.lab.clusters import ClusterLike, cluster
from poise.lab.experiment import Experiment, check, divided, elastic, scaled, speeds_of
from poise.lab.simulator.tasks import parse_switching
from poise.lab.simulator.world import Truth
from poise.lab.traces.failure_model import parse_failure_model, with_failures
from poise.lab.traces.parsing import FieldError
from poise.lab.traces.reader import read_trace
from poise.lab.traces.schema import Trace
from poise.scheduler.core.settings import Cadence, RetryRule, check_round
from poise.scheduler.model.errors import OptionError, UnknownNameError
from poise.scheduler.model.job import Job
from poise.scheduler.placement.strategies import placement_named
from poise.scheduler.throughput.estimation import estimated, parse_profile
from poise.scheduler.throughput.speeds import Speeds
from poise.scheduler.throughput.table import Throughputs, read_throughputs, shipped

TraceLike = Trace | str | PathLike[str]
"""A trace, or what `read_trace` reads one from: a path, `synthetic:...`, or - for standard input."""
Duration = float | str
"""Seconds, or text such as `90s`, `15m`, `1h30m`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentOptions:
    """All that can be said of a trace and its simulation but the trace itself and the policy; None: the preset's value.

    Each is the option of `poise simulate` with this name, `restart_overhead` for `--restart-overhead`; see
    docs/reference/python.md. `drain` is one specification or several.
    """

    format: str = "auto"
    cluster: ClusterLike = "gpu:64"
    throughputs: str | Path | Throughputs | None = None
    true_throughputs: str | Path | Throughputs | None = None
    estimate: str | None = None
    preset: str = "none"
    round: Duration | None = None
    cadence: str | None = None
    recompute: Duration | None = None
    patience: float | None = None
    backfill: bool | None = None
    placement: str | None = None
    restart_overhead: Duration | None = None
    minimum_run: Duration | None = None
    checkpoint_every: Duration = 600.0
    retries: int | None = None
    retry: str | None = None
    backoff: Duration | None = None
    packed_wait: Duration | None = None
    rack_wait: Duration | None = None
    defragment: Duration | None = None
    validation_pool: int | None = None
    validation_time: Duration | None = None
    elastic: bool = False
    micro_batches: int | None = None
    switching: str = "resident=0.003"
    faults: str | Path | None = None
    drain: str | Iterable[str] = ()
    failures: str | float = "none"
    fairness: str = "job"
    seed: int = 0
    jobs: int | None = None
    load: float = 1.0
    until: Duration | None = None

    def deciding(self) -> dict[str, object]:
        """Return what decides the numbers of a run and can be compared: all but the load, and tables given as values."""
        given = {name: getattr(self, name) for name in NAMES if name not in ("load", "cluster")}
        return {name: str(value) if isinstance(value, Path) else value for name, value in given.items() if _is_plain(value)}


NAMES = tuple(each.name for each in fields(ExperimentOptions))
_SETTINGS = {
    "validation_pool": "validation_gpus",
    **{name: name for name in (
        "round", "backfill", "restart_overhead", "minimum_run", "retries", "recompute", "patience", "packed_wait",
        "rack_wait", "defragment", "backoff", "validation_time", "retry", "cadence",
    )},
}  # fmt: skip
"""Options that are settings of the core, and the settings' names."""


@dataclass(frozen=True, slots=True)
class ExperimentRequest:
    """What was asked for: a trace, an experiment, and notes about the two to show beforehand."""

    trace: Trace
    experiment: Experiment
    notes: tuple[str, ...]


def read_experiment(source: TraceLike, options: ExperimentOptions, policy: str) -> ExperimentRequest:
    """Read what the options name; raises RequestError for anything wrong, cheap checks first."""
    chosen = checked(options)
    preset = preset_named(chosen["preset"])
    placement = preset.placement if chosen["placement"] is None else chosen["placement"]
    placement_named(placement)
    if chosen["elastic"] and chosen["micro_batches"] is not None:
        raise OptionError(("elastic", "micro_batches"), "say different things of the same jobs; give one of the two")
    try:
        failing = parse_failure_model(chosen["failures"])
    except FieldError as refused:
        raise OptionError("failures", refused.problem) from None
    nodes = cluster(options.cluster)
    believed, true, notes = _throughputs(options)
    given = {name: chosen[option] for option, name in _SETTINGS.items() if chosen[option] is not None}
    check_round(given.get("round", preset.settings.round))
    settings = replace(preset.settings, **given)
    experiment = Experiment(
        nodes,
        policy,
        placement=placement,
        combinators=preset.combinators,
        settings=settings,
        throughputs=believed,
        truths=true,
        truth=Truth(settings.restart_overhead, chosen["checkpoint_every"], switching=parse_switching(chosen["switching"])),
        faults=chosen["faults"],
        drains=chosen["drain"],
        fairness=chosen["fairness"],
        seed=chosen["seed"],
        until=inf if chosen["until"] is None else chosen["until"],
    )
    experiment.effective_policy()
    speeds_of(experiment)
    trace = scaled(trace_of(source, chosen["format"]), load=chosen["load"], most=chosen["jobs"])
    if chosen["elastic"]:
        trace = elastic(trace)
    if chosen["micro_batches"] is not None:
        trace = divided(trace, chosen["micro_batches"])
    if failing:
        trace = with_failures(trace, failing, experiment.seed, partial(_shortest_run, speeds_of(experiment)[1]))
    check(trace, experiment)
    return ExperimentRequest(trace, experiment, (*trace.notes, *notes))


def trace_of(source: object, format: str = "auto") -> Trace:
    """Return the trace that is named, or the one that a value is or makes."""
    if isinstance(source, str | PathLike):
        return read_trace(str(source), format=format)
    return Trace.of(source)


def _throughputs(options: ExperimentOptions) -> tuple[Throughputs, Throughputs | None, tuple[str, ...]]:
    """The believed speeds, the true ones if they differ, and the notes about estimates."""
    profile = None if options.estimate is None else parse_profile(_text(options.estimate, "estimate"))
    table = _table(options.throughputs, "throughputs") or shipped()
    true = _table(options.true_throughputs, "true_throughputs")
    if profile is None:
        return table, true, ()
    believed, report = estimated(table, profile)
    return believed, true or table, (str(report),)


def _table(given: object, name: str) -> Throughputs | None:
    if given is None or isinstance(given, Throughputs):
        return given
    return read_throughputs(path_of(given, name))


def _shortest_run(speeds: Speeds, job: Job) -> float:
    """Seconds that a job takes on the fastest GPU type that is there; inf if it can run nowhere."""
    _, estimate, steps = speeds.resolve(job)
    best = estimate.best()
    return steps / best if best > 0 else inf


# Values: the command line hands over what click has read, the library whatever it is called with.


def checked(options: ExperimentOptions) -> dict[str, Any]:
    """Return the values of the options that stand for themselves, durations in seconds; OptionError if one is wrong."""
    return {
        name: None if value is None and name in _OPTIONAL else check(value, name)
        for name, check in _CHECKS.items()
        for value in (getattr(options, name),)
    }


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | Path | tuple)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise refused(name, "text", value)
    return value


def _load(value: object, name: str) -> float:
    number = as_number(value)
    if not (isfinite(number) and number > 0):
        raise OptionError(name, f"expected a finite number above 0, got {shown(value)}")
    return float(number)


def _amount(value: object, name: str) -> float:
    number = as_number(value)
    if not number >= 0:
        raise refused(name, "a number of at least 0", value)
    return number


def _one_of(kind: type[StrEnum], value: object, name: str) -> StrEnum:
    text = _text(value, name)
    if text not in set(kind):
        raise UnknownNameError(name, text, kind)
    return kind(text)


def _path_text(value: object, name: str) -> str:
    return str(path_of(value, name))


def _drains(value: object, name: str) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) else items_of(value)
    if given is None:
        raise refused(name, "text such as p100-0@1h..3h, or several", value)
    return tuple(_text(each, name) for each in given)


def _failures(value: object, name: str) -> str:
    return value if isinstance(value, str) else repr(_amount(value, name))


def _at_least(least: int) -> Callable[[object, str], int]:
    return partial(whole, least=least)


_CHECKS: Mapping[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(("format", "preset", "placement", "switching"), _text),
    **dict.fromkeys(
        (
            "round", "recompute", "restart_overhead", "minimum_run", "checkpoint_every", "backoff", "packed_wait",
            "rack_wait", "defragment", "validation_time", "until",
        ),
        seconds,
    ),
    **dict.fromkeys(("retries", "validation_pool", "seed"), _at_least(0)),
    **dict.fromkeys(("micro_batches", "jobs"), _at_least(1)),
    **dict.fromkeys(("backfill", "elastic"), flag),
    "cadence": partial(_one_of, Cadence),
    "retry": partial(_one_of, RetryRule),
    "fairness": partial(_one_of, Fairness),
    "patience": _amount,
    "faults": _path_text,
    "drain": _drains,
    "failures": _failures,
    "load": _load,
}  # fmt: skip
"""How each option that stands for itself is checked; the others name a cluster or a table."""
_OPTIONAL = {each.name for each in fields(ExperimentOptions) if each.default is None}
