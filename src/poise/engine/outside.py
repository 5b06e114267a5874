"""Policies from outside the package: found by name, by reference or as objects, and registered with the catalogue.

A policy comes from outside in one of three ways:

    deadline-first          a name that an installed distribution gives it: an entry point of the group `poise.policies`
    edf:POLICY              an attribute of a module that can be imported: `package.module:attribute`
    spec_of(my_policy())    an object of this process

Parameters and combinators follow as usual: `mypackage.edf:EarliestDeadline:slack=60+agnostic`. What is found may be a
`Listing`, an instance of `Order`, `Planner`, `Allocator` or `Policy`, or a callable that makes one; the parameters of a
callable become parameters of the policy (`factories.py`).

Names of the catalogue come first, then those of distributions, then modules; none shadows an earlier one. Importing is done
here and nowhere else: the catalogue, which decisions are built from, only knows what was registered. So a name that was not
asked for by whoever started this process is unknown in it, whoever sends it.
"""

import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from io import StringIO
from pathlib import Path
from typing import Any

from poise.engine.factories import kind_of, listing_from
from poise.scheduler.model.errors import PoiseError, PolicyError, RequestError, UnknownNameError
from poise.scheduler.model.plan import Order, Planner, Policy
from poise.scheduler.model.workload import Allocator
from poise.scheduler.policies import catalogue
from poise.scheduler.policies.listing import Listing

GROUP = "poise.policies"
"""The group of entry points under which distributions name their policies."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_REFERENCE = re.compile(r"(?P<module>[^\W\d]\w*(?:\.[^\W\d]\w*)*):(?P<attribute>[^\W\d]\w*(?:\.[^\W\d]\w*)*)(?::|\+|$)")
_EXAMPLE = "write package.module:attribute, e.g. edf:POLICY for POLICY of edf.py"

_targets: dict[str, Any] = {}
"""What was registered, by name: to tell whether it is the same again."""
_referenced: set[str] = set()
"""Names of what was imported: another process can do that as well."""
_files: dict[str, str] = {}
"""The files of registered policies, by name."""
_importing: set[str] = set()


# Finding


def find(spec: str) -> None:
    """Register what a specification asks for if it comes from outside: by a distribution's name, or `module:attribute`.

    Raises UnknownNameError if there is nothing of this name, RequestError if it cannot be imported or is no policy.
    """
    head = spec.split("+", 1)[0]
    match = _REFERENCE.match(spec)
    name = head.partition(":")[0]
    may_be_module = match is not None and _is_object(name) and base_of(spec) not in _targets
    if not may_be_module and find_installed(spec):
        return
    if match is None or name.endswith(".py"):
        if "/" in name or "." in name:
            raise RequestError(f"policy {spec!r}: {_EXAMPLE}")
        raise UnknownNameError("policy", name, {*catalogue.known(), *_by_name()}, _hint_of(name))
    module, attribute = match["module"], match["attribute"]
    name = f"{module}:{attribute}"
    loaded = _import(module, spec)
    target = _attribute(loaded, attribute, spec)
    file = getattr(loaded, "__file__", None)
    _register(name, target, origin=_origin(module, file), file=file)
    _referenced.add(name)


def _is_object(name: str) -> bool:
    """Say whether a name is that of an object of this process, which a module may have as well: `edf` and `edf:POLICY`."""
    return name in _targets and name not in _referenced


def find_installed(spec: str) -> bool:
    """Register the policy of a distribution that a specification names, if it is not registered yet.

    Returns whether the specification's policy is known now.
    """
    if catalogue.is_known(spec):
        return True
    name = spec.split("+", 1)[0].partition(":")[0]
    point = _by_name().get(name)
    if point is None:
        return False
    _register_point(point)
    return True


def check_recorded(spec: str, journal: str) -> None:
    """Raise RequestError if a journal's policy is not known here. A journal alone is no reason to import what it names."""
    if not find_installed(spec) and is_reference(spec):
        remedy = f"say --allow-policy {base_of(spec)} to have it imported"
        raise RequestError(f"{journal}: its policy {spec!r} comes from outside of Poise; {remedy}")


def base_of(spec: str) -> str:
    """The `module:attribute` of a specification."""
    match = _REFERENCE.match(spec)
    return spec if match is None else f"{match['module']}:{match['attribute']}"


