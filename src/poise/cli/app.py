"""`poise`: the table of verbs, and how a command ends: with one line about an error, and an exit code.

0 done · 1 the work failed · 2 the request was wrong · 130 interrupted · 141 the reader of the output has gone. A wrong input
gets no traceback. A verb's module is imported when the verb is typed, so that `poise queue` does not load the simulator.
"""

import os
import sys
from importlib import import_module
from io import TextIOWrapper
from keyword import iskeyword

import click

from poise import __version__
from poise.cli import INTERRUPTED, UNREAD
from poise.scheduler.model.errors import InvariantError, OptionError, PoiseError, RequestError, UnknownNameError
from poise.service.wire.request import plain

VERBS = {
    # studies: simulation and analysis; no service is involved
    "demo": "compare", "simulate": "simulate", "replay": "simulate", "compare": "compare", "analyze": "analyze",
    "policies": "policies", "audit": "audit", "bench": "bench",
    # jobs of the running service
    "submit": "submit", "wait": "submit", "queue": "queue", "show": "queue", "why": "queue",
    "logs": "logs", "events": "logs", "cancel": "control", "hold": "control", "release": "control", "shares": "shares",
    # nodes of the running service
    "nodes": "nodes", "drain": "nodes", "return": "nodes",
    # the service itself
    "serve": "serve", "agent": "agent", "ray": "ray", "use": "admin", "tokens": "admin", "repair": "admin",
}  # fmt: skip
"""Each verb, and the module of this package that holds its command, which has the verb's name, or `return_`."""


class Verbs(click.Group):
    """Imports a verb's module when the verb is used; answers a wrong verb with the nearest right ones."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All verbs, sorted."""
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name."""
        if cmd_name not in VERBS:
            return None
        name = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name
        command = getattr(import_module(f"poise.cli.{VERBS[cmd_name]}"), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that was typed."""
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


def main(group: click.Group = poise, name: str = "poise") -> None:
    """Run a command of a program of this name, and exit with its code."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a letter that a terminal cannot show is no reason to fail
    if sys.stdin is None:  # it was closed
        sys.stdin = open(os.devnull)  # noqa: SIM115 - it stays open until the process ends
    try:
        code = run(group, name)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        code = UNREAD
    except OSError as error:
        code = _fail(_os_problem(error), 1)
    if code == UNREAD:
        # Discard what is still buffered: otherwise Python complains when it ends, and exits with a code of its own.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.__stdout__, sys.__stderr__):
            if stream is not None:
                os.dup2(nowhere, stream.fileno())
    sys.exit(code)


def run(group: click.Group = poise, name: str = "poise") -> int:
    """Run the command of sys.argv; its exit code. Only a bug of ours raises."""
    try:
        result = group.main(prog_name=name, standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = 2
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = f" (see {context.command_path} --help)" if context else ""
        code = _fail(" ".join(error.format_message().split()) + hint, 2)
    except InvariantError:
        raise  # a bug of ours: the traceback is the report
    except OptionError as error:
        code = _fail(error.spelled(lambda name: f"--{name.replace('_', '-')}"), 2)
    except PoiseError as error:
        code = _fail(error, 2 if isinstance(error, RequestError) else 1)
    except (KeyboardInterrupt, click.Abort):
        code = _fail("interrupted before anything was finished", INTERRUPTED)
    except (BrokenPipeError, SystemExit):  # Click and Rich exit if the reader of the output has gone
        code = UNREAD
    except OSError as error:
        code = _fail(_os_problem(error), 1)
    return code


def _os_problem(error: OSError) -> str:
    return f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}"


def _fail(message: object, code: int) -> int:
    click.echo(f"poise: {plain(str(message))}", err=True)
    return code
