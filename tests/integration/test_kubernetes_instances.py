"""Who may act on a real API server: one instance at a time, and none on what its journal does not know."""

import os
import signal
from pathlib import Path
from time import sleep

import pytest
from tests.e2e.kube_service import KubeService
from tests.e2e.service import PATIENCE, Service, until
from tests.kube.controllers import JOBS, Controllers
from tests.kube.kubelet import Pretend
from tests.kube.server import GPU, Json, KubeServer

from poise.service.backends.kubernetes import names
from poise.service.wire.request import JobRequest
from poise.service.wire.views import JobState

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.xdist_group("kubernetes")]

NODES = {"v100-0": ("Tesla-V100-SXM2-16GB", 4), "v100-1": ("Tesla-V100-SXM2-16GB", 4)}


def test_a_second_instance_waits_and_a_first_one_that_has_stood_still_does_nothing_more(
    fresh_kube: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    first = KubeService(tmp_path / "one", fresh_kube, NODES, "--log-format", "json", kubelet=Pretend(fresh_kube))
    agents = first.options.index("--agents")
    others = (*first.options[: agents + 1], "127.0.0.1:0", *first.options[agents + 2 :])
    second = Service(tmp_path / "two", *others)
    first.talk_to_it(monkeypatch)
    with Controllers(fresh_kube):
        try:
            first.up()
            before = bound(fresh_kube, first.namespace, "before")
            second.start()
            until(lambda: " leads; its lease " in second.log, "the second does not wait")
            assert terms(bound(fresh_kube, first.namespace, "meanwhile")) == {"1"}

            os.kill(first.server.pid, signal.SIGSTOP)
            until(lambda: '"event": "leading"' in second.log, "the second never leads")
            assert terms(bound(fresh_kube, first.namespace, "after")) == {"2"}
            # Its journal knows nothing of the pods of the first, and leaves them alone.
            now = pods_of(fresh_kube, first.namespace, "before")
            assert [each["metadata"]["uid"] for each in now] == [each["metadata"]["uid"] for each in before]
            assert all(each["status"]["phase"] == "Running" for each in now)

            fresh_kube.admin.delete(f"{JOBS}/namespaces/{first.namespace}/jobs/before")  # which the first would tell of
            os.kill(first.server.pid, signal.SIGCONT)
            until(lambda: first.server.poll() is not None, "the first does not end")
            assert first.server.returncode == 1
            assert "could not be renewed in time" in first.log or " is now that of " in first.log
            assert terms(pods_of(fresh_kube, first.namespace, "after")) == {"2"}
        finally:
            second.close()
            first.close()


def test_an_empty_journal_ends_nothing(fresh_kube: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = KubeService(tmp_path, fresh_kube, NODES, "--log-format", "json")
    service.talk_to_it(monkeypatch)
    try:
        client = service.up()
        job = client.submit(JobRequest(name="long", command=("sleep", "600"), gpus=1, image="job"))
        until(lambda: client.show(job.id).job.state is JobState.RUNNING, "it does not run")
        service.kill()
        for file in service.state.glob("journal.db*"):
            file.unlink()
        (pod,) = own_pods(service)
        service.start()
        assert service.server.wait(PATIENCE) != 0
        assert "journal.db: empty, but " in service.log, "a journal that was lost is missed"
        (service.state / "jobs").rename(tmp_path / "jobs-of-before")
        service.start()
        until(lambda: '"pod-unknown"' in service.log, "nobody says that there is a pod of which nobody knows")
        sleep(3.0)  # a deletion would follow at once
        assert own_pods(service)[0]["metadata"]["uid"] == pod["metadata"]["uid"]
        assert "deletionTimestamp" not in own_pods(service)[0]["metadata"]
        assert own_pods(service)[0]["status"]["phase"] == "Running"
        (node,) = (each for each in service.client().nodes().nodes if each.name == pod["spec"]["nodeName"])
        assert len(node.withheld) == 1, "its GPU is not given out"
    finally:
        service.close()


def bound(server: KubeServer, namespace: str, name: str) -> list[Json]:
    """Make a Job of two pods, and wait until they run."""
    container = {"name": "main", "image": "any", "resources": {"limits": {GPU: "1"}}}
    template = {"spec": {"schedulerName": "poise", "restartPolicy": "Never", "containers": [container]}}
    job = {"metadata": {"name": name}, "spec": {"parallelism": 2, "completions": 2, "template": template}}
    server.admin.post(f"{JOBS}/namespaces/{namespace}/jobs", job)

    def run() -> bool:
        found = pods_of(server, namespace, name)
        return len(found) == 2 and all(each["status"].get("phase") == "Running" for each in found)

    until(run, f"the pods of {name} do not run")
    return pods_of(server, namespace, name)


def pods_of(server: KubeServer, namespace: str, job: str) -> list[Json]:
    return server.admin.list(f"/api/v1/namespaces/{namespace}/pods", labelSelector=f"job-name={job}")


def own_pods(service: KubeService) -> list[Json]:
    return service.kube.admin.list(f"/api/v1/namespaces/{service.namespace}/pods", labelSelector=names.SERVICE)


def terms(pods: list[Json]) -> set[str]:
    return {each["metadata"]["annotations"][names.TERM] for each in pods}
