"""Traces and clusters as values: read from files, drawn, or built in code."""

from collections.abc import Mapping
from os import PathLike
from typing import Any

from poise.lab.arguments import shown
from poise.lab.traces import reader
from poise.lab.traces.registry import AUTO
from poise.lab.traces.schema import Trace
from poise.lab.traces.synthetic import KNOBS, SYNTHETIC, generate
from poise.scheduler.model.errors import OptionError, UnknownNameError


def read_trace(path: str | PathLike[str], format: str = AUTO) -> Trace:
    """Return the trace in a file, an archive or a folder of files of one format, or of a `synthetic:...` text.

    format   a name of docs/reference/traces.md; `auto` goes by the first bytes of the file

    Raises TraceError with file, line and field if it cannot be read.
    """
    if not isinstance(path, str | PathLike):
        raise OptionError("path", f"expected a path, got {shown(path)}; Trace.of makes a trace of rows")
    if not isinstance(format, str):
        raise OptionError("format", f"expected text, got {shown(format)}")
    return reader.read_trace(str(path), format=format)


def synthetic(**knobs: Any) -> Trace:  # noqa: ANN401 - numbers, text, and lists
    """Return a synthetic trace; the same knobs give the same trace.

    The knobs are those of `poise simulate synthetic:help`: jobs, seed, arrivals, rate, sizes, durations, tenants, models,
    weights, failures, apps. A list stands for alternatives, models=["vae", "lstm"], and a mapping for shares,
    sizes={1: 0.8, 4: 0.2}.
    """
    names = [knob.name for knob in KNOBS]
    for name in knobs:
        if name not in names:
            raise UnknownNameError("knob of a synthetic trace", name, names)
    return generate(SYNTHETIC + ",".join(f"{name}={_text(value, name)}" for name, value in knobs.items()))


def _text(value: object, name: str) -> str:
    """A knob's value as it stands in a specification."""
    if isinstance(value, Mapping):
        return "/".join(f"{key}:{share}" for key, share in value.items())
    if isinstance(value, list | tuple):
        return "/".join(map(str, value))
    text = str(value)
    if "," in text:
        raise OptionError(name, f"expected no comma, got {text!r:.60}")
    return text
