"""What an object from outside is as a policy: a listing for it, made from its signature and docstring if it has none.

A callable's parameters become parameters of the policy. How the text of one is read follows from its annotation, or from the
type of its default: `int`, `float`, `bool`, `str`, an enumeration, `X | None` (written `none`), and lists or tuples of these
with `/` between them. A parameter of another type keeps its default and cannot be set.
"""

import inspect
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from poise.scheduler.model.errors import PoiseError, RequestError
from poise.scheduler.model.plan import Order, Planner, Policy
from poise.scheduler.model.workload import Allocator
from poise.scheduler.policies.listing import Family, Listing, Parameter

Answer = Order | Planner | Allocator | Policy
_EXPECTED = "expected a Listing, an Order, a Planner, an Allocator, or a callable that returns one of them"
_UNSTATED = "not stated"


def listing_from(target: object, name: str) -> Listing:
    """Return the listing of a policy under this name; raises RequestError if it is no policy."""
    if isinstance(target, Listing):
        return replace(target, name=name, make=partial(_checked, target.make, name))
    kind = kind_of(target)
    if kind is None:
        raise RequestError(f"policy {name!r}: {_EXPECTED}, got {_described(target)}")
    summary = _summary(target)
    if kind is not Callable:
        return _plain_listing(name, _family_of(target), summary, lambda: target)
    assert callable(target)
    parameters, required = _parameters(target, name)
    make = partial(_checked, target, name, required)
    return _plain_listing(name, _family_made_by(target, make, required), summary, make, parameters)


def kind_of(target: object) -> object:
    """What sort of policy an object is: `Listing`, the form of its answer, or `Callable`; None if it is no policy."""
    if inspect.ismodule(target):
        return None
    if not inspect.isclass(target):
        for kind in (Listing, Policy, Order, Planner, Allocator):
            if isinstance(target, kind):
                return kind
    return Callable if callable(target) else None


def _plain_listing(
    name: str, family: Family, summary: str, make: Callable[..., Any], parameters: tuple[Parameter, ...] = ()
) -> Listing:
    """A listing that claims nothing."""
    return Listing(name, family, summary, "not of the catalogue", (), make, parameters)


def _checked(make: Callable[..., Any], name: str, required: frozenset[str] = frozenset(), /, **values: Any) -> Any:  # noqa: ANN401
    """Call a factory; one line for whatever it raises, and for what is no policy."""
    missing = sorted(required - values.keys())
    if missing:
        raise RequestError(f"policy {name!r}: parameter {missing[0]} has no default; write {name}:{missing[0]}=VALUE")
    try:
        made = make(**values)
    except PoiseError:
        raise
    except (Exception, SystemExit) as error:
        frame = inspect.trace()[-1]
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise RequestError(f"policy {name!r}: {frame.filename}:{frame.lineno}: {text}") from None
    if inspect.isclass(made) or not isinstance(made, Order | Planner | Allocator | Policy):
        raise RequestError(f"policy {name!r}: {_EXPECTED}; it is a callable that returned {_described(made)}")
    return made


def _described(value: object) -> str:
    if value is None:
        return "None"
    is_begun = hasattr(value, "start") or not any(hasattr(value, name) for name in ("plan", "allocate"))
    lacks = "" if is_begun else "; it has no start()"
    return f"{type(value).__name__} {value!r:.60}".replace("\n", " ") + lacks


def _summary(target: object) -> str:
    """The first line of the docstring, without its full stop."""
    named = target.answer if isinstance(target, Policy) else target
    if isinstance(named, Order):
        named = named.rank
    text = inspect.getdoc(named) or ""
    if isinstance(named, Order | Policy) or not text:
        return "a policy from outside of Poise"
    return " ".join(text.split("\n\n")[0].split()).removesuffix(".")


def _family_of(answer: object) -> Family:
    """The family of a policy by what it answers with."""
    if isinstance(answer, Policy):
        answer = answer.answer
    if isinstance(answer, Order):
        return Family.QUEUE
    return Family.SHARE if isinstance(answer, Allocator) else Family.MARKET


def _family_made_by(target: Callable[..., Any], make: Callable[..., Any], required: frozenset[str]) -> Family:
    """The family of what a callable returns: it is called once if it can be, so that a wrong one is found at once."""
    if not required:
        return _family_of(make())
    made = target if inspect.isclass(target) else _hints(target).get("return")
    if made is Order:
        return Family.QUEUE
    return Family.SHARE if hasattr(made, "allocate") else Family.MARKET if hasattr(made, "plan") else Family.QUEUE


