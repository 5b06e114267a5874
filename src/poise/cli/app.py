"""`poise`: the table of verbs, and how a command ends: with one line about an error, and an exit code.

0 done · 1 the work failed · 2 the request was wrong · 130 interrupted · 141 the reader of the output has gone. A wrong input
gets no traceback. A verb's module is imported when the verb is typed, so that `poise queue` does not load the simulator.
"""

import errno
import os
import sys
from importlib import import_module
from io import TextIOWrapper
from keyword import iskeyword
from typing import NamedTuple

import click
from click.shell_completion import CompletionItem

from poise import __version__
from poise.cli import INTERRUPTED, UNREAD
from poise.scheduler.model.errors import (
    InvariantError,
    OptionError,
    PoiseError,
    RequestError,
    UnknownNameError,
    concise,
    plain,
)

COMPLETION = "_POISE_COMPLETE"
"""Is set by a shell that wants words for the Tab key: the shell's name, and what it wants."""


class VerbEntry(NamedTuple):
    """Where a verb is, and what it does.

    module    of this package, which holds its command under the verb's name, or `return_`
    summary   with which its help begins; here as well, so that `poise --help` imports no verb
    """

    module: str
    summary: str


GROUPS: dict[str, dict[str, VerbEntry]] = {
    "Studies, without a service": {
        "demo": VerbEntry("compare", "Run a built-in trace under several policies"),
        "simulate": VerbEntry("simulate", "Run TRACE under one policy and say how it went"),
        "compare": VerbEntry("compare", "Run TRACE under several policies and show them side by side"),
        "analyze": VerbEntry("analyze", "Characterise the jobs of a trace or a journal"),
        "policies": VerbEntry("policies", "List the policies, or show one in full"),
        "check-policy": VerbEntry("check_policy", "Run the laws of the catalogue on POLICY"),
        "new-policy": VerbEntry("new_policy", "Write a policy to begin with, its test and its page"),
        "audit": VerbEntry("audit", "Measure what a policy does to those who share a cluster"),
        "bench": VerbEntry("bench", "Measure what Poise itself costs"),
        "replay": VerbEntry("simulate", "Hand the facts of JOURNAL to the core again"),
    },
    "Jobs of the running service": {
        "submit": VerbEntry("submit", "Submit a job, an array or a sweep to the running service"),
        "run": VerbEntry("run", "Submit a job, print what it prints, and end as it ends"),
        "queue": VerbEntry("queue", "Show the jobs that have not ended, in scheduling order"),
        "top": VerbEntry("top", "Watch GPUs, tenants and jobs on the whole screen"),
        "show": VerbEntry("queue", "Show everything about JOB"),
        "why": VerbEntry("queue", "Say why JOB runs, waits or has ended"),
        "logs": VerbEntry("logs", "Print what JOB has printed, of all its runs"),
        "wait": VerbEntry("submit", "Wait until all JOBs have ended"),
        "hold": VerbEntry("control", "Keep jobs from running until they are released"),
        "release": VerbEntry("control", "End a hold"),
        "cancel": VerbEntry("control", "Withdraw jobs"),
        "events": VerbEntry("logs", "Show what happened"),
    },
    "Nodes and tenants of the running service": {
        "nodes": VerbEntry("nodes", "Show the nodes"),
        "drain": VerbEntry("nodes", "Take nodes out of service"),
        "return": VerbEntry("nodes", "Give nodes back that were drained"),
        "shares": VerbEntry("shares", "Show what tenants are entitled to, hold and have received"),
    },
    "The service itself": {
        "serve": VerbEntry("serve", "Run training jobs until SIGTERM or Ctrl-C"),
        "agent": VerbEntry("agent", "Run jobs on this machine for a service on another one"),
        "ray": VerbEntry("ray", "Work with the Ray cluster of `poise serve --backend ray`"),
        "use": VerbEntry("admin", "Go on under another POLICY"),
        "tokens": VerbEntry("admin", "List the tokens of the running service, make one or revoke one"),
        "repair": VerbEntry("admin", "Mend the journal in STATE"),
    },
    "The command line": {
        "completion": VerbEntry("completion", "Print what makes the Tab key complete the words of `poise`"),
    },
}  # fmt: skip
"""The verbs by what they are for, as `poise --help` lists them."""
VERBS = {name: verb for group in GROUPS.values() for name, verb in group.items()}


class Verbs(click.Group):
    """Imports a verb's module when the verb is used; answers a wrong verb with the nearest right ones."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All verbs, sorted."""
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name."""
        if cmd_name not in VERBS:
            return None
        name = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name.replace("-", "_")
        command = getattr(import_module(f"poise.cli.{VERBS[cmd_name].module}"), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that was typed."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise UnknownNameError("command", args[0], VERBS)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The verbs in groups, each with its summary."""
        longest = max(map(len, VERBS))
        for heading, verbs in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(longest), verb.summary) for name, verb in verbs.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The verbs that begin with this, or the options of `poise` itself."""
        verbs = [CompletionItem(name, help=verb.summary) for name, verb in VERBS.items() if name.startswith(incomplete)]
        return verbs + click.Command.shell_complete(self, ctx, incomplete)


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
    _open_closed_streams()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a letter that a terminal cannot show is no reason to fail
    code = _completed() if COMPLETION in os.environ else run(group, name)
    is_written = True
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code, is_written = UNREAD, False
    except OSError as error:
        code, is_written = code or _fail(_os_problem(error), 1), False
    if not is_written or code == UNREAD:
        # Discard what is still buffered: otherwise Python complains when it ends, and exits with a code of its own.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    sys.exit(code)


def _completed() -> int:
    """Print the words that a shell wants for the Tab key; the exit code."""
    from poise.cli.words import answer

    return answer()


def _open_closed_streams() -> None:
    """Put something in the place of standard streams that the caller has closed.

    Otherwise the next file that is opened would become one of them. To print on a closed standard output fails, as it does
    for other programs; complaints that nobody can read are dropped.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # becomes this one: it is the lowest number that is free
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - these stay open until the process ends
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


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
    if error.errno == errno.EBADF and error.filename is None:
        return "standard output is closed"
    return f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}"


def _fail(message: object, code: int) -> int:
    """Complain in one line, where there is somebody to read it and room for it; the exit code."""

    try:
        click.echo(f"poise: {concise(plain(str(message)))}", err=True)
    except BrokenPipeError:
        return UNREAD
    except OSError:
        pass  # standard error is full: the code has to do
    return code
