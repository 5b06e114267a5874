"""SIGKILL to the service a hundred times while it binds, creates, suspends and deletes pods on a real API server.

Half of the kills come at any moment, half at a certain write: before it is sent, on its way, or after it was answered. Jobs
of both kinds come and go meanwhile. Pods of others only pretend to run. In pods that Poise creates there are real
agents, as threads of this process, which run real processes.

POISE_CRASH_KILLS and POISE_CRASH_SEED are as in `tests/e2e/test_crashes.py`.
"""

import os
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import pytest
from tests.backends import QUICK, until
from tests.e2e.crashing import check_journal
from tests.e2e.killable import Death, KillableService
from tests.e2e.service import marked_with
from tests.kube.controllers import JOBS, Controllers, install_crds
from tests.kube.kubelet import Pretend
from tests.kube.server import GPU, Json, KubeServer
from tests.remote import AgentThread

from poise.service.agent.agent import AgentConfig
from poise.service.backends.kubernetes import names
from poise.service.client import Client, UnavailableError
from poise.service.wire.agent_messages import NodeSpec
from poise.service.wire.request import JobRequest
from poise.service.wire.views import JobDetail, JobState

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.xdist_group("kubernetes")]

KILLS = int(os.environ.get("POISE_CRASH_KILLS", "100"))
SEED = int(os.environ.get("POISE_CRASH_SEED", "1"))
NODES, GPUS = ("v100-0", "v100-1", "v100-2"), 4
POLICY = ("--policy", "las", "--round", "4s", "--cadence", "both", "--minimum-run", "1s")
OPEN_GANGS, OPEN_JOBS = 8, 4
"""Jobs of each kind that are there at any time until the kills are over: more than there are GPUs for."""
LAST_WRITE = 6
"""A server that is to die at a write dies at one of its first ones."""
WRITE_SECONDS = 1.5
"""A server that has had nothing to write for so long is killed."""
CALM = 10
"""After so many kills the service is left alone until no gang is bound in part."""
CALM_SECONDS = 60.0
"""In which that has to be so: less than the time after which a gang gives up (`gang_runs.PATIENCE`)."""


class AgentPods(Pretend):
    """Kubelets that pretend, except for pods of Poise: each has a real agent, and ends with all its processes."""

    def __init__(self, server: KubeServer, folder: Path, url: str) -> None:
        super().__init__(server)
        self._folder, self._url = folder, url
        self._agents: dict[str, AgentThread] = {}

    def _run(self, pod: Json) -> None:
        super()._run(pod)
        meta = pod["metadata"]
        if names.SERVICE in meta.get("labels", {}):
            bound = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
            account = f"/api/v1/namespaces/{meta['namespace']}/serviceaccounts/{pod['spec']['serviceAccountName']}"
            asked = {"audiences": ["poise"], "expirationSeconds": 3600, "boundObjectRef": bound}
            token = self.api.post(f"{account}/token", {"spec": asked})["status"]["token"]
            command = pod["spec"]["initContainers"][1]["command"]
            gpu_type, _, gpus = command[command.index("--gpus") + 1].partition(":")
            spec = NodeSpec(name=meta["name"], gpu_type=gpu_type, gpus=int(gpus))
            self._agents[meta["uid"]] = AgentThread(AgentConfig(self._url, token, spec, self._state(pod), settings=QUICK))

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


class Record:
    """What a watch has told of the pods, from the first one on.

    terms      of the leader that has bound or created a pod, in the order in which that was done
    bound      uids of pods by gang and epoch for which they were bound
    succeeded  epoch for which they were bound by gang and uid, of pods that have succeeded; some are deleted later
    refused    pods that their node did not take: it had no GPUs left
    """

    def __init__(self, server: KubeServer, namespace: str) -> None:
        self.terms: list[int] = []
        self.bound: dict[tuple[str, str], set[str]] = {}
        self.succeeded: dict[str, dict[str, int]] = {}
        self.refused: list[str] = []
        self._uids: set[str] = set()
        self._watch = server.admin.watch(f"/api/v1/namespaces/{namespace}/pods")
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        for event in self._watch:
            pod = event["object"]
            meta, notes = pod["metadata"], pod["metadata"].get("annotations", {})
            if pod["spec"].get("nodeName") and meta["uid"] not in self._uids:
                self._uids.add(meta["uid"])
                self.terms.append(int(notes[names.TERM]))
                if names.RUN_EPOCH in notes:
                    self.bound.setdefault((gang_of(pod), notes[names.RUN_EPOCH]), set()).add(meta["uid"])
            if pod["status"].get("phase") == "Succeeded" and names.RUN_EPOCH in notes:
                self.succeeded.setdefault(gang_of(pod), {})[meta["uid"]] = int(notes[names.RUN_EPOCH])
            if pod.get("status", {}).get("reason", "").startswith(("OutOf", "Unexpected")):
                self.refused.append(meta["name"])

    def close(self) -> None:
        self._watch.close()
        self._thread.join(10)


