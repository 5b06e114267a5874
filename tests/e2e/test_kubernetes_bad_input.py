"""What is wrong is said in one sentence: on the command line before anything starts, later on the pod that it is about."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.kube_service import KubeService
from tests.e2e.service import until
from tests.kube.server import KubeServer
from tests.shell import COMMAND

from poise.service.wire.request import JobRequest
from poise.service.wire.views import JobState

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.xdist_group("kubernetes")]
V100 = "Tesla-V100-SXM2-16GB"


def refused(state: Path, *options: object) -> str:
    """Start a service that cannot start; return the one line that it says."""
    words = [COMMAND, "serve", "--backend", "kubernetes", "--state", state, "--listen", "127.0.0.1:0", "--image", "poise"]
    done = subprocess.run([*map(str, [*words, *options])], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0, done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("poise: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


def test_what_cannot_start_says_why_in_one_line(fresh_kube: KubeServer, tmp_path: Path) -> None:
    config = fresh_kube.kubeconfig("admin")
    known = ("--kubeconfig", config, "--agents", "127.0.0.1:0")
    assert "context 'elsewhere'" in refused(tmp_path / "a", *known, "--context", "elsewhere")
    assert "nowhere" in refused(tmp_path / "b", "--kubeconfig", tmp_path / "nowhere", "--agents", "127.0.0.1:0")
    assert "policy 'gandiva' puts two jobs on one GPU" in refused(tmp_path / "c", *known, "--policy", "gandiva")
    nobody = fresh_kube.kubeconfig("nobody")
    assert "may not list nodes" in refused(tmp_path / "d", "--kubeconfig", nobody, "--agents", "127.0.0.1:0")


@pytest.fixture
def service(fresh_kube: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeService]:
    made = KubeService(tmp_path, fresh_kube, {"v100-0": (V100, 2)})
    made.talk_to_it(monkeypatch)
    yield made
    made.close()


def test_an_image_without_python_fails_with_an_event_on_the_pod(service: KubeService) -> None:
    client = service.up()
    job = client.submit(JobRequest(name="bare", command=("python3", "-c", "pass"), gpus=1, image="bare")).id
    path = f"/api/v1/namespaces/{service.namespace}/events"
    sentence = "the job's image has no python3, with which Poise starts the job: use an image that has Python 3.10 or newer"
    until(lambda: any(sentence in each["message"] for each in service.kube.admin.list(path)), "no event says so")
    events = [each for each in service.kube.admin.list(path) if sentence in each["message"]]
    assert len(events) == 1
    assert (events[0]["involvedObject"]["kind"], events[0]["type"]) == ("Pod", "Warning")
    until(lambda: client.show(job).job.state.is_final, "it has not failed")
    detail = client.show(job)
    assert (detail.job.state, detail.runs[0].cause) == (JobState.FAILED, "program-missing")
