"""Single values of a job file: counts, durations, sizes, words. What they may be beyond their form the request checks."""

import re
from dataclasses import dataclass
from pathlib import Path

from poise.model.errors import RequestError, Where
from poise.model.units import parse_seconds
from poise.wire.jobfile_tree import Items, Keys, Scalar, Tree, refusal
from poise.wire.request import MOST_GPUS

_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]i?B|B)?")
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
_COUNT = re.compile(r"([0-9]+)(?:\.\.([0-9]+))?")
_WHOLE = re.compile(r"[-+]?[0-9]{1,18}")
_NONE = ("none", "no", "false", "off")
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Gang:
    """GPUs that are asked for. least and most are there where the job is elastic, and `gpus` is the most then."""

    gpus: int
    least: int | None = None
    most: int | None = None

    def fields(self) -> dict[str, int | None]:
        """As fields of a request."""
        return {"gpus": self.gpus, "min_gpus": self.least, "max_gpus": self.most}


def parse_gang(text: str) -> Gang:
    """A gang from `4`, an elastic one from `1..4`; raises ValueError on anything else."""
    match = _COUNT.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a number of GPUs such as 4, or 1..4 for an elastic job, got {text!r}")
    if any(is_too_many(each) for each in match.groups() if each):
        raise ValueError(f"expected at most {MOST_GPUS:,} GPUs, got {text[:40]!r}")
    if match[2] is None:
        return Gang(int(match[1].lstrip("0") or "0"))
    least, most = int(match[1]), int(match[2])
    if not 1 <= least <= most:
        raise ValueError(f"expected the lower number first and at least 1, got {text!r}")
    return Gang(most, least, most)


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
        raise refusal(where, str(error)) from None


def is_none(tree: Tree) -> bool:
    """The word that says that there is to be none."""
    return isinstance(tree, Scalar) and not tree.is_null and tree.text.lower() in _NONE


def scalar(tree: Tree, where: Where) -> Scalar:
    """A single value that is there."""
    if not isinstance(tree, Scalar):
        raise refusal(where, f"expected a single value, got {'a list' if isinstance(tree, Items) else 'keys'}")
    if tree.is_null:
        raise refusal(where, "has no value; give one, or leave the key out")
    return tree


def text(tree: Tree, where: Where) -> str:
    """The value as it was written."""
    return scalar(tree, where).text


def whole(tree: Tree, where: Where) -> int:
    """A whole number."""
    found = text(tree, where)
    if not _WHOLE.fullmatch(found):
        raise refusal(where, f"expected a whole number, got {found[:40]!r}")
    return int(found)


def number(tree: Tree, where: Where) -> float:
    """A number."""
    found = text(tree, where)
    try:
        return float(found)
    except ValueError:
        raise refusal(where, f"expected a number, got {found[:40]!r}") from None


def seconds(tree: Tree, where: Where) -> float:
    """A duration in seconds."""
    try:
        return parse_seconds(text(tree, where))
    except ValueError as error:
        raise refusal(where, str(error)) from None


def whole_seconds(tree: Tree, where: Where) -> int:
    """A duration in whole seconds."""
    return round(seconds(tree, where))


def size(tree: Tree, where: Where) -> int:
    """Bytes."""
    try:
        return parse_bytes(text(tree, where))
    except ValueError as error:
        raise refusal(where, str(error)) from None


def truth(tree: Tree, where: Where) -> bool:
    """Yes or no."""
    found = _WORDS.get(text(tree, where).lower())
    if found is None:
        raise refusal(where, f"expected true or false, got {text(tree, where)[:40]!r}")
    return found


def gang(tree: Tree, where: Where) -> Gang:
    """A number of GPUs, or a range of it."""
    try:
        return parse_gang(text(tree, where))
    except ValueError as error:
        raise refusal(where, str(error)) from None


def items(tree: Tree, where: Where) -> tuple[Tree, ...]:
    """A list, or the single value that stands for a list of one."""
    if isinstance(tree, Keys):
        raise refusal(where, "expected a list, got keys")
    return tree.items if isinstance(tree, Items) else (scalar(tree, where),)


def keys(tree: Tree, where: Where) -> Keys:
    """A mapping."""
    if not isinstance(tree, Keys):
        got = "a list" if isinstance(tree, Items) else f"a single value, {scalar(tree, where).text[:40]!r}"
        raise refusal(where, f"expected keys with values, got {got}")
    return tree
