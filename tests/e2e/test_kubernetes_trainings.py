"""Three PyTorch trainings share two GPUs of a Kubernetes cluster by time slicing, and end as if each had been left alone.

Pods are created on a real API server, and run as processes of this machine.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.kube_service import KubeService
from tests.e2e.service import EXAMPLES, ended
from tests.kube.server import KubeServer

from poise.service.wire.request import JobRequest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.kubernetes, pytest.mark.frameworks, pytest.mark.slow, pytest.mark.xdist_group("kubernetes")]

NODES = {"v100-0": ("Tesla-V100-SXM2-16GB", 1), "v100-1": ("Tesla-V100-SXM2-16GB", 1)}
PATIENCE = 500.0
STEPS, PAUSE = 400, 0.06
LENGTHS = {"long": STEPS, "middle": STEPS - 40, "short": STEPS - 80}
"""Steps of the three trainings: other steps, other weights."""


@pytest.fixture
def service(fresh_kube: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeService]:
    policy = ("--policy", "las", "--round", "8s", "--cadence", "both", "--minimum-run", "4s")
    made = KubeService(tmp_path, fresh_kube, NODES, *policy)
    made.talk_to_it(monkeypatch)
    yield made
    made.close()


def command(steps: int, pause: float) -> tuple[str, ...]:
    """Train, slowly enough for something to happen meanwhile."""
    script = str(EXAMPLES / "train_pytorch.py")
    return (sys.executable, script, "--steps", str(steps), "--seconds-per-step", str(pause))


def test_trainings_that_share_gpus_by_time_end_with_the_weights_of_undisturbed_ones(service: KubeService) -> None:
    client = service.up()
    requests = [JobRequest(name=name, command=command(steps, PAUSE), gpus=1, image="job") for name, steps in LENGTHS.items()]
    jobs = dict(zip(LENGTHS, [each.id for each in client.submit_all(requests)], strict=True))
    details = {name: ended(client, job, PATIENCE) for name, job in jobs.items()}

    for name, job in jobs.items():
        alone = subprocess.run(command(LENGTHS[name], 0.0), capture_output=True, text=True, check=True, timeout=PATIENCE)
        assert client.logs(job).strip().splitlines()[-1] == alone.stdout.strip().splitlines()[-1]
        assert details[name].checkpoint_steps == LENGTHS[name]
    runs = {name: [(run.ended, run.lost) for run in detail.runs] for name, detail in details.items()}
    # GPUs changed hands in the middle of trainings. Which ones depends on how long each took to import PyTorch: one that
    # started quickly may be through before those have caught up that did not.
    assert sum(len(each) > 1 for each in runs.values()) >= 2, runs
    assert not any(lost for each in runs.values() for _, lost in each), runs
    assert service.kube.admin.get(f"/api/v1/namespaces/{service.namespace}/pods")["items"] == []
