"""`poise submit`: jobs for the running service."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Self

import click

from poise.cli import INTERRUPTED
from poise.cli.live import connected, echo_json, found, json_option, patiently_connected
from poise.cli.logs import Screen
from poise.cli.queue import state_of
from poise.scheduler.model.errors import PoiseError, RequestError, Where
from poise.scheduler.model.units import parse_seconds
from poise.service.client import Client, WaitTimeoutError
from poise.service.client.client import new_key
from poise.service.client.streams import wait_for
from poise.service.client.submission import completed_request
from poise.service.wire.draft import JobDraft, Variant, array_of, literal_words, parse_folder, sweep_of
from poise.service.wire.jobfile import MOST_BYTES, parse_gang, read_draft, read_text
from poise.service.wire.request import VARIABLE, JobRequest, PreemptionMode, Replicas, notes_on, plain
from poise.service.wire.sbatch import JOB_NAME, completed, read_sbatch
from poise.service.wire.views import JobRow, JobState

# Files of variables, a line NAME=VALUE each, as many tools write them (`.env`).
#
# # what the job needs
# export DATA=/data/imagenet
# LR=0.1                      # all behind a blank and # is a comment
# NOTE="two words, a tab: \t"
# RAW='as it is: \t #'
#
# A value goes to the end of its line, without blanks at both ends. Nothing is put in place of `$NAME`. Inside double quotes
# `\n`, `\t`, `\"`, `\\` and `\$` stand for one character, inside single ones nothing does.

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
            name, value = _variable(text, Where(str(path), number))
            found[name] = value
    return found


def _variable(text: str, where: Where) -> tuple[str, str]:
    match = _LINE.fullmatch(text)
    if match is None:
        raise RequestError(f"{where}: expected NAME=VALUE, got {text[:_SHOWN]!r}")
    name = match["name"]
    if not re.fullmatch(VARIABLE, name):
        raise RequestError(f"{where}: expected a name of letters, digits and `_` before =, got {name[:_SHOWN]!r}")
    if name.startswith("POISE_"):
        raise RequestError(f"{where}: {name}: names that begin with POISE_ are Poise's own")
    if "\x00" in text:
        raise RequestError(f"{where}: {name}: a character in it cannot be passed on")
    return name, _value(name, match["value"], where)


def _value(name: str, text: str, where: Where) -> str:
    if text[:1] not in ("'", '"'):
        return _COMMENT.sub("", text).strip()
    quoted = _QUOTED.fullmatch(text)
    if quoted is None:
        problem = "the quote is not closed in this line" if text.count(text[0]) < 2 else "something follows the quoted value"
        raise RequestError(
            f'{where}: {name}: {problem}; a value is one line, and \\" stands for a quote inside double quotes'
        )
    if quoted["raw"] is not None:
        return quoted["raw"]
    return _ESCAPE.sub(lambda each: _MEANT.get(each[1], each[1]), quoted["read"])


# The options of `poise submit`, and the draft of jobs that they, a file and a command describe together.

STDIN = "-"
_JOB_FILES = (".yaml", ".yml", ".json", "")

_OPTIONS = (
    click.option("-n", "--name", help="What to call the job."),
    click.option("-g", "--gpus", metavar="N", help="GPUs at once: 4, or 1..4 for an elastic job.  [default: 1]"),
    click.option("--type", "types", multiple=True, metavar="TYPE", help="GPU types that will do, with commas or repeated."),
    click.option(
        "--replicas", type=click.Choice([each.value for each in Replicas]), help="One process a node, or one a GPU."
    ),
    click.option(
        "--env",
        multiple=True,
        metavar="NAME[=VALUE]",
        help="A variable of the job's environment, without =VALUE as it is in this shell; repeat it for more.",
    ),
    click.option("--env-file", multiple=True, metavar="FILE", help="Variables, a line NAME=VALUE each; --env wins over it."),
    click.option(
        "--venv", metavar="DIR", help="Virtual environment, of venv or conda, to run in.  [default: the active one, if any]"
    ),
    click.option("--no-venv", is_flag=True, help="Run in no virtual environment: with what the service has in PATH."),
    click.option("--cwd", metavar="DIR", help="Working directory.  [default: the current one]"),
    click.option("--steps", type=float, help="How long it is, in steps, if you know."),
    click.option("--duration", metavar="TIME", help="How long it is on the reference GPU type, if you know."),
    click.option("--model", help="What it trains, as throughput tables name it."),
    click.option("--batch-size", type=int, help="With which batch size, as throughput tables name it."),
    click.option("--micro-batches", type=int, metavar="K", help="Tasks that a step divides into: any mix of GPUs will do."),
    click.option("--tenant", help="On whose account; operators may name another."),
    click.option("--app", help="Jobs that are explored together."),
    click.option("--weight", type=float, help="What it counts against other jobs; users: up to 1."),
    click.option("--priority", type=int, help="For policies that have priorities; none of the catalogue does."),
    click.option(
        "--preemption",
        type=click.Choice([each.value for each in PreemptionMode]),
        help="At the end of a lease: checkpoint (poise.worker; other scripts stay), restart, never.  [default: checkpoint]",
    ),
    click.option("--checkpoint-every", metavar="TIME", help="Time between checkpoints that nobody asked for."),
    click.option("--deadline", metavar="TIME", help="Time to write a checkpoint.  [default: 60]"),
    click.option("--retries", type=int, metavar="N", help="Failed runs that are forgiven."),
    click.option("--max-duration", metavar="TIME", help="Running time after which it is stopped for good."),
    click.option("--array", type=int, metavar="N", help="N jobs; ARRAY_INDEX says which."),
    click.option("--sweep", multiple=True, metavar="NAME=A,B,...", help="A job for every combination of values."),
    click.option("--hold", is_flag=True, default=None, help="Do not run it before `poise release`."),
)
_SAME = (
    "name", "replicas", "steps", "duration", "model", "batch_size", "micro_batches", "tenant", "app", "weight", "priority",
    "preemption", "max_duration", "hold",
)  # fmt: skip
_TIMES = ("duration", "checkpoint_every", "deadline", "max_duration")
"""Options that are seconds, or 90s, 15m, 1h30m."""
_INNER = {
    "checkpoint_every": ("checkpoint", "every"),
    "deadline": ("checkpoint", "deadline"),
    "retries": ("retry", "on_errors"),
}


def job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Every option that describes a job."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def draft(file: str | None, command: Sequence[str], options: dict[str, Any]) -> JobDraft:
    """What a file or a command says, with the options laid over it."""
    written = _written(file, tuple(command))
    overlaid = written.overridden(_fields(options), _variables(options["env_file"], options["env"], os.environ))
    variants = _variants(options)
    found = replace(overlaid, variants=variants) if variants else overlaid
    return completed(found) if JOB_NAME in written.env else found


def _written(file: str | None, command: tuple[str, ...]) -> JobDraft:
    if file is None:
        if not command:
            raise click.UsageError("give a job file, a script, or a command: poise submit -- python train.py")
        return JobDraft(literal_words(command))
    if file == STDIN:
        return _alone(read_draft(_stdin()), file, command)
    path = Path(file)
    if not path.exists():
        hint = "" if path.suffix.lower() in (".yaml", ".yml") else f"; a command goes after --: poise submit -- {file}"
        raise RequestError(f"{file}: there is no such file{hint}")
    if read_text(path).startswith("#!"):
        return read_sbatch(path, command, os.environ)
    if path.suffix.lower() in _JOB_FILES:
        return _alone(read_draft(path), file, command)
    raise RequestError(
        f"{file}: neither a job file (.yaml) nor a script that begins with #!; a command goes after --: "
        f"poise submit -- {'python ' if path.suffix == '.py' else ''}{file}"
    )


def _alone(found: JobDraft, file: str, command: tuple[str, ...]) -> JobDraft:
    if command:
        raise RequestError(f"{file} says what to run; leave the command out")
    return found


def _stdin() -> str:
    text = sys.stdin.read(MOST_BYTES + 1)
    if text.startswith("#!"):
        raise RequestError("-: a script must be a file, as it is run from there")
    return text


def _fields(options: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request that were given as options."""
    options = {**options, **{name: seconds_of(name, options[name]) for name in _TIMES if options[name] is not None}}
    fields: dict[str, Any] = {name: options[name] for name in _SAME if options[name] is not None}
    for option, (name, part) in _INNER.items():
        if options[option] is not None:
            fields.setdefault(name, {})[part] = options[option]
    if options["gpus"] is not None:
        try:
            fields |= parse_gang(options["gpus"])
        except ValueError as error:
            raise RequestError(f"--gpus: {error}") from None
    if options["types"]:
        fields["gpu_types"] = tuple(part.strip() for each in options["types"] for part in each.split(","))
    for name in ("cwd", "venv"):
        if options[name] is not None:
            fields[name] = _folder(name, options[name])
    if options["no_venv"]:
        if options["venv"] is not None:
            raise RequestError("--venv and --no-venv do not go together; leave one of them out")
        fields["venv"] = None
    return fields


