"""Options that several verbs share, and journals as files.

What only simulations need is in `experiment`, and tables are in `output`, so that a verb of a live service imports neither
the simulator nor what draws tables unless it needs them.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import click

from poise.scheduler.model.units import parse_seconds

Command = TypeVar("Command", bound=Callable[..., Any])


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
FILE, FOLDER = click.Path(dir_okay=False, path_type=Path), click.Path(file_okay=False, path_type=Path)


def json_flag(help: str) -> Callable[[Command], Command]:
    """The option --json with a help text of its own."""
    return click.option("--json", "as_json", is_flag=True, help=help)


json_option = json_flag("One JSON document on stdout.")
only_json_option = json_flag("One JSON document on stdout, nothing else there.")
force_option = click.option("--force", is_flag=True, help="Write over files and folders of other kinds too.")


def print_json(document: object) -> None:
    """Print one JSON document on standard output."""
    click.echo(json.dumps(document, allow_nan=False))


def examples(*lines: str) -> str:
    """The end of a command's help."""
    heading = "Examples" if len(lines) > 1 else "Example"
    return "\n".join(("\b", f"{heading}:", *(f"  {line}" for line in lines))) + "\n"


def with_options(options: Sequence[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    """A decorator that adds options to a command, in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def choice_of(kind: type[StrEnum]) -> "click.Choice[str]":
    """A choice between the values of an enumeration; click would offer their names."""
    return click.Choice([each.value for each in kind])


@contextmanager
def journal_file(path: Path) -> Iterator[Path]:
    """A journal as a path that can be read: of a service's state directory, its last chapter as a temporary file."""
    from poise.engine.journal import NAME
    from poise.service.server.storage.replay import last_chapter, store_of  # most journals are none of a service

    store = store_of(path)
    if store is None:
        yield path
        return
    with TemporaryDirectory(prefix="poise-") as folder:
        file = Path(folder) / NAME
        with file.open("w") as stream:
            stream.writelines(f"{line}\n" for line in last_chapter(store))
        yield file
