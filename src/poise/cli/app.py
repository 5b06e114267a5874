"""`poise`: the group of verbs, and what a user sees of errors: one line, and an exit code.

0 done · 1 the work failed · 2 the request was wrong · 130 interrupted · 141 the reader of the output has gone. No
traceback for a wrong input.
"""

import os
import sys
from importlib import import_module
from io import TextIOWrapper

import click

from poise import __version__
from poise.cli import INTERRUPTED, UNREAD
from poise.scheduler.model.errors import InvariantError, PoiseError, RequestError, UnknownNameError
from poise.service.wire.request import plain

STUDY = ("demo", "simulate", "compare", "analyze", "policies", "replay", "audit", "bench")
LIVE = (
    "serve", "submit", "queue", "show", "logs", "wait", "why", "cancel", "hold", "release", "nodes", "shares", "events",
    "use", "tokens", "repair",
)  # fmt: skip
VERBS = (*STUDY, *LIVE)
MODULES = {
    **{verb: verb for verb in VERBS},
    **dict.fromkeys(("show", "why", "nodes"), "queue"),
    **dict.fromkeys(("cancel", "hold", "release"), "control"),
    **dict.fromkeys(("use", "tokens", "repair"), "admin"),
    "demo": "compare",
    "events": "logs",
    "replay": "simulate",
    "wait": "submit",
}
"""The module that holds each verb."""


class Verbs(click.Group):
    """One module a verb, read when the verb is typed; a wrong verb is answered with the nearest right ones."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All verbs."""
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb of this name."""
        if cmd_name not in VERBS:
            return None
        command = getattr(import_module(f"poise.cli.{MODULES[cmd_name]}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb that was typed."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise UnknownNameError("command", args[0], VERBS)
        return super().resolve_command(ctx, args)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="poise")
def poise() -> None:
    """Share a cluster of mixed GPUs among people who train deep-learning models.

    \b
    Start here:
      poise demo                                    a tour on built-in data
      poise policies                                the catalogue
      poise simulate synthetic:jobs=1000 --cluster gpu:64 --policy tiresias
      poise serve --cluster v100:4,k80:8            run real training jobs on this machine
      poise submit -- python train.py               one of them
    """


def main() -> None:
    """Run a command and exit with its code."""
    _settle_streams()
    try:
        code = _run()
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        code = UNREAD
    except OSError as error:
        code = _say_os(error)
    if code == UNREAD:
        _drop_output()
    sys.exit(code)


def _drop_output() -> None:
    """Lead what is still to be written nowhere: else Python complains at its end, and exits with a code of its own."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            os.dup2(nowhere, stream.fileno())


def _settle_streams() -> None:
    """A letter that a terminal cannot show is no reason to fail; neither is a standard input that was closed."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - it stays open until the process ends


def _run() -> int:
    try:
        result = poise.main(prog_name="poise", standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (click.ClickException, RequestError) as error:
        return _refuse(error)
    except InvariantError:
        raise  # a bug of ours: the traceback is the report
    except PoiseError as error:
        return _say(error, 1)
    except (KeyboardInterrupt, click.Abort):
        return _say("interrupted before anything was finished", INTERRUPTED)
    except (BrokenPipeError, SystemExit):  # Click and Rich exit when they find that the reader of the output has gone
        return UNREAD
    except OSError as error:
        return _say_os(error)
    return result if isinstance(result, int) else 0


def _refuse(error: click.ClickException | RequestError) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return 2
    return _say(_on_one_line(error) if isinstance(error, click.ClickException) else error, 2)


def _say_os(error: OSError) -> int:
    place = f"{error.filename}: " if error.filename else ""
    return _say(f"{place}{error.strerror or error}", 1)


def _on_one_line(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = f" (see {context.command_path} --help)" if context else ""
    return " ".join(error.format_message().split()) + hint


def _say(message: object, code: int) -> int:
    click.echo(f"poise: {plain(str(message))}", err=True)
    return code
