"""What `poise submit --dry-run` prints: what would run, as far as it is known without asking the service."""

import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from poise.cli.live import clock_time
from poise.cli.output import show_notes
from poise.scheduler.model.errors import RequestError, plain
from poise.scheduler.model.units import counted
from poise.service.backends.local.venvs import path_inside
from poise.service.client.config import find_server
from poise.service.client.exporting import Exported, exported
from poise.service.wire.request import EXPORT_NONE, JobRequest, Replicas, notes_on

MANY = 20
"""Jobs above which the first and the last are listed."""
_REPLICAS = {Replicas.NODE: "one process per node", Replicas.GPU: "one process per GPU"}


def show_dry_run(
    requests: Sequence[JobRequest], environ: Mapping[str, str], shipped: Path | None, *, is_array: bool, as_json: bool
) -> None:
    """Print what would run, or the requests as JSON; nothing is sent.

    shipped    the folder that would be sent along;  is_array: the jobs are an array or a sweep
    """
    sent = exported(requests, environ, is_here=_is_here(environ))
    show_notes([plain(note) for note in (*sent.notes, *notes_on(requests))])
    if as_json:
        shown = [request.model_dump(mode="json", exclude_defaults=True) for request in requests]
        click.echo(json.dumps(shown if is_array else shown[0], indent=1))
        return
    click.echo(f"would submit {counted(len(requests), 'job')}; nothing was sent")
    found = _facts(sent, shipped, environ)
    width = max(len(heading) for heading, _ in found)
    for heading, text in found:
        click.echo(f"  {heading:{width}}  {plain(text)}".rstrip())
    if is_array:
        click.echo()
        for line in _jobs(requests):
            click.echo(line)


def _is_here(environ: Mapping[str, str]) -> bool:
    """Whether the service that would be asked is on this machine, as one would be that is started now."""
    try:
        return find_server(environ).is_here
    except RequestError:
        return True


def _facts(sent: Exported, shipped: Path | None, environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Headings and texts about the first job, and what all jobs have."""
    first, taken = sent.requests[0], sent.environments[0] if sent.environments else {}
    shared = {name: value for name, value in first.env.items() if all(each.env.get(name) == value for each in sent.requests)}
    least, most = first.min_gpus or first.gpus, first.max_gpus or first.gpus
    gpus = f"{least}..{most}" if least != most else f"{most}"
    types = " or ".join(first.gpu_types) or "any type"
    rows = [
        ("command", shlex.join(first.command) if len(sent.requests) == 1 else None),
        ("program", _program(first, taken, environ)),
        ("setup", shlex.join(first.setup)),
        ("folder", first.cwd if shipped is None else f"a copy of {shipped}"),
        ("image", first.image),
        ("virtual env", first.venv or "none"),
        ("GPUs", f"{gpus} of {types}" + (f", {first.micro_batches} micro-batches" if first.micro_batches else "")),
        ("replicas", _REPLICAS[first.replicas]),
        ("checkpoints", first.checkpoint.url or "where the service keeps them"),
        ("variables", shlex.join(f"{name}={value}" for name, value in shared.items())),
        ("exported", f"{counted(len(taken), 'variable')} of this shell: {', '.join(sorted(taken))}" if taken else "none"),
        ("after", ", ".join(first.after)),
        ("begins", clock_time(first.begin) + " or later" if first.begin is not None else None),
        ("finish by", clock_time(first.deadline) if first.deadline is not None else None),
        ("at once", f"{first.array_cap} of its array" if first.array_cap is not None else None),
        ("on hold", "until poise release" if first.hold else None),
    ]
    return [(heading, text) for heading, text in rows if text]


def _program(request: JobRequest, taken: Mapping[str, str], environ: Mapping[str, str]) -> str | None:
    """Where the program of a job is found, if it is looked for on this machine; None: its path is in the command."""
    name = request.command[0]
    if "/" in name:
        return None
    own = {**taken, **request.env}.get("PATH")
    if request.image is not None or (request.export != EXPORT_NONE and own is None):
        return "as found where the job runs"
    path = path_inside(request.venv, own or environ.get("PATH", os.defpath))
    return shutil.which(name, path=path) or f"no {name} in PATH on this machine"


def _jobs(requests: Sequence[JobRequest]) -> list[str]:
    """One line for each job: its variables that others have not, and its command."""
    names = [name for name in requests[0].env if len({each.env.get(name) for each in requests}) > 1]
    lines = [
        f"  {' '.join(shlex.quote(f'{name}={each.env[name]}') for name in names)}: {shlex.join(each.command)}"
        for each in requests
    ]
    few = lines if len(lines) <= MANY else [*lines[: MANY // 2], "  …", *lines[-MANY // 2 :]]
    return list(map(plain, few))
