"""Nodes as Ray describes them; whose GPUs are whose; who owns a cluster; which agents and certificates are taken."""

import ssl
import subprocess
from contextlib import suppress
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from poise import __version__
from poise.service.backends.ray.discovery import gpu_nodes, namesakes
from poise.service.backends.ray.driver import PLACED_SECONDS, NodeKeeper, reachable
from poise.service.backends.ray.messages import AgentTerms
from poise.service.backends.ray.node_agent import AgentStatus, trusting, withheld_slots
from poise.service.backends.ray.owner import RayOwner


def ray_node(key: str, gpus: float = 4, labels: dict[str, str] | None = None, *, is_alive: bool = True, **more: Any) -> Any:
    resources = {"CPU": 8.0, **({"GPU": gpus} if gpus else {}), **more.pop("resources", {})}
    return {
        "NodeID": key, "Alive": is_alive, "NodeManagerAddress": f"10.0.0.{key}", "Labels": labels or {},
        "Resources": resources, "DeathReasonMessage": None if is_alive else "health check failed", **more,
    }  # fmt: skip


def test_labels_say_name_type_and_rack() -> None:
    labels = {"node-name": "gpu 1", "ray.io/accelerator-type": "NVIDIA_TESLA_V100", "ray.io/availability-zone": "eu-1b"}
    (node,) = gpu_nodes([ray_node("1", labels=labels)])
    assert (node.name, node.gpu_type, node.gpus, node.rack, node.death) == ("gpu-1", "v100", 4, "eu-1b", None)


def test_what_labels_do_not_say_is_taken_from_address_and_resources() -> None:
    (node,) = gpu_nodes([ray_node("7", resources={"accelerator_type:A100": 1.0})])
    assert (node.name, node.gpu_type, node.rack) == ("10.0.0.7", "a100", "rack-0")


def test_nodes_without_gpus_are_left_out() -> None:
    assert gpu_nodes([ray_node("1", gpus=0)]) == []


@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_nodes_of_one_name_the_living_one_counts(is_first: bool) -> None:
    found = [
        ray_node("1", labels={"node-name": "a"}, is_alive=is_first),
        ray_node("2", labels={"node-name": "a"}, is_alive=not is_first),
    ]
    (node,) = gpu_nodes(found)
    assert (node.key, node.death) == ("1" if is_first else "2", None)
    assert namesakes(found) == []


def test_living_namesakes_are_named() -> None:
    found = [ray_node("1", labels={"node-name": "a"}), ray_node("2", labels={"node-name": "a"}), ray_node("3")]
    assert namesakes(found) == ["a"]


def test_dead_node_has_the_reason_that_ray_gives() -> None:
    (node,) = gpu_nodes([ray_node("1", gpus=0, is_alive=False)])
    assert (node.gpus, node.death) == (0, "health check failed")


@pytest.mark.parametrize(
    ("held", "visible", "withheld"),
    [
        (("0", "1", "2", "3"), [], ()),
        (("2",), [], (0, 1, 3)),
        ((), [], (0, 1, 2, 3)),
        (("7", "4"), ["4", "5", "6", "7"], (1, 2)),
        (("GPU-b",), ["GPU-a", "GPU-b", "GPU-c", "GPU-d"], (0, 2, 3)),
        (("9",), [], (0, 1, 2, 3)),
    ],
)
def test_slots_that_are_not_held_are_withheld(held: tuple[str, ...], visible: list[str], withheld: tuple[int, ...]) -> None:
    assert withheld_slots(4, held, visible) == withheld


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://0.0.0.0:8643", "http://10.1.2.3:8643"),
        ("https://[::]:8643", "https://10.1.2.3:8643"),
        ("https://gpu0:8643", "https://gpu0:8643"),
    ],
)
def test_agents_are_given_an_address_that_leads_to_the_server(url: str, expected: str) -> None:
    assert reachable(url, "10.1.2.3") == expected


def test_owner_follows_the_last_start_of_its_service_and_no_other_service() -> None:
    owner = RayOwner("mine", "http://a")
    assert owner.claim("mine", "first", "http://a").is_holder
    assert owner.claim("mine", "second", "http://b").is_holder
    assert not owner.beat("mine", "first").is_holder
    assert owner.beat("mine", "second").is_holder
    other = owner.claim("theirs", "third", "http://c")
    assert (other.service, other.server, other.is_holder) == ("mine", "http://b", False)


def test_owner_that_was_restarted_takes_the_first_beat_for_its_holder() -> None:
    owner = RayOwner("mine", "http://a")
    assert owner.look().age is None
    assert owner.beat("mine", "second").is_holder


class RayWithAnAgent:
    """As much of the module `ray` as a look at one agent needs: the agent answers, and may be killed."""

    class exceptions:  # noqa: N801 - as Ray calls it
        RayError = RayActorError = ActorUnavailableError = OSError

    def __init__(self, version: str) -> None:
        self.version, self.killed = version, 0

    def get(self, _answer: object) -> AgentStatus:
        return AgentStatus(self.version, (), None)

    def kill(self, _actor: object) -> None:
        self.killed += 1


@pytest.mark.parametrize(("version", "killed"), [(__version__, 0), ("0.0.1", 1)])
def test_agent_of_another_version_is_replaced_once_it_has_had_time(version: str, killed: int) -> None:
    ray = RayWithAnAgent(version)
    (node,) = gpu_nodes([ray_node("1")])
    keeper = NodeKeeper(ray, node, AgentTerms(service="s", server="http://x", token="t"))
    for _ in range(2):
        keeper._take_answer()
    assert ray.killed == 0  # it was only just asked for
    keeper._asked_at -= PLACED_SECONDS + 1
    keeper._take_answer()
    assert ray.killed == killed
    assert (keeper.problem or "").startswith("Poise 0.0.1 is installed there") == bool(killed)


def issued(folder: Path) -> tuple[Path, Path]:
    """A certificate of `localhost` that an authority has signed which nobody knows; and its key."""
    openssl = which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    new, signed = "req -x509 -newkey rsa:2048 -nodes -days 2", "-CA ca.pem -CAkey ca.key"
    for words in (
        f"{new} -subj /CN=authority -keyout ca.key -out ca.pem",
        f"{new} -subj /CN=localhost -addext subjectAltName=DNS:localhost {signed} -keyout k.pem -out c.pem",
    ):
        subprocess.run([openssl, *words.split()], check=True, capture_output=True, cwd=folder)
    return folder / "c.pem", folder / "k.pem"


def test_certificate_of_the_server_is_trusted_though_its_authority_is_not_known(tmp_path: Path) -> None:
    certificate, key = issued(tmp_path)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate, key)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting(certificate.read_text()).wrap_bio(down, up, server_hostname="localhost")
    serving = server.wrap_bio(up, down, server_side=True)
    for _ in range(4):
        for side in (client, serving):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    assert client.version() == serving.version() == "TLSv1.3"
    assert (client.getpeercert() or {})["subject"] == ((("commonName", "localhost"),),)