def find_all() -> tuple[str, ...]:
    """Register the policies of all distributions; returns what is wrong with those that cannot be, a line for each."""
    problems = []
    by_name = _by_name()
    for point in _points():
        if point.name in catalogue.POLICIES:
            problems.append(f"{_called(point)}: the catalogue has a policy of this name, which stays; name it otherwise")
        elif by_name[point.name] != point:
            problems.append(f"{_called(point)}: {_called(by_name[point.name])} has this name already, and is used")
        elif point.name not in _targets:
            try:
                _register_point(point)
            except PoiseError as error:
                problems.append(str(error))
    return tuple(problems)


def is_reference(spec: str) -> bool:
    """Say whether a specification that is not known looks like `module:attribute`."""
    return _REFERENCE.match(spec) is not None


def spec_of(policy: str | Policy | Listing | Order | Planner | Allocator | Callable[..., Any]) -> str:
    """Return the specification of a policy in this process; an object is registered under a name of its own.

    A string is looked up, as on the command line. An object's name is that of its class or function in kebab case, or the
    name of its listing; a number is appended where another object has that name. The same object always has the same name.
    """
    if isinstance(policy, str):
        find(policy)
        return policy
    for name, target in _targets.items():
        if target is policy and name not in _referenced:
            return name
    wanted = _kebab(_own_name(policy))
    taken = {*catalogue.known(), *_by_name()}
    name = next(each for each in _numbered(wanted) if each not in taken)
    file = getattr(sys.modules.get(getattr(_maker(policy), "__module__", "")), "__file__", None)
    _register(name, policy, origin="an object of this process", file=file)
    return name


def _register_point(point: EntryPoint) -> None:
    """Import what an entry point names, and register it."""
    called = _called(point)
    if not _NAME.fullmatch(point.name):
        raise PolicyError(f"{called}: expected a name of letters, digits, - and _, e.g. deadline-first")
    match = _REFERENCE.fullmatch(point.value.split("[")[0].strip().replace(" ", ""))
    if match is None:
        raise PolicyError(f"{called}: expected package.module:attribute, got {point.value!r}")
    try:
        loaded = _import(match["module"], point.name)
        target = _attribute(loaded, match["attribute"], point.name)
        file = getattr(loaded, "__file__", None)
        _register(point.name, target, origin=f"{_distribution(point)} ({point.value})", file=file)
    except PoiseError as error:
        raise PolicyError(f"{called}: {error}") from None
    _referenced.add(point.name)


def _points() -> tuple[EntryPoint, ...]:
    """All entry points of the group, each once, in the order of their names."""
    found = {(point.name, point.value, _distribution(point)): point for point in entry_points(group=GROUP)}
    return tuple(found[key] for key in sorted(found))


def _by_name() -> dict[str, EntryPoint]:
    """Entry points by name. Of several with one name, the first counts; `find_all` tells of the others."""
    by_name: dict[str, EntryPoint] = {}
    for point in _points():
        if point.name not in catalogue.POLICIES:
            by_name.setdefault(point.name, point)
    return by_name


def _distribution(point: EntryPoint) -> str:
    return "an unknown distribution" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def _called(point: EntryPoint) -> str:
    return f"policy {point.name!r} of {_distribution(point)} (entry point {point.value})"


# Importing


def _import(module: str, spec: str) -> Any:  # noqa: ANN401 - a module
    """Import a module for a policy. Whatever it prints is dropped; whatever it raises becomes one line."""
    if module in _importing:
        raise RequestError(f"policy {spec!r}: asked for while its module {module} is being imported; do that in a function")
    _importing.add(module)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            return importlib.import_module(module)
    except PoiseError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            where = f"{module.replace('.', '/')}.py here" if "" in sys.path or str(Path.cwd()) in sys.path else "such module"
            raise RequestError(
                f"policy {spec!r}: there is no module {error.name!r}: no {where}, and none that is installed"
            ) from None
        raise RequestError(f"policy {spec!r}: {_where(error)}") from None
    except (Exception, SystemExit) as error:  # whatever a module of others does when it is imported
        raise RequestError(f"policy {spec!r}: {_where(error)}") from None
    finally:
        _importing.discard(module)


