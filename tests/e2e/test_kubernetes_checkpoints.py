"""Checkpoints on a claim that pods share: the job writes there, and its next run finds them on another node."""

import json
import sys
from pathlib import Path

import pytest
from tests.e2e.kube_service import IMAGES, KubeService
from tests.e2e.service import PATIENCE, ended, until
from tests.kube.kubelet import Processes
from tests.kube.server import KubeServer

from poise.service.client import ServerRefusedError
from poise.service.wire.request import Checkpoint, JobRequest, PodOptions, Volume

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.xdist_group("kubernetes")]

NODES = {"v100-0": ("Tesla-V100-SXM2-16GB", 1), "v100-1": ("Tesla-V100-SXM2-16GB", 1)}
STEPS = 150
COUNTS = """
import json, os, sys, time
from poise import worker

state = {"total": 0}

def save(path):
    with open(path, "w") as file:
        json.dump(state, file)

def load(path):
    with open(path) as file:
        state.update(json.load(file))

for step in worker.attach(save, load, checkpoint_every=5).steps(int(sys.argv[1])):
    state["total"] += step
    time.sleep(0.05)
print(os.environ.get("OF_THE_SHELL"), os.environ.get("LD_LIBRARY_PATH"))
print("total", state["total"])
"""


def test_checkpoints_on_a_claim_follow_a_job_from_node_to_node(
    fresh_kube: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = tmp_path / "claim"
    claim.mkdir()
    kubelet = Processes(fresh_kube, images=IMAGES, claims={"shared": claim})
    service = KubeService(tmp_path, fresh_kube, NODES, kubelet=kubelet)
    service.talk_to_it(monkeypatch)
    try:
        client = service.up()
        place = Checkpoint(url="/mnt/ckpt/here")
        request = JobRequest(command=(sys.executable, "-c", COUNTS, str(STEPS)), image="job", checkpoint=place)
        with pytest.raises(ServerRefusedError, match="which is on no claim that the job can write"):
            client.submit(request)
        options = PodOptions(volumes=(Volume(name="shared", path="/mnt/ckpt"),))
        monkeypatch.setenv("OF_THE_SHELL", "comes along")
        monkeypatch.setenv("LD_LIBRARY_PATH", "/of/this/machine")
        job = client.submit(request.model_copy(update={"pod": options})).id
        until(lambda: client.show(job).steps > STEPS / 10, "it makes no progress")
        pods = fresh_kube.admin.get(f"/api/v1/namespaces/{service.namespace}/pods")
        assert len(pods["items"]) == 1
        assert "comes along" not in json.dumps(pods), "its agent is told, not Kubernetes"
        (run,) = client.show(job).runs
        (node,) = run.gpus
        client.drain(node)
        detail = ended(client, job, PATIENCE)
        assert [each.how for each in detail.runs][-1] == "finished"
        assert [[*each.gpus] for each in detail.runs] == [[node], [*(NODES.keys() - {node})]]
        assert not any(each.lost for each in detail.runs), detail.runs
        assert client.logs(job).strip().splitlines()[-2:] == ["comes along None", f"total {sum(range(STEPS))}"]
        assert [*claim.glob(f"here/*/{job}/step-{STEPS}")], "its last checkpoint is on the claim"
    finally:
        service.close()
