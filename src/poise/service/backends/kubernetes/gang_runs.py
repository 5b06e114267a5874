"""Runs of pods that others have created: found, bound whole where Poise says, and made to leave as their owner allows.

A gang (`gangs.py`) becomes a job of the service when all its pods exist. Its run is what its owner does on the GPUs that
the job has: pods that the owner makes again are bound to the places of those before them. It is over when the
owner says so, when it was suspended and its pods are gone, or, of pods without an owner, when all have ended.

Nothing has to be remembered: which pods are bound, and where, is written on them, and an adopted run goes on from what
there is. If a bind fails, the rest of the gang is bound at the next look, so a gang is whole in the end or leaves as one.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import time  # noqa: TID251 - events carry the time at which things happened
from typing import Any

from pydantic import ValidationError

from poise.scheduler.model.errors import PoiseError
from poise.service.backends.api import (
    DesiredState,
    JobFound,
    JobGone,
    JobHeld,
    OnEvent,
    RunBegan,
    RunEnded,
    RunEnding,
    RunPart,
)
from poise.service.backends.kubernetes import names
from poise.service.backends.kubernetes.actions import Actions
from poise.service.backends.kubernetes.client import ApiError, PatchKind
from poise.service.backends.kubernetes.gangs import (
    SUSPENDED_BY,
    Gang,
    GangIndex,
    OwnerPhase,
    Preempts,
    placement_of,
)
from poise.service.backends.kubernetes.kube_run import KubeRun
from poise.service.backends.kubernetes.objects import Json, Key, PodInfo
from poise.service.backends.kubernetes.view import ClusterView
from poise.service.wire.draft import clean_name
from poise.service.wire.request import JobRequest, PreemptionMode, RetrySpec, first_problem

PATIENCE = 120.0  # seconds in which a gang that was to start has to be whole and bound; then it gives its GPUs back
EVICT_SECONDS = 5.0  # between two tries to evict what a disruption budget protects


@dataclass(eq=False, slots=True)
class FoundGang:
    """A gang that the service was told of.

    job       its id; None: it has not been accepted yet
    is_over   the job has ended, or was cancelled
    problem   why it was refused;  is_final: asking again is of no use while the cluster is as it is
    is_held   its owner has suspended it
    """

    job: str | None = None
    is_over: bool = False
    problem: str | None = None
    is_final: bool = False
    is_held: bool = False


class GangRuns:
    """Gangs and their runs. All of it belongs to the loop of the back end.

    tenant_of   whose the jobs of a namespace are
    types_of    GPU types that a gang may run on, and what is wrong with what it asks for
    """

    def __init__(
        self,
        index: GangIndex,
        view: ClusterView,
        actions: Actions,
        on_event: OnEvent,
        tenant_of: Callable[[str], str],
        types_of: Callable[[Gang], tuple[tuple[str, ...], str | None]],
    ) -> None:
        self._index, self._view, self._actions, self._on_event = index, view, actions, on_event
        self._tenant_of, self._types_of = tenant_of, types_of
        self.found: dict[str, FoundGang] = {}  # by key of the gang
        self.runs: dict[str, KubeRun] = {}  # open runs by key of the gang
        self.problems: dict[str, str] = {}  # gangs that are not scheduled, and why

    # Finding gangs

    def look_at(self, keys: Iterable[str]) -> None:
        """Tell the service of gangs that are new, gone, or suspended by their owner; wake the runs of the others."""
        for key in keys:
            gang, found = self._index.get(key), self.found.get(key)
            run = self.runs.get(key)
            if run is not None:
                run.changed.set()
            if gang is None:
                if run is None:  # else its end is told first
                    self._forget(key)
                continue
            if found is not None and found.job is not None and not found.is_over:
                self._look_at_known(gang, found, run)
            elif found is None or (found.job is None and not found.is_final):
                self._report(gang)

    def _report(self, gang: Gang) -> None:
        """Report a gang once it is whole. Pods that are bound are none that Poise has not bound: it leaves them alone."""
        self.problems.pop(gang.key, None)
        if gang.problem is not None:
            self.problems[gang.key] = gang.problem
            return
        is_active = gang.owner is None or gang.owner.state is OwnerPhase.ACTIVE
        is_ready = gang.is_whole and not _is_suspended(gang) and not any(pod.node for pod in gang.pods)
        if not is_active or not (is_ready or _is_suspended_by_us(gang)):
            return
        types, problem = self._types_of(gang)
        if problem is not None:
            self.problems[gang.key] = problem
            return
        try:
            request = request_of(gang, types)
        except ValidationError as error:
            field, text = first_problem(error)
            self.problems[gang.key] = text if field is None else f"{field}: {text}"
            return
        self.found.setdefault(gang.key, FoundGang()).problem = None
        self._on_event(JobFound(gang.key, self._tenant_of(gang.namespace), request))

    def _look_at_known(self, gang: Gang, found: FoundGang, run: KubeRun | None) -> None:
        assert found.job is not None
        is_done = gang.owner is not None and gang.owner.state is not OwnerPhase.ACTIVE
        if is_done and run is None:
            found.is_over = True
            self._on_event(JobGone(found.job))  # it has come to an end without Poise
            return
        is_held = _is_suspended(gang) and not _is_suspended_by_us(gang)
        if is_held != found.is_held:
            found.is_held = is_held
            self._on_event(JobHeld(found.job, is_held))

    def _forget(self, key: str) -> None:
        self.problems.pop(key, None)
        found = self.found.pop(key, None)
        if found is not None and found.job is not None and not found.is_over:
            self._on_event(JobGone(found.job))

    def accepted(self, key: str, job: str, *, is_over: bool) -> None:
        """Take the id of a job that was found."""
        self.found[key] = FoundGang(job, is_over)
        self.problems.pop(key, None)
        if self._index.get(key) is None:
            self._forget(key)  # it was deleted meanwhile

    def refused(self, key: str, text: str, *, is_final: bool) -> None:
        """Take why a job was not accepted."""
        if self._index.get(key) is not None:
            self.found[key] = FoundGang(problem=text, is_final=is_final)
            self.problems[key] = text

    def retry_refused(self) -> None:
        """Report again what was refused: the cluster has changed, or time has passed."""
        keys = [key for key, found in self.found.items() if found.job is None]
        for key in keys:
            self.found[key].is_final = False
        self.look_at(keys)
        self.look_at([key for key in self.problems if key not in self.found])

    def adopt(self, runs: Iterable[KubeRun]) -> None:
        """Know the jobs of runs of before a restart: their pods are bound, and are not reported again."""
        for run in runs:
            assert run.order.request.pods is not None
            self.found[run.order.request.pods.key] = FoundGang(run.order.job)

    # The life of a run

    async def live(self, run: KubeRun) -> RunEnded:
        """Bind the gang, wait until its owner says that it is over or it has left, and say how it ended."""
        pods = run.order.request.pods
        assert pods is not None
        self.runs[pods.key] = run
        try:
            return await self._live(run, pods.key)
        finally:
            del self.runs[pods.key]
            if self._index.get(pods.key) is None:
                self._forget(pods.key)

    async def _live(self, run: KubeRun, key: str) -> RunEnded:
        clock = asyncio.get_running_loop().time
        last_whole, bound = clock(), dict[Key, str]()
        while True:
            gang = self._index.get(key)
            if gang is not None:
                bound |= {pod.key: pod.uid for pod in gang.pods if self._is_of(pod, run)}
            end = self._end_of(run, gang, bound)
            if end is not None:
                return end
            if gang is not None:
                if run.must_end:
                    await self._send_away(run, gang)
                elif _is_suspended(gang):
                    await self._resume(run, gang)
                elif await self._bind(run, gang):
                    last_whole = clock()
                elif clock() - last_whole > PATIENCE:
                    # Its owner does not make the pods that are missing: others can use the GPUs meanwhile.
                    run.desired, run.failure = DesiredState.LEAVE, ("job-preempted", "its pods did not all come")
                    run.changed.set()
                self._note_began(run, gang)
            await run.wait()

    def _is_of(self, pod: PodInfo, run: KubeRun) -> bool:
        """Whether a pod was bound for this run."""
        return bool(pod.node) and pod.annotations.get(names.RUN_EPOCH) == str(run.order.epoch)

    def _end_of(self, run: KubeRun, gang: Gang | None, bound: Mapping[Key, str]) -> RunEnded | None:
        """Say how a run has ended; None: it has not, or GPUs are still in use."""
        ours = [pod for key, uid in bound.items() if (pod := self._view.pods.get(key)) is not None and pod.uid == uid]
        if any(pod.holds_gpus and self._is_served(pod.node) for pod in ours):
            return None
        owner = None if gang is None else gang.owner
        if owner is not None and owner.state is OwnerPhase.COMPLETE:
            return run.ended(RunEnding.FINISHED, codes=_codes(ours))
        if owner is not None and owner.state is OwnerPhase.FAILED:
            return run.ended(RunEnding.FAILED, _failure_of(ours), _codes(ours))
        if gang is None:
            if ours and all(pod.phase == "Succeeded" for pod in ours):
                return run.ended(RunEnding.FINISHED, codes=_codes(ours))
            if any(pod.phase == "Failed" for pod in ours) and not run.must_end:
                return run.ended(RunEnding.FAILED, _failure_of(ours), _codes(ours))
            return run.ended(RunEnding.YIELDED)  # it was deleted
        has_left = run.must_end and not any(pod.node for pod in gang.pods)
        return run.ended(RunEnding.YIELDED) if has_left and self._may_leave(run, gang) else None

    def _may_leave(self, run: KubeRun, gang: Gang) -> bool:
        """Whether its owner knows that it is to stay away: else pods would come back that nobody expects."""
        return gang.preempts is not Preempts.SUSPEND or _is_suspended(gang) or not run.has_begun

    def _is_served(self, node: str) -> bool:
        found = self._view.nodes.get(node)
        return found is not None and found.is_ready

    def _note_began(self, run: KubeRun, gang: Gang) -> None:
        ours = [pod for pod in gang.pods if self._is_of(pod, run)]
        if not run.has_begun and len(ours) == len(gang.pods) and all(pod.phase == "Running" for pod in ours) and ours:
            run.has_begun = True
            self._on_event(RunBegan(*run.key, time()))

    # What is changed in Kubernetes

    async def _bind(self, run: KubeRun, gang: Gang) -> bool:
        """Bind the pods that are not; say whether the whole gang is bound."""
        if not gang.is_whole:
            return False
        unbound = [pod for pod in gang.pods if not pod.node]
        if not unbound:
            return True
        places = placement_of(gang, [(part.node, len(part.slots)) for part in run.order.gpus])
        if places is None:
            return False
        slots = {part.node: part for part in run.order.gpus}
        bindings = (self._bind_pod(run, pod, slots[places[pod.key]]) for pod in unbound)
        return all(await asyncio.gather(*bindings))

    async def _bind_pod(self, run: KubeRun, pod: PodInfo, part: RunPart) -> bool:
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/binding"
        body: Json = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {
                "name": pod.name,
                "namespace": pod.namespace,
                "uid": pod.uid,
                "annotations": {
                    names.RUN_JOB: run.order.job,
                    names.RUN_EPOCH: str(run.order.epoch),
                    names.TERM: str(self._actions.term),
                    names.SLOTS: ",".join(map(str, part.slots)),
                },
            },
            "target": {"apiVersion": "v1", "kind": "Node", "name": part.node},
        }
        try:
            await self._actions.persist(lambda: self._actions.client.post(path, body), lambda: not run.must_end)
        except ApiError:
            # It is bound already (an answer was lost), or gone, or another pod by now: the watch says which.
            return False
        return not run.must_end

    async def _send_away(self, run: KubeRun, gang: Gang) -> None:
        """Have a gang leave: suspend its owner, or have its pods evicted. What was never bound stays where it is."""
        assert run.notice is not None or run.desired is not DesiredState.GONE
        if gang.preempts is Preempts.SUSPEND and gang.owner is not None:
            if not _is_suspended(gang) and any(pod.node for pod in gang.pods):
                await self._suspend(run, gang, suspend=True)
            return
        for pod in gang.pods:
            if pod.node and not pod.ending:
                await self._evict(run, gang, pod)

    async def _resume(self, run: KubeRun, gang: Gang) -> None:
        if _is_suspended_by_us(gang):
            await self._suspend(run, gang, suspend=False)

    async def _suspend(self, run: KubeRun, gang: Gang, *, suspend: bool) -> None:
        owner = gang.owner
        assert owner is not None
        annotations = {SUSPENDED_BY: str(run.order.epoch) if suspend else None, names.TERM: str(self._actions.term)}
        body: Json = {"metadata": {"uid": owner.uid, "annotations": annotations}, "spec": {"suspend": suspend}}
        try:
            await self._actions.persist(lambda: self._actions.client.patch(owner.path, body, PatchKind.MERGE))
        except ApiError as error:
            run.failure = "permission-error", f"{owner.kind} {owner.name} cannot be suspended: {error.message}"
            await asyncio.sleep(EVICT_SECONDS)

    async def _evict(self, run: KubeRun, gang: Gang, pod: PodInfo) -> None:
        base = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
        body: Json = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": pod.namespace},
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        }
        try:
            if run.desired is DesiredState.GONE and gang.preempts is Preempts.NEVER:
                # Somebody has cancelled the job: nobody makes these pods again, and nobody wants them.
                await self._actions.persist(lambda: self._actions.client.delete(base, uid=pod.uid))
            else:
                await self._actions.client.post(f"{base}/eviction", body)
        except PoiseError as error:  # a disruption budget says: not now
            run.failure = "job-preempted", f"pod {pod.name} cannot be evicted now: {error}"


def request_of(gang: Gang, types: tuple[str, ...]) -> JobRequest:
    """Make the request of a gang; ValidationError says what is wrong with its annotations."""
    size = sum(pod.gpus > 0 for pod in gang.pods) or gang.size or 1  # while it is suspended it has no pods
    mode = PreemptionMode.NEVER if gang.preempts is Preempts.NEVER else PreemptionMode.RESTART
    said = next((pod.annotations[names.DURATION] for pod in gang.pods if names.DURATION in pod.annotations), None)
    fields: dict[str, Any] = {
        "name": clean_name(gang.name),
        "command": (f"{gang.kind.lower()}/{gang.name}",),
        "gpus": size * gang.gpus,
        "gpu_types": types,
        "duration": said,
        "preemption": mode,
        "retry": RetrySpec(on_errors=0),  # its owner makes pods that have failed again, as often as it was told to
        "pods": {
            "key": gang.key, "kind": gang.kind, "namespace": gang.namespace, "name": gang.name, "size": size,
            "gpus": gang.gpus,
        },
    }  # fmt: skip
    return JobRequest.model_validate(fields)


def _is_suspended(gang: Gang) -> bool:
    return gang.owner is not None and bool(gang.owner.suspended)


def _is_suspended_by_us(gang: Gang) -> bool:
    return gang.owner is not None and SUSPENDED_BY in gang.owner.annotations


def _codes(pods: Iterable[PodInfo]) -> tuple[int | None, ...]:
    """Exit codes of the first container of each pod, by their names."""
    ordered = sorted(pods, key=lambda pod: pod.key)
    return tuple(next((each.code for each in pod.containers if not each.is_init), None) for pod in ordered)


def _failure_of(pods: Iterable[PodInfo]) -> str:
    states = [each for pod in pods for each in pod.containers]
    return "cpu-out-of-memory" if any(each.reason == "OOMKilled" for each in states) else "no-signature"
