"""Scripts written for Slurm: what their `#SBATCH` lines mean here.

The script itself is neither changed nor copied: the interpreter of its first line is given its path. Options without a
meaning here are ignored with a note; those whose absence would do harm are errors. `read_sbatch` is the way in; `_Header`
holds the options of one script and translates them, one method per field of the draft.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from poise.scheduler.model.errors import RequestError, Where
from poise.service.wire import draft
from poise.service.wire.after import AfterEnd
from poise.service.wire.draft import Array, DraftSource, JobDraft, Variant
from poise.service.wire.jobfile import parse_gpu_count, read_text
from poise.service.wire.moments import moment_from_now
from poise.service.wire.request import EXPORT_ALL, EXPORT_NONE, NAME

JOB_NAME = "SLURM_JOB_NAME"  # the variable that every job of a script has here, and no other job
_LONG = {
    "J": "job-name", "G": "gpus", "N": "nodes", "t": "time", "a": "array", "o": "output", "e": "error", "D": "chdir",
    "A": "account", "d": "dependency", "n": "ntasks", "c": "cpus-per-task", "p": "partition", "q": "qos", "H": "hold",
    "C": "constraint", "w": "nodelist", "x": "exclude", "b": "begin", "L": "licenses", "M": "clusters", "k": "no-kill",
    "O": "overcommit", "s": "oversubscribe", "Q": "quiet", "v": "verbose", "W": "wait", "i": "input", "B": "extra-node-info",
}  # fmt: skip
_SAME = {"tasks-per-node": "ntasks-per-node"}  # long names with a second spelling
_ALONE = {
    "requeue", "no-requeue", "hold", "exclusive", "overcommit", "oversubscribe", "contiguous", "quiet", "verbose", "wait",
    "test-only", "spread-job", "use-min-nodes", "no-kill", "parsable", "reboot", "ignore-pbs",
}  # fmt: skip
"""Options without a value."""
_READ = {
    "job-name", "gres", "gpus", "gpus-per-node", "gpus-per-task", "nodes", "ntasks", "time", "array", "chdir", "account",
    "export", "requeue", "no-requeue", "hold", "dependency", "begin", "deadline",
}  # fmt: skip
_HARMFUL = {
    "constraint": "features of nodes are not known here; name the GPU type, e.g. --gres=gpu:v100:2",
    "test-only": "it would be submitted all the same; use `poise submit --dry-run`",
    "uid": "jobs run as the user of the service",
    "gid": "jobs run as the user of the service",
    "clusters": "there is one cluster here",
}
_NOTES = {
    "output": "`poise logs JOB` has what the job prints",
    "error": "`poise logs JOB` has what the job prints",
    "mem": "memory is not scheduled; `limits: {memory: 8GB}` of a job file bounds a replica's address space",
    "signal": "a job that has to leave gets TERM, and KILL after the deadline",
}
_KNOWN_VARIABLES = {
    "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_SUBMIT_DIR", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT",
    "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX",
}  # fmt: skip
_USED = re.compile(r"\$\{?(SLURM_[A-Z0-9_]+)")
_SRUN = re.compile(r"(?m)^[^#\n]*\b(srun|scontrol)\b")
_GPUS = re.compile(r"(?:([A-Za-z][\w.-]*):)?([0-9]+)")
_ENDS = {"afterok": AfterEnd.SUCCEEDED, "afternotok": AfterEnd.FAILED, "afterany": AfterEnd.ENDED}
_TIME = re.compile(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?")


class Option(NamedTuple):
    """An option of a `#SBATCH` line, by its long name. `value` is empty if it has none."""

    name: str
    value: str
    line: int


def read_sbatch(path: Path, arguments: tuple[str, ...], environ: Mapping[str, str]) -> JobDraft:
    """A script as a draft. `environ` is where `--export=NAME` is looked up; `arguments` are the script's own."""
    script = read_text(path)
    found = list(options(script, str(path)))
    for each in found:
        if each.name in _HARMFUL:
            raise RequestError(f"{Where(str(path), each.line, f'--{each.name}')}: {_HARMFUL[each.name]}")
    first = script.split("\n", 1)[0].strip()
    if not first.startswith("#!") or not first[2:].strip():
        raise RequestError(f"{Where(str(path), 1)}: a script begins with its interpreter, e.g. #!/bin/bash")
    # As the kernel reads the first line: a program, and all the rest as one argument.
    command = (*first[2:].strip().split(None, 1), str(draft.current_folder() / path), *arguments)
    header = _Header(str(path), {each.name: each for each in found})  # of a repeated option, Slurm takes the last
    name = draft.clean_name(header.value("job-name") or path.name)
    return JobDraft(
        draft.literal_words(command),
        env={**header.exported(environ), JOB_NAME: name, "SLURM_SUBMIT_DIR": str(draft.current_folder())},
        fields={"name": name, **header.gpus(), **header.fields(), **header.export()},
        variants=header.variants(),
        source=DraftSource(str(path)),
        notes=tuple(f"{path}: {each}" for each in header.notes(script)),
    )


