"""`poise run`: a job that belongs to the command: submitted, printed while it runs, cancelled with it.

Ctrl-C, SIGTERM, SIGHUP and a reader of the output that goes away cancel the job. Only what ends the command without a word,
SIGKILL, leaves it to itself.
"""

import re
import signal
import sys
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

import click

from poise.cli import INTERRUPTED
from poise.cli.live import connected_for_long, state_of
from poise.cli.logs import Screen
from poise.cli.options import json_flag, print_json
from poise.cli.output import show_notes
from poise.cli.submit import COMMAND, SubmitCommand, draft_of, job_options, shipped_folder, standing_of
from poise.scheduler.model.errors import PoiseError, plain
from poise.service.client import Client, ServerRefusedError
from poise.service.client.client import new_key
from poise.service.client.shipping import packed_folder
from poise.service.client.submission import completed_request, with_files
from poise.service.wire.views import JobDetail, JobRow, JobState

EPILOG = """\b
Examples:
  poise run -- python train.py --epochs 10
  poise run -g 4 --type a100 -- python train.py > train.log
  poise run --quiet -- nvidia-smi | head -20
"""
SIGNALLED = 128
"""Exit codes above this: the number of a signal, as shells have it."""
_OF_SEVERAL = {"array": None, "sweep": (), "hold": None}
"""Options of `submit` that one job that is waited for cannot have, with what they are if they are not given."""


_BEGIN = "--- run "
_HEADING = re.compile(r"--- run \d+ on [^\n]* ---\n")
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_LONGEST = 4096
"""Characters of a heading at most: it lists the GPUs of a node."""


class RunCommand(SubmitCommand):
    """`run` takes the options of `submit` that describe one job, and a command after `--`."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The options."""
        return [each for each in super().get_params(ctx) if each.name not in _OF_SEVERAL]


@click.command(cls=RunCommand, epilog=EPILOG, options_metavar="[OPTIONS] -- COMMAND...")
@click.argument("words", nargs=-1, metavar="")
@job_options
@click.option("-q", "--quiet", is_flag=True, help="Do not say on stderr why it waits, where it runs and how it ended.")
@json_flag("What the job prints goes to stderr; one JSON document on stdout says how it ended.")
@click.pass_context
def run(ctx: click.Context, /, words: tuple[str, ...], quiet: bool, as_json: bool, **options: Any) -> int:  # noqa: ANN401
    """Submit a job, print what it prints, and end as it ends.

    Standard error says why it waits for its turn. What rank 0 prints goes to standard output; `poise logs --replica` has
    that of others. Ctrl-C cancels the job and shows what it still prints; a second one ends the command at once. SIGTERM,
    SIGHUP, and a reader of the output that goes away, cancel the job too. A restart of the service does not matter. The job
    has no standard input. One that fails is not repeated, unless --retries says so.

    Exit codes: that of rank 0's process, or 128 and the signal that ended it; 1 if the job was cancelled, or failed without
    one; 130 after Ctrl-C; 141 if the output is no longer read.
    """
    command = ctx.meta[COMMAND]
    if words or not command:
        given = " ".join(words) if words else "python train.py"
        raise click.UsageError(f"the command goes after --: poise run -- {given}", ctx)
    options["retries"] = options["retries"] or "0"
    draft = draft_of(None, command, _OF_SEVERAL | options)
    show_notes([plain(note) for note in draft.notes])
    key = new_key()
    (request,) = draft.requests(key)
    if options["ship"] is not None:
        shipped = shipped_folder(options["ship"], request)
        request = with_files(request, shipped, packed_folder(shipped, options["ship_mib"] << 20)[1])
    request = completed_request(request)
    with connected_for_long() as client:
        if options["ship"] is not None:
            client.ship(shipped, most_mib=options["ship_mib"], tenant=request.tenant)
        with Signals() as signals:
            (handle,) = client.submit_all([request], key=key)
            show_notes([plain(note) for note in handle.notes])
            attached = AttachedJob(client, handle.id, signals, quiet=quiet, to_stderr=as_json)
            code = attached.until_ended()
        if as_json:
            print_json({"job": handle.id, "state": attached.state.value, "code": code})
    return code


class SignalledError(Exception):
    """A signal asks the command to end."""


