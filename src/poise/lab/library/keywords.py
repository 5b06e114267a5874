"""The keywords that `simulate`, `compare` and `sweep` share: for type checkers, for `help()`, and for what is misspelt."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from poise.lab.clusters import ClusterLike
from poise.lab.options import NAMES, Duration, ExperimentOptions
from poise.scheduler.throughput.table import Throughputs

Function = TypeVar("Function", bound=Callable[..., Any])


class ExperimentKeywords(TypedDict, total=False):
    """Options of an experiment, as in ExperimentOptions."""

    format: str
    cluster: ClusterLike
    throughputs: str | Path | Throughputs | None
    true_throughputs: str | Path | Throughputs | None
    estimate: str | None
    preset: str
    round: Duration | None
    cadence: Literal["rounds", "events", "both"] | None
    recompute: Duration | None
    patience: float | None
    backfill: bool | None
    placement: str | None
    restart_overhead: Duration | None
    minimum_run: Duration | None
    checkpoint_every: Duration
    retries: int | None
    retry: Literal["count", "cause"] | None
    backoff: Duration | None
    packed_wait: Duration | None
    rack_wait: Duration | None
    defragment: Duration | None
    validation_pool: int | None
    validation_time: Duration | None
    elastic: bool
    micro_batches: int | None
    switching: str
    faults: str | Path | None
    drain: str | Iterable[str]
    failures: str | float
    fairness: Literal["job", "tenant", "app"]
    seed: int
    jobs: int | None
    load: float
    until: Duration | None


def with_keywords(function: Function) -> Function:
    """Show the options by name in `help()` and where notebooks complete, in the place of `**options`."""
    shown = inspect.signature(function)
    own = [each for each in shown.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    more = [
        Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in fields(ExperimentOptions)
        if each.name not in shown.parameters
    ]
    function.__signature__ = Signature([*own, *more], return_annotation=shown.return_annotation)  # type: ignore[attr-defined]
    return function


def options_of(function: Callable[..., Any], given: Mapping[str, Any]) -> ExperimentOptions:
    """Return the options; TypeError, as from any function, for a keyword that it does not have."""
    for name in given:
        if name not in NAMES:
            known = list(inspect.signature(function).parameters)
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{hint}")
    return ExperimentOptions(**given)
