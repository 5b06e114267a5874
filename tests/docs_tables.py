"""The parts of the documents that are made from the code: catalogue, command line, formats, knobs, presets, codes."""

import ast
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, fields
from functools import cached_property
from inspect import getdoc
from pathlib import Path
from typing import get_args

import click

from poise import policies
from poise.cli.app import poise
from poise.cli.simulate import simulate
from poise.engine.assembly import PRESETS
from poise.lab.options import ExperimentOptions
from poise.lab.traces.registry import FORMATS
from poise.lab.traces.synthetic import KNOBS
from poise.scheduler.core.reasons import Code
from poise.scheduler.core.settings import Settings
from poise.scheduler.model.arithmetic import Bools, Floats, Ints
from poise.scheduler.model.job_table import JobView, Snapshot
from poise.scheduler.policies.catalogue import COMBINATORS, POLICIES, Listing, PolicyProperty

_ROOT = Path(__file__).resolve().parents[1]
WIDTH = 100
"""Columns of the help that the reference shows."""


def generated(name: str) -> str:
    """The text of a generated part; a name may carry an argument, as in `policy fifo`."""
    kind, _, argument = name.partition(" ")
    return f"\n{_PARTS[kind](argument).strip()}\n\n"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _source(listing: Listing) -> str:
    """What a policy is from, as a link to the paper if it is one."""
    return listing.paper if listing.url is None else f"[{listing.paper}]({listing.url})"


def _policies(_argument: str) -> str:
    """The comparison: one row a policy, one column a claim."""
    headings = ["policy", "family", "what it does", "parameters", *map(str, PolicyProperty), "from"]
    rows = [
        [
            f"[`{each.name}`]({each.name}.md)",
            each.family,
            each.summary,
            " ".join(_code(parameter.name) for parameter in each.parameters),
            *("yes" if claim in each.claims else "" for claim in PolicyProperty),
            _source(each),
        ]
        for each in POLICIES.values()
    ]
    return _table(headings, rows)


def _systems(_argument: str) -> str:
    """Where each policy stands among the systems of the field."""
    headings = ["system", "paper", "optimises", "fairness", "heterogeneity", "gang", "elasticity", "verified here"]
    rows = [[f"[`{each.name}`]({each.name}.md)", _source(each), *astuple(each.traits)] for each in POLICIES.values()]
    return _table(headings, rows)


def _policy(name: str) -> str:
    """The catalogue's row of one policy."""
    listing = POLICIES[name]
    claims = "\n".join(f"- {claim}" for claim in listing.claims)
    claimed = (
        f"Claims, which the tests check in random worlds and by audits:\n\n{claims}" if claims else "It makes no claims."
    )
    parameters = _table(
        ("parameter", "default", "meaning"), [(_code(p.name), _code(p.default), p.meaning) for p in listing.parameters]
    )
    shown = parameters if listing.parameters else "It has no parameters."
    return f"From: {_source(listing)}.\n\n{claimed}\n\n{shown}"


def _combinators(_argument: str) -> str:
    return _table(("combinator", "what it does"), [(_code(f"+{each.name}"), each.summary) for each in COMBINATORS.values()])


def _help(verbs: str) -> str:
    """The help of one verb, of a verb below another as in `bench solve`, or of `poise` itself."""
    context = click.Context(poise, info_name="poise", terminal_width=WIDTH, help_option_names=["-h", "--help"])
    for verb in verbs.split():
        assert isinstance(context.command, click.Group)
        command = context.command.get_command(context, verb)
        assert command is not None
        context = click.Context(command, info_name=verb, parent=context)
    return f"```text\n{context.command.get_help(context)}\n```"


def _formats(_argument: str) -> str:
    return _table(("format", "what it is"), [(_code(each.name), each.summary) for each in FORMATS])


def _format(name: str) -> str:
    """What the reader of a format says of it."""
    reader = next(each for each in FORMATS if each.name == name).job_of
    text = sys.modules[reader.__module__].__doc__ or ""
    return re.sub(r"^(\w+) {2,}(?=\S)", r"- `\1`: ", text, flags=re.MULTILINE)