def _attribute(module: Any, path: str, spec: str) -> Any:  # noqa: ANN401 - a module, and whatever it has
    """The attribute of a module, or of one of its classes."""
    found = module
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except Exception as error:  # a module may have a `__getattr__` of its own
            file = getattr(module, "__file__", None) or "built into Python"
            if not isinstance(error, AttributeError):
                raise RequestError(f"policy {spec!r}: {_where(error)}") from None
            known = [each for each, value in vars(module).items() if _is_own_policy(module, each, value)]
            if "." not in path and known:
                raise UnknownNameError(f"attribute of {module.__name__} ({file})", path, known) from None
            raise RequestError(
                f"policy {spec!r}: {module.__name__} ({file}) has no {path!r}, nor anything else that is a policy"
            ) from None
    return found


def _is_own_policy(module: Any, name: str, value: object) -> bool:  # noqa: ANN401 - a module
    """Say whether an attribute could be meant: a policy, or something to call that this module defines."""
    kind = kind_of(value)
    is_own = kind is not Callable or getattr(value, "__module__", None) == module.__name__
    return kind is not None and is_own and not name.startswith("_")


def _where(error: BaseException) -> str:
    """An exception as one line that begins with the file and line where it arose."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen ") and frame.filename not in _OURS
    ]
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    return f"{frames[-1].filename}:{frames[-1].lineno}: {text}" if frames else text


_OURS = {__file__, importlib.__file__}


# Registering


def _register(name: str, target: Any, *, origin: str, file: str | None) -> None:  # noqa: ANN401 - whatever was found
    if name in _targets and _targets[name] is target:
        return
    listing = replace(listing_from(target, name), origin=origin)
    catalogue.register(listing)
    _targets[name] = target
    if file is not None:
        _files[name] = file


def _origin(module: str, file: str | None) -> str:
    return module if file is None else file


def _hint_of(name: str) -> str:
    """What to write instead if the name is that of a file in the current folder."""
    return f"(a policy of {name}.py: {name}:ATTRIBUTE)" if os.path.isfile(f"{name}.py") else ""


def _maker(policy: object) -> Any:  # noqa: ANN401 - a class, a function
    """What has the name and the module of an object: itself if it is a class or a function, else its class."""
    return policy if hasattr(policy, "__qualname__") else type(policy)


def _own_name(policy: object) -> str:
    if isinstance(policy, Policy | Listing):
        return policy.name
    if isinstance(policy, Order):
        *around, name = getattr(policy.rank, "__qualname__", "order").replace(".<locals>", "").split(".")
        return around[-1] if around and name in _NAMELESS else name.strip("<>")
    return str(getattr(_maker(policy), "__name__", "policy"))


_NAMELESS = ("rank", "<lambda>")
"""Names of ranks that say nothing: that of the function around them is better."""


def _kebab(name: str) -> str:
    """`EarliestDeadline` as `earliest-deadline`; letters, digits and single hyphens."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name)
    return re.sub(r"[^A-Za-z0-9]+", "-", spaced).strip("-").lower() or "policy"


def _numbered(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}-{number}"
        number += 1


# Errors while a policy decides


def has_listing(spec: str) -> bool:
    """Say whether the author of a specification's policy wrote a listing for it."""
    name = catalogue.listing_of(spec).name
    return name in catalogue.POLICIES or isinstance(_targets.get(name), Listing)


def can_be_imported(spec: str) -> bool:
    """Say whether another process can find a specification's policy by its name."""
    name = catalogue.listing_of(spec).name
    return name in catalogue.POLICIES or name in _referenced


def source_files(spec: str) -> tuple[str, ...]:
    """The file of a specification's policy if it comes from outside; empty for a policy of the catalogue."""
    file = _files.get(catalogue.listing_of(spec).name)
    return () if file is None else (file,)


@contextmanager
def blaming(spec: str) -> Iterator[None]:
    """Turn whatever is raised inside into PolicyError, one line with the policy's file and line, if it is from outside."""
    if catalogue.listing_of(spec).name not in _targets:
        yield
        return
    try:
        yield
    except (RequestError, PolicyError):
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, OSError) and not _own_frames(spec, error):
            raise  # of a file that Poise reads or writes
        raise PolicyError(f"policy {spec!r}: {blamed(spec, error)}") from error


def _own_frames(spec: str, error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of a traceback that are in the policy's own file."""
    files = source_files(spec)
    return [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]


def blamed(spec: str, error: BaseException) -> str:
    """What a policy raised as one line, which begins with the line of the policy's own file if there is one."""
    frames = _own_frames(spec, error)
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    if frames:
        return f"{frames[-1].filename}:{frames[-1].lineno}: {text}"
    return str(error) if isinstance(error, PoiseError) else f"the core cannot use its answer: {text}"
