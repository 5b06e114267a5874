"""Files of variables, a line NAME=VALUE each, as many tools write them (`.env`).

    # what the job needs
    export DATA=/data/imagenet
    LR=0.1                      # all behind a blank and # is a comment
    NOTE="two words, a tab: \\t"
    RAW='as it is: \\t #'

A value goes to the end of its line, without blanks at both ends. Nothing is put in place of `$NAME`. Inside double quotes
`\\n`, `\\t`, `\\"`, `\\\\` and `\\$` stand for one character, inside single ones nothing does.
"""

import re
from pathlib import Path

from poise.model.errors import Where
from poise.wire.jobfile import read_text
from poise.wire.jobfile_tree import refusal
from poise.wire.request import VARIABLE

_LINE = re.compile(r"(?:export\s+)?(?P<name>[^\s=]*)\s*=\s*(?P<value>.*)")
_QUOTED = re.compile(r"""(?:'(?P<raw>[^']*)'|"(?P<read>(?:[^"\\]|\\.)*)")\s*(?:#.*)?""")
_COMMENT = re.compile(r"(?:^|\s)#.*")
_ESCAPE = re.compile(r"\\(.)")
_MEANT = {"n": "\n", "t": "\t"}
_SHOWN = 40


def read_env_file(path: Path) -> dict[str, str]:
    """The variables of a file, in order; RequestError names the line that is wrong."""
    found: dict[str, str] = {}
    for number, line in enumerate(read_text(path, "file of variables").split("\n"), start=1):
        text = line.strip()
        if text and not text.startswith("#"):
            name, value = _variable(text, Where(str(path), number))
            found[name] = value
    return found


def _variable(text: str, where: Where) -> tuple[str, str]:
    match = _LINE.fullmatch(text)
    if match is None:
        raise refusal(where, f"expected NAME=VALUE, got {text[:_SHOWN]!r}")
    name = match["name"]
    if not re.fullmatch(VARIABLE, name):
        raise refusal(where, f"expected a name of letters, digits and `_` before =, got {name[:_SHOWN]!r}")
    if name.startswith("POISE_"):
        raise refusal(where, f"{name}: names that begin with POISE_ are Poise's own")
    if "\x00" in text:
        raise refusal(where, f"{name}: a character in it cannot be passed on")
    return name, _value(name, match["value"], where)


def _value(name: str, text: str, where: Where) -> str:
    if text[:1] not in ("'", '"'):
        return _COMMENT.sub("", text).strip()
    quoted = _QUOTED.fullmatch(text)
    if quoted is None:
        problem = "the quote is not closed in this line" if text.count(text[0]) < 2 else "something follows the quoted value"
        raise refusal(where, f'{name}: {problem}; a value is one line, and \\" stands for a quote inside double quotes')
    if quoted["raw"] is not None:
        return quoted["raw"]
    return _ESCAPE.sub(lambda each: _MEANT.get(each[1], each[1]), quoted["read"])
