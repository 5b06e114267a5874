"""Runs that Poise starts as pods: from an order to pods, and from what pods and agents say to the end of the run.

The agents in the pods say what the processes do, through `RemoteRuns`, as on any other machines: to it, each pod is a node.
Kubernetes says what becomes of the pods: one could not be started, was deleted, or has ended without a word of its agent.
Both have to agree before a run is over: its end is known *and* its pods hold no GPUs any more.

An end is written to the state directory before the pods are deleted. A service that is killed in between finds it there;
the pods alone could not say any more how the run ended, and it would be begun a second time.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace

from poise.durable import replace_file
from poise.service.backends.api import DesiredState, RunEnded, RunEnding, RunNotice, RunOrder, RunPart
from poise.service.backends.kubernetes import names
from poise.service.backends.kubernetes.actions import Actions
from poise.service.backends.kubernetes.errors import ApiError, ApiUnavailableError, words_of
from poise.service.backends.kubernetes.kube_run import SLOW_SECONDS, START_SECONDS, KubeRun
from poise.service.backends.kubernetes.manifests import (
    JOB_CONTAINER,
    LEAVING_SECONDS,
    PodTerms,
    checkpoint_problem,
    links_of,
    run_pods,
)
from poise.service.backends.kubernetes.objects import ContainerState, Json, PodInfo
from poise.service.backends.kubernetes.view import ClusterView
from poise.service.backends.local.state_dir import StateDir
from poise.service.backends.remote.runs import RemoteRuns
from poise.service.backends.run_table import Key

END_FILE = "ended.json"  # in the directory of a job: how its latest run ended
NEWS_SECONDS = 5.0  # for the last words of an agent, after its pod has ended
PULL_SECONDS = 600.0  # for an image that cannot be fetched at first
KEEP_AGAIN_SECONDS = 5.0  # between two tries to write down how a run has ended
KILL_GRACE = 10  # seconds between TERM and KILL in a pod whose job is not wanted any more

NEVER_BEGAN = "node-exhausted"  # cause of a pod that its node did not take: no fault of the job
TAKEN = "Taken"  # reason of an ApiError: something that is not ours has the name
NO_IMAGE, BAD_IMAGE, UNUSABLE = "image-missing", "program-missing", "checkpoint-place-unusable"
_REFUSED = ("OutOf", "UnexpectedAdmissionError", "NodeAffinity", "NodePorts", "Taint")
_HOPELESS = (
    "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError", "RunContainerError",
    "StartError",
)  # fmt: skip
_PULLING = ("ErrImagePull", "ImagePullBackOff")


class PodRuns:
    """How runs live that Poise has started. All of it belongs to the loop of the back end.

    place_of  where the checkpoints of a job are kept
    unknown   pods of this service whose jobs the journal never had: their runs, by uid
    """

    def __init__(
        self,
        view: ClusterView,
        actions: Actions,
        remote: RemoteRuns,
        terms: PodTerms,
        state: StateDir,
        place_of: Callable[[RunOrder], str],
    ) -> None:
        self._view, self._actions, self._remote, self._terms, self._state = view, actions, remote, terms, state
        self._place_of = place_of
        self.unknown: dict[str, Key | None] = {}
        self._last: dict[str, PodInfo] = {}  # pods of open runs as they were last seen, by name
        self._failing_since: dict[str, float] = {}  # since when they cannot start, for a reason that may pass
        self._over_since: dict[str, float] = {}

    # What the agents say

    def order_for_agents(self, order: RunOrder) -> RunOrder:
        """Return the order as the agents in the pods know it: each pod is a node, whose GPUs are numbered from 0."""
        parts = zip(links_of(order), order.gpus, strict=True)
        return replace(
            order, gpus=tuple(RunPart(link, part.gpu_type, tuple(range(len(part.slots)))) for link, part in parts)
        )

    def adopt(self, runs: list[KubeRun]) -> None:
        """Prepare runs of before a restart. Those of which there is nothing need no agents to say so."""
        known: list[tuple[RunOrder, DesiredState]] = []
        for run in runs:
            run.reported_end = self._kept_end(run)
            if run.reported_end is None and (run.desired is DesiredState.RUN or any(self._pods(run))):
                known.append((self.order_for_agents(run.order), run.desired))
                self._expect(run)
            elif run.reported_end is None:
                run.reported_end = run.ended(RunEnding.YIELDED)
        self._remote.adopt(known)

    def stop(self, run: KubeRun, notice: RunNotice) -> None:
        """Ask a run to leave; its pods are deleted if it does not."""
        self._remote.stop(run.key, notice)
        run.force_at = asyncio.get_running_loop().time() + notice.deadline + LEAVING_SECONDS

    def kill(self, run: KubeRun, reason: str) -> None:
        """End a run whose job is not wanted any more."""
        self._remote.kill(run.key, reason)
        run.force_at = asyncio.get_running_loop().time() + LEAVING_SECONDS

    # The life of a run

    async def live(self, run: KubeRun) -> RunEnded:
        """Create its pods, wait for its end, and remove them."""
        if run.reported_end is None and run.must_end and not run.is_adopted:
            return run.ended(RunEnding.YIELDED)  # it was never begun
        if run.reported_end is None:
            if not run.is_adopted:
                self._expect(run)
                self._remote.launch(self.order_for_agents(run.order))
            # With the pod of rank 0, which is created last, there have been all of them: what is missing was deleted.
            if self.pod(links_of(run.order)[0]) is None:
                await self._create(run)
            while run.reported_end is None:
                self._look(run)
                if asyncio.get_running_loop().time() >= run.force_at:
                    run.force_at = asyncio.get_running_loop().time() + LEAVING_SECONDS
                    await self._delete(run)
                if run.reported_end is None:
                    await run.wait()
            await self._keep(run, run.reported_end)
        await self._remove(run)
        for link in links_of(run.order):
            self._remote.forget(link)
            self._last.pop(link, None)
            self._failing_since.pop(link, None)
            self._over_since.pop(link, None)
        return run.reported_end

    def links_at(self, run: KubeRun, node: str) -> list[str]:
        """Return the names of a run's pods on a node."""
        return [link for link, part in zip(links_of(run.order), run.order.gpus, strict=True) if part.node == node]

    def _expect(self, run: KubeRun) -> None:
        for link in links_of(run.order):
            self._remote.expect(link)

    async def _create(self, run: KubeRun) -> None:
        """Create what there has to be for a run, unless it is there; if that is refused, the run has failed."""
        place = self._place_of(run.order)
        problem = checkpoint_problem(run.order.request.pod, place)
        if problem is not None:  # it was not when the job was accepted: the service keeps checkpoints elsewhere now
            run.trouble(UNUSABLE, problem)
            self._give_up(run, problem, UNUSABLE)
            return
        service, pods = run_pods(run.order, self._terms, self._actions.term, place)
        base = f"/api/v1/namespaces/{self._terms.namespace}"
        for kind, document in [("services", service)] * (service is not None) + [("pods", each) for each in pods]:
            assert document is not None
            try:
                await self._actions.persist(
                    lambda kind=kind, document=document: self._create_once(f"{base}/{kind}", document),  # type: ignore[misc]
                    lambda: not run.must_end,
                )
            except ApiError as error:
                text = f"its {kind[:-1]} {document['metadata']['name']} was refused: {error.message}"
                cause = NEVER_BEGAN if _is_no_fault_of_the_job(error) else "incorrect-inputs"
                run.trouble(cause, text)
                self._give_up(run, text, cause)
                return
        if run.must_end:
            self._give_up(run, "it was not wanted any more before it was created", NEVER_BEGAN)

    async def _create_once(self, path: str, document: Json) -> None:
        try:
            await self._actions.client.post(path, document)
        except ApiError as error:
            if error.reason == "Conflict":  # of others who count against the same quota: it is as good as no answer
                raise ApiUnavailableError(error.message, status=error.status) from error
            if error.reason != "AlreadyExists":
                raise
            # An answer was lost, or an earlier leader has created it: the same name is the same part of the same run.
            try:
                found = await self._actions.client.get(f"{path}/{document['metadata']['name']}")
            except ApiError as gone:
                if gone.status == 404:  # it has vanished since: it is created again
                    raise ApiUnavailableError(gone.message, status=gone.status) from gone
                raise
            labels = found["metadata"].get("labels") or {}
            is_ours = all(labels.get(name) == text for name, text in document["metadata"]["labels"].items())
            if not is_ours or names.run_key(labels) in self.unknown.values():
                raise ApiError(409, TAKEN, f"{error.message}, and it is none of this service") from error

    def _give_up(self, run: KubeRun, evidence: str, cause: str) -> None:
        for link in links_of(run.order):
            self._remote.give_up(link, evidence, cause)

    # What becomes of the pods

    def _look(self, run: KubeRun) -> None:
        """Tell of pods that have ended, were deleted, or cannot start: their agents say nothing more."""
        for link in links_of(run.order):
            pod = self.pod(link)
            if pod is None:
                self._look_for_deleted(link)
                continue
            self._last[link] = pod
            problem = start_problem(pod)
            if problem is not None:
                self._look_at_failing(run, pod, *problem)
            elif pod.is_over:
                self._look_at_ended(run, pod)
            elif self._has_joined(link) or pod.phase != "Pending":
                self._failing_since.pop(link, None)
            else:
                self._look_at_silent(run, pod)

    def _look_for_deleted(self, link: str) -> None:
        # A pod that is gone before its containers have ended may live on a node that is cut off: its lease decides.
        # One that was never heard of will not be listened to when it comes.
        last = self._last.get(link)
        if last is not None and (not self._has_joined(link) or _has_ended(last)):
            self._remote.give_up(link, "its pod was deleted", "killed")

    def _look_at_failing(self, run: KubeRun, pod: PodInfo, cause: str, text: str, is_final: bool) -> None:
        now = asyncio.get_running_loop().time()
        since = self._failing_since.setdefault(pod.name, now)
        if is_final or pod.is_over or now - since >= PULL_SECONDS:
            run.trouble(cause, text)
            self._remote.give_up(pod.name, text, cause)

    def _look_at_silent(self, run: KubeRun, pod: PodInfo) -> None:
        """Tell of a pod that does not start and does not say why: a claim that is missing, for example."""
        now = asyncio.get_running_loop().time()
        since = self._failing_since.setdefault(pod.name, now)
        if now - since >= SLOW_SECONDS:
            where = f"kubectl describe pod {pod.name} -n {pod.namespace}"
            text = f"its pod {pod.name} has not started for {SLOW_SECONDS / 60:g} minutes; {where} shows what it waits for"
            run.trouble(NEVER_BEGAN, text)
            if now - since >= START_SECONDS:
                self._remote.give_up(pod.name, text, NEVER_BEGAN)

    def _look_at_ended(self, run: KubeRun, pod: PodInfo) -> None:
        """Give up a pod that has ended once its agent has had time for its last words."""
        loop = asyncio.get_running_loop()
        since = self._over_since.setdefault(pod.name, loop.time())
        if loop.time() - since >= NEWS_SECONDS or not self._has_joined(pod.name):
            text = f"pod {pod.name} has ended: {pod.message or pod.reason or pod.phase}"
            self._remote.give_up(pod.name, text, cause_of(pod))
        else:
            loop.call_later(NEWS_SECONDS, run.changed.set)

    def _has_joined(self, link: str) -> bool:
        found = self._remote.links.get(link)
        return found is not None and found.spec is not None

    def pod(self, link: str) -> PodInfo | None:
        """Return a pod of ours; one of another service, or of an unknown job, may have the same name."""
        pod = self._view.pods.get((self._terms.namespace, link))
        is_ours = pod is not None and pod.labels.get(names.SERVICE) == self._terms.service and pod.uid not in self.unknown
        return pod if is_ours else None

    def _pods(self, run: KubeRun) -> Iterator[PodInfo]:
        return (pod for link in links_of(run.order) if (pod := self.pod(link)) is not None)

    # Its end

    def _kept_end(self, run: KubeRun) -> RunEnded | None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads((self._state.job_path(run.order.job) / END_FILE).read_text())
            if found["epoch"] == run.order.epoch:
                return RunEnded(**{**found, "how": RunEnding(found["how"]), "codes": tuple(found["codes"])})
        return None

    async def _keep(self, run: KubeRun, end: RunEnded) -> None:
        """Write down how a run has ended, however long the disk is full: until then its pods say so."""
        while True:
            try:
                await asyncio.to_thread(self._keep_end, end)
            except OSError as error:
                run.trouble("storage-full", f"its end cannot be written down: {words_of(error)}")
                await asyncio.sleep(KEEP_AGAIN_SECONDS)
            else:
                return

    def _keep_end(self, end: RunEnded) -> None:
        folder = self._state.job_path(end.job)
        folder.mkdir(mode=0o700, exist_ok=True)
        replace_file(folder / END_FILE, json.dumps(asdict(end)) + "\n")

    async def _delete(self, run: KubeRun) -> None:
        """Ask for the deletion of a run's pods and of its service, by their uids: others may have their names by then."""
        base, client = f"/api/v1/namespaces/{self._terms.namespace}", self._actions.client
        for pod in [*self._pods(run)]:
            with suppress(ApiError):  # it is asked for again while the pod is there
                await self._actions.delete(f"{base}/pods/{pod.name}", pod.uid, KILL_GRACE)
        if len(run.order.gpus) > 1:
            path = f"{base}/services/{names.service_name(run.order.job, run.order.epoch)}"
            with suppress(ApiError):
                found = await self._actions.persist(lambda: client.get(path))
                if found is not None and self._is_ours(found["metadata"].get("labels") or {}):
                    await self._actions.delete(path, found["metadata"]["uid"])

    def _is_ours(self, labels: Mapping[str, str]) -> bool:
        return labels.get(names.SERVICE) == self._terms.service and names.run_key(labels) not in self.unknown.values()

    async def _remove(self, run: KubeRun) -> None:
        """Delete its pods; return once they hold no GPUs any more."""
        await self._delete(run)
        while left := [pod for pod in self._pods(run) if not pod.is_over and self._view.is_served(pod.node)]:
            await run.wait()
            if any(not pod.ending for pod in left):  # it was refused, or has not been told yet
                await self._delete(run)


