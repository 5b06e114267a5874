"""`poise logs`: what a job prints. `poise events`: what happened, who did it, and to what."""

import re
import sys
from types import TracebackType
from typing import Self, TextIO
from unicodedata import category

import click

from poise.cli.live import (
    answer,
    clock_time,
    connected,
    connected_for_long,
    document,
    suggesting,
    until_interrupted,
)
from poise.cli.options import examples, json_option, print_json
from poise.scheduler.model.errors import RequestError, plain
from poise.service.wire.views import EventRow

EPILOG = """\b
Examples:
  poise logs 17
  poise logs -f 17
  poise logs --tail 20 --replica 1 17
"""


@click.command(epilog=EPILOG)
@click.argument("job")
@click.option("-f", "--follow", is_flag=True, help="Go on as more is printed, until the job has ended.")
@click.option("--replica", type=click.IntRange(0), default=0, show_default=True, help="Which of its processes.")
@click.option("--tail", type=click.IntRange(0), metavar="N", help="The last N lines only.")
@click.option("--raw", is_flag=True, help="Pass everything on to a terminal: escape codes of the job can change it.")
@json_option
def logs(job: str, follow: bool, replica: int, tail: int | None, raw: bool, as_json: bool) -> int:
    """Print what JOB has printed, of all its runs. Following survives a restart of the server.

    On a terminal colours are shown, and other escape codes are left out; elsewhere the text is as it was printed.
    """
    if follow and as_json:
        raise RequestError("--json is one document, and what is followed has no end; leave one of them out")

    def show_and_follow() -> None:
        text, offset = ("", 0) if tail is None else client.tail(job, tail, replica=replica)
        screen.show(text)
        for part in client.follow_log(job, replica=replica, offset=offset):
            screen.show(part)

    with connected_for_long() if follow else connected() as client, suggesting(client, job):
        if follow:
            with Screen(raw=raw) as screen:
                return until_interrupted(show_and_follow)
        text = client.log(job, replica=replica) if tail is None else client.tail(job, tail, replica=replica)[0]
        if as_json:
            print_json({"job": job, "replica": replica, "text": text})
        else:
            with Screen(raw=raw) as screen:
                screen.show(text)
    return 0


@click.command(epilog=examples("poise events", "poise events --job 17 --follow"))
@click.option("--job", help="Only what concerns this job.")
@click.option("--tenant", help="Only what concerns this tenant.")
@click.option("-f", "--follow", is_flag=True, help="Go on as more happens, until Ctrl-C; with --json one object a line.")
@click.option("--limit", type=click.IntRange(1, 1_000), default=50, show_default=True, help="How many, the latest.")
@json_option
def events(job: str | None, tenant: str | None, follow: bool, limit: int, as_json: bool) -> int:
    """Show what happened: [time] [actor] [objects] and a sentence. It is a view of the journal."""
    if follow:

        def show_forever() -> None:
            for each in client.follow_events(after=-limit, job=job, tenant=tenant):
                answer(each, _show_event, as_json=as_json)

        with connected_for_long() as client:
            return until_interrupted(show_forever)
    with connected() as client:
        found = client.events(after=-limit, job=job, tenant=tenant, limit=limit)
    if as_json:
        print_json(document(found))
    else:
        for each in found.events:
            _show_event(each)
    return 0


def _show_event(each: EventRow) -> None:
    objects = " ".join(name for name in (each.job, each.tenant) if name)
    click.echo(f"[{clock_time(each.time)}] [{each.actor}] [{objects}] {plain(' '.join(each.text.split()))}")


# Logs on a terminal

RESET = "\x1b[0m"
LONGEST = 64
"""Characters of an unfinished escape sequence up to which its rest is waited for: it may come with the next part."""
_PASSING = frozenset("\n\r\t")
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_SGR = re.compile(r"\x1b\[[0-9;]{0,32}m")
_TOKEN = re.compile(
    r"(?P<colour>\x1b\[[0-9;]{0,32}m)"
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # other commands of the cursor and the screen
    r"|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)"  # titles, links, answers to questions
    r"|\x1b[ -/]*[0-Z\\^-~]"  # short ones
    r"|\x1b"
)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b\n]*\x1b?|[ -/]*)?\Z")


def harmless(text: str) -> str:
    """The text without anything that a terminal would obey, except colours."""
    kept: list[str] = []
    at = 0
    for match in _TOKEN.finditer(text):
        kept += [_visible(text[at : match.start()]), match["colour"] or ""]
        at = match.end()
    return "".join([*kept, _visible(text[at:])])


def _visible(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(each for each in text if each in _PASSING or category(each) not in _HIDDEN)


class Screen:
    """Standard output for parts of a log; on a terminal colours pass, and other commands to it do not.

    A log is text of a stranger: escape codes could rewrite what stands above, set the title, or make the terminal type into
    the next command line. Colours and weights (SGR) pass, and are reset at the end; so do tabs, line ends and carriage
    returns, which progress bars need. Everything else that is a command, or cannot be seen, is left out. If standard output
    is no terminal, or with `raw`, every character passes. `to`: another stream in the place of standard output.
    """

    def __init__(self, *, raw: bool = False, to: TextIO | None = None) -> None:
        self._to = to or sys.stdout
        self._is_filtered = not raw and self._to.isatty()
        self._held = ""
        self._is_coloured = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def show(self, part: str) -> None:
        """Print a part; an escape sequence that is cut off waits for the next one."""
        # color: Click must not strip colours where standard output is no terminal.
        click.echo(self.filtered(part) if self._is_filtered else part, self._to, nl=False, color=True)

    def filtered(self, part: str) -> str:
        """What a terminal is shown of the next part."""
        text, self._held = self._held + part, ""
        if (cut := _UNFINISHED.search(text)) is not None and len(text) - cut.start() <= LONGEST:
            text, self._held = text[: cut.start()], text[cut.start() :]
        shown = harmless(text)
        self._is_coloured = self._is_coloured or _SGR.search(shown) is not None
        return shown

    def close(self) -> None:
        """Reset the colours of the terminal."""
        if self._is_filtered:
            click.echo(harmless(self._held) + RESET * self._is_coloured, self._to, nl=False, color=True)
        self._held = ""
