"""What is wrong with a request, in a line for people: the field, what was expected there, and what was given."""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from poise.model.errors import UnknownNameError
from poise.wire.request import Checkpoint, Limits, Request, Retry, Wire

_NAMES = {"name", "tenant", "app", "gpu_types"}
_A_NAME = "letters, digits, `.`, `_` and `-`, at most 64, the first a letter or a digit"
_PARTS: dict[str, type[Wire]] = {"checkpoint": Checkpoint, "retry": Retry, "limits": Limits}
_BOUNDS = (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than"))
_SHOWN = 60


def complaint(error: ValidationError) -> tuple[str | None, str]:
    """The first thing that is wrong: its field, if it is one field's fault, and the line.

    A name that is not known comes before everything else: what is missing may have been meant by it.
    """
    wrong = error.errors(include_url=False)
    first = next((each for each in wrong if each["type"] == "extra_forbidden"), wrong[0])
    path = [str(part) for part in first["loc"]]
    if first["type"] == "value_error":
        name, colon, text = first["msg"].removeprefix("Value error, ").partition(": ")
        return (name, text) if colon else (None, name)
    if first["type"] == "extra_forbidden":
        known = _PARTS[path[0]].model_fields if path[0] in _PARTS else Request.model_fields
        return ".".join(path[:-1]) or None, str(UnknownNameError("field", path[-1], known))
    inner = [part for part in path[1:] if not part.isdigit()] if path[0] != "env" else []
    return ".".join([path[0], *inner]), _expectation(first, path)


def _expectation(first: Any, path: Sequence[str]) -> str:  # noqa: ANN401 - what pydantic tells of an error
    kind, context, got = first["type"], first.get("ctx", {}), _shown(first["input"])
    bound = next((f"{words} {context[name]:,.15g}" for name, words in _BOUNDS if name in context), None)
    if kind == "missing":
        return "is missing"
    if path[-1] == "[key]":
        return f"expected names of letters, digits and `_`, got {got}"
    if kind.startswith("string_"):
        return _text(kind, path[0], got)
    if bound is not None:
        return f"expected {bound}, got {got}"
    if "max_length" in context:
        return f"expected at most {context['max_length']:,} of them"
    if kind == "too_short":
        return f"expected at least {context['min_length']:,} of them, got {context['actual_length']:,}"
    wanted = {"tuple_type": "a list", "enum": context.get("expected"), "dict_type": "names with values"}.get(kind)
    return f"expected {wanted}, got {got}" if wanted else f"{first['msg'].replace('Input should be', 'expected')}, got {got}"


def _text(kind: str, field: str, got: str) -> str:
    if field in _NAMES:
        return f"expected {_A_NAME}, got {got}"
    if field == "key":
        return f"expected 8 to 64 letters, digits, `_` and `-`, got {got}"
    if kind == "string_pattern_mismatch":
        return (
            f"expected an absolute path, got {got}" if field in ("cwd", "venv") else "a character in it cannot be passed on"
        )
    if kind in ("string_too_long", "string_too_short"):
        return f"expected a text that is neither empty nor too long, got {got}"
    return f"expected text, got {got}"


def _shown(value: object) -> str:
    if isinstance(value, dict | list | tuple):
        return "several values"
    text = repr(value[: _SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
