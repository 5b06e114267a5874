"""What the service writes for a runner: order.json (command, environments, limits, deadlines) and lease.json.

`order_fields` turns a `RunOrder` into order.json, with one environment per replica as torchrun would set it. `check_request`
at the end says at submission whether the machine has what a job asks for, so that no job waits for hours only to fail.
"""

import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from poise.scheduler.model.errors import RequestError
from poise.service.backends.api import RunNotice, RunOrder, RunPart
from poise.service.backends.local.lease_files import VERSION, Fields
from poise.service.backends.local.shipped_files import SHIPPED, archive_path
from poise.service.backends.local.state_dir import StateDir
from poise.service.backends.local.venvs import has_python, inside, path_inside
from poise.service.wire.request import JobRequest, PreemptionMode, Replicas

INHERITED = ("PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "CUDA_HOME", "PYTHONPATH")
"""Variables of the service's environment that jobs see, besides LC_*. None of them could hold a secret."""

Devices = Mapping[tuple[str, int], str]  # device by node and slot, as CUDA_VISIBLE_DEVICES names it


class Isolation(StrEnum):
    """What jobs are kept from."""

    NONE = "none"  # nothing: they see what the user of the service sees
    FILES = "files"  # they see nothing of the state directory except their own part
    FULL = "full"  # nor processes other than their own; nothing that they start outlives their run


class NodeLease(NamedTuple):
    """The time for which this node may run anything (`runner/fence.py`).

    file      says until when
    seconds   for how long each renewal is
    since     since when the node has had a lease without a gap, in seconds since boot
    """

    file: str
    seconds: float
    since: float


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """How runs are kept. Times in seconds."""

    term_seconds: float = 10.0  # between TERM and KILL
    guard_seconds: float = 10.0  # after which a runner that should be gone, and still has children, is killed
    progress_every: float = 1.0  # between two looks at what runs report
    silent_seconds: float = 60.0  # after which a runner that does nothing is killed; a healthy one wakes twice a second
    log_bytes: int = 10 << 20  # per part of a replica's log
    log_files: int = 5  # parts of it that are kept
    isolation: Isolation = Isolation.NONE  # a run that cannot be isolated like this does not start
    node_lease: NodeLease | None = None  # of a node that has to end its runs if it is cut off; None: it need not
    starter: Path | None = (
        None  # directory of what starts runners, in another container (`starters.py`); None: they are forked
    )


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Select the part of the service's environment that jobs get."""
    return {name: value for name, value in environ.items() if name in INHERITED or name.startswith("LC_")}


def order_fields(
    order: RunOrder,
    state: StateDir,
    settings: LocalSettings,
    *,
    base: Mapping[str, str],
    devices: Devices,
    port: int,
    begun: float,
) -> Fields:
    """Return the contents of order.json.

    base   environment that all jobs start from (`inherited`)
    port   MASTER_PORT, which the service keeps free of other runs unless rank 0 is on another node
    begun  steps of the newest complete checkpoint
    """
    request = order.request
    most = request.max_duration
    folder = state.job_path(order.job)
    hidden = {"state": str(state.path.parent), "job": str(folder), "processes": settings.isolation is Isolation.FULL}
    given = {"PYTHONUNBUFFERED": "1", **request.env}
    own, directory, more = inside(request.venv, {**base, **given}), request.cwd or str(folder / "work"), {}
    if settings.starter is not None:
        # The environment and the working directory are those of the container: its runner knows them, and completes both.
        own, directory, more = {}, request.cwd or ".", {"inherit": given}
    return {
        "job": order.job,
        "epoch": order.epoch,
        "begun": begun,
        "gpus": [[part.node, part.gpu_type, list(part.slots)] for part in order.gpus],
        "argv": list(request.command),
        "setup": list(request.setup),
        "directory": str(folder / SHIPPED) if request.files else directory,
        "files": None if request.files is None else _archive(state, order.tenant, request.files),
        "venv": request.venv,
        "environment": {**own, **_run_variables(order, state, port)},  # ours last: a job cannot override them
        "replicas": list(_replicas(order, devices)),
        "limits": request.limits.model_dump(),
        "deadline": request.checkpoint.deadline,
        "saves": request.preemption is PreemptionMode.CHECKPOINT,
        "term_seconds": settings.term_seconds,
        "seconds_left": None if most is None else max(0.0, most - order.ran),
        "log": {"bytes": settings.log_bytes, "files": settings.log_files},
        "isolation": None if settings.isolation is Isolation.NONE else hidden,
        "node_lease": None if settings.node_lease is None else list(settings.node_lease),
        **more,
    }


def _archive(state: StateDir, tenant: str, sha256: str) -> Fields:
    return {"archive": str(archive_path(state.path.parent, tenant, sha256)), "sha256": sha256}


def lease_fields(job: str, epoch: int, ends: float | None, notice: RunNotice | None, mode: str) -> Fields:
    """Return the contents of lease.json. `seconds` bounds `ends`, in case the clock is set back."""
    fields: Fields = {"job": job, "epoch": epoch, "ends": None, "cause": None, "text": None, "seconds": None, "mode": None}
    if notice is not None:
        fields.update(ends=ends, cause=notice.cause, text=notice.text, seconds=notice.deadline, mode=mode)
    return fields


def leaving_mode(request: JobRequest) -> str:
    """How a run is made to leave. A job that should never be preempted has no checkpoint to write either."""
    return "checkpoint" if request.preemption is PreemptionMode.CHECKPOINT else "restart"


def run_marks(state: StateDir, job: str, epoch: int) -> dict[str, str]:
    """Return the variables by which all processes of a run are recognised. Its directory is unique to this service."""
    return {"POISE_RUN": f"{job}/{epoch}", "POISE_RUN_DIR": str(state.run_path(job, epoch))}


def free_port(taken: set[int]) -> int:
    """Find a TCP port of this machine that nothing listens on and that no other run was given."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in taken:
            return port


def _run_variables(order: RunOrder, state: StateDir, port: int) -> dict[str, str]:
    """Variables that all replicas of a run share."""
    request = order.request
    values: dict[str, object] = {
        "POISE_JOB": order.job,
        "POISE_EPOCH": order.epoch,
        "POISE_TENANT": order.tenant,
        "POISE_CHECKPOINT_DIR": state.job_path(order.job) / "checkpoint",
        "POISE_GPUS": sum(len(part.slots) for part in order.gpus),
        "POISE_LEASE_VERSION": VERSION,
        "MASTER_ADDR": "127.0.0.1" if order.part is None else order.part.master,
        "MASTER_PORT": port,
    }
    if order.part is not None and len(order.gpus) > 1:
        values["POISE_NODES"] = len(order.gpus)
    if request.checkpoint.every is not None:
        values["POISE_CHECKPOINT_EVERY"] = request.checkpoint.every
    if request.micro_batches is not None:
        values["POISE_MICRO_BATCHES"] = request.micro_batches
        speeds = rank_speeds(order)
        if len(set(speeds)) > 1:
            values["POISE_RANK_SPEEDS"] = ",".join(f"{each:.6g}" for each in speeds)
    if "SLURM_JOB_NAME" in request.env:  # submitted as an sbatch script, which may ask for its job's number
        values["SLURM_JOB_ID"] = order.job
    return {**run_marks(state, order.job, order.epoch), **{name: str(value) for name, value in values.items()}}


def world_size(order: RunOrder) -> int:
    """Return the number of processes of a run, on all nodes."""
    return sum(replicas_on(part, order.request) for part in order.gpus)


def ranks_here(order: RunOrder) -> list[int]:
    """Return the ranks that the order starts on this machine."""
    return [each["rank"] for each in _replicas(order, {})]


def rank_speeds(order: RunOrder) -> list[float]:
    """Return the believed speed of each rank relative to the fastest GPU type; its part of the micro-batches follows."""
    fastest = max((order.speeds.get(part.gpu_type, 1.0) for part in order.gpus), default=1.0)
    found: list[float] = []
    for part in order.gpus:
        one, ranks = order.speeds.get(part.gpu_type, 1.0) / fastest, replicas_on(part, order.request)
        found += [one * len(part.slots) / ranks] * ranks
    return found


def replicas_on(part: RunPart, request: JobRequest) -> int:
    """Return how many processes of a run these GPUs get."""
    return 1 if request.replicas is Replicas.NODE else len(part.slots)


def _replicas(order: RunOrder, devices: Devices) -> Iterator[Fields]:
    """Number ranks by node, as torchrun does. All replicas on a node see all GPUs that the run has there."""
    size, rank, parts_here = world_size(order), 0, order.parts_here
    for group, part in enumerate(order.gpus):
        here = replicas_on(part, order.request)
        if part not in parts_here:
            rank += here
            continue
        visible = ",".join(devices.get((part.node, slot), str(slot)) for slot in part.slots)
        for local in range(here):
            yield {
                "rank": rank,
                "title": f"run {order.epoch} on {part.node} {list(part.slots)}",
                "environment": {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(here),
                    "GROUP_RANK": str(group),
                    "CUDA_VISIBLE_DEVICES": visible,
                    "POISE_GPU_TYPE": part.gpu_type,
                },
            }
            rank += 1


# Checks at submission

LONGEST_SHOWN = 200
MOST_BYTES = (128 << 10) - 1  # of one argument, or of one variable with its name: execve(2) refuses more (MAX_ARG_STRLEN)


def check_request(request: JobRequest, environ: Mapping[str, str] | None = None, hidden: str | None = None) -> None:
    """Check that the working directory and the programs exist and can be used; RequestError names what cannot.

    environ   the service's environment; None: this process's
    hidden    directory that jobs do not see; None: they see all
    """
    base = inherited(os.environ if environ is None else environ)
    cwd, venv = request.cwd, request.venv
    if request.files is not None:
        cwd = "/"  # programs of the archive are looked for when it is unpacked
    elif cwd is not None and not os.path.isdir(cwd):
        what = "is not a directory" if os.path.exists(cwd) else "does not exist"
        raise RequestError(f"cwd: {cwd[:LONGEST_SHOWN]!r} {what}; name a directory of the machine that the service runs on")
    _check_visible("cwd", cwd, hidden)
    if venv is not None and not has_python(venv):
        text = "is no virtual environment of the machine that the service runs on: it has no bin/python"
        raise RequestError(f"venv: {venv[:LONGEST_SHOWN]!r} {text}; name one that is, or submit with --no-venv")
    _check_visible("venv", venv, hidden)
    path = path_inside(venv, request.env.get("PATH", base.get("PATH", os.defpath)))
    for field, command in (("command", request.command), ("setup", request.setup)):
        if command:
            _check_size(field, {f"argument {number}": text for number, text in enumerate(command)})
            if request.files is None or "/" not in command[0]:
                _check_program(field, command[0], cwd, path)
            _check_visible(field, command[0] if command[0].startswith("/") else None, hidden)
    _check_size("env", {name: f"{name}={value}" for name, value in request.env.items()})


def _check_visible(field: str, path: str | None, hidden: str | None) -> None:
    """Refuse a path inside the directory that jobs do not see."""
    if path is None or hidden is None:
        return
    if os.path.commonpath((os.path.realpath(path), os.path.realpath(hidden))) == os.path.realpath(hidden):
        shown = path[:LONGEST_SHOWN]
        raise RequestError(
            f"{field}: {shown!r} lies in the state directory of the service, which jobs do not see; move it out of {hidden}"
        )


def _check_program(field: str, program: str, cwd: str | None, path: str) -> None:
    shown = program[:LONGEST_SHOWN]
    if "/" not in program:
        if shutil.which(program, path=path) is None:
            raise RequestError(f"{field}: no program {shown!r} in the PATH of the job; give its path, or set PATH in env")
        return
    if not program.startswith("/") and cwd is None:
        raise RequestError(f"{field}: {shown!r} is a relative path; give an absolute one, or a cwd")
    where = os.path.join(cwd or "/", program)
    if not os.path.isfile(where):
        raise RequestError(f"{field}: no program at {where[:LONGEST_SHOWN]!r}")
    if not os.access(where, os.X_OK):
        raise RequestError(
            f"{field}: {where[:LONGEST_SHOWN]!r} is not executable; run chmod +x, or name its interpreter first"
        )


def _check_size(field: str, texts: Mapping[str, str]) -> None:
    """Refuse texts, by the name that the message shows, that execve cannot pass on."""
    for name, text in texts.items():
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise RequestError(f"{field}: not every character of {name} can be written as UTF-8") from None
        if size > MOST_BYTES:
            raise RequestError(
                f"{field}: {name} has {size:,} bytes as UTF-8; at most {MOST_BYTES:,} can be handed over: put it into a file"
            )
