"""Commands that people write in one line, as the argument lists that are run. No shell is involved, ever.

Words are split and quoted as in a shell, and `${NAME}` stands for a variable of the job, replaced here, once, and never
split again. Whatever else only a shell would understand is an error that says so: passed on as plain text it would do
something else than its author meant.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from poise.model.errors import UnknownNameError

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=")
_RUN_TIME = re.compile(r"POISE_\w+|(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|CUDA_VISIBLE_DEVICES")
_SHELL = re.compile(r"&&|\|\||>>|<<|[|&;<>()`*?]")
_BLANK = " \t"
_ESCAPED_IN_QUOTES = '$`"\\'


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for a variable. `otherwise`: what stands there if nothing sets it; None: that is an error."""

    name: str
    otherwise: str | None = None


Word = tuple[str | Slot, ...]


def parse_words(text: str) -> tuple[Word, ...]:
    """A command written in one line; ValueError says what only a shell would understand, and what to do instead."""
    return _Scanner(text.strip()).words()


def literal_words(arguments: Iterable[str]) -> tuple[Word, ...]:
    """A command that is a list already: each argument stands as it is, but for variables that the job sets."""
    return tuple(_pieces(argument) for argument in arguments)


def fill(words: Iterable[Word], env: Mapping[str, str]) -> tuple[str, ...]:
    """The argument list for these variables; ValueError names one that is not set."""
    return tuple("".join(_value(piece, env) for piece in word) for word in words)


def _pieces(argument: str) -> Word:
    """Every second part of the split is a name."""
    parts = _VARIABLE.split(argument)
    return tuple(Slot(part, f"${{{part}}}") if place % 2 else part for place, part in enumerate(parts))


def _value(piece: str | Slot, env: Mapping[str, str]) -> str:
    if isinstance(piece, str):
        return piece
    found = env.get(piece.name, piece.otherwise)
    if found is not None:
        return found
    if _RUN_TIME.fullmatch(piece.name):
        raise ValueError(f"${{{piece.name}}} is set where the job runs: let the program read it from its environment")
    if not env:
        raise ValueError(f"${{{piece.name}}} is not set; give it in `env`")
    raise ValueError(str(UnknownNameError("variable", piece.name, env)))


class _Scanner:
    """Reads a line once, from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._words: list[Word] = []
        self._word: list[str | Slot] | None = None
        """The word that is being read; None between words."""

    def words(self) -> tuple[Word, ...]:
        """All words of the line."""
        while self._at < len(self._text):
            self._step(self._text[self._at])
        self._end_word()
        return tuple(self._words)

    def _step(self, letter: str) -> None:
        if letter in _BLANK:
            self._at += 1
            self._end_word()
        elif letter == "'":
            self._add(self._until_single_quote())
        elif letter == '"':
            self._double_quoted()
        elif letter == "\\":
            self._escaped()
        elif letter == "$":
            self._variable()
        else:
            self._bare(letter)

    def _bare(self, letter: str) -> None:
        """A letter outside of quotes that stands for itself."""
        if letter in "\n\r":
            raise ValueError("it has several lines, and only a shell runs those; put them into a script and run that")
        shell = _SHELL.match(self._text, self._at)
        if shell or (self._word is None and letter in "~#"):
            raise _for_a_shell(shell[0] if shell else letter)
        assignment = _ASSIGNMENT.match(self._text, self._at) if self._word is None and not self._words else None
        if assignment:
            raise ValueError(f"`{assignment[0]}` before the program is for a shell; put {assignment[1]} into `env`")
        self._at += 1
        self._add(letter)

    def _until_single_quote(self) -> str:
        end = self._text.find("'", self._at + 1)
        if end < 0:
            raise ValueError("a single quote is not closed")
        inside = self._text[self._at + 1 : end]
        self._at = end + 1
        return inside

    def _double_quoted(self) -> None:
        self._add("")
        self._at += 1
        while self._at < len(self._text):
            letter = self._text[self._at]
            if letter == '"':
                self._at += 1
                return
            self._inside_double_quotes(letter)
        raise ValueError("a double quote is not closed")

    def _inside_double_quotes(self, letter: str) -> None:
        following = self._text[self._at + 1 : self._at + 2]
        if letter == "$":
            self._variable()
        elif letter == "`":
            raise _for_a_shell(letter)
        elif letter == "\\" and following and following in _ESCAPED_IN_QUOTES:
            self._at += 2
            self._add(following)
        else:
            self._at += 1
            self._add(letter)

    def _escaped(self) -> None:
        """A backslash: the next letter stands for itself; at the end of a line, the line goes on."""
        if self._at + 1 >= len(self._text):
            raise ValueError("it ends with a backslash")
        following = self._text[self._at + 1]
        self._at += 2
        if following != "\n":
            self._add(following)

    def _variable(self) -> None:
        found = _VARIABLE.match(self._text, self._at)
        if found is None:
            if self._text.startswith("$(", self._at):
                raise _for_a_shell("$(")
            raise ValueError("after `$` only ${NAME} is understood; write '$' in single quotes to mean the letter")
        self._at = found.end()
        self._add(Slot(found[1]))

    def _add(self, piece: str | Slot) -> None:
        self._word = [*(self._word or ()), piece] if isinstance(piece, Slot) else _joined(self._word or [], piece)

    def _end_word(self) -> None:
        if self._word is not None:
            self._words.append(tuple(self._word))
            self._word = None


def _joined(word: list[str | Slot], text: str) -> list[str | Slot]:
    """The word with the text at its end, in one piece with text that is there already."""
    if word and isinstance(word[-1], str):
        word[-1] += text
        return word
    return [*word, text]


def _for_a_shell(syntax: str) -> ValueError:
    return ValueError(
        f"{syntax!r} is for a shell, and no shell sees a command; put it into a script and run that, or quote it"
    )