def _knobs(_argument: str) -> str:
    return _table(("knob", "default", "meaning"), [(_code(each.name), _code(each.default), each.meaning) for each in KNOBS])


def _presets(_argument: str) -> str:
    rows = [
        (
            _code(name),
            preset.settings.cadence,
            f"{preset.settings.round:g} s",
            f"{preset.settings.recompute:g} s",
            "yes" if preset.settings.backfill else "no",
            _code(preset.placement),
            _code(preset.combinators),
            preset.summary,
        )
        for name, preset in PRESETS.items()
    ]
    return _table(("preset", "cadence", "round", "recompute", "back-fill", "placement", "adds", "in words"), rows)


def _settings(_argument: str) -> str:
    default = Settings()
    return _table(("setting", "default"), [(_code(each.name), f"{getattr(default, each.name)}") for each in fields(default)])


def _codes(_argument: str) -> str:
    return ", ".join(_code(code) for code in Code)


def _attributes(kind: str) -> str:
    """The attributes of what policies see, with their docstrings: of `JobView`, of `Snapshot`, of a dataclass."""
    seen = {"JobView": JobView, "Snapshot": Snapshot}[kind]
    hints = {name: value for name, value in vars(seen).items() if isinstance(value, property | cached_property)}
    rows = []
    for name, value in hints.items():
        getter = value.fget if isinstance(value, property) else value.func
        if not name.startswith("_") and getter is not None:
            rows.append((_code(name), _type_name(getter.__annotations__["return"]), _first_paragraph(getter)))
    return _table(("attribute", "type", "meaning"), rows)


def _type_name(kind: object) -> str:
    return _ARRAYS.get(str(kind)) or (kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind))


_ARRAYS = {str(Floats): "array of float", str(Ints): "array of int", str(Bools): "array of bool"}


def _names(_argument: str) -> str:
    """What `poise.policies` has, and what each is, in a line."""
    rows = [(_code(name), _first_paragraph(getattr(policies, name))) for name in policies.__all__]
    return _table(("name", "what it is"), rows)


def _first_paragraph(thing: object) -> str:
    return _ARRAYS.get(str(thing)) or " ".join((getdoc(thing) or "").split("\n\n")[0].split())


def _library_options(_argument: str) -> str:
    """The options that `simulate`, `compare` and `sweep` of the library share, as the command line explains them."""
    helps = {each.name: each.help for each in simulate.params if isinstance(each, click.Option)}
    rows = []
    for each in fields(ExperimentOptions):
        text = " ".join((helps[each.name] or "").split())
        meaning = text if each.default is None else re.sub(r"\s*\[default: [^]]*\]", "", text)
        rows.append([_code(each.name), _code(_option_type(each.name, each.type)), _code(repr(each.default)), meaning])
    return _table(["option", "type", "default", "meaning"], rows)


def _option_type(option: str, kind: object) -> str:
    """A type as a reader would write it."""
    if option == "cluster":
        return "ClusterLike"
    name = kind.__name__ if isinstance(kind, type) else str(kind)
    return re.sub(r"(\w+\.)+", "", name).replace("float | str", "Duration")


def _script(words: str) -> str:
    """An example as it is, or some of its functions and classes: `examples/live/train_jax.py advance main`."""
    path, *names = words.split()
    text = (_ROOT / path).read_text(encoding="utf-8")
    if names:
        found = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        lines = text.splitlines()
        first = {name: min([found[name].lineno, *(each.lineno for each in found[name].decorator_list)]) for name in names}
        text = "\n\n\n".join("\n".join(lines[first[name] - 1 : found[name].end_lineno]) for name in names)
    return f"```text\n{text.strip()}\n```"


_PARTS: dict[str, Callable[[str], str]] = {
    "policies": _policies,
    "systems": _systems,
    "policy": _policy,
    "combinators": _combinators,
    "help": _help,
    "formats": _formats,
    "format": _format,
    "knobs": _knobs,
    "presets": _presets,
    "settings": _settings,
    "codes": _codes,
    "attributes": _attributes,
    "names": _names,
    "library-options": _library_options,
    "script": _script,
}
