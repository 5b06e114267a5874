"""`poise submit`: jobs for the running service. `poise wait`: until jobs have ended.

A file or a command becomes a draft (`poise.service.wire`), the options override it, and the draft becomes requests, which
the client completes and sends. Files of variables (--env-file) are read at the end of this module.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from pydantic import ValidationError

from poise.cli import INTERRUPTED
from poise.cli.dry_run import show_dry_run
from poise.cli.live import connected, connected_for_long, find_job, state_of
from poise.cli.logs import Screen
from poise.cli.options import choice_of, examples, json_option, print_json, with_options
from poise.cli.output import show_notes
from poise.scheduler.model.errors import PoiseError, RequestError, Where, plain
from poise.scheduler.model.units import parse_seconds
from poise.service.client import Client, WaitTimeoutError
from poise.service.client.client import new_key
from poise.service.client.shipping import SHIP_MIB, packed_folder
from poise.service.client.streams import wait_for
from poise.service.client.submission import completed_request, with_files
from poise.service.wire.draft import Array, JobDraft, current_folder, literal_words, parse_array, parse_folder, sweep_of
from poise.service.wire.environments import parse_export
from poise.service.wire.jobfile import (
    MOST_BYTES,
    parse_gang,
    parse_memory,
    parse_volume,
    read_draft,
    read_text,
)
from poise.service.wire.moments import moment_from_now
from poise.service.wire.request import (
    VARIABLE,
    JobRequest,
    PreemptionMode,
    Replicas,
    first_problem,
    image_problem,
)
from poise.service.wire.sbatch import JOB_NAME, completed, read_sbatch
from poise.service.wire.views import JobRow, JobState

MANY = 20
"""Jobs above which a person at a terminal is asked first, and above which ids are abbreviated."""
TIMED_OUT = 124
"""Exit code if the time is up, as that of timeout(1)."""
MOST_NAMED = 10
"""Jobs that are named in a line of advice."""
STDIN = "-"
_JOB_FILES = (".yaml", ".yml", ".json", "")
COMMAND = "poise.cli.submit.command"  # where the words after `--` are kept

Given = TypeVar("Given")
Parsed = TypeVar("Parsed")

EPILOG = """\b
Examples:
  poise submit -- python train.py --epochs 10
  poise submit -g 4 --type v100,a100 -n resnet50 -- python train.py
  poise submit job.yaml --env LR=0.01 --env WANDB_API_KEY --env-file secrets.env
  poise submit --follow -- python train.py
  poise submit --sweep LR=0.1,0.01 --sweep SEED=1,2 -- python train.py --lr '${LR}' --seed '${SEED}'
  poise submit --array 0-99%10 --after prep:succeeded -- python train.py
  poise submit script.sbatch
