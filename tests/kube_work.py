"""Jobs of both kinds on a real API server, for tests that make trouble: those that Poise starts, and gangs of others.

Pods of others only pretend to run. In pods that Poise creates there are real agents, as threads of this process, which run
real processes. In the end everything has to have been done once, whatever happened meanwhile.
"""

import random
import socket
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Self

import pytest
from tests.backends import PATIENCE, QUICK, until
from tests.e2e.killable import KillableService
from tests.e2e.service import marked_with
from tests.kube.controllers import JOBS, install_crds
from tests.kube.kubelet import Pretend
from tests.kube.server import GPU, Json, KubeServer
from tests.remote import AgentThread

from poise.service.agent.agent import AgentConfig
from poise.service.backends.kubernetes import names
from poise.service.client import Client, UnavailableError
from poise.service.wire.agent_messages import NodeSpec
from poise.service.wire.request import JobRequest
from poise.service.wire.views import JobDetail, JobState

NODES, GPUS = ("v100-0", "v100-1", "v100-2"), 4
POLICY = ("--policy", "las", "--round", "4s", "--cadence", "both", "--minimum-run", "1s")
OPEN_GANGS, OPEN_JOBS = 8, 4
"""Jobs of each kind that are there at any time until it is enough: more than there are GPUs for."""


class AgentPods(Pretend):
    """Kubelets that pretend, except for pods of Poise: each has a real agent, and ends with all its processes."""

    def __init__(self, server: KubeServer, folder: Path, url: str) -> None:
        super().__init__(server)
        self._folder, self._url = folder, url
        self._agents: dict[str, AgentThread] = {}

    def _run(self, pod: Json) -> None:
        # The token first: while there is no API server to ask, nothing of the pod has begun, and it is tried again.
        is_ours = names.SERVICE in pod["metadata"].get("labels", {})
        token = self._token(pod) if is_ours else ""
        super()._run(pod)
        if is_ours and pod["metadata"]["uid"] in self._began:
            self._agents[pod["metadata"]["uid"]] = self._agent(pod, token)

    def _token(self, pod: Json) -> str:
        meta = pod["metadata"]
        bound = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
        account = f"/api/v1/namespaces/{meta['namespace']}/serviceaccounts/{pod['spec']['serviceAccountName']}"
        asked = {"audiences": ["poise"], "expirationSeconds": 3600, "boundObjectRef": bound}
        return str(self.api.post(f"{account}/token", {"spec": asked})["status"]["token"])

    def _agent(self, pod: Json, token: str) -> AgentThread:
        command = pod["spec"]["initContainers"][1]["command"]
        gpu_type, _, gpus = command[command.index("--gpus") + 1].partition(":")
        spec = NodeSpec(name=pod["metadata"]["name"], gpu_type=gpu_type, gpus=int(gpus))
        return AgentThread(AgentConfig(self._url, token, spec, self._state(pod), settings=QUICK))

    def _end(self, pod: Json, code: int, *, deletes: bool = False) -> None:
        agent = self._agents.pop(pod["metadata"]["uid"], None)
        if agent is not None:
            agent.stop()
            self._kill_all(self._state(pod))
        super()._end(pod, code, deletes=deletes)

    def _end_all(self) -> None:
        for agent in self._agents.values():
            agent.stop()
        self._kill_all(self._folder)

    def _state(self, pod: Json) -> Path:
        return self._folder / str(pod["metadata"]["name"])

    @staticmethod
    def _kill_all(state: Path) -> None:
        while found := marked_with(state):
            for each in found:
                each.kill()
            sleep(0.01)