def _is_no_fault_of_the_job(refusal: ApiError) -> bool:
    """Whether another run of the job may be accepted although this one was refused.

    The next run has another name, and quotas change. Without a credential, a right or the namespace, no job could be run:
    an administrator has to give it back, and the jobs wait until then.
    """
    is_quota = refusal.status in (403, 429) and "quota" in refusal.message
    is_right = refusal.status == 403 and "cannot create resource" in refusal.message
    return refusal.reason == TAKEN or is_quota or is_right or refusal.status in (401, 404)


def _has_ended(pod: PodInfo) -> bool:
    return pod.is_over or (bool(pod.containers) and all(each.state == "terminated" for each in pod.containers))


def cause_of(pod: PodInfo) -> str:
    """Say what a pod has ended of, of which its agent has not said anything."""
    if pod.reason.startswith(_REFUSED):
        return NEVER_BEGAN
    problem = start_problem(pod)
    if problem is not None:
        return problem[0]
    if any(each.reason == "OOMKilled" for each in pod.containers):
        return "cpu-out-of-memory"
    disrupted = pod.condition("DisruptionTarget")
    if (
        pod.reason in ("Evicted", "Preempting", "NodeLost", "NodeShutdown", "Terminated", "Shutdown")
        or disrupted is not None
    ):
        return "node-lost"
    return "killed"


def start_problem(pod: PodInfo) -> tuple[str, str, bool] | None:
    """Say why a container of a pod cannot be started: cause, a sentence, and whether it never will be; None: it can."""
    for each in pod.containers:
        if each.reason in _HOPELESS or (each.state == "terminated" and each.code == 128):
            return (
                (BAD_IMAGE, _sentence(each), True)
                if each.reason != "InvalidImageName"
                else (NO_IMAGE, _sentence(each), True)
            )
        if each.reason in _PULLING:
            return NO_IMAGE, _sentence(each), False
    return None


def _sentence(container: ContainerState) -> str:
    said = " ".join((container.message or container.reason).split())
    if container.name == JOB_CONTAINER and "python3" in said and "not found" in said:
        return "the job's image has no python3, with which Poise starts the job: use an image that has Python 3.10 or newer"
    if container.reason in (*_PULLING, "InvalidImageName"):
        return f"the image of container {container.name} cannot be fetched: {said}"
    return f"container {container.name} cannot be started: {said}"
