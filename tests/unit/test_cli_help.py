"""What every command says of itself: what it does, what each option means, and an example."""

import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from poise.cli.app import GROUPS, VERBS, poise
from poise.cli.kubectl import plugin


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


@pytest.mark.parametrize("verb", VERBS)
def test_summary_of_a_verb_is_how_its_help_begins(verb: str) -> None:
    text = " ".join((EVERY[f"poise {verb}"].help or "").split())
    summary = VERBS[verb].summary
    assert text.startswith(summary)
    assert text[len(summary)] in ".,:;"


def help_at(command: click.Command, name: str, width: int) -> str:
    """The help of a command on a terminal of this width."""
    return command.get_help(click.Context(command, info_name=name, terminal_width=width, help_option_names=["-h", "--help"]))


PROGRAMS = {"poise": poise, "kubectl poise": plugin} | {
    name: command for name, command in EVERY.items() if isinstance(command, click.Group)
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_summary_is_cut_or_broken_where_a_terminal_has_80_columns(name: str) -> None:
    command = PROGRAMS[name]
    lines = help_at(command, name, 80).splitlines()
    for each in command.list_commands(click.Context(command)):
        (line,) = (line for line in lines if line.startswith(f"  {each} "))
        following = [*lines, ""][lines.index(line) + 1]
        assert not line.endswith("...")
        assert not following.startswith("    ")


def test_verbs_are_listed_once_each_in_groups_with_headings() -> None:
    shown = help_at(poise, "poise", 80)
    assert len(VERBS) == sum(map(len, GROUPS.values()))
    assert [line[:-1] for line in shown.splitlines() if line[:1].isalpha() and line.endswith(":")][1:] == list(GROUPS)


def test_help_of_the_program_imports_no_verb() -> None:
    code = """
import sys
sys.argv = ["poise", "--help"]
from poise.cli.app import VERBS, run
assert run() == 0
loaded = {f"poise.cli.{verb.module}" for verb in VERBS.values()} & sys.modules.keys()
assert not loaded and "pydantic" not in sys.modules, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