class Served(KillableService):
    """The service under test, its namespace, and where its agents connect."""

    def __init__(self, folder: Path, namespace: str, agents: str, *options: object) -> None:
        super().__init__(folder, *options)
        self.namespace, self.agents = namespace, agents

    @classmethod
    def of(cls, server: KubeServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Self:
        """Make nodes, a namespace, and a service for them, which is not started yet."""
        for name in ("POISE_URL", "POISE_TOKEN", "POISE_CA"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        monkeypatch.setenv("POISE_STATE", str(folder / "state"))
        install_crds(server)
        namespace = server.namespace("work")
        server.service_account(namespace, "poise-job")
        for node in NODES:
            server.add_node(node, GPUS)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            agents = f"127.0.0.1:{probe.getsockname()[1]}"  # the same after each restart: agents know it
        where = ("--backend", "kubernetes", "--kubeconfig", server.kubeconfig("admin"), "--namespace", namespace)
        options = (*where, "--agents", agents, "--image", "poise", "--log-format", "json", *POLICY)
        return cls(folder, namespace, f"http://{agents}", *options)


def gang_of(pod: Json) -> str:
    """The name of the gang of a pod of others."""
    meta = pod["metadata"]
    return str(meta.get("labels", {}).get("job-name") or meta["annotations"][names.GANG])


def is_alone(pod: Json) -> bool:
    """Whether nobody owns a pod, so that nobody would make it again."""
    return "ownerReferences" not in pod["metadata"]


class Work:
    """Jobs of both kinds, which come until the test says that it is enough, and none while it holds `pause`."""

    def __init__(self, server: KubeServer, namespace: str, folder: Path, seed: int) -> None:
        self.admin, self.namespace, self.done_file = server.admin, namespace, folder / "done"
        self.done_file.touch()
        self.gangs: dict[str, int] = {}  # pods of each by name
        self.jobs: list[str] = []
        self._random = random.Random(seed)
        self._enough = threading.Event()
        self.pause = threading.Lock()

    def come(self, client: Client) -> None:
        """Keep some of each kind open until it is enough."""
        while not self._enough.is_set():
            with self.pause:
                if len(self.gangs) - len(self.finished_gangs()) < OPEN_GANGS:
                    self._make_gang()
                if len(self.jobs) - len(self.done()) < OPEN_JOBS:
                    self._submit(client)
            self._enough.wait(0.1)

    def enough(self) -> None:
        self._enough.set()

    def pods(self) -> list[Json]:
        """The pods of others."""
        found = self.admin.list(f"/api/v1/namespaces/{self.namespace}/pods")
        return [pod for pod in found if names.SERVICE not in pod["metadata"].get("labels", {})]

    def finished_gangs(self) -> set[str]:
        """Names of gangs that are done, as their owners say, or their pods where there is none."""
        jobs = {
            job["metadata"]["name"]
            for job in self.admin.list(f"{JOBS}/namespaces/{self.namespace}/jobs")
            if any(each["type"] == "Complete" for each in job.get("status", {}).get("conditions", []))
        }
        alone = Counter(gang_of(pod) for pod in self.pods() if is_alone(pod) and pod["status"].get("phase") == "Succeeded")
        return jobs | {name for name, pods in alone.items() if pods == self.gangs[name]}

    def partly_bound(self) -> list[str]:
        """Gangs some of whose pods are bound, while others wait."""
        live: dict[str, list[bool]] = {}
        for pod in self.pods():
            meta, has_ended = pod["metadata"], pod["status"].get("phase") in ("Succeeded", "Failed")
            # What a Job has done before it was suspended is done: the rest of it may wait.
            if "deletionTimestamp" not in meta and (is_alone(pod) or not has_ended):
                live.setdefault(gang_of(pod), []).append(not pod["spec"].get("nodeName"))
        return [name for name, waits in live.items() if any(waits) and not all(waits)]

    def done(self) -> list[str]:
        """Jobs that Poise has started, each time when one was done."""
        return self.done_file.read_text().split()

    def _make_gang(self) -> None:
        number, size = len(self.gangs), self._random.choice([2, 3, 4, 4, 6])
        # Pods that are made again begin anew: one that needed longer than a round would never end.
        name, notes = f"gang-{number}", {"test/seconds": f"{self._random.uniform(0.2, 1.5):.1f}"}
        spec = {
            "schedulerName": "poise", "restartPolicy": "Never",
            "containers": [{"name": "main", "image": "any", "resources": {"limits": {GPU: "1"}}}],
        }  # fmt: skip
        self.gangs[name] = size
        if number % 4 == 3:  # nobody would make these again, so they are not preempted
            marks = {names.GANG: name, names.GANG_SIZE: str(size)}
            for each in range(size):
                meta = {"name": f"{name}-{each}", "annotations": {**notes, **marks}}
                self.admin.post(f"/api/v1/namespaces/{self.namespace}/pods", {"metadata": meta, "spec": spec})
            return
        body: Json = {
            "metadata": {"name": name},
            "spec": {
                "parallelism": size, "completions": size, "completionMode": "Indexed", "backoffLimit": 0,
                "template": {"metadata": {"annotations": notes}, "spec": spec},
            },
        }  # fmt: skip
        self.admin.post(f"{JOBS}/namespaces/{self.namespace}/jobs", body)

    def _submit(self, client: Client) -> None:
        name, gpus = f"own-{len(self.jobs)}", self._random.choice([1, 1, 2, 6])  # of 6, parts are on two nodes
        seconds = self._random.uniform(0.1, 1.0)
        # All parts wait, and that of rank 0 says that it is done: with this last word it has ended.
        words = f'sleep {seconds:.1f}; [ "$RANK" != 0 ] || echo {name} >> {self.done_file}'
        request = JobRequest(name=name, command=("sh", "-c", words), gpus=gpus, image="job", cwd="/")
        until(lambda: self._is_accepted(client, request))
        self.jobs.append(name)

    @staticmethod
    def _is_accepted(client: Client, request: JobRequest) -> bool:
        """Ask, once more; a client that waited longer each time would hardly ever meet a server that lives."""
        with suppress(UnavailableError):
            return bool(client.submit_all([request], key=f"submission-{request.name}"))
        return False


def until_done(client: Client, work: Work) -> None:
    """Wait until all jobs have ended, in the cluster and in the journal."""
    deadline = monotonic() + PATIENCE
    while waiting := [f"{job.name} {job.state}" for job in client.queue(limit=500).jobs if not job.state.is_final]:
        assert monotonic() < deadline, f"{waiting}; pods of others: {[*map(brief, work.pods())]}"
        sleep(0.2)
    until(lambda: work.finished_gangs() == work.gangs.keys())


def brief(pod: Json) -> str:
    """What there is to say of a pod."""
    meta = pod["metadata"]
    epoch, is_ending = meta["annotations"].get(names.EPOCH), "deletionTimestamp" in meta
    return f"{meta['name']} {pod['spec'].get('nodeName')} {pod['status'].get('phase')} run {epoch} {'ending' * is_ending}"


def owned(server: KubeServer, service: Served, kind: str) -> list[Json]:
    """What there is that Poise has created."""
    return server.admin.list(f"/api/v1/namespaces/{service.namespace}/{kind}", labelSelector=names.SERVICE)


def check_gangs(work: Work, details: dict[str, JobDetail]) -> None:
    """Every gang is one job that has succeeded, of which the journal knows, and no owner has counted a failure."""
    found = {each.job.name: each for each in details.values() if each.job.name in work.gangs}
    assert found.keys() == work.gangs.keys()
    for each in found.values():
        check_ended_once(each)
    assert {pod["metadata"]["annotations"][names.JOB] for pod in work.pods()} <= details.keys()
    for job in work.admin.list(f"{JOBS}/namespaces/{work.namespace}/jobs"):
        status, size = job["status"], work.gangs[job["metadata"]["name"]]
        assert (status.get("succeeded"), status.get("failed", 0)) == (size, 0), status


def check_own(work: Work, details: dict[str, JobDetail]) -> None:
    """Every job that was submitted is there once, and has been done once."""
    found = [each for each in details.values() if each.job.name not in work.gangs]
    assert sorted(str(each.job.name) for each in found) == sorted(work.jobs)
    assert sorted(work.done()) == sorted(work.jobs)
    for each in found:
        check_ended_once(each)


def check_ended_once(detail: JobDetail) -> int:
    """A job has succeeded, by one run and no other, and all its runs have ended; return the number of this run."""
    assert detail.job.state is JobState.SUCCEEDED, detail
    (epoch,) = [run.epoch for run in detail.runs if run.how == "finished"]
    assert all(run.how is not None for run in detail.runs), detail
    return epoch
