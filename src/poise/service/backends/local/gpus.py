"""The GPUs of this machine, as its driver reports them."""

import re
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from types import ModuleType

from poise.scheduler.model.cluster import Cluster, Node
from poise.scheduler.model.errors import RequestError
from poise.service.backends.local.orders import Devices

REMEDY = "declare GPUs instead, e.g. --cluster v100:4,k80:8"
_SAYS_NOTHING = {"nvidia", "tesla", "quadro", "geforce", "amd", "instinct", "laptop", "gpu"}
_SERIES = {"rtx", "gtx", "titan", "pro"}  # words that mean something only with the one that follows
_SUFFIXES = {"ti", "super", "ada", "xp"}
_NAME = re.compile(r"[a-z][a-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Machine:
    """One node per GPU type of this machine, and the UUID of the device behind each slot."""

    cluster: Cluster
    devices: Devices


def discover(nvml: ModuleType | None = None) -> Machine:
    """Ask the driver what is in this machine; RequestError says what to do if it does not answer.

    nvml   Python's binding of the driver's library; None: the one that is installed
    """
    if nvml is None:
        try:
            nvml = import_module("pynvml")  # by name: it has no types, and is of use only where there is a driver
        except ImportError:
            raise RequestError(
                f"GPUs cannot be looked for: nvidia-ml-py, a part of the installation, is missing; install it, or {REMEDY}"
            ) from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise RequestError(f"no GPU driver answers on this machine ({error}); {REMEDY}") from None
    uuids: dict[str, list[str]] = {}
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name, uuid = _text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlDeviceGetUUID(handle))
            uuids.setdefault(gpu_type(name), []).append(uuid)
    except nvml.NVMLError as error:
        raise RequestError(f"the GPU driver does not say what there is ({error}); {REMEDY}") from None
    finally:
        nvml.nvmlShutdown()
    if not uuids:
        raise RequestError(f"no GPU was found on this machine; {REMEDY}")
    nodes = tuple(Node(f"{kind}-0", kind, len(found)) for kind, found in uuids.items())
    return Machine(Cluster(nodes), {(f"{kind}-0", slot): u for kind, found in uuids.items() for slot, u in enumerate(found)})


def devices_of(cluster: Cluster, nvml: ModuleType | None = None) -> Devices:
    """Return the devices behind a cluster if it is what this machine has; none if it was declared otherwise."""
    try:
        machine = discover(nvml)
    except RequestError:
        return {}
    real, given = ({(node.name, node.gpu_type, node.gpus) for node in each.nodes} for each in (machine.cluster, cluster))
    return machine.devices if real == given else {}


def numbered(cluster: Cluster) -> Devices:
    """Number GPUs of which no more is known, from 0 in the cluster's order."""
    numbers = count()
    return {(node.name, slot): str(next(numbers)) for node in cluster.nodes for slot in range(node.gpus)}


def gpu_type(name: str) -> str:
    """Shorten a device's name to the usual one: `Tesla V100-SXM2-16GB` is v100, `NVIDIA GeForce RTX 4090` rtx4090."""
    words = [word for word in re.split(r"[^a-z0-9.]+", name.lower()) if word and word not in _SAYS_NOTHING]
    taken: list[str] = []
    for word in words:
        is_complete = bool(taken) and taken[-1] not in _SERIES
        if is_complete and word not in _SUFFIXES:
            break
        taken.append(word)
    if len(taken) > 1 and taken[0] == "rtx" and re.fullmatch(r"a\d+", taken[1]):
        taken = taken[1:]  # RTX A6000 is the A6000
    found = "".join(taken)
    return found if _NAME.fullmatch(found) else f"gpu{found}"


def _text(value: str | bytes) -> str:
    """Older versions of the library answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value