def completed(given: JobDraft) -> JobDraft:
    """The draft of a script after options have overridden it.

    An array that they ask for gets Slurm's variables too, and if neither asks for GPUs a note says what the job gets.
    """
    note = () if "gpus" in given.fields else (f"{given.source.file}: it asks for no GPU; it gets 1, the least there is",)
    return replace(given, variants=_with_slurm_names(given.variants), notes=(*given.notes, *note))


def _with_slurm_names(variants: Iterable[Variant]) -> tuple[Variant, ...]:
    """The jobs of an array with their variables under Slurm's names as well; the jobs of a sweep are unchanged."""
    known = tuple(variants)
    indices = [int(each[draft.ARRAY_INDEX]) for each in known if draft.ARRAY_INDEX in each]
    if not indices:
        return known
    shared = {
        "SLURM_ARRAY_TASK_COUNT": str(len(indices)),
        "SLURM_ARRAY_TASK_MIN": str(min(indices)),
        "SLURM_ARRAY_TASK_MAX": str(max(indices)),
    }
    return tuple({**each, "SLURM_ARRAY_TASK_ID": each[draft.ARRAY_INDEX], **shared} for each in known)


def options(script: str, file: str) -> Iterator[Option]:
    """The options of all `#SBATCH` lines before the first command, in order."""
    for number, line in enumerate(script.splitlines(), start=1):
        if line.startswith("#SBATCH"):
            try:
                words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError as error:
                raise RequestError(f"{Where(file, number)}: #SBATCH: {str(error).lower()}") from None
            while words:
                word = words.pop(0)
                if word.startswith("--"):
                    name, equals, value = word[2:].partition("=")
                    name = _SAME.get(name, name)
                elif len(word) > 1 and word[0] == "-" and word[1] in _LONG:
                    name, value = _LONG[word[1]], word[2:].removeprefix("=")
                    equals = value
                else:
                    raise RequestError(f"{Where(file, number)}: #SBATCH: expected an option, got {word[:40]!r}")
                if not equals and name not in _ALONE and words and not words[0].startswith("-"):
                    value = words.pop(0)
                yield Option(name, value, number)
        elif line.strip() and not line.startswith("#"):
            return


