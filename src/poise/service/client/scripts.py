"""What a script that is submitted does by itself, as far as its text says: join a process group of PyTorch.

Such a script expects one process per GPU, as a launcher starts them. Where one is in the command (torchrun, `python -m
torch.distributed.run`), or the script starts processes itself (`torch.multiprocessing.spawn`), that is seen to. Nothing of
the script is run, and one that cannot be read says nothing.
"""

import ast
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache

JOINS = "init_process_group"
STARTS = frozenset({"spawn", "start_processes", "elastic_launch", "Process", "Popen"})
MOST_BYTES = 1 << 20  # of a script that is read
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_WITH_VALUE = ("-W", "-X")  # options of Python that take the next word
_TEXT = re.compile(rf"(?m)^[^#\n]*\b{JOINS}\s*\(")


def joins_process_group(command: Sequence[str], folder: str | None) -> bool:
    """Whether a command runs a Python script that joins a process group and starts no processes for it.

    folder   in which the command runs
    """
    script = _script_of(command)
    if script is None:
        return False
    path = os.path.join(folder or "/", script)
    try:
        if not os.path.isfile(path):  # reading a pipe would wait
            return False
        with open(path, "rb") as file:
            text = file.read(MOST_BYTES + 1)
    except (OSError, ValueError):
        return False
    return JOINS.encode() in text and len(text) <= MOST_BYTES and _joins(text)


def _script_of(command: Sequence[str]) -> str | None:
    """The script of `python [OPTIONS] FILE ...`, or of a command that is one; None: there is none."""
    program, *words = command
    if program.endswith(".py"):
        return program
    if not _PYTHON.fullmatch(os.path.basename(program)):
        return None
    rest = iter(words)
    for word in rest:
        if word in _WITH_VALUE:
            next(rest, None)
        elif not word.startswith("-"):
            return word
        elif re.fullmatch(r"-|-[A-Za-z]*[cm].*", word):  # standard input, a program in the command, a module
            return None
    return None


@lru_cache(maxsize=4)
def _joins(text: bytes) -> bool:  # of all jobs of a sweep it is the same
    try:
        with warnings.catch_warnings(action="ignore"):
            called = set(_called(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # of a Python that is newer, perhaps
        return _TEXT.search(text.decode(errors="replace")) is not None
    return JOINS in called and not called & STARTS


def _called(tree: ast.AST) -> Iterator[str]:
    """Names of all functions that are called somewhere, without what they belong to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            yield node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
