"""Throughput tables in files: Poise's CSV, Gavel's JSON (told apart by content), and the table that Poise ships.

A CSV table names its reference GPU type in a comment above the header, `# reference: v100`. A row is a job alone or, with
the `with_*` columns filled in, two jobs on the same GPUs. docs/reference/throughput-tables.md describes the format.

Every error names file, line and field, and what was expected there. Read in three parts: `Line`, the
cells of one line of CSV with their place; Gavel's tables; tables of ours.
"""

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple, NoReturn

from poise.scheduler.model.errors import ThroughputError, Where
from poise.scheduler.model.speed import Locality
from poise.scheduler.throughput.measurements import Alone, JobClass, Throughputs, Together, same_model

__all__ = ["JobClass", "Throughputs", "read_throughputs", "shipped"]

LEAST_RATE, MOST_RATE = 1e-9, 1e15
MOST_GPUS = 1_000_000
RATE = f"0 or a number from {LEAST_RATE:g} to {MOST_RATE:g}"
_LEVELS = {level.name.lower(): level for level in Locality}


def is_rate(rate: float) -> bool:
    """Whether this can be a speed: 0, or within bounds so that products do not overflow."""
    return rate == 0 or LEAST_RATE <= rate <= MOST_RATE


def shown(value: object) -> str:
    """A value for an error message: on one line, and not too long to read."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True, slots=True)
class Line:
    """The cells of one line of CSV, by column. A column that the file does not have reads as empty."""

    file: str
    number: int
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """The cell without surrounding spaces."""
        return self.cells.get(column, "")

    def refuse(self, column: str, expected: str) -> NoReturn:
        """Raise the error that names this cell and what was expected in it."""
        got = shown(self.text(column)) if self.text(column) else "nothing"
        raise ThroughputError(f"{Where(self.file, self.number, column)}: expected {expected}, got {got}")

    def count(self, column: str, most: int = MOST_GPUS) -> int:
        """A whole number of at least 1."""
        text = self.text(column)
        number = int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else 0
        if not 1 <= number <= most:
            self.refuse(column, f"a whole number from 1 to {most:,}")
        return number

    def number_above_zero(self, column: str) -> float:
        """A finite number above 0."""
        number = self._float(column)
        if not (math.isfinite(number) and number > 0):
            self.refuse(column, "a finite number above 0")
        return number

    def rate(self, column: str) -> float:
        """Steps per second, >= 0."""
        rate = self._float(column)
        if not is_rate(rate):
            self.refuse(column, f"steps per second: {RATE}")
        return abs(rate)

    def locality(self, column: str) -> Locality:
        """One of packed, rack, cluster."""
        level = _LEVELS.get(self.text(column).lower())
        if level is None:
            self.refuse(column, f"one of {', '.join(_LEVELS)}")
        return level

    def _float(self, column: str) -> float:
        text = self.text(column)
        try:
            return math.nan if "_" in text else float(text)
        except ValueError:
            return math.nan


def lines(text: str, file: str, required: Sequence[str], optional: Sequence[str] = ()) -> Iterator[Line]:
    """The lines below the header. Comments (`#`) and empty lines are skipped; columns may come in any order."""
    # Comments become empty lines, so that the lines after them keep their numbers.
    source = ("\n" if line.startswith("#") else line for line in io.StringIO(text, newline=""))
    reader = csv.reader(source, strict=True)
    header: list[str] | None = None
    try:
        for cells in reader:
            stripped = [cell.strip() for cell in cells]
            if not any(stripped):
                continue
            if header is None:
                header = _header(stripped, Where(file, reader.line_num, "header"), required, optional)
            elif len(stripped) != len(header):
                where = Where(file, reader.line_num)
                raise ThroughputError(f"{where}: expected {len(header)} fields as in the header, got {len(stripped)}")
            else:
                yield Line(file, reader.line_num, dict(zip(header, stripped, strict=True)))
    except csv.Error as error:
        raise ThroughputError(f"{Where(file, reader.line_num)}: expected a line of CSV: {error}") from None
    if header is None:
        raise ThroughputError(f"{Where(file)}: expected a header {','.join(required)}, got an empty file")


def _header(names: list[str], where: Where, required: Sequence[str], optional: Sequence[str]) -> list[str]:
    header = [name.lower() for name in names]
    missing = [name for name in required if name not in header]
    if missing:
        raise ThroughputError(f"{where}: expected the column {missing[0]!r}, got {shown(','.join(names))}")
    for index, name in enumerate(header):
        if name not in (*required, *optional):
            raise ThroughputError(f"{where}: unknown column {shown(name)}; known: {', '.join((*required, *optional))}")
        if name in header[:index]:
            raise ThroughputError(f"{where}: the column {name!r} stands there twice")
    return header


# Gavel's JSON
#
# `{type: {"('Model (batch size N)', gang)": {"null": steps/s alone, "('Other', gang)": [mine, the other's], …}}}`
#
# A type `T_unconsolidated` holds the speeds on type T of gangs that are spread over more nodes than they need. The table
# does not say how far, so the value is used both within a rack and across racks. 0 means "does not fit, or was not
# measured": such a job does not run there. Pairs of unequal gangs, and of spread gangs, have no place in our tables and are
# left out.

_GAVEL_REFERENCE = "v100"
_SPREAD = "_unconsolidated"
_KEY = re.compile(r"""\((['"])(?P<model>[^'"]+?)(?: \(batch size (?P<batch>[0-9]{1,15})\))?\1, (?P<gpus>[0-9]{1,7})\)""")


class _Gang(NamedTuple):
    job: JobClass
    gpus: int


def parse_gavel(text: str, file: str, skews: Mapping[str, float]) -> Throughputs:
    """Read Gavel's JSON. The reference is v100, or the first type of the file if it has no v100."""
    try:
        loaded: object = json.loads(text)
    except json.JSONDecodeError as error:
        raise ThroughputError(f"{Where(file, error.lineno)}: expected JSON as Gavel writes it: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise ThroughputError(f"{Where(file)}: expected JSON as Gavel writes it: {shown(str(error))}") from None
    alone: list[Alone] = []
    together: list[Together] = []
    for gpu_type, classes in _object(loaded, Where(file), "GPU types").items():
        where = Where(file, field=gpu_type)
        name = gpu_type.removesuffix(_SPREAD).lower()
        locality = Locality.PACKED if gpu_type == gpu_type.removesuffix(_SPREAD) else Locality.RACK
        for key, speeds in _object(classes, where, "job classes").items():
            job, gpus = _gang(key, where)
            place = Where(file, field=f"{gpu_type} {key}")
            for other_key, value in _object(speeds, place, "speeds").items():
                if other_key == "null":
                    alone.append(Alone(job, name, gpus, locality, _rate(value, place)))
                elif locality is Locality.PACKED and (other := _gang(other_key, place)).gpus == gpus:
                    if not isinstance(value, list) or len(value) != 2:
                        raise ThroughputError(f"{place}: expected two speeds of a pair, got {shown(value)}")
                    rates = _rate(value[0], place), _rate(value[1], place)
                    together.append(Together(job, other.job, name, gpus, rates))
    if not alone:
        raise ThroughputError(f"{Where(file)}: expected the speed of at least one job alone (`null`), got none")
    measured = {each.gpu_type for each in alone}
    reference = _GAVEL_REFERENCE if _GAVEL_REFERENCE in measured else alone[0].gpu_type
    return Throughputs.of(Path(file).name, reference, alone, together, skews)


def _object(value: object, where: Where, of: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ThroughputError(f"{where}: expected an object of {of}, got {shown(value)}")
    return value


def _gang(key: str, where: Where) -> _Gang:
    gang = _parsed(key)
    if gang is None:
        raise ThroughputError(f"{where}: expected a key like \"('A3C (batch size 4)', 1)\", got {shown(key)}")
    return gang


@lru_cache(maxsize=1024)
def _parsed(key: str) -> _Gang | None:
    """The class and gang that a key names; None if it names none. Few keys recur thousands of times, hence the cache."""
    found = _KEY.fullmatch(key)
    if found is None or not same_model(found["model"]):
        return None
    gpus, batch_size = int(found["gpus"]), int(found["batch"]) if found["batch"] else None
    return _Gang(JobClass(found["model"], batch_size), gpus) if 1 <= gpus <= MOST_GPUS and batch_size != 0 else None


def _rate(value: object, where: Where) -> float:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not is_rate(number):
        raise ThroughputError(f"{where}: expected steps per second: {RATE}, got {shown(value)}")
    return abs(float(number))


# Tables of ours, and the shipped one

MOST_BYTES = 32 * 1024 * 1024
_REQUIRED = ("model", "batch_size", "gpu_type", "gpus", "locality", "steps_per_second")
_OPTIONAL = ("with_model", "with_batch_size", "with_steps_per_second", "source")
_MODEL_COLUMNS = ("model", "largest_tensor_mb", "size_mb", "source")
_MOST_BATCH = 10**15
_MB = 1 << 20
_REFERENCE = re.compile(r"#\s*reference\s*:\s*(\S+)\s*")
_GPU_TYPE = re.compile(r"[a-z][\w.-]*", re.ASCII)


@cache
def shipped() -> Throughputs:
    """The table that comes with Poise. Every row says where its number is from; the reference type is v100."""
    data = files("poise.scheduler.throughput") / "data" / "throughputs.csv"
    return _parse(data.read_text(encoding="utf-8"), "throughputs.csv", "shipped")


def read_throughputs(path: str | Path) -> Throughputs:
    """Read a table from a file of ours or of Gavel's. Raises ThroughputError for anything else."""
    try:
        with Path(path).open("rb") as source:
            raw = source.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ThroughputError(f"{path}: cannot read the throughput table: {reason}") from None
    if len(raw) > MOST_BYTES:
        raise ThroughputError(f"{path}: expected a throughput table of at most {MOST_BYTES >> 20} MB, got more")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = Where(str(path), raw.count(b"\n", 0, error.start) + 1)
        raise ThroughputError(f"{where}: expected UTF-8 text, got the byte 0x{raw[error.start]:02x}") from None
    if text.lstrip().startswith("{"):
        skews, sizes = _models()
        return parse_gavel(text, str(path), skews).with_sizes(sizes)
    return _parse(text, str(path), Path(path).name)


def _parse(text: str, file: str, name: str) -> Throughputs:
    reference = _reference(text, file)
    alone: list[Alone] = []
    together: list[Together] = []
    rows = list(lines(text, file, _REQUIRED, _OPTIONAL))
    for line in rows:
        if line.text("with_model"):
            together.append(_together(line))
        else:
            alone.append(_alone(line))
    # Two rows that answer one question are a mistake of the author, even if they agree. Pairs have no order.
    seen: dict[tuple[object, ...], int] = {}
    for line in rows:
        named = [prefix for prefix in ("", "with_") if line.text(f"{prefix}model")]
        jobs = [(same_model(line.text(f"{each}model")), line.text(f"{each}batch_size").lstrip("0")) for each in named]
        question = (*sorted(jobs), _gpu_type(line), line.count("gpus"), line.locality("locality"))
        earlier = seen.setdefault(question, line.number)
        if earlier != line.number:
            line.refuse("model", f"one row per measurement (line {earlier} has this one already)")
    if not alone:
        raise ThroughputError(f"{Where(file)}: expected at least one row of a job alone, got none")
    skews, sizes = _models()
    table = Throughputs.of(name, reference, alone, together, skews).with_sizes(sizes)
    if reference not in table.gpu_types:
        known = ", ".join(table.gpu_types)
        raise ThroughputError(f"{Where(file)}: reference: expected a type with a row ({known}), got {reference!r}")
    return table


def _reference(text: str, file: str) -> str:
    """The reference type, which a comment above the header names."""
    got = "nothing"
    for number, line in enumerate(io.StringIO(text), start=1):
        found = _REFERENCE.fullmatch(line)
        if found:
            return found[1].lower()
        if line.strip() and not line.startswith("#"):
            got = f"{shown(line.strip())} in line {number}"
            break
    expected = "Gavel's JSON, or above the header a line `# reference: GPU_TYPE`"
    raise ThroughputError(f"{Where(file)}: expected {expected}, got {got}")


def _alone(line: Line) -> Alone:
    for column in ("with_batch_size", "with_steps_per_second"):
        if line.text(column):
            line.refuse(column, "nothing where with_model is empty")
    job = _job(line, "model", "batch_size")
    gpu_type, gpus = _gpu_type(line), line.count("gpus")
    return Alone(job, gpu_type, gpus, line.locality("locality"), line.rate("steps_per_second"))


def _together(line: Line) -> Together:
    if line.locality("locality") is not Locality.PACKED:
        line.refuse("locality", "packed for a pair")
    first, second = _job(line, "model", "batch_size"), _job(line, "with_model", "with_batch_size")
    rates = line.rate("steps_per_second"), line.rate("with_steps_per_second")
    return Together(first, second, _gpu_type(line), line.count("gpus"), rates)


def _job(line: Line, model: str, batch_size: str) -> JobClass:
    if not same_model(line.text(model)):
        line.refuse(model, "the name of a model")
    return JobClass(line.text(model), line.count(batch_size, _MOST_BATCH) if line.text(batch_size) else None)


def _gpu_type(line: Line) -> str:
    gpu_type = line.text("gpu_type").lower()
    if not _GPU_TYPE.fullmatch(gpu_type):
        line.refuse("gpu_type", "a GPU type such as v100")
    return gpu_type


@cache
def _models() -> tuple[dict[str, float], dict[str, float]]:
    """By model whose architecture is public: size of its largest tensor ÷ its size, and bytes of its parameters."""
    text = (files("poise.scheduler.throughput") / "data" / "models.csv").read_text(encoding="utf-8")
    skews, sizes = {}, {}
    for line in lines(text, "models.csv", _MODEL_COLUMNS):
        model, size = line.text("model"), line.number_above_zero("size_mb")
        skews[model], sizes[model] = line.number_above_zero("largest_tensor_mb") / size, size * _MB
    return skews, sizes
