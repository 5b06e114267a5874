"""A YAML document as a tree that knows its lines, and in which every value is still as its author wrote it.

Nothing is built from tags, keys do not repeat, and size, depth and the number of values are bounded, those that aliases
repeat included: a file of a few lines cannot become a document of a billion values.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from poise.scheduler.model.errors import RequestError, UnknownNameError, Where
from poise.scheduler.model.units import parse_seconds
from poise.service.wire.request import MOST_GPUS

MOST_BYTES = 256 << 10
MOST_VALUES = 20_000
MOST_DEPTH = 8

_PLAIN = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "timestamp", "value")}
_NULL = "tag:yaml.org,2002:null"
_LISTS = {"tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"}


@dataclass(frozen=True, slots=True)
class Scalar:
    """A single value: the text that stands there, without quotes. Lines count from 1."""

    text: str
    line: int
    is_null: bool = False


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    items: "tuple[Tree, ...]"
    line: int


@dataclass(frozen=True, slots=True)
class Keys:
    """A mapping, in the order in which it was written; `lines` are those of the keys."""

    entries: "dict[str, Tree]"
    lines: dict[str, int]
    line: int


Tree = Scalar | Items | Keys


def syntax_refusal(where: Where, problem: str) -> RequestError:
    """The error of a file: its name, the line, the key, and what is wrong there."""
    return RequestError(f"{where}: {problem}")


def parse_tree(text: str, file: str) -> Tree:
    """The one document that this text is."""
    if len(text) > MOST_BYTES:
        raise syntax_refusal(Where(file), f"larger than {MOST_BYTES >> 10} KiB; that is no job file")
    try:
        node: Any = yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        problem = error.problem or ""
        whole = f"{error.context or ''} {problem}" if problem.startswith("but ") or not problem else problem
        raise syntax_refusal(Where(file, line), f"not YAML: {whole.strip()}") from None
    except yaml.reader.ReaderError as error:
        raise syntax_refusal(Where(file), unfit(error)) from None
    except yaml.YAMLError as error:
        raise syntax_refusal(Where(file), f"not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise syntax_refusal(Where(file), "nested too deeply; that is no job file") from None
    if node is None:
        raise syntax_refusal(Where(file), "is empty; expected keys such as `run` and `gpus`")
    return _Walk(file).tree(node, 0)


def unfit(error: yaml.reader.ReaderError) -> str:
    """What to say of text that holds a character which YAML does not allow."""
    code = error.character if isinstance(error.character, int) else 0
    # Bytes of standard input that are not UTF-8 come as surrogates.
    return (
        "not UTF-8 text"
        if 0xD800 <= code <= 0xDFFF
        else f"not YAML: it holds the control character U+{code:04X}; take it out"
    )


def check_keys(keys: Keys, known: Iterable[str], where: Where) -> None:
    """Refuse a key that is not known, with the nearest that is."""
    for key in keys.entries:
        if key not in known:
            place = Where(where.file, keys.lines[key], where.field)
            raise syntax_refusal(place, str(UnknownNameError("key", key, known)))


class _Walk:
    """From nodes to trees, counting."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._left = MOST_VALUES

    def tree(self, node: yaml.Node, depth: int) -> Tree:
        """A node and all that is below it."""
        line = node.start_mark.line + 1
        self._left -= 1
        if self._left < 0:
            raise syntax_refusal(
                Where(self._file, line), f"more than {MOST_VALUES:,} values, aliases counted; that is no job file"
            )
        if depth > MOST_DEPTH:
            raise syntax_refusal(Where(self._file, line), "nested too deeply; that is no job file")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, line)
        if node.tag not in _LISTS:
            raise syntax_refusal(Where(self._file, line), f"the tag {node.tag!r} has no meaning here")
        if isinstance(node, yaml.MappingNode):
            return self._keys(node, line, depth)
        return Items(tuple(self.tree(each, depth + 1) for each in node.value), line)

    def _scalar(self, node: yaml.ScalarNode, line: int) -> Scalar:
        if node.tag not in _PLAIN:
            raise syntax_refusal(Where(self._file, line), f"the tag {node.tag!r} has no meaning here")
        return Scalar(node.value, line, is_null=node.tag == _NULL)

    def _keys(self, node: yaml.MappingNode, line: int, depth: int) -> Keys:
        entries: dict[str, Tree] = {}
        lines: dict[str, int] = {}
        for key, value in node.value:
            at = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise syntax_refusal(Where(self._file, at), "a key must be a word")
            if key.value in entries:
                raise syntax_refusal(
                    Where(self._file, at), f"the key {key.value!r} stands in line {lines[key.value]} already"
                )
            entries[key.value], lines[key.value] = self.tree(value, depth + 1), at
        return Keys(entries, lines, line)


# Single values of a job file: counts, durations, sizes, words. What they may be beyond their form the request checks.

_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]i?B|B)?")
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
_COUNT = re.compile(r"([0-9]+)(?:\.\.([0-9]+))?")
_WHOLE = re.compile(r"[-+]?[0-9]{1,18}")
_NONE = ("none", "no", "false", "off")
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class GangSpec:
    """GPUs that are asked for. least and most are there where the job is elastic, and `gpus` is the most then."""

    gpus: int
    least: int | None = None
    most: int | None = None

    def fields(self) -> dict[str, int | None]:
        """As fields of a request."""
        return {"gpus": self.gpus, "min_gpus": self.least, "max_gpus": self.most}