class _Header:
    """The options of one script, by name."""

    def __init__(self, file: str, options: Mapping[str, Option]) -> None:
        self._file = file
        self._options = options

    def value(self, name: str) -> str | None:
        """The value of an option, if it is there and has one."""
        found = self._options.get(name)
        return None if found is None or not found.value else found.value

    def error(self, name: str, problem: str) -> RequestError:
        """The error that an option is wrong."""
        return RequestError(f"{Where(self._file, self._options[name].line, f'--{name}')}: {problem}")

    def fields(self) -> dict[str, Any]:
        """Preemption, time limit, folder, tenant, hold, and what it waits for."""
        asked, refused = self._options.get("requeue"), self._options.get("no-requeue")
        may_requeue = asked is not None and (refused is None or asked.line > refused.line)  # the later one counts
        # A script without options for Slurm is a job like any other.
        fields: dict[str, Any] = {"preemption": "restart" if may_requeue else "never"} if self._options else {}
        if seconds := self._time_limit():
            fields["max_duration"] = seconds
        if folder := self.value("chdir"):
            try:
                fields["cwd"] = draft.parse_folder(folder)
            except ValueError as error:
                raise self.error("chdir", str(error)) from None
        if tenant := self.value("account"):
            fields["tenant"] = tenant
        if "hold" in self._options:
            fields["hold"] = True
        return {**fields, **self._start()}

    def _start(self) -> dict[str, Any]:
        """What it waits for before it may start, and when it should be done."""
        fields: dict[str, Any] = {}
        if dependencies := self.value("dependency"):
            fields["after"] = tuple(self._after(dependencies))
        for option in ("begin", "deadline"):
            if text := self.value(option):
                try:
                    fields[option] = moment_from_now(text)
                except ValueError as error:
                    raise self.error(option, str(error)) from None
        if (array := self._array()) is not None and array.cap is not None:
            fields["array_cap"] = array.cap
        return fields

    def _after(self, text: str) -> Iterator[str]:
        """The jobs that it waits for, from `afterok:17:18,afterany:20`: all of these have to be met."""
        for each in text.split(","):
            kind, *jobs = each.strip().split(":")
            if kind not in _ENDS or not jobs or not all(re.fullmatch(NAME, job) for job in jobs):
                expected = (
                    "afterok:ID, afternotok:ID or afterany:ID, with more ids after colons and more of them after commas"
                )
                raise self.error("dependency", f"expected {expected}, got {text[:40]!r}")
            named = jobs if kind == "afternotok" else [",".join(jobs)]  # of those, each has to have failed
            yield from (f"{job}:{_ENDS[kind]}" for job in named)

    def gpus(self) -> dict[str, Any]:
        """GPUs of all nodes together, and their type; empty if the script asks for none."""
        name = self._gpu_option()
        text = "" if name is None else self.value(name) or ""
        if name == "gres":  # of generic resources, the GPUs: `gpu:v100:2` is `v100:2`, `gpu` is one
            parts = [part.partition(":")[2] or "1" for part in text.split(",") if part.partition(":")[0] == "gpu"]
            text = ",".join(part if re.search(r"(^|:)\d+$", part) else f"{part}:1" for part in parts)
        if name is None or not text:
            return {}
        match = _GPUS.fullmatch(text)
        if match is None:
            raise self.error(name, f"expected GPUs such as 2 or v100:2, got {text[:40]!r}; mixed types are not supported")
        try:
            count = parse_gpu_count(match[2], text)
        except ValueError as error:
            raise self.error(name, str(error)) from None
        tasks = self._count("nodes") * self._count("ntasks-per-node") if self._counts_by_node() else self._count("ntasks")
        times = {"gpus": 1, "gpus-per-task": tasks}.get(name, self._count("nodes"))
        return {"gpus": count * times, **({"gpu_types": (match[1],)} if match[1] else {})}

    def export(self) -> dict[str, str]:
        """Whether the whole environment comes along: without the option, and with ALL; else only what is named."""
        given = self.value("export")
        if given is None:
            return {}
        return {"export": EXPORT_ALL if "ALL" in map(str.strip, given.split(",")) else EXPORT_NONE}

    def exported(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables that `--export` names; unset ones are left out, as Slurm does."""
        env: dict[str, str] = {}
        for part in (self.value("export") or "NONE").split(","):
            name, equals, value = part.strip().partition("=")
            if not equals and name in ("ALL", "NONE", "NIL"):
                continue
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise self.error("export", f"expected NAME or NAME=VALUE, got {part[:40]!r}")
            if equals or name in environ:
                env[name] = value if equals else environ[name]
        return env

    def variants(self) -> tuple[Variant, ...]:
        """The jobs of an array, with Slurm's variables and ours."""
        array = self._array()
        return () if array is None else _with_slurm_names(array.variants)

    def _array(self) -> Array | None:
        text = self.value("array")
        try:
            return None if text is None else draft.parse_slurm_array(text)
        except ValueError as error:
            raise self.error("array", str(error)) from None

    def notes(self, script: str) -> Iterator[str]:
        """What was ignored, and what the script will miss."""
        for each in self._options.values():
            if each.name not in _READ and not (each.name == "ntasks-per-node" and self._counts_by_node()):
                why = _NOTES.get("mem" if each.name.startswith("mem-per") else each.name)
                yield f"--{each.name} is ignored" + (f": {why}" if why else "")
        if self.value("deadline"):
            yield "--deadline is told to policies that look at deadlines; a job that cannot meet it is not removed"
        if self._count("nodes") > 1:
            yield "--nodes: the GPUs of all nodes are asked for together, on as few nodes as can be"
        for name in sorted(set(_USED.findall(script)) - _KNOWN_VARIABLES):
            yield f"it uses {name}, which is not set here"
        for name in sorted(set(_SRUN.findall(script))):
            yield f"it runs {name}; Poise starts the replicas itself (`replicas: gpu` for one per GPU)"

    def _gpu_option(self) -> str | None:
        """The option that says how many GPUs; of several, the most direct one."""
        return next((each for each in ("gpus", "gpus-per-node", "gres", "gpus-per-task") if self.value(each)), None)

    def _counts_by_node(self) -> bool:
        """Whether `--ntasks-per-node` counts: `--ntasks`, if given, wins over it."""
        return self._gpu_option() == "gpus-per-task" and self.value("ntasks") is None

    def _count(self, name: str) -> int:
        text = self.value(name) or "1"
        if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
            raise self.error(name, f"expected one whole number, got {text[:40]!r}")
        return int(text)

    def _time_limit(self) -> float:
        """Seconds; 0 for no limit."""
        text = self.value("time") or "UNLIMITED"
        if text.upper() in ("UNLIMITED", "INFINITE"):
            return 0.0
        match = _TIME.fullmatch(text)
        if match is None:
            raise self.error("time", f"expected MINUTES, MIN:SEC, H:MIN:SEC or DAYS-H[:MIN[:SEC]], got {text[:40]!r}")
        days, *rest = (int(each) if each else 0 for each in match.groups())
        if match[1] is None and match[4] is None:  # without days and hours, minutes come first
            rest = [0, *rest[:2]]
        hours, minutes, seconds = rest
        return ((days * 24.0 + hours) * 60 + minutes) * 60 + seconds
