"""When pods of a run are given up of which the agents say nothing."""

import asyncio
from types import SimpleNamespace
from typing import Any

from tests.simulated_time import simulate

from poise.service.backends.api import DesiredState, RunOrder, RunPart
from poise.service.backends.kubernetes import names, pod_runs
from poise.service.backends.kubernetes.kube_run import SLOW_SECONDS, START_SECONDS, KubeRun
from poise.service.backends.kubernetes.manifests import PodTerms
from poise.service.backends.kubernetes.objects import read_pod
from poise.service.backends.kubernetes.pod_runs import NEWS_SECONDS, PULL_SECONDS, PodRuns
from poise.service.wire.request import RELAY, JobRequest

NAME = names.pod_name("1", 1, 0)
SERVICE = "5" * 32
PULLING = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}


class Watched:
    """One run of one pod, whose status the test sets; what was given up of it, and when."""

    def __init__(self, *, has_joined: bool = True, service: str = SERVICE, unknown: dict[str, None] | None = None) -> None:
        self._service = service
        self.given_up: list[tuple[str, float]] = []
        view: Any = SimpleNamespace(pods={}, nodes={})
        self.view = view
        remote: Any = SimpleNamespace(links={NAME: SimpleNamespace(spec="joined" if has_joined else None)})
        remote.give_up = lambda _link, _text, cause: self.given_up.append((cause, self.now()))
        nothing: Any = None  # neither the API server nor the state directory is asked
        self._runs = PodRuns(view, nothing, remote, PodTerms("jobs", SERVICE, "", "poise"), nothing, lambda _order: RELAY)
        self._runs.unknown.update(unknown or {})
        order = RunOrder("1", 1, (RunPart("n1", "v100", (0,)),), JobRequest(command=("true",), image="job"))
        self._run = KubeRun(order, DesiredState.RUN)

    @property
    def trouble(self) -> tuple[str, str] | None:
        return self._run.failure

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    async def look(self, seconds: float, phase: str, **state: Any) -> None:
        """Look at the pod as it is for so long, every two seconds."""
        spec = {"nodeName": "n1", "containers": [{"name": "job"}]}
        status = {"phase": phase, "containerStatuses": [{"name": "job", "state": state}]}
        head = {"name": NAME, "namespace": "jobs", "uid": "1", "labels": {names.SERVICE: self._service}}
        found = {"metadata": head, "spec": spec, "status": status}
        self.view.pods["jobs", NAME] = read_pod(found, names.GPU_RESOURCE)
        until = self.now() + seconds
        while self.now() < until and not self.given_up:
            self._runs._look(self._run)
            await asyncio.sleep(pod_runs.NEWS_SECONDS / 2)


def test_an_image_that_could_not_be_fetched_at_first_costs_the_agent_no_time_for_its_last_words() -> None:
    async def scene() -> None:
        pod = Watched()
        await pod.look(PULL_SECONDS / 2, "Pending", **PULLING)
        await pod.look(3600.0, "Running", running={})
        ended = pod.now()
        await pod.look(60.0, "Succeeded", terminated={"exitCode": 0})
        assert pod.given_up == [("killed", ended + NEWS_SECONDS)]

    simulate(scene)


def test_an_image_is_waited_for_anew_each_time_it_cannot_be_fetched() -> None:
    async def scene() -> None:
        pod = Watched()
        await pod.look(0.9 * PULL_SECONDS, "Pending", **PULLING)
        await pod.look(10.0, "Running", running={})
        began = pod.now()
        await pod.look(2 * PULL_SECONDS, "Pending", **PULLING)
        assert pod.given_up == [("image-missing", began + PULL_SECONDS)]

    simulate(scene)


def test_a_pod_that_does_not_start_and_does_not_say_why_is_told_of_and_given_up_in_the_end() -> None:
    async def scene() -> None:
        pod = Watched(has_joined=False)
        await pod.look(SLOW_SECONDS, "Pending", waiting={"reason": "ContainerCreating"})
        assert pod.trouble is None
        await pod.look(2 * START_SECONDS, "Pending", waiting={"reason": "ContainerCreating"})
        assert pod.trouble is not None
        assert f"kubectl describe pod {NAME} -n jobs" in pod.trouble[1]
        assert pod.given_up == [("node-exhausted", START_SECONDS)]

    simulate(scene)


def test_a_pod_of_another_service_or_of_an_unknown_job_is_not_looked_at() -> None:
    async def scene() -> None:
        for service, unknown in (("6" * 32, {}), (SERVICE, {"1": None})):
            pod = Watched(has_joined=False, service=service, unknown=unknown)
            await pod.look(2 * START_SECONDS, "Failed", terminated={"exitCode": 1})
            assert pod.given_up == []

    simulate(scene)


def test_a_pod_whose_agent_was_never_heard_of_is_given_up_as_soon_as_it_is_over() -> None:
    async def scene() -> None:
        pod = Watched(has_joined=False)
        await pod.look(10.0, "Failed", terminated={"exitCode": 137, "reason": "OOMKilled"})
        assert pod.given_up == [("cpu-out-of-memory", 0.0)]

    simulate(scene)
