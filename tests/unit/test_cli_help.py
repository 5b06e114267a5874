"""What every command says of itself: what it does, what each option means, and an example."""

from collections.abc import Iterator

import click
import pytest

from poise.cli.app import VERBS, poise


def commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """A command and those below it."""
    yield path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(context := click.Context(command)):
            if (below := command.get_command(context, name)) is not None:
                yield from commands(below, (*path, name))


EVERY = {" ".join(path): command for path, command in commands(poise, ("poise",)) if path != ("poise",)}


@pytest.mark.parametrize("name", EVERY)
def test_help_of_every_command_has_a_sentence_for_each_option_and_an_example(name: str) -> None:
    command = EVERY[name]
    assert command.help
    assert [each.opts for each in command.params if isinstance(each, click.Option) and not each.help] == []
    assert f"  {name}" in (command.epilog or "")


def test_every_verb_was_looked_at() -> None:
    assert {f"poise {verb}" for verb in VERBS} <= EVERY.keys()
