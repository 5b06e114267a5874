"""What a runner is told: the command, the environment of every replica, limits and deadlines."""

import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from poise.scheduler.model.errors import RequestError
from poise.service.backends.api import RunNotice, RunOrder, RunPart
from poise.service.backends.local.lease_files import VERSION, Fields
from poise.service.backends.local.state_dir import StateDir
from poise.service.wire.request import JobRequest, PreemptionMode, Replicas

# Virtual environments of jobs: their programs come first in PATH, as after `activate`.

GONE = "virtual-environment-gone"
"""Why a run could not be begun whose virtual environment was deleted after the job was submitted."""
_PYTHONS = ("python", "python3")
_CONDA = "conda-meta"


def programs(venv: str) -> str:
    """The directory of its programs."""
    return os.path.join(venv, "bin")


def has_python(venv: str) -> bool:
    """It has a Python that can be started."""
    return holds_python(programs(venv))


def holds_python(folder: str) -> bool:
    """One of the programs in a directory is Python."""
    return any(os.access(os.path.join(folder, name), os.X_OK) for name in _PYTHONS)


def path_inside(venv: str | None, path: str) -> str:
    """PATH of a job, given what it would be without a virtual environment."""
    return path if venv is None else programs(venv) + os.pathsep + path


def inside(venv: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """An environment with a virtual environment in force; as it was if there is none."""
    if venv is None:
        return dict(environment)
    kept = {name: value for name, value in environment.items() if name not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    name = "CONDA_PREFIX" if os.path.isdir(os.path.join(venv, _CONDA)) else "VIRTUAL_ENV"
    return {**kept, name: venv, "PATH": path_inside(venv, environment.get("PATH", os.defpath))}


INHERITED = ("PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "CUDA_HOME", "PYTHONPATH")
"""What a job sees of the server's environment, and LC_*: nothing that could be a secret."""

Devices = Mapping[tuple[str, int], str]
"""Names of devices by node and slot, as CUDA_VISIBLE_DEVICES has them."""


class Isolation(StrEnum):
    """What jobs are kept from.

    NONE    nothing: they see what the user sees who runs the service
    FILES   they see nothing of the state directory but what is their own
    FULL    nor processes other than their own, and nothing that they leave behind outlives their run
    """

    NONE = "none"
    FILES = "files"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """How runs are kept. Times in seconds.

    term_seconds     between TERM and KILL
    guard_seconds    after which a runner that should be gone, and has processes left, is killed itself
    progress_every   between two looks at what runs report of themselves
    silent_seconds   after which a runner that does nothing at all is killed; one that is well looks around twice a second
    log_bytes        of a part of a replica's log;  log_files: parts that are kept
    isolation        what jobs are kept from; a run that cannot be is not begun
    """

    term_seconds: float = 10.0
    guard_seconds: float = 10.0
    progress_every: float = 1.0
    silent_seconds: float = 60.0
    log_bytes: int = 10 << 20
    log_files: int = 5
    isolation: Isolation = Isolation.NONE


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of the server's environment that jobs get."""
    return {name: value for name, value in environ.items() if name in INHERITED or name.startswith("LC_")}


def directory(request: JobRequest, folders: StateDir, job: str) -> str:
    """Where a job runs: where its owner said, or in a directory of its own."""
    return request.cwd or str(folders.job_path(job) / "work")


def leaving_mode(request: JobRequest) -> str:
    """How a run is made to leave; a job that should never be preempted knows of no checkpoint either."""
    return "checkpoint" if request.preemption is PreemptionMode.CHECKPOINT else "restart"


def marked(folders: StateDir, job: str, epoch: int) -> dict[str, str]:
    """What is in the environment of everything that belongs to a run. The directory is this service's alone."""
    return {"POISE_RUN": f"{job}/{epoch}", "POISE_RUN_DIR": str(folders.run_path(job, epoch))}


def free_port(taken: set[int]) -> int:
    """A TCP port of this machine that nobody listens on and that no other run was given."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in taken:
            return port


def order_fields(
    order: RunOrder, folders: StateDir, settings: LocalSettings, *, base: Mapping[str, str], devices: Devices, port: int
) -> Fields:
    """What order.json says."""
    request = order.request
    most = request.max_duration
    own = inside(request.venv, {**base, "PYTHONUNBUFFERED": "1", **request.env})
    return {
        "job": order.job,
        "epoch": order.epoch,
        "gpus": [[part.node, part.gpu_type, list(part.slots)] for part in order.gpus],
        "argv": list(request.command),
        "setup": list(request.setup),
        "directory": directory(request, folders, order.job),
        "venv": request.venv,
        "environment": {**own, **_common(order, folders, port)},
        "replicas": list(_replicas(order, devices)),
        "limits": request.limits.model_dump(),
        "deadline": request.checkpoint.deadline,
        "term_seconds": settings.term_seconds,
        "seconds_left": None if most is None else max(0.0, most - order.ran),
        "log": {"bytes": settings.log_bytes, "files": settings.log_files},
        "isolation": _isolation(order.job, folders, settings.isolation),
    }


def _isolation(job: str, folders: StateDir, level: Isolation) -> Fields | None:
    """What the runner is to hide, and what not; None: nothing."""
    if level is Isolation.NONE:
        return None
    hidden = {"state": str(folders.path.parent), "job": str(folders.job_path(job))}
    return {**hidden, "processes": level is Isolation.FULL}


def lease_fields(job: str, epoch: int, ends: float | None, notice: RunNotice | None, mode: str) -> Fields:
    """What lease.json says. `seconds` bounds `ends`, should the clock be set back."""
    if notice is None:
        return {"job": job, "epoch": epoch, "ends": None, "cause": None, "text": None, "seconds": None, "mode": None}
    said = {"cause": notice.cause, "text": notice.text, "seconds": notice.deadline, "mode": mode}
    return {"job": job, "epoch": epoch, "ends": ends, **said}


def _common(order: RunOrder, folders: StateDir, port: int) -> dict[str, str]:
    """Variables that all replicas of a run have alike."""
    request = order.request
    values: dict[str, object] = {
        "POISE_JOB": order.job,
        "POISE_EPOCH": order.epoch,
        "POISE_TENANT": order.tenant,
        "POISE_CHECKPOINT_DIR": folders.job_path(order.job) / "checkpoint",
        "POISE_GPUS": sum(len(part.slots) for part in order.gpus),
        "POISE_LEASE_VERSION": VERSION,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    if request.checkpoint.every is not None:
        values["POISE_CHECKPOINT_EVERY"] = request.checkpoint.every
    if request.micro_batches is not None:
        values["POISE_MICRO_BATCHES"] = request.micro_batches
        speeds = rank_speeds(order)
        if len(set(speeds)) > 1:
            values["POISE_RANK_SPEEDS"] = ",".join(f"{each:.6g}" for each in speeds)
    if "SLURM_JOB_NAME" in request.env:
        values["SLURM_JOB_ID"] = order.job
    return {**marked(folders, order.job, order.epoch), **{name: str(value) for name, value in values.items()}}


def replica_count(order: RunOrder) -> int:
    """Processes of a run."""
    return sum(_on(part, order.request) for part in order.gpus)


def rank_speeds(order: RunOrder) -> list[float]:
    """How fast the GPUs of each rank are believed to be; its part of the micro-batches follows from that."""
    fastest = max((order.speeds.get(part.gpu_type, 1.0) for part in order.gpus), default=1.0)
    found: list[float] = []
    for part in order.gpus:
        one, ranks = order.speeds.get(part.gpu_type, 1.0) / fastest, _on(part, order.request)
        found += [one * len(part.slots) / ranks] * ranks
    return found


def _on(part: RunPart, request: JobRequest) -> int:
    return 1 if request.replicas is Replicas.NODE else len(part.slots)


def _replicas(order: RunOrder, devices: Devices) -> Iterator[Fields]:
    """Ranks by node, as torchrun numbers them. All replicas of a node see all GPUs of it that the run has."""
    size, rank = replica_count(order), 0
    for group, part in enumerate(order.gpus):
        here = _on(part, order.request)
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


# Whether what a job asks for is on this machine: said at submission, so that nothing waits for hours only to fail.

LONGEST_SHOWN = 200
MOST_BYTES = (128 << 10) - 1
"""Of an argument, or of a variable with its name: the kernel starts nothing that has more (MAX_ARG_STRLEN in execve(2))."""


def checked(request: JobRequest, environ: Mapping[str, str] | None = None, hidden: str | None = None) -> None:
    """The working directory is there, and so are the programs, and they can be started; RequestError says what is not.

    environ   the server's environment; None: this process's
    hidden    directory that jobs do not see; None: they see all
    """
    base = inherited(os.environ if environ is None else environ)
    cwd = request.cwd
    if cwd is not None and not os.path.isdir(cwd):
        what = "is not a directory" if os.path.exists(cwd) else "does not exist"
        raise RequestError(f"cwd: {cwd[:LONGEST_SHOWN]!r} {what}; name a directory of the machine that the service runs on")
    _check_seen("cwd", cwd, hidden)
    _check_venv(request.venv)
    _check_seen("venv", request.venv, hidden)
    path = path_inside(request.venv, request.env.get("PATH", base.get("PATH", os.defpath)))
    for field, command in (("command", request.command), ("setup", request.setup)):
        if command:
            _check_bytes(field, {f"argument {number}": text for number, text in enumerate(command)})
            _check_program(field, command[0], cwd, path)
            _check_seen(field, command[0] if command[0].startswith("/") else None, hidden)
    _check_bytes("env", {name: f"{name}={value}" for name, value in request.env.items()})


def _check_venv(venv: str | None) -> None:
    if venv is not None and not has_python(venv):
        text = "is no virtual environment of the machine that the service runs on: it has no bin/python"
        raise RequestError(f"venv: {venv[:LONGEST_SHOWN]!r} {text}; name one that is, or submit with --no-venv")


def _check_seen(field: str, path: str | None, hidden: str | None) -> None:
    """It does not lie in what jobs do not see."""
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


def _check_bytes(field: str, texts: Mapping[str, str]) -> None:
    """Each can be handed to a program; they have names for people."""
    for name, text in texts.items():
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise RequestError(f"{field}: not every character of {name} can be written as UTF-8") from None
        if size > MOST_BYTES:
            raise RequestError(
                f"{field}: {name} has {size:,} bytes as UTF-8; at most {MOST_BYTES:,} can be handed over: put it into a file"
            )
