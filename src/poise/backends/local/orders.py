"""What a runner is told: the command, the environment of every replica, limits and deadlines."""

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from poise.backends.local.folders import Folders
from poise.backends.local.records import VERSION, Fields
from poise.backends.local.venvs import inside
from poise.engine.live import Notice, Part, RunOrder
from poise.wire.request import Preemption, Replicas, Request

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


def directory(request: Request, folders: Folders, job: str) -> str:
    """Where a job runs: where its owner said, or in a directory of its own."""
    return request.cwd or str(folders.job_path(job) / "work")


def leaving_mode(request: Request) -> str:
    """How a run is made to leave; a job that should never be preempted knows of no checkpoint either."""
    return "checkpoint" if request.preemption is Preemption.CHECKPOINT else "restart"


def marked(folders: Folders, job: str, epoch: int) -> dict[str, str]:
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
    order: RunOrder, folders: Folders, settings: LocalSettings, *, base: Mapping[str, str], devices: Devices, port: int
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


def _isolation(job: str, folders: Folders, level: Isolation) -> Fields | None:
    """What the runner is to hide, and what not; None: nothing."""
    if level is Isolation.NONE:
        return None
    hidden = {"state": str(folders.path.parent), "job": str(folders.job_path(job))}
    return {**hidden, "processes": level is Isolation.FULL}


def lease_fields(job: str, epoch: int, ends: float | None, notice: Notice | None, mode: str) -> Fields:
    """What lease.json says. `seconds` bounds `ends`, should the clock be set back."""
    if notice is None:
        return {"job": job, "epoch": epoch, "ends": None, "cause": None, "text": None, "seconds": None, "mode": None}
    said = {"cause": notice.cause, "text": notice.text, "seconds": notice.deadline, "mode": mode}
    return {"job": job, "epoch": epoch, "ends": ends, **said}


def _common(order: RunOrder, folders: Folders, port: int) -> dict[str, str]:
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


def _on(part: Part, request: Request) -> int:
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