"""

_OPTIONS = (
    click.option("-n", "--name", help="What to call the job."),
    click.option("-g", "--gpus", metavar="N", help="GPUs at once: 4, or 1..4 for an elastic job.  [default: 1]"),
    click.option("--type", "types", multiple=True, metavar="TYPE", help="GPU types that will do, with commas or repeated."),
    click.option("--replicas", type=choice_of(Replicas), help="Processes of the job: one per node, or one per GPU."),
    click.option("--env", multiple=True, metavar="NAME[=VALUE]",
        help="A variable of the job's environment, without =VALUE as it is in this shell; repeat it for more."),
    click.option("--env-file", multiple=True, metavar="FILE", help="Variables, one NAME=VALUE per line; --env wins."),
    click.option("--export", metavar="all|none|NAME[=VALUE],...",
        help="What the job gets of this shell's environment: what makes sense there, nothing, or these.  [default: all]"),
    click.option("--venv", metavar="DIR",
        help="Virtual environment, of venv or conda, to run in.  [default: the active one, if any]"),
    click.option("--no-venv", is_flag=True, help="Run in no virtual environment: with what else is in PATH."),
    click.option("--cwd", metavar="DIR", help="Working directory.  [default: the current one]"),
    click.option("--ship", metavar="[=DIR]",
        help="Send the working directory, or DIR, along, without what .gitignore ignores; the job runs in that."),
    click.option("--ship-mib", type=click.IntRange(1, 1 << 20), default=SHIP_MIB, show_default=True, metavar="N",
        help="MiB that --ship sends, at most."),
    click.option("--steps", type=float, help="How long it is, in steps, if you know."),
    click.option("--duration", metavar="TIME", help="How long it is on the reference GPU type, if you know."),
    click.option("--model", help="What it trains, as throughput tables name it."),
    click.option("--batch-size", type=int, help="With which batch size, as throughput tables name it."),
    click.option("--micro-batches", type=int, metavar="K", help="Tasks that a step divides into: any mix of GPUs will do."),
    click.option("--tenant", help="On whose account; operators may name another."),
    click.option("--app", help="Jobs that are explored together."),
    click.option("--weight", type=float, help="What it counts against other jobs; users: up to 1."),
    click.option("--priority", type=int, help="For policies that have priorities; none of the catalogue does."),
    click.option("--preemption", type=choice_of(PreemptionMode),
        help="At the end of a lease: checkpoint (poise.worker; other scripts stay), restart, never.  [default: checkpoint]"),
    click.option("--checkpoint-every", metavar="TIME", help="Time between checkpoints while the job runs undisturbed."),
    click.option("--deadline", metavar="TIME", help="Time to write a checkpoint.  [default: 60]"),
    click.option("--checkpoint-url", metavar="URL",
        help="Where checkpoints are kept over machines: a shared path, a URL, relay.  [default: as the service says]"),
    click.option("--retries", type=int, metavar="N", help="Failed runs that are forgiven."),
    click.option("--max-duration", metavar="TIME", help="Running time after which it is stopped for good."),
    click.option("--image", metavar="NAME", help="Container image to run in, if the service runs jobs on Kubernetes."),
    click.option("--volume", "volumes", multiple=True, metavar="[KIND:]NAME:PATH[:ro]",
        help="Mount a PersistentVolumeClaim at PATH; with KIND secret or config, a Secret or ConfigMap. Repeatable."),
    click.option("--cpu", type=float, metavar="N", help="Processors of each pod."),
    click.option("--memory", metavar="SIZE", help="Memory of each pod, such as 64GiB or 64Gi."),
    click.option("--service-account", metavar="NAME",
        help="Service account of the job's pods.  [default: one without rights]"),
    click.option("--run-as", type=int, metavar="UID",
        help="UID of the job's processes.  [default: 0, which is root, whatever the image says]"),
    click.option("--pull-secret", "pull_secrets", multiple=True, metavar="NAME",
        help="Secret with which the image is fetched; repeat it for more."),
    click.option("--array", metavar="N", help="N jobs, or indices such as 0-99, 0-99:2 or 1,3; ARRAY_INDEX says which. "
        "%CAP after it: at most CAP of them hold GPUs at once."),
    click.option("--sweep", multiple=True, metavar="NAME=A,B,...", help="A job for every combination of values."),
    click.option("--after", multiple=True, metavar="JOB[:END]",
        help="Wait for a job, or all jobs of an app. END: ended (the default), succeeded or failed. Repeatable."),
    click.option("--begin", metavar="TIME", help="Do not run it before: 16:00, tomorrow, now+2h, 2026-11-20T16:00Z, ..."),
    click.option("--finish-by", metavar="TIME", help="When it should be done, for policies that look at deadlines."),
    click.option("--hold", is_flag=True, default=None, help="Do not run it before `poise release`."),
)  # fmt: skip
job_options = with_options(_OPTIONS)
"""Every option that describes a job."""


class SubmitCommand(click.Command):
    """A command whose words after `--` are another command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep what stands after `--` apart."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[COMMAND] = tuple(args[at + 1 :])
        # An option whose value may be left out would take the next word, such as a job file, for it.
        known = ["--ship=" if each == "--ship" else each for each in args[:at]]
        try:
            return super().parse_args(ctx, known)
        except click.NoSuchOption as error:
            if "--" in args or all(word.startswith("-") for word in args):
                raise
            text = f"{error.format_message()} A command goes after --: poise {self.name} -- python train.py"
            raise click.UsageError(text, ctx) from None


