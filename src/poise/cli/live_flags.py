"""The options of `poise submit`, and the draft of jobs that they, a file and a command describe together."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from poise.model.errors import RequestError
from poise.model.units import parse_seconds
from poise.wire.envfile import read_env_file
from poise.wire.jobfile import read_draft, read_text
from poise.wire.jobfile_draft import Draft, Variant, array_of, sweep_of
from poise.wire.jobfile_tree import MOST_BYTES
from poise.wire.jobfile_values import parse_folder, parse_gang
from poise.wire.jobfile_words import literal_words
from poise.wire.request import Preemption, Replicas
from poise.wire.sbatch import JOB_NAME, read_sbatch, settled

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
        type=click.Choice([each.value for each in Preemption]),
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


def draft(file: str | None, command: Sequence[str], options: dict[str, Any]) -> Draft:
    """What a file or a command says, with the options laid over it."""
    written = _written(file, tuple(command))
    overlaid = written.overlaid(_fields(options), _variables(options["env_file"], options["env"], os.environ))
    variants = _variants(options)
    found = replace(overlaid, variants=variants) if variants else overlaid
    return settled(found) if JOB_NAME in written.env else found


def _written(file: str | None, command: tuple[str, ...]) -> Draft:
    if file is None:
        if not command:
            raise click.UsageError("give a job file, a script, or a command: poise submit -- python train.py")
        return Draft(literal_words(command))
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


def _alone(found: Draft, file: str, command: tuple[str, ...]) -> Draft:
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
            fields |= parse_gang(options["gpus"]).fields()
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
        return parse_folder(text, Path())
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
