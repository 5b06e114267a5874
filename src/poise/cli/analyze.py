"""`poise analyze`: the Philly study of any trace or journal."""

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from textwrap import fill
from typing import Any

import click

from poise.cli.options import FILE, force_option, journal_file, only_json_option, print_json
from poise.cli.output import check_report, console, show_notes, show_table
from poise.cli.simulate import show_knobs
from poise.lab.analysis.sources import Subject, journal_at, journal_subject, trace_subject
from poise.lab.analysis.study import KEYS, covered, study
from poise.lab.analysis.tables import Layout, StudyPart
from poise.lab.report.characterisation import bar, characterisation_page, table
from poise.lab.traces.reader import read_trace
from poise.lab.traces.registry import format_names
from poise.lab.traces.synthetic import HELP, SYNTHETIC
from poise.scheduler.model.errors import UnknownNameError
from poise.scheduler.throughput.table import read_throughputs, shipped

MAIN = (
    "overview", "sizes", "statuses", "tenants", "delays_by_size", "causes", "order", "nodes", "speed_by_size", "attempts",
    "failures", "losses",
)  # fmt: skip
"""Parts that are printed unless one is asked for."""
MOST_ROWS = 15
WIDEST = 120
"""Characters of a line of text."""

EPILOG = """\b
Examples:
  poise analyze jobs.csv --html study.html
  poise analyze synthetic:jobs=5000 --part sizes
  poise simulate synthetic:jobs=500 --policy srtf --out run1 && poise analyze run1 --json
"""


@click.command(epilog=EPILOG)
@click.argument("source", metavar="TRACE_OR_JOURNAL")
@click.option("--format", "trace_format", default="auto", show_default=True, help=f"One of {', '.join(format_names())}.")
@click.option("--throughputs", metavar="FILE", help="Speeds of jobs that state steps and no duration.  [default: shipped]")
@click.option("--part", metavar="KEY", help=f"One part alone, with all its rows: {', '.join(KEYS)}.")
@click.option("--html", type=FILE, help="Write a page with figures to a file.")
@force_option
@only_json_option
@click.option("--quiet", is_flag=True, help="No notes on stderr.")
def analyze(
    source: str,
    part: str | None,
    html: Path | None,
    force: bool,
    as_json: bool,
    quiet: bool,
    **reading: str | None,
) -> int:
    """Characterise the jobs of a trace or a journal, as the Philly study did.

    TRACE_OR_JOURNAL is whatever `simulate` takes, or a journal: a file, the directory that --out wrote, or the state of a
    service (since its policy, shares or cluster last changed). Shown are sizes, statuses, tenants, queueing delay and its
    causes, starts out of order, locality, attempts and failures, as far as the input covers them. Of a journal that is
    damaged, cut off or too new, what could be read is shown, with exit code 1.
    """
    if source == SYNTHETIC + HELP:
        show_knobs(as_json=as_json)
        return 0
    if part is not None and part not in KEYS:
        raise UnknownNameError("part of the study", part, KEYS)
    check_report(html, force=force, quiet=quiet)
    subject = _subject(source, reading["trace_format"] or "auto", reading["throughputs"])
    parts = study(subject.records)
    if html is not None:
        problem = (f"Not read to its end: {subject.problem}",) if subject.problem else ()
        footer = "\n\n".join((*problem, *subject.notes))
        page = characterisation_page(subject.name, "\n\n".join(_intro(subject)), parts, footer=footer)
        html.write_text(page, encoding="utf-8")
    if part is not None:
        parts = tuple(each for each in parts if each.key == part)
    show_notes(subject.notes, quiet=quiet)
    if as_json:
        print_json(_document(subject, parts))
    else:
        _show(subject, parts, part)
        if html is not None:
            click.echo(f"report: {html}")
    if subject.problem is not None:
        click.echo(f"poise: {subject.problem}", err=True)
    return 0 if subject.problem is None else 1


def _subject(source: str, trace_format: str, throughputs: str | None) -> Subject:
    with journal_file(Path(source)) as file:
        journal = journal_at(str(file))
        if journal is not None:
            subject = journal_subject(journal)
            return subject if file == Path(source) else replace(subject, name=source)
    table = shipped() if throughputs is None else read_throughputs(throughputs)
    return trace_subject(read_trace(source, format=trace_format), table)


def _intro(subject: Subject) -> list[str]:
    """Sentences on what this is, and what it covers."""
    there, lacking = covered(subject.records)
    about = "".join(f"; {name} {value}" for name, value in subject.about)
    covers = [f"It tells {', '.join(there)}."] if there else []
    lacks = [f"It does not tell {', '.join(lacking)}."] if lacking else []
    jobs = len(subject.records.gpus)
    return [f"{jobs:,} job{'s' * (jobs != 1)} of a {subject.source}{about}.", *covers, *lacks]


def _document(subject: Subject, parts: Sequence[StudyPart]) -> dict[str, Any]:
    """Everything as JSON: times in seconds, fractions from 0 to 1."""
    there, lacking = covered(subject.records)
    about = {"kind": str(subject.source), "name": subject.name, "jobs": len(subject.records.gpus), **dict(subject.about)}
    found = {}
    for part in parts:
        rows = [
            {key: None if isinstance(value, float) and not isfinite(value) else value for key, value in row.items()}
            for row in part.records()
        ]
        texts = {"title": part.title, "text": part.text, "caveat": part.caveat}
        found[part.key] = {**texts, "rows": rows, "missing": part.missing or None}
    return {
        "source": about,
        "covers": there,
        "lacks": lacking,
        "parts": found,
        "notes": list(subject.notes),
        "problem": subject.problem,
    }


def _show(subject: Subject, parts: Sequence[StudyPart], chosen: str | None) -> None:
    first, *rest = _intro(subject)
    _say(f"{subject.name}: {first}", *rest, "")
    for part in parts:
        if not part.missing and (chosen or part.key in MAIN):
            _show_part(part, None if chosen else MOST_ROWS)
    missing: dict[str, list[str]] = {}
    for part in parts:
        if part.missing:
            missing.setdefault(part.missing, []).append(part.title)
    for why, titles in missing.items():
        _say(f"Not covered: {'; '.join(titles)}. {why}")
    if chosen is None:
        others = [part.key for part in parts if not part.missing and part.key not in MAIN]
        _say(f"More with --part {', '.join(others)}; everything with --json or --html FILE.")


def _say(*paragraphs: str) -> None:
    """Print paragraphs, wrapped to the terminal."""
    width = min(WIDEST, console().width)
    for each in paragraphs:
        click.echo(fill(each, width, break_long_words=False, break_on_hyphens=False))


def _show_part(part: StudyPart, most: int | None) -> None:
    """Print a part: all rows with the text about it, or at most `most` rows."""
    if most is None and part.text:
        _say(part.text, "")
    if part.rows:
        shown = table(part, most)
        if part.bar:  # a column of fractions is shown once more, as bars
            place = [column.key for column in part.columns].index(part.bar)
            rows = tuple((*cells, bar(row[place])) for cells, row in zip(shown.rows, part.rows, strict=False))
            shown = replace(shown, columns=(*shown.columns, ""), rows=rows, words=(*(shown.words or ()), ""))
        show_table(shown, part.title)
    else:
        _say(f"{part.title}: nothing", "")
    if most is not None and len(part.rows) > most and part.layout is Layout.TABLE:
        _say(f"{most} of {len(part.rows):,} rows; all with --part {part.key}", "")
    if part.caveat:
        _say(part.caveat, "")
