"""What a pretend kubelet knows of pods in general: their GPUs, their status, addresses, images."""

import base64
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.kube.server import GPU, Json, now

_IPS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Image:
    """What an image has: here, a way to find programs among those of this machine.

    entrypoint    for containers without a command
    path          where programs are looked for, unless the container says otherwise
    root          a directory, for volumes that are images
    """

    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()
    path: str = os.defpath
    environment: Mapping[str, str] = field(default_factory=dict)
    root: Path | None = None


def gpus_of(pod: Json) -> int:
    """Return how many GPUs a pod takes: of its main containers and sidecars, or of the init container that asks for most."""
    spec = pod["spec"]
    inits = spec.get("initContainers", [])
    sidecars = sum(gpus_of_container(each) for each in inits if each.get("restartPolicy") == "Always")
    most = max([gpus_of_container(each) for each in inits if each.get("restartPolicy") != "Always"], default=0)
    return max(sum(gpus_of_container(each) for each in spec["containers"]), most) + sidecars


def gpus_of_container(container: Json) -> int:
    amounts = container.get("resources", {})
    return int({**amounts.get("requests", {}), **amounts.get("limits", {})}.get(GPU, 0))


def an_ip() -> str:
    number = next(_IPS)
    return f"127.{64 + (number >> 16) % 64}.{number >> 8 & 255}.{number & 255}"


def decoded(text: str) -> str:
    return base64.b64decode(text).decode(errors="replace")


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace `$(NAME)` as Kubernetes does; `$$` is a dollar."""

    def one(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else values.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)", one, text)


def named(container: Json, uid: str) -> Json:
    image = container["image"]
    return {"name": container["name"], "image": image, "imageID": f"sha256:{image}", "containerID": f"containerd://{uid}"}


def pod_status(pod: Json, phase: str, ip: str, containers: Sequence[Json], inits: Sequence[Json] = ()) -> Json:
    """Return the status of a pod. Conditions are merged by type: those of others stay."""
    is_ready = phase == "Running" and all(each["ready"] for each in containers)
    reached = {
        "PodReadyToStartContainers": phase != "Failed" or bool(containers),
        "Initialized": all("terminated" in each["state"] or each["started"] for each in inits),
        "ContainersReady": is_ready,
        "Ready": is_ready,
    }
    why = {"Succeeded": "PodCompleted", "Failed": "PodFailed"}.get(phase, "ContainersNotReady")
    conditions = [
        {"type": kind, "status": str(value), "reason": None if value else why, "lastTransitionTime": now()}
        for kind, value in reached.items()
    ]
    return {
        "phase": phase,
        "conditions": conditions,
        "hostIP": "127.0.0.1",
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "startTime": pod.get("status", {}).get("startTime") or now(),
        "containerStatuses": list(containers),
        "initContainerStatuses": list(inits),
    }