def gang_of(pod: Json) -> str:
    """The name of the gang of a pod of others."""
    meta = pod["metadata"]
    return str(meta.get("labels", {}).get("job-name") or meta["annotations"][names.GANG])


def is_alone(pod: Json) -> bool:
    """Whether nobody owns a pod, so that nobody would make it again."""
    return "ownerReferences" not in pod["metadata"]


class Work:
    """Jobs of both kinds, which come until the test says that it is enough."""

    def __init__(self, server: KubeServer, namespace: str, folder: Path) -> None:
        self.admin, self.namespace, self.done_file = server.admin, namespace, folder / "done"
        self.done_file.touch()
        self.gangs: dict[str, int] = {}  # pods of each by name
        self.jobs: list[str] = []
        self._random = random.Random(SEED)
        self._enough = threading.Event()

    def come(self, client: Client) -> None:
        """Keep some of each kind open until it is enough."""
        while not self._enough.is_set():
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


class Killer:
    """Kills the service, again and again."""

    def __init__(self, service: KillableService, work: Work) -> None:
        self.counts: Counter[str] = Counter()
        self.starts: list[float] = []  # seconds until it answered
        self._service, self._work, self._random = service, work, random.Random(SEED)

    def rage(self, kills: int) -> None:
        """Kill a service that runs so many times; there is one again at the end."""
        for number in range(1, kills + 1):
            if number % 2:
                self._kill_at_a_moment()
            else:
                self._kill_at_a_write()
            if number % CALM == 0 or number == kills:
                self._up()
                until_calm(self._work)

    def _up(self, death: Death | None = None) -> None:
        if not self._service.is_alive():
            began = monotonic()
            self._service.start(death)
            while self._service.is_alive() and not self._service.has_answered:
                sleep(0.005)
            if self._service.is_alive():
                self.starts.append(monotonic() - began)

    def _kill_at_a_moment(self) -> None:
        if self._random.random() < 0.2:  # now and then before it answers
            if not self._service.is_alive():
                self._service.start()
            sleep(self._random.uniform(0.0, 0.5))
            self.counts["while starting"] += 1
        else:
            self._up()
            sleep(self._random.uniform(0.0, 1.0))
            self.counts["at any moment"] += 1
        self._service.kill()

    def _kill_at_a_write(self) -> None:
        death = Death(self._random.randint(1, LAST_WRITE), self._random.choice(("before", "sent", "after")))
        self._service.kill()
        self._up(death)
        deadline = monotonic() + WRITE_SECONDS
        while self._service.is_alive() and monotonic() < deadline:
            sleep(0.005)
        self.counts["no write" if self._service.is_alive() else death.when] += 1
        self._service.kill()


def until_calm(work: Work) -> None:
    """Wait until no gang is bound in part, which must not take long with a service that is left alone."""
    deadline = monotonic() + CALM_SECONDS
    while found := work.partly_bound():
        assert monotonic() < deadline, f"bound in part: {found}"
        sleep(0.1)


def until_done(client: Client, work: Work) -> None:
    """Wait until all jobs have ended, in the cluster and in the journal."""
    deadline = monotonic() + 45
    while waiting := [f"{job.name} {job.state}" for job in client.queue(limit=500).jobs if not job.state.is_final]:
        assert monotonic() < deadline, f"{waiting}; pods of others: {[*map(brief, work.pods())]}"
        sleep(0.2)
    until(lambda: work.finished_gangs() == work.gangs.keys())


def brief(pod: Json) -> str:
    """What there is to say of a pod."""
    meta = pod["metadata"]
    epoch, is_ending = meta["annotations"].get(names.RUN_EPOCH), "deletionTimestamp" in meta
    return f"{meta['name']} {pod['spec'].get('nodeName')} {pod['status'].get('phase')} run {epoch} {'ending' * is_ending}"


