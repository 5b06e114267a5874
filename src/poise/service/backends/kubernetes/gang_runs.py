"""Runs of pods that others have created: found, bound whole where Poise says, and made to leave as their owner allows.

A gang (`gangs.py`) becomes a job of the service when all its pods exist. Its run is what its owner does on the GPUs that
the job has: pods that the owner makes again are bound to the places of those before them. It is over when the
owner says so, when it was suspended and its pods are gone, or, of pods without an owner, when all have ended.

Nothing has to be remembered: which pods are bound, and where, is written on them, and an adopted run goes on from what
there is. If a bind fails, the rest of the gang is bound at the next look, so a gang is whole in the end or leaves as one.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import time  # noqa: TID251 - events carry the time at which things happened
from typing import Any, NamedTuple

from pydantic import ValidationError

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
from poise.service.backends.kubernetes.client import PatchKind
from poise.service.backends.kubernetes.errors import ApiError, ApiUnavailableError, LeadershipLostError
from poise.service.backends.kubernetes.gangs import Gang, GangIndex, GangProblem, Preempts
from poise.service.backends.kubernetes.kube_run import SLOW_SECONDS, START_SECONDS, KubeRun
from poise.service.backends.kubernetes.objects import Json, ObjectKey, PodInfo
from poise.service.backends.kubernetes.owners import OwnerInfo, OwnerPhase
from poise.service.backends.kubernetes.places import label_fits, placement_of
from poise.service.backends.kubernetes.view import ClusterView
from poise.service.backends.run_table import Key
from poise.service.wire.draft import clean_name
from poise.service.wire.request import JobRequest, PreemptionMode, RetrySpec, first_problem

GANG_START_SECONDS = 120.0  # for a gang that was to start to be whole and bound; then it gives its GPUs back
SUSPEND_AGAIN_SECONDS = 5.0  # between two tries to suspend an owner whose API refuses it
INCOMPLETE_SECONDS = 10.0  # after which the users of a gang are told that pods of it are missing


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

    @property
    def may_report(self) -> bool:
        """Whether it was refused, and may be reported again. What was reported and not answered yet may not."""
        return self.problem is not None and not self.is_final


class Obstacle(NamedTuple):
    """Why pods cannot be bound to the places that were chosen for them. `is_lasting`: waiting is of no use."""

    text: str
    is_lasting: bool


class GangQueries(NamedTuple):
    """What the back end is asked about gangs.

    tenant_of   whose the jobs of a namespace are
    types_of    GPU types that a gang may run on, and what is wrong with what it asks for
    is_lost     whether the core was told that nothing runs on a node any more
    is_open     whether a job has a run that is not over, be it that it waits for others
    """

    tenant_of: Callable[[str], str]
    types_of: Callable[[Gang], tuple[tuple[str, ...], GangProblem | None]]
    is_lost: Callable[[str], bool]
    is_open: Callable[[str], bool]


class GangRuns:
    """Gangs and their runs. All of it belongs to the loop of the back end."""

    def __init__(
        self,
        index: GangIndex,
        view: ClusterView,
        actions: Actions,
        on_event: OnEvent,
        ask: GangQueries,
        start: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._index, self._view, self._actions, self._on_event, self._ask = index, view, actions, on_event, ask
        self._start = start  # starts a background task; its faults are those of the back end
        self.found: dict[str, FoundGang] = {}  # by key of the gang
        self.runs: dict[str, KubeRun] = {}  # open runs by key of the gang
        self.problems: dict[str, GangProblem] = {}  # of gangs that are not scheduled
        self._incomplete: dict[str, float] = {}  # gangs of which pods are missing, and since when
        self._bound_before: dict[Key, dict[ObjectKey, str]] = {}  # uids of pods of adopted runs, until they live
        self._latest_bound: dict[str, int] = {}  # epoch of the latest of these runs, by job; as of the restart
        self._held: set[str] = set()  # gangs that were suspended by their users before the service was told of them
        self._unmarking: set[str] = set()  # uids of owners that their users have resumed

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
            self._unmark_resumed_owner(gang)
            if found is not None and found.job is not None and not found.is_over:
                self._look_at_known(gang, found, found.job)
            elif found is None or found.may_report:
                self._report(gang)

    def _report(self, gang: Gang) -> None:
        """Report a gang once it is whole. Pods that are bound are none that Poise has not bound: it leaves them alone."""
        self.problems.pop(gang.key, None)
        since = self._incomplete.pop(gang.key, None)
        if gang.problem is not None:
            self.problems[gang.key] = GangProblem("cannot-run", gang.problem)
            return
        if _is_held(gang):
            self._held.add(gang.key)
        is_active = gang.owner is None or gang.owner.state is OwnerPhase.ACTIVE
        is_placed = any(pod.node for pod in gang.pods)
        is_ready = gang.is_whole and not _is_suspended(gang) and not is_placed
        if not is_active or not (is_ready or _is_suspended_by_us(gang)):
            if is_active and gang.pods and not is_placed and not _is_suspended(gang):
                self._incomplete[gang.key] = asyncio.get_running_loop().time() if since is None else since
            return
        types, problem = self._ask.types_of(gang)
        if problem is not None:
            self.problems[gang.key] = problem
            return
        try:
            request = request_of(gang, types)
        except ValidationError as error:
            field, text = first_problem(error)
            self.problems[gang.key] = GangProblem("cannot-run", text if field is None else f"{field}: {text}")
            return
        self.found.setdefault(gang.key, FoundGang()).problem = None
        self._on_event(JobFound(gang.key, self._ask.tenant_of(gang.namespace), request))

    def _look_at_known(self, gang: Gang, found: FoundGang, job: str) -> None:
        is_done = gang.owner is not None and gang.owner.state is not OwnerPhase.ACTIVE
        # A run that is open tells of the end itself.
        if is_done and not self._ask.is_open(job) and not _completed_after_preemption(gang):
            found.is_over = True
            self._on_event(JobGone(job))  # it has come to an end without Poise
            return
        is_held = not is_done and _is_held(gang)
        if is_held != found.is_held:
            found.is_held = is_held
            self._on_event(JobHeld(job, is_held))

    def incomplete(self) -> list[tuple[Gang, str]]:
        """Return the gangs of which pods have been missing for a while, and a sentence on each."""
        now, found = asyncio.get_running_loop().time(), list[tuple[Gang, str]]()
        for key, since in self._incomplete.items():
            gang = self._index.get(key)
            if gang is not None and now - since >= INCOMPLETE_SECONDS:
                found.append((gang, _missing(gang)))
        return found

    def _forget(self, key: str) -> None:
        self.problems.pop(key, None)
        self._incomplete.pop(key, None)
        self._held.discard(key)
        found = self.found.pop(key, None)
        if found is not None and found.job is not None and not found.is_over:
            self._on_event(JobGone(found.job))

    def accepted(self, key: str, job: str, *, is_over: bool) -> None:
        """Record the id of a job that was found."""
        # A job that its user had suspended when this service started may be held in the journal since before.
        self.found[key] = FoundGang(job, is_over, is_held=key in self._held)
        self._held.discard(key)
        self.problems.pop(key, None)
        self.look_at([key])  # it may have been deleted, or suspended, meanwhile

    def refused(self, key: str, text: str, *, is_final: bool) -> None:
        """Record why a job was not accepted."""
        if self._index.get(key) is not None:
            self.found[key] = FoundGang(problem=text, is_final=is_final)
            # What is wrong for good is wrong with the nodes that there are: the rest was checked before.
            self.problems[key] = GangProblem("rejected" if is_final else "cannot-run", text)

    def retry_refused(self) -> None:
        """Report again what was refused: the cluster has changed, or time has passed."""
        keys = [key for key, found in self.found.items() if found.problem is not None]
        for key in keys:
            self.found[key].is_final = False
        self.look_at(keys)
        self.look_at([key for key in self.problems if key not in self.found])

    def adopt(self, runs: Iterable[KubeRun]) -> None:
        """Register runs of before a restart: their pods are bound, and are not reported again.

        Of a gang without an owner, pods that have ended are no part any more. How its run ended, they alone can say.
        """
        of_gang: dict[str, list[KubeRun]] = {}
        for run in runs:
            assert run.order.request.pods is not None
            key = run.order.request.pods.key
            self.found[key] = FoundGang(run.order.job)
            of_gang.setdefault(key, []).append(run)
            self._index.open(key)
        for pod in self._view.pods.values():
            for run in of_gang.get(pod.annotations.get(names.GANG_KEY, ""), ()):
                if self._is_of(pod, run):
                    self._bound_before.setdefault(run.key, {})[pod.key] = pod.uid
                    job, epoch = run.key
                    self._latest_bound[job] = max(epoch, self._latest_bound.get(job, 0))

    # The life of a run

    async def live(self, run: KubeRun) -> RunEnded:
        """Bind the gang, wait until its owner says that it is over or it has left, and say how it ended."""
        pods = run.order.request.pods
        assert pods is not None
        if self._needs_no_run(run, self.found.get(pods.key)):
            return run.ended(RunEnding.YIELDED)
        assert pods.key not in self.runs
        self.runs[pods.key] = run
        self._index.open(pods.key)
        try:
            end = await self._live(run, pods.key)
            if end.how is RunEnding.FINISHED and pods.key in self.found:
                self.found[pods.key].is_over = True
            return end
        finally:
            del self.runs[pods.key]
            self._index.close(pods.key)
            # Soon, not now: how the run has ended is told first. Else a job that has finished would be cancelled.
            asyncio.get_running_loop().call_soon(self.look_at, [pods.key])

    def _needs_no_run(self, run: KubeRun, found: FoundGang | None) -> bool:
        """Whether a run has never begun and need not, or was over before a crash: then a later one had pods by then."""
        is_unwanted = run.must_end and not run.is_adopted
        is_done = found is not None and found.is_over  # with the run before, on its way out
        return is_unwanted or is_done or run.order.epoch < self._latest_bound.get(run.order.job, 0)

    async def _live(self, run: KubeRun, key: str) -> RunEnded:
        clock = asyncio.get_running_loop().time
        last_whole, bound = clock(), self._bound_before.pop(run.key, {})
        bound_since: float | None = None
        while True:
            gang = self._index.get(key)
            if gang is not None:
                bound |= {pod.key: pod.uid for pod in gang.pods if self._is_of(pod, run)}
            end = self._end_of(run, gang, bound)
            if end is not None:
                if end.how is RunEnding.FINISHED and not run.has_begun:  # faster than anybody has looked
                    self._on_event(RunBegan(*run.key, time()))
                return end
            if gang is not None:
                if await self._advance(run, gang, bound):
                    last_whole = clock()
                    bound_since = last_whole if bound_since is None else bound_since
                    self._look_at_start(run, gang, last_whole - bound_since)
                elif clock() - last_whole > GANG_START_SECONDS and not run.must_end and _may_go(gang):
                    # Its owner does not make the pods that are missing, or they cannot be bound: others can use the GPUs.
                    self._give_gpus_back(run, "job-preempted", run.obstacle or _missing(gang))
                self._note_began(run, gang)
            await run.wait()

    async def _advance(self, run: KubeRun, gang: Gang, bound: dict[ObjectKey, str]) -> bool:
        """Take the next step for a gang; return whether all its pods are bound."""
        if run.must_end:
            await self._preempt(run, gang, bound)
            return False
        lost = next((part.node for part in run.order.gpus if self._ask.is_lost(part.node)), None)
        if lost is not None and _may_go(gang):
            # What its owner makes again has to go elsewhere, and the rest of the gang with it.
            self._give_gpus_back(run, "node-lost", f"node {lost} is lost")
            return False
        if _is_suspended(gang):
            await self._resume(run, gang)
            return False
        return await self._bind(run, gang, bound)

    def _look_at_start(self, run: KubeRun, gang: Gang, seconds: float) -> None:
        """Tell of a gang that was bound so long ago and has not started: a volume that is missing, for example."""
        waiting = [pod for pod in gang.pods if pod.phase == "Pending"]
        if run.has_begun or not waiting or seconds < SLOW_SECONDS:
            return
        pod = min(waiting, key=lambda each: each.name)
        shown = f"kubectl describe pod {pod.name} -n {pod.namespace}"
        text = f"pod {pod.name}, bound to node {pod.node}, has not started for {seconds / 60:.0f} minutes; {shown} says why"
        if seconds >= START_SECONDS and _may_go(gang):
            self._give_gpus_back(run, "job-preempted", text)
        else:
            run.trouble("node-exhausted", text)

    def _give_gpus_back(self, run: KubeRun, cause: str, text: str) -> None:
        """Have a run leave without a request from the engine."""
        run.desired = DesiredState.LEAVE
        run.trouble(cause, f"run {run.order.epoch} gave its GPUs back: {text}")
        run.changed.set()

    def _is_of(self, pod: PodInfo, run: KubeRun) -> bool:
        """Whether a pod was bound for this run."""
        return bool(pod.node) and pod.annotations.get(names.EPOCH) == str(run.order.epoch)

    def _there(self, bound: Mapping[ObjectKey, str]) -> list[PodInfo]:
        """Return the pods with these uids that still exist."""
        return [pod for key, uid in bound.items() if (pod := self._view.pods.get(key)) is not None and pod.uid == uid]

    def _end_of(self, run: KubeRun, gang: Gang | None, bound: Mapping[ObjectKey, str]) -> RunEnded | None:
        """Say how a run has ended; None: it has not, or GPUs are still in use."""
        ours = self._there(bound)
        if any(pod.holds_gpus and self._view.is_served(pod.node) for pod in ours):
            return None
        if any(not pod.node and not pod.is_over and not pod.ending for pod in ours):
            return None  # it was bound, of which the watch has not told yet
        owner = None if gang is None else gang.owner
        if owner is not None and owner.state is OwnerPhase.COMPLETE:
            return run.ended(RunEnding.FINISHED, codes=_codes(ours))
        if owner is not None and owner.state is OwnerPhase.FAILED:
            return run.ended(RunEnding.FAILED, _failure_of(ours), _codes(ours))
        if gang is None:
            return _end_of_gone(run, ours)
        if owner is not None and not _is_suspended(gang) and not gang.pods and _have_succeeded(ours):
            return None  # its owner is about to say that it has finished, or to make further pods
        has_left = run.must_end and not any(pod.node and self._view.is_served(pod.node) for pod in gang.pods)
        # The run is over only once its owner is suspended: else pods would come back that no run expects.
        may_leave = gang.preempts is not Preempts.SUSPEND or _is_suspended(gang) or not bound
        if not has_left or not may_leave:
            return None
        is_lost = run.failure is not None and run.failure[0] == "node-lost"
        return run.ended(RunEnding.FAILED, "node-lost") if is_lost else run.ended(RunEnding.YIELDED)

    def _note_began(self, run: KubeRun, gang: Gang) -> None:
        ours = [pod for pod in gang.pods if self._is_of(pod, run)]
        if not run.has_begun and len(ours) == len(gang.pods) and all(pod.phase == "Running" for pod in ours) and ours:
            run.has_begun = True
            self._on_event(RunBegan(*run.key, time()))

    # What is changed in Kubernetes

    async def _bind(self, run: KubeRun, gang: Gang, bound: dict[ObjectKey, str]) -> bool:
        """Bind the pods that are not, and note them; say whether the whole gang is bound."""
        run.obstacle = None
        if not gang.is_whole:
            return False
        unbound = [pod for pod in gang.pods if not pod.node]
        if not unbound:
            return True
        places = placement_of(gang, [(part.node, len(part.slots)) for part in run.order.gpus])
        if places is None:
            return False
        obstacle = self._obstacle(run, unbound, places)
        if obstacle is not None:
            run.obstacle = obstacle.text
            if obstacle.is_lasting and _may_go(gang):
                self._give_gpus_back(run, "job-preempted", obstacle.text)
            return False
        slots = {part.node: part for part in run.order.gpus}
        bindings = (self._bind_pod(run, gang.key, pod, slots[places[pod.key]]) for pod in unbound)
        done = await asyncio.gather(*bindings)
        bound |= {pod.key: pod.uid for pod, is_bound in zip(unbound, done, strict=True) if is_bound}
        return all(done)

    def _obstacle(self, run: KubeRun, unbound: Iterable[PodInfo], places: Mapping[ObjectKey, str]) -> Obstacle | None:
        """Say why pods cannot be bound to their places now; None: they can.

        The core chose the places when they were free. Since then pods of others may have been bound there, or the node was
        closed; and pods that the owner makes again may have come before those that they replace are gone. If they were bound
        all the same, the kubelet would refuse them, which Jobs count as failures.
        """
        wanted: Counter[str] = Counter()
        for pod in unbound:
            wanted[places[pod.key]] += pod.gpus
        for node, gpus in wanted.items():
            found = self._view.nodes.get(node)
            if found is None or not self._view.is_served(node):
                return Obstacle(f"node {node} is not Ready", is_lasting=False)
            if found.is_cordoned:
                return Obstacle(f"node {node} is cordoned", is_lasting=True)
            if found.gpus < sum(len(part.slots) for part in run.order.gpus if part.node == node):
                # Its device plug-in is being restarted, for example; the other pods of the gang may go on meanwhile.
                return Obstacle(f"node {node} offers only {found.gpus} GPUs now", is_lasting=False)
            there = [*self._view.at(node)]
            stays = sum(pod.gpus for pod in there if not pod.ending)
            if gpus and stays + gpus > found.gpus:
                return Obstacle(f"other pods hold {stays} of the {found.gpus} GPUs of node {node}", is_lasting=True)
            if gpus and sum(pod.gpus for pod in there) + gpus > found.gpus:
                return Obstacle(f"pods on node {node} are still ending", is_lasting=False)
        return None

    async def _bind_pod(self, run: KubeRun, gang: str, pod: PodInfo, part: RunPart) -> bool:
        """Bind a pod; say whether it is, or may be, bound.

        It waits for the answer however long that takes: a run whose pods might be bound or not could neither end nor go on.
        """
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/binding"
        body: Json = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {
                "name": pod.name,
                "namespace": pod.namespace,
                "uid": pod.uid,
                "annotations": {
                    names.JOB: run.order.job,
                    names.EPOCH: str(run.order.epoch),
                    names.GANG_KEY: gang,
                    names.TERM: str(self._actions.term),
                    names.SLOTS: ",".join(map(str, part.slots)),
                },
            },
            "target": {"apiVersion": "v1", "kind": "Node", "name": part.node},
        }
        if run.must_end:
            return False
        try:
            await self._actions.persist(lambda: self._actions.client.post(path, body))
        except ApiError as error:
            # 409: it is bound already (an answer was lost), or another pod by now: the watch says which. 404: it is gone.
            if error.status not in (404, 409):
                run.trouble("permission-error", f"pod {pod.name} cannot be bound to node {part.node}: {error.message}")
            return error.status == 409
        return True

    async def _preempt(self, run: KubeRun, gang: Gang, bound: Mapping[ObjectKey, str]) -> None:
        """Have a gang leave: suspend its owner, or have its pods evicted. What was never bound stays where it is.

        Pods that no owner would make again are left alone, unless their job was cancelled.
        """
        if gang.preempts is Preempts.SUSPEND and gang.owner is not None:
            if not _is_suspended(gang) and gang.pods and (bound or any(pod.node for pod in gang.pods)):
                await self._suspend(run, gang, suspend=True)
            return
        if gang.preempts is Preempts.NEVER and run.desired is not DesiredState.GONE:
            return
        pods = [pod for pod in gang.pods if pod.node]
        if not self._is_leaving(run, bound):
            obstacle = await self._budget_obstacle(gang.namespace, pods)
            if obstacle is not None:
                run.trouble("job-preempted", f"{gang.what} cannot be evicted now: {obstacle}")
                return
            run.is_leaving = True
        await asyncio.gather(*(self._evict(run, pod) for pod in pods))

    def _is_leaving(self, run: KubeRun, bound: Mapping[ObjectKey, str]) -> bool:
        """Whether evictions have begun, be it before a restart: then the rest has to follow."""
        return run.is_leaving or any(
            pod.ending and pod.condition("DisruptionTarget") is not None for pod in self._there(bound)
        )

    async def _budget_obstacle(self, namespace: str, pods: Sequence[PodInfo]) -> str | None:
        """Say which disruption budget does not allow that all these pods leave; None: they may.

        Budgets count pods one by one. Of a gang of which some may leave and others not, nothing would be left that works.
        """
        path = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
        try:
            budgets = (await self._actions.client.get(path)).get("items") or ()
        except ApiUnavailableError as error:
            return error.text  # asked again at the next look
        except ApiError as error:
            return error.message
        guarded: set[ObjectKey] = set()
        for budget in budgets:
            # Kubernetes lets pods go that have not started, whatever their budget says.
            hit = [
                pod
                for pod in pods
                if pod.phase == "Running" and _is_selected(pod, (budget.get("spec") or {}).get("selector"))
            ]
            name, allowed = budget["metadata"]["name"], (budget.get("status") or {}).get("disruptionsAllowed") or 0
            if len(hit) > allowed:
                return f"disruption budget {name} allows {allowed} of its {len(hit)} pods to leave"
            if any(pod.key in guarded for pod in hit):
                return f"several disruption budgets select its pods ({name} is one), and Kubernetes evicts no such pod"
            guarded.update(pod.key for pod in hit)
        return None

    async def _resume(self, run: KubeRun, gang: Gang) -> None:
        if _is_suspended_by_us(gang):
            await self._suspend(run, gang, suspend=False)

    async def _suspend(self, run: KubeRun, gang: Gang, *, suspend: bool) -> None:
        owner = gang.owner
        assert owner is not None
        annotations = {names.SUSPENDED_BY: str(run.order.epoch) if suspend else None, names.TERM: str(self._actions.term)}
        body: Json = {"metadata": {"uid": owner.uid, "annotations": annotations}, "spec": {"suspend": suspend}}
        try:
            await self._actions.persist(lambda: self._actions.client.patch(owner.path, body, PatchKind.MERGE))
        except ApiError as error:
            if error.status in (404, 409):  # it is gone, or was changed in that moment: the next look shows it
                return
            run.trouble("permission-error", f"{owner.kind} {owner.name} cannot be suspended: {error.message}")
            await asyncio.sleep(SUSPEND_AGAIN_SECONDS)

    async def _evict(self, run: KubeRun, pod: PodInfo) -> None:
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/eviction"
        body: Json = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": pod.namespace},
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        }
        try:
            await self._actions.client.post(path, body)
        except ApiUnavailableError:
            pass  # tried again at the next look
        except ApiError as error:
            if error.status not in (404, 409):  # 429: a disruption budget says: not now
                what = "may not" if error.status == 403 else "cannot now"
                run.trouble("job-preempted", f"pod {pod.name} {what} be evicted: {error.message}")

    # Owners that their users have resumed

    def _unmark_resumed_owner(self, gang: Gang) -> None:
        """Take back the mark of an owner that Poise has suspended and its user has resumed.

        Poise writes mark and `suspend` in one request. If the mark stayed, a later suspension by the user would look like
        one of Poise, and Poise would resume it.
        """
        owner = gang.owner
        if owner is None or owner.suspended or names.SUSPENDED_BY not in owner.annotations or owner.uid in self._unmarking:
            return
        self._unmarking.add(owner.uid)
        self._start(self._unmark(owner))

    async def _unmark(self, owner: OwnerInfo) -> None:
        body: Json = {"metadata": {"uid": owner.uid, "annotations": {names.SUSPENDED_BY: None}}}
        # It is gone, or this service does not lead any more: then it is the next one's to do.
        with suppress(ApiError, LeadershipLostError):
            await self._actions.persist(lambda: self._actions.client.patch(owner.path, body, PatchKind.MERGE))
        self._unmarking.discard(owner.uid)


def request_of(gang: Gang, types: tuple[str, ...]) -> JobRequest:
    """Make the request of a gang; ValidationError says what is wrong with its annotations."""
    size = sum(pod.gpus > 0 for pod in gang.pods) or gang.workers or gang.size or 1  # suspended, it has no pods
    mode = PreemptionMode.NEVER if gang.preempts is Preempts.NEVER else PreemptionMode.RESTART
    fields: dict[str, Any] = {
        "name": clean_name(gang.name),
        "command": (f"{gang.kind.lower()}/{gang.name}",),
        "gpus": size * gang.gpus,
        "gpu_types": types,
        "duration": gang.annotation(names.DURATION),
        "model": gang.annotation(names.MODEL),
        "preemption": mode,
        "retry": RetrySpec(on_errors=0),  # its owner makes pods that have failed again, as often as it was told to
        "pods": {
            "key": gang.key, "kind": gang.kind, "namespace": gang.namespace, "name": gang.name, "size": size,
            "gpus": gang.gpus,
        },
    }  # fmt: skip
    return JobRequest.model_validate(fields)


def _end_of_gone(run: KubeRun, pods: Sequence[PodInfo]) -> RunEnded:
    """Say how a run has ended whose gang has no pods and no owner any more; these are left of it, and are over."""
    if _have_succeeded(pods):
        return run.ended(RunEnding.FINISHED, codes=_codes(pods))
    # Of what was deleted, containers end with a code of their own: that is no failure of the job.
    if any(pod.phase == "Failed" and not pod.ending for pod in pods) and not run.must_end:
        return run.ended(RunEnding.FAILED, _failure_of(pods), _codes(pods))
    return run.ended(RunEnding.YIELDED)  # it was deleted


def _is_selected(pod: PodInfo, selector: Json | None) -> bool:
    """Whether a label selector selects a pod; an empty one selects all, and none at all selects nothing."""
    if selector is None:
        return False
    return all(pod.labels.get(name) == text for name, text in (selector.get("matchLabels") or {}).items()) and all(
        label_fits(pod.labels.get(each["key"]), each) for each in selector.get("matchExpressions") or ()
    )


def _have_succeeded(pods: Sequence[PodInfo]) -> bool:
    return bool(pods) and all(pod.phase == "Succeeded" for pod in pods)


def _is_suspended(gang: Gang) -> bool:
    return gang.owner is not None and bool(gang.owner.suspended)


def _is_suspended_by_us(gang: Gang) -> bool:
    return _is_suspended(gang) and not _is_held(gang)


def _is_held(gang: Gang) -> bool:
    """Whether its user has suspended it."""
    return gang.owner is not None and gang.owner.is_held


def _completed_after_preemption(gang: Gang) -> bool:
    """Whether a gang has completed after Poise had sent it away: its pods have done the rest on their way out.

    Its run had ended before its owner could say so. The job is not cancelled: its next run ends at once, as one that has
    finished, and so the journal knows it, too.
    """
    owner = gang.owner
    return owner is not None and owner.state is OwnerPhase.COMPLETE and names.TERM in owner.annotations


def _may_go(gang: Gang) -> bool:
    """Whether Poise may have it leave of its own accord: its pods are made again, or none is bound."""
    return gang.preempts is not Preempts.NEVER or not any(pod.node for pod in gang.pods)


def _missing(gang: Gang) -> str:
    """Say which pods of a gang are missing."""
    gated = [pod.name for pod in gang.pods if pod.is_gated]
    if gated:
        return f"{gang.what}: {len(gated)} of its pods wait for scheduling gates to be removed ({gated[0]} is one)"
    if gang.size is None:
        return f"{gang.what}: it is not known yet, or does not exist any more; its pods are placed once it is known"
    there = len(gang.pods) + gang.finished
    return f"{gang.what}: {there} of its {gang.size} pods exist; a gang is placed when all of them do"


def _codes(pods: Iterable[PodInfo]) -> tuple[int | None, ...]:
    """Exit codes of the first container of each pod, by their names."""
    ordered = sorted(pods, key=lambda pod: pod.key)
    return tuple(next((each.code for each in pod.containers if not each.is_init), None) for pod in ordered)


def _failure_of(pods: Iterable[PodInfo]) -> str:
    states = [each for pod in pods for each in pod.containers]
    return "cpu-out-of-memory" if any(each.reason == "OOMKilled" for each in states) else "no-signature"
