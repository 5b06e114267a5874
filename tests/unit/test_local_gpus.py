"""GPUs as a driver reports them; the driver is a pretended one."""

from types import ModuleType
from unittest.mock import patch

import pytest

from poise.scheduler.model.cluster import Node, parse_cluster
from poise.scheduler.model.errors import RequestError
from poise.service.backends.local.gpus import devices_of, discover, gpu_type, numbered

NAMES = {
    "Tesla V100-SXM2-16GB": "v100",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100 80GB PCIe": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA L40S": "l40s",
    "NVIDIA A10G": "a10g",
    "Tesla K80": "k80",
    "Tesla P100-PCIE-16GB": "p100",
    "Tesla T4": "t4",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 4070 Ti SUPER": "rtx4070tisuper",
    "GeForce GTX 1080 Ti": "gtx1080ti",
    "NVIDIA GeForce RTX 3080 Laptop GPU": "rtx3080",
    "NVIDIA RTX A6000": "a6000",
    "Quadro RTX 6000": "rtx6000",
    "NVIDIA RTX 6000 Ada Generation": "rtx6000ada",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtxpro6000",
    "NVIDIA TITAN V": "titanv",
    "NVIDIA TITAN RTX": "titanrtx",
    "NVIDIA Graphics Device": "graphics",
    "4090": "gpu4090",
    "": "gpu",
}


class NoDriverError(Exception):
    pass


class Nvml(ModuleType):
    """A driver with these devices; None: there is none."""

    NVMLError = NoDriverError

    def __init__(self, names: list[str | bytes] | None) -> None:
        super().__init__("pynvml")
        self.names = names
        self.is_open = False

    def nvmlInit(self) -> None:  # noqa: N802 - as the library has it
        if self.names is None:
            raise NoDriverError("Driver Not Loaded")
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.names or ())

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:  # noqa: N802
        assert self.names is not None
        return self.names[handle]

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}"


@pytest.mark.parametrize("name", NAMES)
def test_gpu_type_is_what_people_call_it(name: str) -> None:
    assert gpu_type(name) == NAMES[name]
    if name:
        parse_cluster(f"{gpu_type(name)}:4")


def test_machine_with_several_types_has_a_node_for_each() -> None:
    nvml = Nvml(["Tesla V100-SXM2-16GB", b"Tesla K80", "Tesla V100-SXM2-16GB"])
    machine = discover(nvml)
    assert machine.cluster.nodes == (Node("v100-0", "v100", 2), Node("k80-0", "k80", 1))
    assert (
        devices_of(machine.cluster, nvml)
        == machine.devices
        == {("v100-0", 0): "GPU-0", ("v100-0", 1): "GPU-2", ("k80-0", 0): "GPU-1"}
    )
    assert not nvml.is_open


def test_declared_gpus_are_numbered_through() -> None:
    declared = parse_cluster("v100:3@2,k80:1")
    assert numbered(declared) == {("v100-0", 0): "0", ("v100-0", 1): "1", ("v100-1", 0): "2", ("k80-0", 0): "3"}
    for nvml in (Nvml(None), Nvml(["Tesla K80"])):
        assert devices_of(declared, nvml) == {}


def test_machine_without_a_driver_gets_a_remedy() -> None:
    with pytest.raises(RequestError, match=r"no GPU driver answers .*Driver Not Loaded.*--cluster v100:4,k80:8"):
        discover(Nvml(None))


def test_machine_without_gpus_gets_a_remedy() -> None:
    with pytest.raises(RequestError, match="no GPU was found on this machine; declare GPUs instead"):
        discover(Nvml([]))


def test_machine_without_the_package_gets_a_remedy() -> None:
    with (
        patch.dict("sys.modules", {"pynvml": None}),
        pytest.raises(RequestError, match=r"nvidia-ml-py.*--cluster v100:4,k80:8"),
    ):
        discover()