@pytest.fixture
def service(fresh_kube: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    for name in ("POISE_URL", "POISE_TOKEN", "POISE_CA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("POISE_STATE", str(tmp_path / "state"))
    install_crds(fresh_kube)
    namespace = fresh_kube.namespace("kills")
    fresh_kube.service_account(namespace, "poise-job")
    for node in NODES:
        fresh_kube.add_node(node, GPUS)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        agents = f"127.0.0.1:{probe.getsockname()[1]}"  # the same after each restart: agents know it
    where = ("--backend", "kubernetes", "--kubeconfig", fresh_kube.kubeconfig("admin"), "--namespace", namespace)
    options = (*where, "--agents", agents, "--image", "poise", "--log-format", "json", *POLICY)
    made = Served(tmp_path, namespace, f"http://{agents}", *options)
    yield made
    made.close()


def test_a_service_that_is_killed_a_hundred_times_binds_whole_gangs_and_ends_every_job_once(
    service: Served, fresh_kube: KubeServer, tmp_path: Path
) -> None:
    began = monotonic()
    record, work = Record(fresh_kube, service.namespace), Work(fresh_kube, service.namespace, tmp_path)
    killer = Killer(service, work)
    kubelet, controllers = AgentPods(fresh_kube, tmp_path / "pods", service.agents), Controllers(fresh_kube, 0.25)
    try:
        with kubelet, controllers, ThreadPoolExecutor(1) as pool:
            client = service.up()
            coming = pool.submit(work.come, service.client(patience=0.5))
            try:
                killer.rage(KILLS)
            finally:
                work.enough()
            coming.result()
            raged = monotonic() - began
            until_done(client, work)
            details = {row.id: client.show(row.id) for row in client.queue(states=list(JobState), limit=500).jobs}
            check_gangs(work, record, details)
            check_own(work, details)
            until(lambda: not owned(fresh_kube, service, "pods") and not owned(fresh_kube, service, "services"))
            assert (kubelet.problems, controllers.problems) == ([], [])
        service.kill()
        check_journal(service, details)
        check_leaders(service, record)
    except BaseException as error:
        problems = [*kubelet.problems[-3:], *controllers.problems[-3:]]
        error.add_note(
            f"POISE_CRASH_SEED={SEED} POISE_CRASH_KILLS={KILLS}; {dict(killer.counts)}; {problems}; {service.log[-3000:]}"
        )
        raise
    finally:
        record.close()
    starts = sorted(killer.starts)
    print(  # noqa: T201 - the figures of docs/explanation/surviving-crashes.md
        f"\n{killer.counts.total()} kills {dict(killer.counts)} in {raged:.0f} s of {monotonic() - began:.0f} s;"
        f" a start took {starts[len(starts) // 2]:.2f} s, at most {starts[-1]:.2f} s;"
        f" {len(work.gangs)} gangs, {len(work.jobs)} jobs of Poise, {sum(len(each.runs) for each in details.values())} runs,"
        f" {sum(each.preemptions for each in details.values())} preemptions, {len(record.terms)} pods placed"
    )


def owned(server: KubeServer, service: Served, kind: str) -> list[Json]:
    """What there is that Poise has created."""
    return server.admin.list(f"/api/v1/namespaces/{service.namespace}/{kind}", labelSelector=names.SERVICE)


def check_gangs(work: Work, record: Record, details: dict[str, JobDetail]) -> None:
    """Every gang is one job, has run as a whole, and each of its pods has succeeded once, of which the journal knows."""
    found = {each.job.name: each for each in details.values() if each.job.name in work.gangs}
    assert found.keys() == work.gangs.keys()
    for name, size in work.gangs.items():
        last, succeeded = check_ended_once(found[name]), record.succeeded[name]
        assert len(succeeded) == size, found[name]
        earlier = sum(epoch < last for epoch in succeeded.values())  # on the way out of runs that were preempted
        assert len(record.bound.get((name, str(last)), ())) + earlier == size, found[name]
    assert {pod["metadata"]["annotations"][names.RUN_JOB] for pod in work.pods()} <= details.keys()
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


def check_leaders(service: KillableService, record: Record) -> None:
    """Nobody has acted after its successor has, no GPU was given out twice, and nobody has waited for a dead leader."""
    assert record.terms == sorted(record.terms)
    assert record.terms[-1] <= service.starts
    assert record.refused == []
    assert "Traceback" not in service.log
    assert '"level": "error"' not in service.log
    assert " leads; its lease " not in service.log, "a dead leader has the same lock"
