"""Throughput tables in files: our CSV, and by content Gavel's JSON; the table that Poise ships.

A table of ours names its reference GPU type in a comment above the header, `# reference: v100`. A row is a job alone,
or, with the `with_*` columns filled in, two jobs on the same GPUs. docs/reference/throughput-tables.md is the format.
"""

import io
import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path

from poise.model.errors import ThroughputError, Where
from poise.model.speed import Locality
from poise.throughput.gavel import parse_gavel
from poise.throughput.lines import Line, lines, shown
from poise.throughput.measured import Alone, JobClass, Throughputs, Together, same_model

__all__ = ["JobClass", "Throughputs", "read_throughputs", "shipped"]

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
    """The table that comes with Poise; every row says where its number is from. Reference: v100."""
    data = files("poise.throughput") / "data" / "throughputs.csv"
    return _parse(data.read_text(encoding="utf-8"), "throughputs.csv", "shipped")


def read_throughputs(path: str | Path) -> Throughputs:
    """A table from a file of ours or of Gavel's, told apart by content. Raises ThroughputError, in one line."""
    text = _text(path)
    if text.lstrip().startswith("{"):
        return parse_gavel(text, str(path), _skews()).with_sizes(_sizes())
    return _parse(text, str(path), Path(path).name)


def _text(path: str | Path) -> str:
    try:
        with Path(path).open("rb") as source:
            raw = source.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ThroughputError(f"{path}: cannot read the throughput table: {reason}") from None
    if len(raw) > MOST_BYTES:
        raise ThroughputError(f"{path}: expected a throughput table of at most {MOST_BYTES >> 20} MB, got more")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ThroughputError(
            f"{Where(str(path), line)}: expected UTF-8 text, got the byte 0x{raw[error.start]:02x}"
        ) from None


def _parse(text: str, file: str, name: str) -> Throughputs:
    reference = _reference(text, file)
    rows = list(lines(text, file, _REQUIRED, _OPTIONAL))
    alone = [_alone(line) for line in rows if not line.text("with_model")]
    together = [_together(line) for line in rows if line.text("with_model")]
    _refuse_duplicates(rows)
    if not alone:
        raise ThroughputError(f"{Where(file)}: expected at least one row of a job alone, got none")
    table = Throughputs.of(name, reference, alone, together, _skews()).with_sizes(_sizes())
    if reference not in table.gpu_types:
        known = ", ".join(table.gpu_types)
        raise ThroughputError(f"{Where(file)}: reference: expected a type with a row ({known}), got {reference!r}")
    return table


def _reference(text: str, file: str) -> str:
    """The type named by the comments above the header."""
    got = "nothing"
    for number, line in enumerate(io.StringIO(text), start=1):
        found = _REFERENCE.fullmatch(line)
        if found:
            return found[1].lower()
        if line.strip() and not line.startswith("#"):
            got = f"{shown(line.strip())} in line {number}"
            break
    raise ThroughputError(
        f"{Where(file)}: expected Gavel's JSON, or above the header a line `# reference: GPU_TYPE`, got {got}"
    )


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


def _refuse_duplicates(rows: Iterable[Line]) -> None:
    """Two rows of one question are a mistake of whoever wrote the table, even if they agree."""
    seen: dict[tuple[object, ...], int] = {}
    for line in rows:
        earlier = seen.setdefault(_question(line), line.number)
        if earlier != line.number:
            line.refuse("model", f"one row a measurement (line {earlier} has this one already)")


def _question(line: Line) -> tuple[object, ...]:
    """What a row answers; the same for a pair and the pair turned round."""
    jobs = [
        (same_model(line.text(f"{prefix}model")), line.text(f"{prefix}batch_size").lstrip("0"))
        for prefix in ("", "with_")
        if line.text(f"{prefix}model")
    ]
    return (*sorted(jobs), _gpu_type(line), line.count("gpus"), line.locality("locality"))


@cache
def _models() -> tuple[Line, ...]:
    """The models whose architecture is public."""
    text = (files("poise.throughput") / "data" / "models.csv").read_text(encoding="utf-8")
    return tuple(lines(text, "models.csv", _MODEL_COLUMNS))


@cache
def _skews() -> dict[str, float]:
    """Largest tensor ÷ model."""
    return {
        line.text("model"): line.number_above_zero("largest_tensor_mb") / line.number_above_zero("size_mb")
        for line in _models()
    }


@cache
def _sizes() -> dict[str, float]:
    """Bytes of the model's parameters."""
    return {line.text("model"): line.number_above_zero("size_mb") * _MB for line in _models()}