@click.command(cls=SubmitCommand, epilog=EPILOG, options_metavar="[OPTIONS] [FILE] [-- COMMAND...]")
@click.argument("file", nargs=-1, metavar="")
@job_options
@click.option("-y", "--yes", is_flag=True, help=f"Do not ask, however many jobs it is (more than {MANY} are asked about).")
@click.option("--dry-run", is_flag=True, help="Print what would run, and send nothing; with --json the requests themselves.")
@click.option("--wait", is_flag=True, help="Wait until the jobs have ended; exit codes as of `poise wait`.")
@click.option("--follow", is_flag=True, help="Print what the job prints until it has ended; exit codes as of `poise wait`.")
@click.option("-q", "--id-only", is_flag=True, help="Print the ids alone, one per line.")
@json_option
@click.pass_context
def submit(ctx: click.Context, /, file: tuple[str, ...], **options: Any) -> int:  # noqa: ANN401
    """Submit a job, an array or a sweep to the running service.

    FILE is a job file in YAML, a script that begins with #! (its #SBATCH lines count), or - for a job file on standard
    input. Or give a command after --; no shell sees it. Options win over what FILE says. The job runs in the current folder
    and in the virtual environment that is active.
    """
    as_json, follow = options["as_json"], options["follow"]
    if len(file) > 1:
        raise click.UsageError(f"one FILE, or a command after --: poise submit -- {' '.join(file)}")
    if as_json and options["id_only"]:
        raise RequestError("--json and --id-only are two forms of one answer; leave one of them out")
    if follow and (as_json or options["id_only"]):
        raise RequestError("--follow prints what the job prints; leave --json and --id-only out, or take --wait")
    draft = draft_of(file[0] if file else None, ctx.meta[COMMAND], options)
    show_notes([plain(note) for note in draft.notes])
    key = new_key()
    drafted = draft.requests(key)
    shipped = None if options["ship"] is None else shipped_folder(options["ship"], drafted[0])
    if shipped is not None:
        _, sha256 = packed_folder(shipped, options["ship_mib"] << 20)
        drafted = tuple(with_files(each, shipped, sha256) for each in drafted)
    requests = tuple(map(completed_request, drafted))
    count = len(requests)
    if options["dry_run"]:
        show_dry_run(requests, os.environ, shipped, is_array=bool(draft.variants), as_json=as_json)
        return 0
    if follow and count > 1:
        raise RequestError(f"--follow prints one log, and these are {count:,} jobs; take --wait, or `poise logs -f` of one")
    if count > MANY and not options["yes"] and not as_json and sys.stdin.isatty():
        click.confirm(f"Submit {count:,} jobs?", default=True, abort=True, err=True)
    with connected_for_long() if follow or options["wait"] else connected() as client:
        if shipped is not None:
            client.ship(shipped, most_mib=options["ship_mib"], tenant=requests[0].tenant)
        handles = client.submit_all(requests, key=key)
        show_notes([plain(note) for note in handles[0].notes])
        return _report(client, [handle.id for handle in handles], requests[0], options)


def shipped_folder(given: str, request: JobRequest) -> Path:
    """The folder that is sent along: the one that is named, or the working directory."""
    return Path(_parsed("--ship", given, parse_folder) if given else request.cwd or current_folder()).resolve()


def _report(client: Client, jobs: list[str], request: JobRequest, options: dict[str, Any]) -> int:
    """Say what was submitted, and wait for it or follow it if that was asked for; the exit code."""
    is_text = not options["as_json"] and not options["id_only"]
    if options["id_only"]:
        click.echo("\n".join(jobs))
    elif is_text:
        _show_submitted(client, jobs, request, beside_log=options["follow"])
    if options["follow"]:
        return _follow(client, jobs[0])
    states, code = _await_jobs(client, jobs, None, quiet=not is_text) if options["wait"] else ({}, 0)
    if options["as_json"]:
        venv = {"venv": request.venv} if request.venv else {}
        ended = {"states": [states[job].value for job in jobs if job in states]} if states else {}
        print_json({"jobs": jobs, **venv, **ended})
    elif is_text:
        for job, state in states.items():
            click.echo(f"{job} {state}")
    return code


