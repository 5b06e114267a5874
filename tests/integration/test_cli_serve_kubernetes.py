"""`poise serve --backend kubernetes`: what cannot start says why in one sentence. No cluster is needed."""

import socket
from pathlib import Path

import pytest
from tests.shell import Said, poise

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
    said = serve(tmp_path / "state", "--kubeconfig", config).failure
    assert said.startswith("no Kubernetes cluster at http://127.0.0.1:")
    assert f"({config}, context 'dev'): no connection: " in said
    said = serve(tmp_path / "state", "--kubeconfig", config, "--context", "other").refusal
    assert said.endswith("there is no context 'other'; there are: dev")
