"""The way in: `read_trace` takes whatever a user may name and answers with one Trace, or one clear TraceError."""

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from poise.model.errors import TraceError, Where
from poise.traces.fields import shown
from poise.traces.intake import Intake
from poise.traces.registry import AUTO, Format, format_named, format_names, recognise
from poise.traces.schema import Trace, TraceJob
from poise.traces.sources import STANDARD_INPUT, Found, bare, found_files, reading, stem
from poise.traces.synthetic import SYNTHETIC, generate

_NAMED_FILES = 5


@dataclass(frozen=True, slots=True)
class _Part:
    """The jobs of one file, whose ids begin with `prefix`."""

    path: str
    file: str
    prefix: str
    jobs: list[TraceJob]


def read_trace(source: str, *, format: str = AUTO) -> Trace:
    """The trace that `source` names, its jobs by (submitted, file, row).

    source   a file, plain or gzip- or xz-compressed; a tar archive or a folder of files of one format, merged by time;
             `-` for standard input; or `synthetic:...` for the generator
    format   a name of `registry.format_names()`; `auto` goes by the first bytes of the file

    Where several files are merged a job's id is `<file stem>/<id>`, and files that are no traces are left out with a
    note. Raises TraceError with file, line and field if it cannot be read, UnknownNameError for an unknown format.
    """
    wanted = None if format == AUTO else format_named(format)
    if source.startswith(SYNTHETIC):
        return generate(source)
    loading = _Loading(source, wanted)
    with _collector_paused(), closing(found_files(source)) as files:
        for found in files:
            loading.take(found)
        return loading.trace()


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A trace is a great many objects and no cycle: looking for cycles among them takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Loading:
    """What has been read so far of one source."""

    def __init__(self, source: str, wanted: Format | None) -> None:
        self._source = source
        self._wanted = wanted
        self._format: Format | None = None
        self._parts: list[_Part] = []
        self._skipped: list[str] = []
        self._tally: Counter[str] = Counter()

    def take(self, found: Found) -> None:
        """Read one file, or leave it out because it is one of several and no trace."""
        chosen = self._choose(found)
        if chosen is None:
            self._skipped.append(found.path)
            return
        if self._format not in (None, chosen):
            raise self._mixed(found, chosen)
        self._format = chosen
        # Whether ids need a prefix is known only when a second file is there: the first goes without until then.
        prefix = f"{stem(found.path)}/" if self._parts else ""
        intake = Intake(found.file, found.stream, prefix, tally=self._tally)
        with reading(found.file):
            jobs = chosen.read(intake)
        self._parts.append(_Part(found.path, found.file, prefix, jobs))

    def trace(self) -> Trace:
        """Everything taken, merged."""
        if self._format is None:
            what = f"{self._wanted.name} trace" if self._wanted else "trace in a known format"
            raise TraceError(Where(self._source), f"expected at least one {what}, got none")
        parts = _with_final_ids(sorted(self._parts, key=attrgetter("path")))
        jobs = [job for part in parts for job in part.jobs]
        if not jobs:
            raise TraceError(Where(self._source), "expected at least one job, got none")
        _check_unique(parts)
        jobs.sort(key=attrgetter("job.submitted"))
        return Trace(_name_of(self._source), tuple(jobs), tuple(self._notes(self._format)))

    def _choose(self, found: Found) -> Format | None:
        if found.alone and self._wanted:
            return self._wanted
        known = recognise(found.head)
        if known is None and found.alone:
            raise _unrecognised(found)
        return known if self._wanted in (None, known) else None

    def _mixed(self, found: Found, chosen: Format) -> TraceError:
        first = self._format.name if self._format else ""
        return TraceError(
            Where(self._source),
            f"expected files of one format, got {first} ({self._parts[0].path}) and {chosen.name} ({found.path}); "
            "choose with --format",
        )

    def _notes(self, used: Format) -> Iterator[str]:
        yield from used.notes
        if len(self._parts) > 1:
            yield f"{len(self._parts)} files merged by time; a job's id is <file>/<id>"
        if self._skipped:
            named = ", ".join(sorted(self._skipped)[:_NAMED_FILES])
            more = ", …" if len(self._skipped) > _NAMED_FILES else ""
            yield f"files left out because they are no {used.name} trace: {len(self._skipped):,} ({named}{more})"
        for what, count in sorted(self._tally.items()):
            yield f"{what}: {count:,}"


def _unrecognised(found: Found) -> TraceError:
    text = found.head.decode(errors="replace").strip()
    if not text:
        got = "nothing but blanks at its beginning" if found.head else "an empty file"
        return TraceError(Where(found.file), f"expected at least one job, got {got}")
    known = ", ".join(format_names()[1:])
    return TraceError(
        Where(found.file, 1), f"expected a trace in a known format ({known}), got {shown(text.splitlines()[0])}"
    )


def _with_final_ids(parts: list[_Part]) -> list[_Part]:
    """The parts with the prefixes they ought to have; most have theirs already."""
    return [_renamed(part, prefix) for part, prefix in zip(parts, _prefixes(parts), strict=True)]


def _prefixes(parts: list[_Part]) -> list[str]:
    """The shortest of: nothing for a lone file, stems, paths without endings, paths; that tells the files apart."""
    if len(parts) == 1:
        return [""]
    paths = [part.path for part in parts]
    choices: Iterable[list[str]] = ([name(path) for path in paths] for name in (stem, bare, str))
    for names in choices:
        if len(set(names)) == len(names):
            break
    return [f"{name}/" for name in names]


def _renamed(part: _Part, prefix: str) -> _Part:
    if part.prefix == prefix:
        return part
    start = len(part.prefix)
    jobs = [replace(each, job=replace(each.job, id=prefix + each.job.id[start:])) for each in part.jobs]
    return replace(part, prefix=prefix, jobs=jobs)


def _check_unique(parts: list[_Part]) -> None:
    """Ids are unique in a file, and prefixes differ; only a prefix with a slash of its own can make two ids equal."""
    if all("/" not in part.prefix[:-1] for part in parts):
        return
    seen: dict[str, str] = {}
    for part in parts:
        for each in part.jobs:
            if seen.setdefault(each.job.id, part.file) is not part.file:
                other = seen[each.job.id]
                raise TraceError(Where(part.file), f"expected new job ids, got {shown(each.job.id)}, as in {other}")


def _name_of(source: str) -> str:
    return "stdin" if source == STANDARD_INPUT else Path(source).resolve().name
