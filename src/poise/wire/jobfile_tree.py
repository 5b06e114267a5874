"""A YAML document as a tree that knows its lines, and in which every value is still as its author wrote it.

Nothing is built from tags, keys do not repeat, and size, depth and the number of values are bounded, those that aliases
repeat included: a file of a few lines cannot become a document of a billion values.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import yaml

from poise.model.errors import RequestError, UnknownNameError, Where

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


def refusal(where: Where, problem: str) -> RequestError:
    """The error of a file: its name, the line, the key, and what is wrong there."""
    return RequestError(f"{where}: {problem}")


def parse_tree(text: str, file: str) -> Tree:
    """The one document that this text is."""
    if len(text) > MOST_BYTES:
        raise refusal(Where(file), f"larger than {MOST_BYTES >> 10} KiB; that is no job file")
    try:
        node: Any = yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        problem = error.problem or ""
        whole = f"{error.context or ''} {problem}" if problem.startswith("but ") or not problem else problem
        raise refusal(Where(file, line), f"not YAML: {whole.strip()}") from None
    except yaml.reader.ReaderError as error:
        raise refusal(Where(file), unfit(error)) from None
    except yaml.YAMLError as error:
        raise refusal(Where(file), f"not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise refusal(Where(file), "nested too deeply; that is no job file") from None
    if node is None:
        raise refusal(Where(file), "is empty; expected keys such as `run` and `gpus`")
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
            raise refusal(place, str(UnknownNameError("key", key, known)))


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
            raise refusal(Where(self._file, line), f"more than {MOST_VALUES:,} values, aliases counted; that is no job file")
        if depth > MOST_DEPTH:
            raise refusal(Where(self._file, line), "nested too deeply; that is no job file")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, line)
        if node.tag not in _LISTS:
            raise refusal(Where(self._file, line), f"the tag {node.tag!r} has no meaning here")
        if isinstance(node, yaml.MappingNode):
            return self._keys(node, line, depth)
        return Items(tuple(self.tree(each, depth + 1) for each in node.value), line)

    def _scalar(self, node: yaml.ScalarNode, line: int) -> Scalar:
        if node.tag not in _PLAIN:
            raise refusal(Where(self._file, line), f"the tag {node.tag!r} has no meaning here")
        return Scalar(node.value, line, is_null=node.tag == _NULL)

    def _keys(self, node: yaml.MappingNode, line: int, depth: int) -> Keys:
        entries: dict[str, Tree] = {}
        lines: dict[str, int] = {}
        for key, value in node.value:
            at = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise refusal(Where(self._file, at), "a key must be a word")
            if key.value in entries:
                raise refusal(Where(self._file, at), f"the key {key.value!r} stands in line {lines[key.value]} already")
            entries[key.value], lines[key.value] = self.tree(value, depth + 1), at
        return Keys(entries, lines, line)