class Signals:
    """SIGINT, SIGTERM and SIGHUP ask for an end: once politely, the second time at once. One that is ignored stays so.

    number   the first signal that came; None: none has
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._is_open = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(each) is not signal.SIG_IGN:
                self._before[each] = signal.signal(each, self._take)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def open(self) -> None:
        """From now on the first signal raises SignalledError; one that has come already does so now."""
        self._is_open = True
        if self.number is not None:
            raise SignalledError

    def close(self) -> None:
        """From now on only a second signal raises something."""
        self._is_open = False

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number
        if self._is_open:
            raise SignalledError
        _say("the job is cancelled once the service has answered; Ctrl-C again ends this at once")


class AttachedJob:
    """A job, and the command that prints what it prints.

    state   that it was last seen in
    """

    def __init__(self, client: Client, job: str, signals: Signals, *, quiet: bool, to_stderr: bool) -> None:
        self.state = JobState.PENDING
        self._client = client
        self._job = job
        self._signals = signals
        self._is_quiet = quiet
        self._offset = 0
        self._headings = Headings()
        self._screen = Screen(to=sys.stderr if to_stderr else None)

    def until_ended(self) -> int:
        """Print what the job prints until it has ended; the exit code of the command."""
        try:
            self._signals.open()
            self._print()
            self._signals.close()
        except SignalledError:
            return self._end_early()
        except OSError:  # nobody reads what it prints, or there is no room for it
            self._signals.close()
            self._cancel()
            raise
        except PoiseError:
            _say(f"job {self._job} goes on: poise logs -f {self._job} · poise cancel {self._job}")
            raise
        return self._ended()

    def _end_early(self) -> int:
        """Cancel the job because of a signal; the exit code."""
        self._signals.close()
        number = self._signals.number or signal.SIGINT
        _say(f"cancelling job {self._job}")
        try:
            self._cancel()
            if number == signal.SIGINT:
                self._print()
                if self._ended() == 0:
                    return 0
        except KeyboardInterrupt:
            return INTERRUPTED
        return SIGNALLED + number

    def _cancel(self) -> None:
        try:
            self._client.cancel(self._job)
        except ServerRefusedError:
            if not self._client.show(self._job).job.state.is_final:  # otherwise it has ended by itself meanwhile
                raise

    def _print(self) -> None:
        with self._screen as screen:
            for part in self._client.follow_job(self._job, on_change=self._tell, offset=self._offset):
                printed, headings = self._headings.told_apart(part.text)
                if headings and not self._is_quiet:
                    click.echo("\n".join(map(plain, headings)), err=True)
                screen.show(printed)
                self._offset = part.next
            screen.show(self._headings.rest())

    def _tell(self, row: JobRow) -> None:
        """Say how the job stands, until it has ended: that is said once all that it has printed is there."""
        self.state = row.state
        if not self._is_quiet and not row.state.is_final:
            click.echo(plain(f"{row.id}{standing_of(row)}"), err=True)

    def _ended(self) -> int:
        """Say how the job ended; its exit code."""
        detail = self._client.show(self._job)
        self.state = detail.job.state
        if not self._is_quiet:
            cause = f": {detail.cause}" if detail.cause else ""
            click.echo(plain(f"{self._job} {state_of(detail.job)}{cause}"), err=True)
        return exit_code(detail)


class Headings:
    """Tells the lines with which logs begin a run from what the job has printed: only that is the output of the command.

    A line that could become a heading is kept back until its end is there.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_at_start = True

    def told_apart(self, part: str) -> tuple[str, list[str]]:
        """What the job has printed of this part, and the headings in it."""
        printed: list[str] = []
        headings: list[str] = []
        text, self._held = self._held + part, ""
        for line in _LINE.findall(text):
            if self._is_at_start and _HEADING.fullmatch(line):
                headings.append(line[:-1])
            elif self._is_at_start and _could_become_heading(line):
                self._held = line  # it is the last one
            else:
                printed.append(line)
                self._is_at_start = line.endswith("\n")
        return "".join(printed), headings

    def rest(self) -> str:
        """What was kept back, once nothing comes after it."""
        held, self._held = self._held, ""
        return held


def _could_become_heading(line: str) -> bool:
    return not line.endswith("\n") and len(line) < _LONGEST and (_BEGIN.startswith(line) or line.startswith(_BEGIN))


def exit_code(detail: JobDetail) -> int:
    """The code of a job that has ended: that of its last run's rank 0, 128 and the signal, or 1."""
    if detail.job.state is JobState.SUCCEEDED:
        return 0
    codes = detail.runs[-1].codes if detail.runs and detail.job.state is JobState.FAILED else ()
    code = (codes[0] if codes else None) or 1
    return code if code > 0 else SIGNALLED - code


def _say(text: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        click.echo(f"\npoise: {plain(text)}", err=True)
