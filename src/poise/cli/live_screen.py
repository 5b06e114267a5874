"""What jobs print, on a terminal: colours, and no other command to it. Where it is no terminal, every byte as it is.

A log is text of a stranger: escape codes could rewrite what stands above, set the title, or have the terminal answer into
the next command line. Colours and weights (SGR) pass, and are reset at the end; so do tabs, line ends and carriage returns,
which bars of progress live by. Everything else that is a command, or cannot be seen, is left out.
"""

import re
import sys
from types import TracebackType
from typing import Self
from unicodedata import category

import click

ESCAPE = "\x1b"
RESET = "\x1b[0m"
LONGEST = 64
"""Characters of an escape sequence that is waited for: the rest may come with the next part."""
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
    """The text with nothing in it that a terminal would obey, but for colours."""
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
    """Standard output for parts of a log. `raw`: a terminal gets them as they are, too."""

    def __init__(self, *, raw: bool = False) -> None:
        self._is_filtered = not raw and sys.stdout.isatty()
        self._held = ""
        self._is_coloured = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def show(self, part: str) -> None:
        """Print a part; a sequence that is cut off waits for the next one."""
        click.echo(self.filtered(part) if self._is_filtered else part, nl=False, color=True)  # as it is

    def filtered(self, part: str) -> str:
        """What a terminal is shown of the next part."""
        text, self._held = self._held + part, ""
        if (cut := _UNFINISHED.search(text)) is not None and len(text) - cut.start() <= LONGEST:
            text, self._held = text[: cut.start()], text[cut.start() :]
        shown = harmless(text)
        self._is_coloured = self._is_coloured or _SGR.search(shown) is not None
        return shown

    def close(self) -> None:
        """Give the terminal back as it was."""
        if self._is_filtered:
            click.echo(harmless(self._held) + RESET * self._is_coloured, nl=False, color=True)
        self._held = ""