def _folder(option: str, text: str) -> str:
    try:
        return parse_folder(text)
    except ValueError as error:
        raise RequestError(f"--{option}: {error}") from None


def _variables(files: Sequence[str], given: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """What files and options say of the job's environment; of a variable that is there twice, what is said last counts."""
    found: dict[str, str] = {}
    for each in files:
        found |= read_env_file(Path(each))
    for text in given:
        name, value = (text, _copied(text, environ)) if "=" not in text else _pair("--env", text)
        found[name] = value
    return found


def _copied(name: str, environ: Mapping[str, str]) -> str:
    """The value of a variable of this shell."""
    if not name.isidentifier() or not name.isascii():
        raise RequestError(f"--env: expected NAME=VALUE, or the NAME of a variable of this shell, got {name[:60]!r}")
    if name not in environ:
        raise RequestError(f"--env: {name} is not set in this shell; write --env {name}=VALUE, or export it first")
    return environ[name]


def seconds_of(option: str, text: str) -> float:
    """What an option says that is seconds, or 90s, 15m, 1h30m."""
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise RequestError(f"--{option.replace('_', '-')}: {error}") from None


def _variants(options: dict[str, Any]) -> tuple[Variant, ...]:
    sweeps = [_pair("--sweep", each, "V1,V2,...") for each in options["sweep"]]
    if options["array"] is not None and sweeps:
        raise RequestError("--array and --sweep do not go together; give the index as one more variable of the sweep")
    twice = next((name for place, (name, _) in enumerate(sweeps) if name in dict(sweeps[:place])), None)
    if twice is not None:
        raise RequestError(f"--sweep: {twice} is there twice; write all its values with commas")
    option = "--sweep" if sweeps else "--array"
    try:
        if sweeps:
            return sweep_of({name: tuple(values.split(",")) if values else () for name, values in sweeps})
        return () if options["array"] is None else array_of(options["array"])
    except ValueError as error:
        raise RequestError(f"{option}: {error}") from None


def _pair(option: str, text: str, expected: str = "VALUE") -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier() or not name.isascii():
        raise RequestError(f"{option}: expected NAME={expected}, got {text[:60]!r}")
    return name, value


# Verbs that wait until jobs have ended: `poise wait`, `submit --wait` and `submit --follow`.

LATE = 124
"""The exit code where the time is up, as that of timeout(1)."""
MOST_NAMED = 10
"""Jobs that are named in a line of advice."""


def tell(row: JobRow) -> None:
    """Say on standard error how a job stands that is waited for."""
    name = f" {row.name}" if row.name != row.id else ""
    click.echo(plain(f"{row.id}{name}: {state_of(row)}, {row.reason.text}"), err=True)


def waited(client: Client, jobs: Sequence[str], timeout: float | None, *, quiet: bool) -> tuple[dict[str, JobState], int]:
    """The final states of jobs, and the exit code: 0 if all succeeded, 1 if not, 124 where the time is up, 130 on Ctrl-C."""
    try:
        states = wait_for(client, jobs, timeout=timeout, on_change=None if quiet else tell)
    except WaitTimeoutError as error:
        click.echo(f"poise: {error}", err=True)
        return {}, LATE
    except KeyboardInterrupt:
        return {}, interrupted(jobs)
    return states, code_of(states.values())


def code_of(states: Iterable[JobState]) -> int:
    """0: all have succeeded."""
    return 0 if all(state is JobState.SUCCEEDED for state in states) else 1


def interrupted(jobs: Sequence[str]) -> int:
    """After Ctrl-C: the jobs know nothing of it."""
    few = " ".join(jobs[:MOST_NAMED]) + (" …" if len(jobs) > MOST_NAMED else "")
    logs = f" · poise logs -f {few}" if len(jobs) == 1 else ""
    goes = "the job goes on" if len(jobs) == 1 else "the jobs go on"
    click.echo(f"\npoise: {goes}; poise wait {few}{logs} · poise cancel {few}", err=True)
    return INTERRUPTED


def followed(client: Client, job: str) -> int:
    """Print what a job prints until it has ended; the exit code is that of `waited`."""
    screen = Screen()
    try:
        with screen:
            for part in client.follow_log(job):
                screen.show(part)
    except KeyboardInterrupt:
        return interrupted([job])
    states, code = waited(client, [job], None, quiet=True)
    for state in states.values():
        click.echo(f"{job} {state}", err=True)
    return code


MANY = 20
"""Jobs above which a person at a terminal is asked first."""
_COMMAND = "poise.cli.submit.command"

EPILOG = """\b
Examples:
  poise submit -- python train.py --epochs 10
  poise submit -g 4 --type v100,a100 -n resnet50 -- python train.py
  poise submit job.yaml --env LR=0.01 --env WANDB_API_KEY --env-file secrets.env
  poise submit --follow -- python train.py
  poise submit --sweep LR=0.1,0.01 --sweep SEED=1,2 -- python train.py --lr '${LR}' --seed '${SEED}'
  poise submit script.sbatch
"""


class SubmitCommand(click.Command):
    """A command whose words after `--` are another command's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep what stands after `--` apart."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_COMMAND] = tuple(args[at + 1 :])
        try:
            return super().parse_args(ctx, args[:at])
        except click.NoSuchOption as error:
            if "--" in args or all(word.startswith("-") for word in args):
                raise
            text = f"{error.format_message()} A command goes after --: poise submit -- python train.py"
            raise click.UsageError(text, ctx) from None


@click.command(cls=SubmitCommand, epilog=EPILOG, options_metavar="[OPTIONS] [FILE] [-- COMMAND...]")
@click.argument("file", nargs=-1, metavar="")
@job_options
@click.option("-y", "--yes", is_flag=True, help=f"Do not ask, however many jobs it is (more than {MANY} are asked about).")
@click.option("--dry-run", is_flag=True, help="Print what would be submitted, as JSON; nothing is sent.")
@click.option("--wait", is_flag=True, help="Wait until the jobs have ended; exit codes as of `poise wait`.")
@click.option("--follow", is_flag=True, help="Print what the job prints until it has ended; exit codes as of `poise wait`.")
@click.option("-q", "--id-only", is_flag=True, help="Print the ids alone, one a line.")
@json_option
@click.pass_context
def submit(ctx: click.Context, /, file: tuple[str, ...], dry_run: bool, **options: Any) -> int:  # noqa: ANN401
    """Submit a job, an array or a sweep to the running service.

    FILE is a job file in YAML, a script that begins with #! (its #SBATCH lines count), or - for a job file on standard
    input. Or give a command after --; no shell sees it. Options win over what FILE says. The job runs in the current folder
    and in the virtual environment that is active.
    """
    if len(file) > 1:
        raise click.UsageError(f"one FILE, or a command after --: poise submit -- {' '.join(file)}")
    manner = Manner.of(options)
    found = draft(file[0] if file else None, ctx.meta[_COMMAND], options)
    _note(found.notes)
    key = new_key()
    requests = tuple(map(completed_request, found.requests(key)))
    if dry_run:
        _note(notes_on(requests))
        shown = [request.model_dump(mode="json", exclude_defaults=True) for request in requests]
        click.echo(json.dumps(shown if found.variants else shown[0], indent=1))
        return 0
    manner.check(len(requests))
    if len(requests) > MANY and manner.asks and sys.stdin.isatty():
        click.confirm(f"Submit {len(requests):,} jobs?", default=True, abort=True, err=True)
    with connected() if manner.end is FollowEnd.NONE else patiently_connected() as client:
        return _submit(client, requests, key, manner)


class FollowEnd(Enum):
    """What is done once the jobs are submitted."""

    NONE = "none"
    WAIT = "wait"
    FOLLOW = "follow"


class OutputForm(Enum):
    """What is printed of a submission."""

    LINES = "lines"
    IDS = "ids"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Manner:
    """How a submission is made: what is asked before, printed, and waited for."""

    form: OutputForm
    end: FollowEnd
    asks: bool

    @classmethod
    def of(cls, options: dict[str, Any]) -> Self:
        """What the options say, which are taken out of them; RequestError if they contradict each other."""
        yes, as_json, ids, wait, follow = (options.pop(name) for name in ("yes", "as_json", "id_only", "wait", "follow"))
        if as_json and ids:
            raise RequestError("--json and --id-only are two forms of one answer; leave one of them out")
        if follow and (as_json or ids):
            raise RequestError("--follow prints what the job prints; leave --json and --id-only out, or take --wait")
        form = OutputForm.JSON if as_json else OutputForm.IDS if ids else OutputForm.LINES
        return cls(
            form, FollowEnd.FOLLOW if follow else FollowEnd.WAIT if wait else FollowEnd.NONE, asks=not yes and not as_json
        )

    def check(self, jobs: int) -> None:
        """RequestError for what cannot be done with so many jobs."""
        if self.end is FollowEnd.FOLLOW and jobs > 1:
            raise RequestError(
                f"--follow prints one log, and these are {jobs:,} jobs; take --wait, or `poise logs -f` of one"
            )


def _note(notes: Iterable[str]) -> None:
    for note in notes:
        click.echo(plain(f"note: {note}"), err=True)


def _submit(client: Client, requests: tuple[JobRequest, ...], key: str, manner: Manner) -> int:
    handles = client.submit_all(requests, key=key)
    _note(handles[0].notes)
    jobs = [handle.id for handle in handles]
    venv = requests[0].venv
    if manner.form is OutputForm.LINES:
        _tell(client, jobs, requests[0], is_log=manner.end is FollowEnd.FOLLOW)
    elif manner.form is OutputForm.IDS:
        click.echo("\n".join(jobs))
    if manner.end is FollowEnd.FOLLOW:
        return followed(client, jobs[0])
    states, code = (
        ({}, 0) if manner.end is FollowEnd.NONE else waited(client, jobs, None, quiet=manner.form is not OutputForm.LINES)
    )
    if manner.form is OutputForm.JSON:
        more = {"venv": venv} if venv else {}
        echo_json(
            {"jobs": jobs, **more, **({"states": [states[job].value for job in jobs if job in states]} if states else {})}
        )
    elif manner.form is OutputForm.LINES:
        for job, state in states.items():
            click.echo(f"{job} {state}")
    return code


def _tell(client: Client, jobs: list[str], request: JobRequest, *, is_log: bool) -> None:
    """What became of a submission, for people; beside a log that is followed it does not stand in the log's way."""
    first, lines = jobs[0], []
    if len(jobs) == 1:
        lines.append(f"submitted {first}{_standing(client, first)}")
        further = f"next: poise why {first} · poise logs -f {first} · poise queue"
    else:
        lines += [f"submitted {len(jobs):,} jobs of app {request.app}: {' '.join(_few(jobs))}"]
        lines += [f"{first}{_standing(client, first)}"]
        further = f"next: poise queue --app {request.app} · poise why {first} · poise logs -f {first}"
    if request.venv is not None:
        lines.append(f"runs in the virtual environment {request.venv} (--no-venv: in none)")
    for line in lines if is_log else (*lines, further):
        click.echo(plain(line), err=is_log)


def _standing(client: Client, job: str) -> str:
    """Its name, state and reason; nothing if the server is away by now: the job is submitted all the same."""
    try:
        row = client.show(job).job
    except PoiseError:
        return ""
    name = f" {row.name}" if row.name != row.id else ""
    return f"{name}: {state_of(row)}, {row.reason.text}"


def _few(jobs: list[str]) -> list[str]:
    return jobs if len(jobs) <= MANY else [*jobs[: MANY // 2], "…", *jobs[-MANY // 2 :]]


# `poise wait`: until jobs have ended.

WAIT_EPILOG = """\b
Examples:
  poise wait 17
  poise wait 17 18 --timeout 1h && echo done
"""


@click.command(epilog=WAIT_EPILOG)
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@click.option("--timeout", metavar="TIME", help="Wait no longer than that.  [default: as long as it takes]")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing of jobs that have not ended.")
@json_option
def wait(jobs: tuple[str, ...], timeout: str | None, quiet: bool, as_json: bool) -> int:
    """Wait until all JOBs have ended, then print each with its final state. A restart of the server does not end it.

    Exit codes: 0 all succeeded, 1 one failed or was cancelled; 124 the time is up, 130 Ctrl-C, and the jobs go on.
    """
    most = None if timeout is None else seconds_of("timeout", timeout)
    with patiently_connected(most) as client:
        ids = list(dict.fromkeys(found(client, each) for each in jobs))
        states, code = waited(client, ids, most, quiet=quiet)
    if as_json:
        echo_json([{"job": job, "state": state.value} for job, state in states.items()])
    else:
        for job, state in states.items():
            click.echo(f"{job} {state}")
    return code
