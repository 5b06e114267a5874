"""The trace formats that can be read: name, summary, how the first bytes of a file give it away, and its reader."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from poise.lab.traces.formats import alibaba, gavel, helios, itp, philly, philly_csv, poise, shockwave, tiresias
from poise.lab.traces.parsing import TraceInput, split_header
from poise.lab.traces.schema import TraceJob
from poise.scheduler.model.errors import UnknownNameError

AUTO = "auto"
_KEY = re.compile(r'"(\w+)"\s*:')

Sniff = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Format:
    """One format.

    sniff   whether a text that starts like this has the format; no text has two formats
    notes   what the reader assumes of every such file
    """

    name: str
    summary: str
    sniff: Sniff
    read: Callable[[TraceInput], list[TraceJob]]
    notes: tuple[str, ...] = ()


def format_named(name: str) -> Format:
    """Return the format of this name; UnknownNameError names the nearest ones if there is none."""
    for known in FORMATS:
        if known.name == name:
            return known
    raise UnknownNameError("trace format", name, format_names())


def format_names() -> tuple[str, ...]:
    """Return everything that `--format` takes."""
    return (AUTO, *(known.name for known in FORMATS))


def recognise(head: bytes) -> Format | None:
    """Return the format of a file that starts with these bytes; None if it is none of ours."""
    text = head.decode(errors="replace").removeprefix("\ufeff").lstrip("\r\n")
    return next((known for known in FORMATS if known.sniff(text)), None)


def _first_line(text: str) -> str:
    return text.partition("\n")[0].rstrip("\r")


def _csv_with(*choices: Sequence[str]) -> Sniff:
    """Accept a CSV header that has all columns of one of these choices."""
    return lambda text: any(set(columns) <= set(split_header(_first_line(text))) for columns in choices)


def _tsv_of(widths: Sequence[int]) -> Sniff:
    """Accept a first line with one of these numbers of tab-separated cells."""
    return lambda text: _first_line(text).count("\t") + 1 in widths


def _is_philly(text: str) -> bool:
    return text.lstrip()[:1] in ("[", "{") and not set(_KEY.findall(text)).isdisjoint(philly.KEYS)


def _is_poise(text: str) -> bool:
    """Accept what has sure column names, so that a misspelt other one is named by the reader."""
    if text.lstrip()[:1] == "{":
        keys = set(_KEY.findall(_first_line(text)))
        return keys.isdisjoint(philly.KEYS) and not keys.isdisjoint(poise.REQUIRED)
    return len(set(split_header(_first_line(text))) & set(poise.REQUIRED)) >= 2


FORMATS = (
    Format("poise", "Poise's own: JSON lines, or CSV with the same columns", _is_poise, poise.read),
    Format("gavel", "Gavel: 10 tab-separated columns, or the older 7", _tsv_of(gavel.WIDTHS), gavel.read),
    Format("shockwave", "Shockwave: 12 tab-separated columns", _tsv_of(shockwave.WIDTHS), shockwave.read),
    Format("tiresias", "Tiresias and Muri: CSV", _csv_with(tiresias.COLUMNS), tiresias.read),
    Format(
        "philly",
        "Philly's job log, or what is derived from it: JSON",
        _is_philly,
        philly.read,
        ("a job's duration is the sum of the run times of its attempts",),
    ),
    Format(
        "philly-csv",
        "Philly's passed jobs, or durations and sizes alone: CSV",
        _csv_with(philly_csv.COLUMNS, philly_csv.ALONE),
        philly_csv.read,
    ),
    Format("itp", "Microsoft ITP clusters: CSV", _csv_with(itp.COLUMNS), itp.read),
    Format("helios", "Helios' log, as published or cut: CSV", _csv_with(helios.COLUMNS), helios.read),
    Format("alibaba", "Alibaba's GPU cluster v2023, list of pods: CSV", _csv_with(alibaba.COLUMNS), alibaba.read),
)