def _show_submitted(client: Client, jobs: list[str], request: JobRequest, *, beside_log: bool) -> None:
    """Print what became of a submission; on standard error beside a log that is followed."""
    first = jobs[0]
    try:
        standing = standing_of(client.show(first).job)
    except PoiseError:  # the server is away by now: the job is submitted all the same
        standing = ""
    if len(jobs) == 1:
        lines = [f"submitted {first}{standing}"]
        advice = f"next: poise why {first} · poise logs -f {first} · poise queue"
    else:
        few = jobs if len(jobs) <= MANY else [*jobs[: MANY // 2], "…", *jobs[-MANY // 2 :]]
        lines = [f"submitted {len(jobs):,} jobs of app {request.app}: {' '.join(few)}", f"{first}{standing}"]
        advice = f"next: poise queue --app {request.app} · poise why {first} · poise logs -f {first}"
    if request.venv is not None:
        lines.append(f"runs in the virtual environment {request.venv} (--no-venv: in none)")
    for line in lines if beside_log else (*lines, advice):
        click.echo(plain(line), err=beside_log)


def standing_of(row: JobRow) -> str:
    """The name of a job, if it has one, its state and the reason."""
    name = f" {row.name}" if row.name != row.id else ""
    return f"{name}: {state_of(row)}, {row.reason.text}"


# Waiting: `poise wait`, `submit --wait` and `submit --follow`.


@click.command(epilog=examples("poise wait 17", "poise wait 17 18 --timeout 1h && echo done"))
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@click.option("--timeout", metavar="TIME", help="Wait no longer than that.  [default: as long as it takes]")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing of jobs that have not ended.")
@json_option
def wait(jobs: tuple[str, ...], timeout: str | None, quiet: bool, as_json: bool) -> int:
    """Wait until all JOBs have ended, then print each with its final state. A restart of the server does not end it.

    Exit codes: 0 all succeeded, 1 one failed or was cancelled; 124 the time is up, 130 Ctrl-C, and the jobs go on.
    """
    most = None if timeout is None else _parsed("--timeout", timeout, parse_seconds)
    with connected_for_long(most) as client:
        ids = list(dict.fromkeys(find_job(client, each) for each in jobs))
        states, code = _await_jobs(client, ids, most, quiet=quiet)
    if as_json:
        print_json([{"job": job, "state": state.value} for job, state in states.items()])
    else:
        for job, state in states.items():
            click.echo(f"{job} {state}")
    return code


def _await_jobs(
    client: Client, jobs: Sequence[str], timeout: float | None, *, quiet: bool
) -> tuple[dict[str, JobState], int]:
    """The final states of jobs, and the exit code: 0 if all succeeded, 1 if not, 124 if the time is up, 130 on Ctrl-C."""

    def show_change(row: JobRow) -> None:
        click.echo(plain(f"{row.id}{standing_of(row)}"), err=True)

    try:
        states = wait_for(client, jobs, timeout=timeout, on_change=None if quiet else show_change)
    except WaitTimeoutError as error:
        click.echo(f"poise: {error}", err=True)
        return {}, TIMED_OUT
    except KeyboardInterrupt:
        return {}, _interrupted(jobs)
    return states, 0 if all(state is JobState.SUCCEEDED for state in states.values()) else 1


def _follow(client: Client, job: str) -> int:
    """Print what a job prints until it has ended; the exit code is that of `_await_jobs`."""
    try:
        with Screen() as screen:
            for part in client.follow_log(job):
                screen.show(part)
    except KeyboardInterrupt:
        return _interrupted([job])
    states, code = _await_jobs(client, [job], None, quiet=True)
    for state in states.values():
        click.echo(f"{job} {state}", err=True)
    return code


def _interrupted(jobs: Sequence[str]) -> int:
    """Say after Ctrl-C that the jobs continue; the exit code."""
    few = " ".join(jobs[:MOST_NAMED]) + (" …" if len(jobs) > MOST_NAMED else "")
    logs = f" · poise logs -f {few}" if len(jobs) == 1 else ""
    goes = "the job goes on" if len(jobs) == 1 else "the jobs go on"
    click.echo(f"\npoise: {goes}; poise wait {few}{logs} · poise cancel {few}", err=True)
    return INTERRUPTED


# The draft that a file, a command and the options describe together.


def _part_of_pod(part: str, value: Parsed) -> Parsed:
    """A part of `pod` that a request can have; ValueError says what is wrong with it, without the name of the field."""
    try:
        JobRequest.model_validate({"command": ("x",), "pod": {part: value}})
    except ValidationError as error:
        raise ValueError(first_problem(error)[1]) from None
    return value


def _image(name: str) -> str:
    """The name of a container image; ValueError says what is wrong with it."""
    if (problem := image_problem(name)) is not None:
        raise ValueError(problem)
    return name


_FIELDS = (
    "name", "replicas", "steps", "model", "batch_size", "micro_batches", "tenant", "app", "weight", "priority",
    "preemption", "hold",
)  # fmt: skip
"""Options that are fields of a request of the same name and value."""
_PARSED: dict[str, tuple[str, Callable[[str], Any]]] = {
    "duration": ("duration", parse_seconds),
    "begin": ("begin", moment_from_now),
    "finish_by": ("deadline", moment_from_now),
    "max_duration": ("max_duration", parse_seconds),
    "checkpoint_every": ("checkpoint.every", parse_seconds),
    "deadline": ("checkpoint.deadline", parse_seconds),
    "checkpoint_url": ("checkpoint.url", str),
    "retries": ("retry.on_errors", int),
    "cwd": ("cwd", parse_folder),
    "venv": ("venv", parse_folder),
    "cpu": ("pod.cpu", partial(_part_of_pod, "cpu")),
    "memory": ("pod.memory", lambda text: _part_of_pod("memory", parse_memory(text))),
    "service_account": ("pod.service_account", partial(_part_of_pod, "service_account")),
    "run_as": ("pod.user", partial(_part_of_pod, "user")),
    "image": ("image", _image),
}
"""Options that are parsed, and their fields; `.` before a part of a field."""


def draft_of(file: str | None, command: tuple[str, ...], options: dict[str, Any]) -> JobDraft:
    """What a file or a command says, overridden by the options."""
    written = _written(file, command)
    fields = _fields(options)
    if (array := _array(options["array"], options["sweep"])) is not None:
        fields["array_cap"] = array.cap
    given = _variables(options["env_file"], options["env"])
    if options["export"] is not None:
        fields["export"], named = _parsed("--export", options["export"], parse_export)
        given = named | given
    found = written.overridden(fields, given)
    found = found if array is None else replace(found, variants=array.variants)
    return completed(found) if JOB_NAME in written.env else found


def _written(file: str | None, command: tuple[str, ...]) -> JobDraft:
    if file is None:
        if not command:
            raise click.UsageError("give a job file, a script, or a command: poise submit -- python train.py")
        return JobDraft(literal_words(command))
    path = Path(file)
    source: Path | str = path
    if file == STDIN:
        source = sys.stdin.read(MOST_BYTES + 1)
        if source.startswith("#!"):
            raise RequestError("-: a script must be a file, as it is run from there")
    elif not path.exists():
        hint = "" if path.suffix.lower() in (".yaml", ".yml") else f"; a command goes after --: poise submit -- {file}"
        raise RequestError(f"{file}: there is no such file{hint}")
    elif read_text(path).startswith("#!"):
        return read_sbatch(path, command, os.environ)
    elif path.suffix.lower() not in _JOB_FILES:
        raise RequestError(
            f"{file}: neither a job file (.yaml) nor a script that begins with #!; a command goes after --: "
            f"poise submit -- {'python ' if path.suffix == '.py' else ''}{file}"
        )
    found = read_draft(source)
    if command:
        raise RequestError(f"{file} says what to run; leave the command out")
    return found


def _fields(options: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request that were given as options."""
    fields: dict[str, Any] = {name: options[name] for name in _FIELDS if options[name] is not None}
    for option, (path, parse) in _PARSED.items():
        if options[option] is not None:
            name, _, part = path.partition(".")
            value = _parsed(f"--{option.replace('_', '-')}", options[option], parse)
            fields[name] = {**fields.get(name, {}), part: value} if part else value
    if options["gpus"] is not None:
        fields |= _parsed("--gpus", options["gpus"], parse_gang)
    if options["types"]:
        fields["gpu_types"] = tuple(part.strip() for each in options["types"] for part in each.split(","))
    if options["after"]:
        fields["after"] = tuple(options["after"])
    if options["volumes"]:
        found = tuple(_parsed("--volume", each, parse_volume) for each in options["volumes"])
        volumes = _parsed("--volume", found, partial(_part_of_pod, "volumes"))
        fields["pod"] = {**fields.get("pod", {}), "volumes": volumes}
    if options["pull_secrets"]:
        secrets = _parsed("--pull-secret", options["pull_secrets"], partial(_part_of_pod, "pull_secrets"))
        fields["pod"] = {**fields.get("pod", {}), "pull_secrets": secrets}
    if options["no_venv"]:
        if options["venv"] is not None:
            raise RequestError("--venv and --no-venv do not go together; leave one of them out")
        fields["venv"] = None
    return fields


def _parsed(option: str, text: Given, parse: Callable[[Given], Parsed]) -> Parsed:
    try:
        return parse(text)
    except ValueError as error:
        raise RequestError(f"{option}: {error}") from None


def _variables(files: Sequence[str], given: Sequence[str]) -> dict[str, str]:
    """The job's environment as files and options say; the last value of a variable counts."""
    found: dict[str, str] = {}
    for each in files:
        found |= read_env_file(Path(each))
    for text in given:
        if "=" in text:
            name, value = _pair("--env", text)
            found[name] = value
        elif not text.isidentifier() or not text.isascii():
            raise RequestError(f"--env: expected NAME=VALUE, or the NAME of a variable of this shell, got {text[:60]!r}")
        elif text not in os.environ:
            raise RequestError(f"--env: {text} is not set in this shell; write --env {text}=VALUE, or export it first")
        else:
            found[text] = os.environ[text]
    return found


def _array(array: str | None, sweep: Sequence[str]) -> Array | None:
    values: dict[str, tuple[str, ...]] = {}
    for text in sweep:
        name, listed = _pair("--sweep", text, "V1,V2,...")
        if name in values:
            raise RequestError(f"--sweep: {name} is there twice; write all its values with commas")
        values[name] = tuple(listed.split(",")) if listed else ()
    if array is not None and sweep:
        raise RequestError("--array and --sweep do not go together; give the index as one more variable of the sweep")
    try:
        if sweep:
            return Array(sweep_of(values), None)
        return None if array is None else parse_array(array)
    except ValueError as error:
        raise RequestError(f"{'--sweep' if sweep else '--array'}: {error}") from None


def _pair(option: str, text: str, expected: str = "VALUE") -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier() or not name.isascii():
        raise RequestError(f"{option}: expected NAME={expected}, got {text[:60]!r}")
    return name, value


# Files of variables, as many tools write them (`.env`):
#
#     # what the job needs
#     export DATA=/data/imagenet
#     LR=0.1                      # everything after a blank and # is a comment
#     NOTE="two words, a tab: \t"
#     RAW='as it is: \t #'
#
# A value ends with its line, without blanks at both ends. `$NAME` is not replaced. Inside double quotes `\n`, `\t`, `\"`,
# `\\` and `\$` stand for one character, inside single quotes nothing does.

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
            try:
                name, value = _variable(text)
            except ValueError as error:
                raise RequestError(f"{Where(str(path), number)}: {error}") from None
            found[name] = value
    return found


def _variable(text: str) -> tuple[str, str]:
    """Name and value of one line; ValueError says what is wrong."""
    match = _LINE.fullmatch(text)
    if match is None:
        raise ValueError(f"expected NAME=VALUE, got {text[:_SHOWN]!r}")
    name, value = match["name"], match["value"]
    if not re.fullmatch(VARIABLE, name):
        raise ValueError(f"expected a name of letters, digits and `_` before =, got {name[:_SHOWN]!r}")
    if name.startswith("POISE_"):
        raise ValueError(f"{name}: names that begin with POISE_ are Poise's own")
    if "\x00" in text:
        raise ValueError(f"{name}: a character in it cannot be passed on")
    if value[:1] not in ("'", '"'):
        return name, _COMMENT.sub("", value).strip()
    quoted = _QUOTED.fullmatch(value)
    if quoted is None:
        is_open = value.count(value[0]) < 2
        problem = "the quote is not closed in this line" if is_open else "something follows the quoted value"
        raise ValueError(f'{name}: {problem}; a value is one line, and \\" stands for a quote inside double quotes')
    if quoted["raw"] is not None:
        return name, quoted["raw"]
    return name, _ESCAPE.sub(lambda each: _MEANT.get(each[1], each[1]), quoted["read"])
