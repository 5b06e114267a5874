"""`poise serve --backend kubernetes`: what cannot start says why in one sentence. No cluster is needed."""

import socket
from pathlib import Path

import pytest
from tests.shell import Said, poise

from poise.cli.serve import _announce
from poise.service.server.startup import Running

CONFIG = """
apiVersion: v1
kind: Config
current-context: dev
contexts: [{{name: dev, context: {{cluster: dev, user: dev}}}}]
clusters: [{{name: dev, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: dev, user: {{}}}}]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A kubeconfig of a server that is not there."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    file = tmp_path / "config"
    file.write_text(CONFIG.format(port=port))
    return file


def serve(state: Path, *options: object) -> Said:
    """Try to start a service on Kubernetes; it must not."""
    where = ("--state", state, "--listen", "127.0.0.1:0", "--agents", "127.0.0.1:0", "--quiet")
    return poise("serve", "--backend", "kubernetes", *where, *options)


def test_a_refusal_at_the_start_is_said_once(tmp_path: Path, config: Path) -> None:
    said = serve(tmp_path / "state", "--kubeconfig", config, "--host-name", "gpu1").failure
    assert said.startswith("no Kubernetes cluster at http://127.0.0.1:")
    assert f"({config}, context 'dev'): no connection: " in said
    said = serve(tmp_path / "state", "--kubeconfig", config, "--host-name", "gpu1", "--context", "other").refusal
    assert said.endswith("there is no context 'other'; there are: dev")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ("--cluster", "v100:4"),
            "--cluster: the nodes of Kubernetes are read from the cluster; leave it out, or choose them with --nodes",
        ),
        (
            ("--namespace", "A_B"),
            "--namespace 'A_B': expected the name of a namespace: small letters, digits and `-`, at most 63",
        ),
        (
            ("--gpu-resource", "gpu gpu"),
            "--gpu-resource 'gpu gpu': expected the name of a resource, such as nvidia.com/gpu",
        ),
        (
            ("--scheduler-name", "po/ise"),
            "--scheduler-name 'po/ise': expected a name of Kubernetes: small letters, digits, `-` and `.`",
        ),
        (
            ("--gpu-type-label", "a b"),
            "--gpu-type-label 'a b': expected the key of a label, such as cloud.google.com/gke-accelerator",
        ),
        (("--image", "a b"), "--image: expected the name of a container image, such as pytorch/pytorch:2.9.0, got 'a b'"),
        (("--address", "head:6379"), "--address goes with --backend ray"),
    ],
)
def test_options_that_kubernetes_cannot_take_are_refused(
    tmp_path: Path, config: Path, options: tuple[str, ...], text: str
) -> None:
    assert serve(tmp_path / "state", "--kubeconfig", config, *options).refusal == text


@pytest.mark.parametrize("backend", ["local", "remote", "ray", "null"])
def test_options_of_kubernetes_are_refused_on_other_back_ends(tmp_path: Path, backend: str) -> None:
    where = ("--backend", backend, "--cluster", "v100:1", "--state", tmp_path / "state", "--listen", "127.0.0.1:0")
    for option in (
        "--kubeconfig", "--context", "--namespace", "--nodes", "--image", "--scheduler-name", "--gpu-resource",
        "--gpu-type-label",
    ):  # fmt: skip
        assert poise("serve", *where, option, "x").refusal == f"{option} goes with --backend kubernetes"
    for option in ("--gangs", "--no-gangs"):
        assert poise("serve", *where, option).refusal == f"{option} goes with --backend kubernetes"


@pytest.mark.parametrize("names", [(), ("--host-name", "localhost"), ("--host-name", "gpu1"), ("--host-name", "10.0.0.1")])
def test_an_address_that_pods_cannot_reach_is_warned_of(tmp_path: Path, config: Path, names: tuple[str, ...]) -> None:
    said = serve(tmp_path / "state", "--kubeconfig", config, *names)
    warned = "agents-unreachable" in said.err
    assert warned == ("gpu1" not in names and "10.0.0.1" not in names)
    if warned:
        assert "say --agents 0.0.0.0:8643, and with --host-name the name or address by which pods reach" in said.err


@pytest.mark.parametrize("as_json", [True, False])
def test_agents_in_pods_are_not_said_to_use_the_token_of_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, as_json: bool
) -> None:
    running = Running("http://h:1", 1, tmp_path, tmp_path / "admin.token", is_first=False, agents="http://h:2")
    _announce(running, as_json=as_json, quiet=False, is_in_pods=True)
    said = capsys.readouterr()
    assert "agents.token" not in said.out + said.err
    assert "poise: agents in pods connect to http://h:2, with the service-account tokens of their pods\n" in said.err
    _announce(running, as_json=as_json, quiet=False, is_in_pods=False)
    said = capsys.readouterr()
    assert f"poise: agents connect to http://h:2, with {tmp_path}/agents.token\n" in said.err
    assert ("agents_token_file" in said.out) == as_json