def parse_gang(text: str) -> GangSpec:
    """A gang from `4`, an elastic one from `1..4`; raises ValueError on anything else."""
    match = _COUNT.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a number of GPUs such as 4, or 1..4 for an elastic job, got {text!r}")
    if any(is_too_many(each) for each in match.groups() if each):
        raise ValueError(f"expected at most {MOST_GPUS:,} GPUs, got {text[:40]!r}")
    if match[2] is None:
        return GangSpec(int(match[1].lstrip("0") or "0"))
    least, most = int(match[1]), int(match[2])
    if not 1 <= least <= most:
        raise ValueError(f"expected the lower number first and at least 1, got {text!r}")
    return GangSpec(most, least, most)


def is_too_many(digits: str) -> bool:
    """Whether a number is of more GPUs than a job may have; one of very many digits is not worked out."""
    digits = digits.lstrip("0") or "0"
    return len(digits) > len(str(MOST_GPUS)) or int(digits) > MOST_GPUS


def parse_bytes(text: str) -> int:
    """Bytes from `8GB` (8·10⁹), `8GiB` (8·2³⁰) or a plain number; raises ValueError on anything else."""
    match = _BYTES.fullmatch(text)
    if match is None or len(text) > 40:
        raise ValueError(f"expected a size such as 8GB or 512MiB, got {text[:40]!r}")
    unit = (match[2] or "B").upper()
    base = 1024.0 if "I" in unit else 1000.0
    return round(float(match[1]) * base ** _POWERS.get(unit[0], 0))


def here() -> Path:
    """The current folder."""
    try:
        return Path.cwd()
    except OSError:
        raise RequestError("the current folder is not there any more; go to another one") from None


def absolute(path: Path) -> Path:
    """The path from the root; a relative one begins at the current folder."""
    return path if path.is_absolute() else here() / path


def parse_folder(text: str, base: Path) -> str:
    """A path that begins at `base`, unless it begins at the root or at a home (`~`, `~ann`); ValueError: no such home."""
    try:
        return str(absolute(base / Path(text).expanduser()))
    except RuntimeError:
        raise ValueError(f"nobody's home is known as {text[:40]!r}") from None


def folder(tree: Tree, where: Where, base: Path) -> str:
    """An absolute path."""
    try:
        return parse_folder(text(tree, where), base)
    except ValueError as error:
        raise syntax_refusal(where, str(error)) from None


def is_none(tree: Tree) -> bool:
    """The word that says that there is to be none."""
    return isinstance(tree, Scalar) and not tree.is_null and tree.text.lower() in _NONE


def scalar(tree: Tree, where: Where) -> Scalar:
    """A single value that is there."""
    if not isinstance(tree, Scalar):
        raise syntax_refusal(where, f"expected a single value, got {'a list' if isinstance(tree, Items) else 'keys'}")
    if tree.is_null:
        raise syntax_refusal(where, "has no value; give one, or leave the key out")
    return tree


def text(tree: Tree, where: Where) -> str:
    """The value as it was written."""
    return scalar(tree, where).text


def whole(tree: Tree, where: Where) -> int:
    """A whole number."""
    found = text(tree, where)
    if not _WHOLE.fullmatch(found):
        raise syntax_refusal(where, f"expected a whole number, got {found[:40]!r}")
    return int(found)


def number(tree: Tree, where: Where) -> float:
    """A number."""
    found = text(tree, where)
    try:
        return float(found)
    except ValueError:
        raise syntax_refusal(where, f"expected a number, got {found[:40]!r}") from None


def seconds(tree: Tree, where: Where) -> float:
    """A duration in seconds."""
    try:
        return parse_seconds(text(tree, where))
    except ValueError as error:
        raise syntax_refusal(where, str(error)) from None


def whole_seconds(tree: Tree, where: Where) -> int:
    """A duration in whole seconds."""
    return round(seconds(tree, where))


def size(tree: Tree, where: Where) -> int:
    """Bytes."""
    try:
        return parse_bytes(text(tree, where))
    except ValueError as error:
        raise syntax_refusal(where, str(error)) from None


def truth(tree: Tree, where: Where) -> bool:
    """Yes or no."""
    found = _WORDS.get(text(tree, where).lower())
    if found is None:
        raise syntax_refusal(where, f"expected true or false, got {text(tree, where)[:40]!r}")
    return found


def gang(tree: Tree, where: Where) -> GangSpec:
    """A number of GPUs, or a range of it."""
    try:
        return parse_gang(text(tree, where))
    except ValueError as error:
        raise syntax_refusal(where, str(error)) from None


def items(tree: Tree, where: Where) -> tuple[Tree, ...]:
    """A list, or the single value that stands for a list of one."""
    if isinstance(tree, Keys):
        raise syntax_refusal(where, "expected a list, got keys")
    return tree.items if isinstance(tree, Items) else (scalar(tree, where),)


def keys(tree: Tree, where: Where) -> Keys:
    """A mapping."""
    if not isinstance(tree, Keys):
        got = "a list" if isinstance(tree, Items) else f"a single value, {scalar(tree, where).text[:40]!r}"
        raise syntax_refusal(where, f"expected keys with values, got {got}")
    return tree


# Commands that people write in one line, as the argument lists that are run. No shell is involved, ever.
#
# Words are split and quoted as in a shell, and `${NAME}` stands for a variable of the job, replaced here, once, and never
# split again. Whatever else only a shell would understand is an error that says so: passed on as plain text it would do
# something else than its author meant.

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