# Parameters


def _parameters(target: Callable[..., Any], name: str) -> tuple[tuple[Parameter, ...], frozenset[str]]:
    """The parameters that a specification can set, and the names of those that it has to."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        problem = f"the parameters of {_described(target)} are not known; write a function"
        raise RequestError(f"policy {name!r}: {problem}") from None
    hints = _hints(target)
    found, required = [], set()
    for each in signature.parameters.values():
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            continue
        has_default = each.default is not each.empty
        kind = hints.get(each.name, type(each.default) if has_default else each.empty)
        if kind in (each.empty, Any) and has_default:
            kind = type(each.default)
        read = None if each.kind is each.POSITIONAL_ONLY else _reader(kind)
        if read is None and has_default:
            continue
        if read is None:
            raise RequestError(
                f"policy {name!r}: parameter {each.name} has no default and no type that text can be read as; "
                "give it a default, or annotate it as int, float, bool, str or a list of these"
            )
        found.append(Parameter(each.name, _text_of(each.default) if has_default else "", _meaning(kind), read))
        if not has_default:
            required.add(each.name)
    return tuple(found), frozenset(required)


def _hints(target: Any) -> Mapping[str, Any]:  # noqa: ANN401 - any callable
    """The annotations of what is called; none if they cannot be evaluated."""
    called = target.__init__ if inspect.isclass(target) else target
    if not inspect.isroutine(called):
        called = getattr(called, "func", None) or type(called).__call__
    try:
        return get_type_hints(called)
    except Exception:  # an annotation may name what is not there at run time
        return {}


def _text_of(value: object) -> str:
    """A default as it would be written."""
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case Enum():
            return str(value.value)
        case tuple() | list():
            return "/".join(map(_text_of, value))
        case float():
            return f"{value:g}" if float(f"{value:g}") == value else repr(value)
        case int() | str():
            return str(value)
        case _:
            return "as made"


def _meaning(kind: Any) -> str:  # noqa: ANN401 - a type
    """What a parameter is, as far as its type says."""
    return _KINDS.get(kind, "") or str(getattr(kind, "__name__", kind)).removeprefix("typing.")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("expected a whole number") from None


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("expected a number") from None
    if math.isnan(value):
        raise ValueError("expected a number")
    return value


def _switch(text: str) -> bool:
    if text.lower() not in _SWITCHES:
        raise ValueError("expected yes or no")
    return _SWITCHES[text.lower()]


_SWITCHES = {"yes": True, "true": True, "on": True, "1": True, "no": False, "false": False, "off": False, "0": False}
_READERS: dict[Any, Callable[[str], Any]] = {int: _whole, float: _number, bool: _switch, str: str}
_KINDS = {int: "a whole number", float: "a number", bool: "yes or no", str: "text"}


def _reader(kind: Any) -> Callable[[str], Any] | None:  # noqa: ANN401 - a type
    """How the text of a parameter of this type is read; None if it cannot be."""
    if kind in _READERS:
        return _READERS[kind]
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return partial(_member, {str(each.value): each for each in kind})
    if kind in (tuple, list):
        return partial(_sequence, _number, kind)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return partial(_member, {str(each): each for each in parts})
    if origin in (Union, types.UnionType) and types.NoneType in parts and len(parts) == 2:
        inner = _reader(next(each for each in parts if each is not types.NoneType))
        return None if inner is None else partial(_optional, inner)
    if origin is list or (origin is tuple and len(parts) == 2 and parts[1] is Ellipsis):
        inner = _reader(parts[0])
        return None if inner is None else partial(_sequence, inner, origin)
    return None


def _member(members: Mapping[str, Any], text: str) -> Any:  # noqa: ANN401 - a member
    if text not in members:
        raise ValueError(f"expected {' or '.join(members)}")
    return members[text]


def _optional(read: Callable[[str], Any], text: str) -> Any:  # noqa: ANN401
    return None if text == "none" else read(text)


def _sequence(read: Callable[[str], Any], kind: type, text: str) -> Any:  # noqa: ANN401
    return kind(map(read, text.split("/")))
