"""The trace formats that can be read: name, summary, how the first bytes of a file give it away, and its reader."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from poise.lab.traces.formats import (
    alibaba,
    gavel,
    helios,
    itp,
    philly,
    philly_csv,
    poise,
    sacct,
    sacct_json,
    sacct_text,
    shockwave,
    tiresias,
)
from poise.lab.traces.parsing import Cells, TraceInput, csv_rows, split_header, tsv_rows
from poise.lab.traces.schema import TraceJob
from poise.scheduler.model.errors import UnknownNameError

AUTO = "auto"
_KEY = re.compile(r'"(\w+)"\s*:')

JobOf = Callable[[Cells, TraceInput], TraceJob | None]


@dataclass(frozen=True, slots=True)
class Format:
    """One format.

    sniff     whether a text that starts like this has the format; no text has two formats
    records   yields what a file holds, each with its line;  job_of: makes a job of each, None for what is left out
    notes     what the reader assumes of every such file
    """

    name: str
    summary: str
    sniff: Callable[[str], bool]
    records: Callable[[TraceInput], Iterable[tuple[int, Any]]]
    job_of: Callable[[Any, TraceInput], TraceJob | None]
    notes: tuple[str, ...] = ()

    def read(self, source: TraceInput) -> list[TraceJob]:
        """Return the jobs of a file of this format, in its order."""
        return source.jobs(self.records(source), self.job_of)


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


def _csv(name: str, summary: str, job_of: JobOf, *choices: Sequence[str]) -> Format:
    """A table whose header has all columns of one of these choices; its rows are read by the first that it has."""

    def sniff(text: str) -> bool:
        return any(set(columns) <= set(split_header(_first_line(text))) for columns in choices)

    return Format(name, summary, sniff, lambda source: csv_rows(source.lines(), source.file, *choices), job_of)


def _tsv(name: str, summary: str, job_of: JobOf, widths: Sequence[int]) -> Format:
    """A table without header, whose first line has one of these numbers of tab-separated cells."""

    def sniff(text: str) -> bool:
        return _first_line(text).count("\t") + 1 in widths

    return Format(name, summary, sniff, lambda source: tsv_rows(source.lines()), job_of)


def _is_poise(text: str) -> bool:
    """Accept what has sure column names, so that a misspelt other one is named by the reader."""
    if text.lstrip()[:1] == "{":
        keys = set(_KEY.findall(_first_line(text)))
        return keys.isdisjoint((*philly.KEYS, *sacct_json.KEYS)) and not keys.isdisjoint(poise.REQUIRED)
    return len(set(split_header(_first_line(text))) & set(poise.REQUIRED)) >= 2


def _is_philly(text: str) -> bool:
    keys = set(_KEY.findall(text))
    return text.lstrip()[:1] in ("[", "{") and not keys.isdisjoint(philly.KEYS) and keys.isdisjoint(sacct_json.KEYS)


def _is_sacct(text: str) -> bool:
    if text.lstrip()[:1] == "{":
        return set(sacct_json.KEYS) <= set(_KEY.findall(text))
    return sacct_text.is_header(_first_line(text))


_AS_LOGGED = (
    "a job's duration is that on the GPUs that it ran on, and counts as that on the reference type of the throughput table",
)
FORMATS = (
    Format("poise", "Poise's own: JSON lines, or CSV with the same columns", _is_poise, poise.records, poise.job_of),
    _tsv("gavel", "Gavel: 10 tab-separated columns, or the older 7", gavel.job_of, gavel.WIDTHS),
    _tsv("shockwave", "Shockwave: 12 tab-separated columns", shockwave.job_of, shockwave.WIDTHS),
    _csv("tiresias", "Tiresias and Muri: CSV", tiresias.job_of, tiresias.COLUMNS),
    Format(
        "philly",
        "Philly's job log, or what is derived from it: JSON",
        _is_philly,
        TraceInput.objects,
        philly.job_of,
        ("a job's duration is the sum of the run times of its attempts",),
    ),
    _csv("philly-csv", "Philly's passed jobs, or durations and sizes alone: CSV", philly_csv.job_of, *philly_csv.CHOICES),
    _csv("itp", "Microsoft ITP clusters: CSV", itp.job_of, itp.COLUMNS),
    _csv("helios", "Helios' log, as published or cut: CSV", helios.job_of, *helios.CHOICES),
    _csv("alibaba", "Alibaba's GPU cluster v2023, list of pods: CSV", alibaba.job_of, alibaba.COLUMNS),
    Format(
        "sacct",
        "Slurm's accounting: what `sacct --parsable2` or `sacct --json` prints",
        _is_sacct,
        sacct.records,
        sacct.job_of,
        _AS_LOGGED,
    ),
)
