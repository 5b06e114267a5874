"""The Kubernetes back end: a remote back end whose nodes are pods, and the scheduler of pods that others create.

    engine ── KubernetesBackend ──┬── PodRuns ── pods that Poise creates ── agents in them ── RemoteRuns
                                  ├── GangRuns ── pods of others, bound where the core says
                                  └── ClusterView ◀── watches on nodes, pods, jobs, namespaces

The core decides on the cluster's real nodes; `RemoteRuns`, which talks to the agents, knows each pod as a node of its own.
All of it runs in the loop of the remote back end's thread, so nothing needs locks: watches, requests to the API server and
the agents' sessions are tasks of one loop.

Only one instance acts. It holds a Lease, writes the number of its term on what it creates, binds, suspends or resumes, and
stops for good when it cannot renew the lease, before another can have it (`leadership.py`).
"""

import asyncio
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, time  # noqa: TID251 - reports carry the time at which things happened
from typing import Any

import httpx

from poise.scheduler.model.cluster import Node
from poise.scheduler.model.errors import PoiseError, RequestError
from poise.service.backends.api import (
    AllFound,
    BackendEvent,
    BackendFailed,
    DesiredState,
    NodeReport,
    NodeState,
    OnEvent,
    OperatorLog,
    RunEnded,
    RunNotice,
    RunOrder,
    TenantWeighed,
)
from poise.service.backends.kubernetes import names
from poise.service.backends.kubernetes.access import KubeConfig, load_config
from poise.service.backends.kubernetes.actions import Actions
from poise.service.backends.kubernetes.authority import PodAuthority
from poise.service.backends.kubernetes.client import KubeClient
from poise.service.backends.kubernetes.discovery import Discovery, ObservedNode, observed
from poise.service.backends.kubernetes.errors import ApiError, ApiUnavailableError, LeadershipLostError, NotLeadingError
from poise.service.backends.kubernetes.gang_runs import GangQueries, GangRuns
from poise.service.backends.kubernetes.gangs import Gang, GangIndex, GangProblem
from poise.service.backends.kubernetes.kube_run import KubeRun, KubeRuns, Life
from poise.service.backends.kubernetes.leadership import Leadership
from poise.service.backends.kubernetes.manifests import LEAVING_SECONDS, PodTerms, links_of
from poise.service.backends.kubernetes.mirror import Mirror
from poise.service.backends.kubernetes.objects import Json, NodeInfo, PodInfo
from poise.service.backends.kubernetes.owners import read_owner
from poise.service.backends.kubernetes.places import NodeTypes
from poise.service.backends.kubernetes.pod_runs import PodRuns
from poise.service.backends.kubernetes.reasons import ReasonWriter
from poise.service.backends.kubernetes.rights import (
    GANG_RIGHTS,
    LEASE_NAME,
    OPTIONAL,
    RIGHTS,
    check_rights,
    is_defined,
    rights_on,
)
from poise.service.backends.kubernetes.view import ClusterView
from poise.service.backends.local.state_dir import token
from poise.service.backends.remote.backend import STANDARD, AgentAccess, RemoteBackend
from poise.service.backends.remote.identity import ServiceIdentity
from poise.service.backends.remote.links import with_slack
from poise.service.backends.remote.relay import CheckpointPlaces

NODES = "/api/v1/nodes"
_REQUEST = re.compile(r"^[A-Z]+ /\S*: ")  # with which the text of an ApiUnavailableError begins
SYNC_SECONDS = 60.0  # for the first look at the cluster
LOOK_SECONDS = 1.0  # between two looks at nodes that are not ready, and at gangs that were refused
REPORT_AGAIN_SECONDS = 30.0  # after which a gang that was refused is reported again
EXPLAINED = 20  # waiting gangs of which the reason is asked for at each look


@dataclass(frozen=True, slots=True)
class KubernetesOptions:
    """How the cluster is found, and what of it is used.

    namespace      where Poise creates pods, and holds its lease; None: that of the configuration
    nodes          label selector of the nodes that Poise uses; empty: all that have GPUs
    image          of Poise, for the agents in pods
    certificate    with which agents check the server, PEM; None: with those of the image
    scheduler      pods of others with this schedulerName are placed by Poise;  gangs: whether any are
    resource       what Kubernetes calls a GPU
    tolerate       keys of taints that do not keep jobs away from a node
    pull_secrets   secrets of the namespace with which nodes fetch Poise's own image
    runtime_class  of pods of jobs; None: the default of the nodes
    lease_seconds  of the lease by which one instance leads
    type_labels    of nodes that name their GPU product, looked for before that of GPU feature discovery
    lock           name of the lock on the state directory that this process has; empty: it has none
    transport      of requests to the API server; None: the network (tests have another)
    """

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None
    nodes: str = ""
    image: str = "poise"
    certificate: Path | None = None
    scheduler: str = names.SCHEDULER
    resource: str = names.GPU_RESOURCE
    gangs: bool = True
    tolerate: Sequence[str] = ()
    pull_secrets: Sequence[str] = ()
    runtime_class: str | None = None
    lease_seconds: float = 15.0
    lock: str = ""
    transport: httpx.AsyncBaseTransport | None = None
    config: KubeConfig | None = None
    type_labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServiceQueries:
    """What the back end may ask the service.

    highest   the highest number of a job that the journal knows; 0: it is empty
    explain   why a job waits: code and sentence; None: it does not
    """

    highest: Callable[[], int] = lambda: 0
    explain: Callable[[str], tuple[str, str] | None] = lambda _job: None


@dataclass(eq=False, slots=True)
class NodeHistory:
    """What was last reported of a node, and since when its kubelet is silent."""

    node: Node
    reported: ObservedNode | None = None
    silent_since: float | None = None


class KubernetesBackend(RemoteBackend):
    """A `LiveBackend` on a Kubernetes cluster, and a `JobFinder`."""

    def __init__(  # noqa: PLR0913 - those of a remote back end, and of Kubernetes
        self,
        nodes: Iterable[Node],
        state_dir: Path,
        on_event: OnEvent,
        access: AgentAccess,
        options: KubernetesOptions,
        log: OperatorLog,
        journal: ServiceQueries,
        *,
        lease: float,
        checkpoints: CheckpointPlaces = STANDARD,
    ) -> None:
        self._config = options.config or load_config(options.kubeconfig, options.context, os.environ)
        self._options, self._log, self._journal, self._tell = options, log, journal, on_event
        self._namespace = options.namespace or self._config.namespace
        self._lease = lease
        self._known_nodes = {node.name: NodeHistory(node) for node in nodes}
        type_labels = dict.fromkeys((names.OWN_TYPE_LABEL, *options.type_labels, names.PRODUCT_LABEL))
        self._discovery = Discovery([*type_labels], resource=options.resource, tolerated=options.tolerate)
        self._refusal: Exception | None = None
        self._dirty_nodes: set[str] = set()
        self._node_types = 0, NodeTypes((), options.resource)  # with the count of node changes it is for
        self._tenants: dict[str, str] = {}  # by namespace
        self._is_adopted = False
        self._warned: dict[str, str] = {}  # what the operator was told, by name of the node or uid of the owner
        self._bad_weights: dict[str, str] = {}  # what the operator was told of namespaces
        self._turn = 0  # of the waiting gangs whose reasons are told
        service = ServiceIdentity(state_dir)
        service.save_now()  # pods are known by this name before any has a lease
        certificate = "" if options.certificate is None else options.certificate.read_text()
        self._terms = PodTerms(
            self._namespace, service.identity, access.url, options.image, certificate, options.resource,
            options.scheduler, options.tolerate, options.pull_secrets, options.runtime_class,
        )  # fmt: skip
        super().__init__((), state_dir, self._hear_agents, access, lease=lease, checkpoints=checkpoints)
        if self._refusal is not None:
            super().close()
            raise self._refusal

    # Orders of the engine

    def adopt(self, runs: Sequence[tuple[RunOrder, DesiredState]]) -> None:
        """Take over what there is of these runs; end what an earlier instance of this very journal has left besides.

        Waits a moment for the agents in the pods, as any remote back end does.
        """
        for order, _ in runs:
            token(order.job)
        self._call(lambda: self._adopt(runs))
        deadline = monotonic() + self._adopt_seconds
        while monotonic() < deadline and not self._call(self._has_settled):
            threading.Event().wait(0.05)

    def launch(self, order: RunOrder) -> None:
        """Begin a run once its GPUs are free and the job's run before it is gone."""
        token(order.job)
        self._post(lambda: self._all.launch(order))

    def stop(self, job: str, epoch: int, notice: RunNotice) -> None:
        """Ask a run for a checkpoint and its GPUs; a gang of others is suspended or evicted."""
        self._post(lambda: self._stop_run(job, epoch, notice))

    def kill(self, job: str, epoch: int, reason: str) -> None:
        """End a run whose job is not wanted any more."""
        self._post(lambda: self._kill_run(job, epoch, reason))

    def accepted(self, key: str, job: str, *, is_over: bool) -> None:
        """Record the id of a job that was found."""
        self._post_if_open(lambda: self._gangs.accepted(key, job, is_over=is_over))

    def refused(self, key: str, text: str, *, is_final: bool) -> None:
        """Record why a job was not accepted."""
        self._post_if_open(lambda: self._gangs.refused(key, text, is_final=is_final))

    def _post_if_open(self, callback: Callable[[], None]) -> None:
        with suppress(Exception):  # an answer may come after the back end was closed
            self._post(callback)

    def _adopt(self, runs: Sequence[tuple[RunOrder, DesiredState]]) -> None:
        found = [KubeRun(order, desired, is_adopted=True) for order, desired in runs]
        for run in found:
            if run.must_end:
                run.force_at = self._loop.time() + run.order.request.checkpoint.deadline + LEAVING_SECONDS
                run.notice = RunNotice("stopped", run.order.reason or "", run.order.request.checkpoint.deadline)
        self._pods.adopt([run for run in found if run.order.request.pods is None])
        self._gangs.adopt(run for run in found if run.order.request.pods is not None)
        self._all.adopt(found)
        self._is_adopted = True
        self._end_strays({run.key for run in found})
        self._dirty_nodes.update(self._view.nodes, self._known_nodes)
        self._report_nodes()
        if self._options.gangs:
            # How a run has ended whose pods are all over is told by the run itself: it is not gone.
            self._tell(AllFound(frozenset(gang.key for gang in self._index).union(self._gangs.found)))
            self._index.changed()  # all of which are looked at now
            self._gangs.look_at([gang.key for gang in self._index])

    def _end_strays(self, open_runs: set[tuple[str, int]]) -> None:
        """Delete pods of this service that its journal has ended."""
        for pod in self._own_pods():
            if names.run_key(pod.labels) not in open_runs and pod.uid not in self._pods.unknown:
                self._start(self._delete_stray(pod))

    def _is_stray(self, pod: PodInfo) -> bool:
        """Whether a pod of this service, none of an open run, has to be deleted."""
        is_known = self._is_adopted and pod.uid not in self._pods.unknown
        return is_known and pod.namespace == self._namespace and not pod.ending

    def _note_unknown(self) -> None:
        """Note the pods of this service whose jobs the journal never had: it is empty, or an older copy.

        They are left alone, and their GPUs are not given out. To their agents there is no server, so that their runs save
        and end when their lease does.
        """
        highest = self._journal.highest()
        for pod in self._own_pods():
            job = pod.labels.get(names.JOB, "")
            number = names.number(job)
            if not pod.is_over and (number is None or number > highest):
                self._pods.unknown[pod.uid] = names.run_key(pod.labels)
                self._log.warning("pod-unknown", pod=pod.name, job=job, text="the journal never had it; it is left alone")

    def _own_pods(self) -> list[PodInfo]:
        ours = self._terms.service
        return [
            pod
            for pod in self._view.pods.values()
            if pod.labels.get(names.SERVICE) == ours and pod.namespace == self._namespace
        ]

    async def _delete_stray(self, pod: PodInfo) -> None:
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
        with suppress(ApiError):
            await self._actions.delete(path, pod.uid)

    def _has_settled(self) -> bool:
        """Whether no adopted run waits for agents that there are to say how it is."""
        there = [link for name, link in self._runs.links.items() if (self._namespace, name) in self._view.pods]
        return not there or (all(link.session is not None for link in there) and self._runs.is_settled())

    def _stop_run(self, job: str, epoch: int, notice: RunNotice) -> None:
        run = self._all.stop((job, epoch), notice)
        if run is not None and run.order.request.pods is None:
            self._pods.stop(run, notice)

    def _kill_run(self, job: str, epoch: int, reason: str) -> None:
        run = self._all.kill((job, epoch), reason, LEAVING_SECONDS)
        if run is not None and run.order.request.pods is None:
            self._pods.kill(run, reason)

    def _tell_end(self, run: KubeRun, end: RunEnded) -> None:
        """Report the end of a run; before it, what others hold where it was, or the core would give that out again."""
        self._dirty_nodes.update(part.node for part in run.order.gpus)
        self._report_nodes()
        self._tell(end)

    def _life_of(self, run: KubeRun) -> Life:
        return self._pods.live if run.order.request.pods is None else self._gangs.live

    def _hear_agents(self, news: BackendEvent) -> None:
        """Take what `RemoteRuns` reports. Its nodes are pods, of which the engine knows nothing."""
        if isinstance(news, NodeReport):
            return
        if isinstance(news, RunEnded):
            run = self._all.table.get((news.job, news.epoch))
            if run is not None:  # the engine is told once its pods are gone
                run.reported_end = news
                run.changed.set()
            return
        self._tell(news)

    # The loop

    async def _serve(self) -> None:
        options = self._options
        # Renewals of the lease wait for nothing else: neither for what is changed, nor for reviews of agents' tokens, of
        # which a restart makes one per pod at once.
        urgent = KubeClient(self._config, transport=options.transport, connections=4)
        reviews = KubeClient(self._config, transport=options.transport, connections=4)
        self._tasks: set[asyncio.Task[None]] = set()
        self._identity = f"{socket.gethostname()}-{secrets.token_hex(6)}"
        leadership = Leadership(
            urgent, self._namespace, LEASE_NAME, self._identity, lock=options.lock, seconds=options.lease_seconds
        )
        self._client = KubeClient(self._config, transport=options.transport, may_write=leadership.is_leading)
        self._actions = Actions(self._client, leadership)
        self._index = GangIndex(options.scheduler)
        self._view = ClusterView(options.scheduler, options.resource, self._dirty_nodes.add, self._pod_changed)
        self._pods = PodRuns(self._view, self._actions, self._runs, self._terms, self._state, self._relay.place_of)
        questions = GangQueries(self._tenant_of, self._types_of, self._is_lost, lambda job: any(self._all.table.of(job)))
        self._gangs = GangRuns(self._index, self._view, self._actions, self._tell, questions, self._start)
        self._all = KubeRuns(self._tell_end, self._life_of, self._fail, self._tell_trouble)
        self._reasons = ReasonWriter(self._client, self._identity, is_leading=leadership.is_leading)
        unknown = self._pods.unknown
        self._authority = PodAuthority(reviews, self._view, self._namespace, lambda pod: pod.uid in unknown)
        self._mirrors: list[Mirror] = []
        try:
            try:
                await self._prepare(leadership, urgent)
            except (PoiseError, TimeoutError) as error:
                self._refusal = error if isinstance(error, PoiseError) else PoiseError(self._not_synced())
                return  # which lets the constructor go on
            self._start(self._watch_over())
            self._start(self._reasons.run())
            await super()._serve()
        finally:
            await self._all.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            with suppress(PoiseError, httpx.HTTPError):
                await self._authority.close()
                await leadership.release()
            for client in (self._client, urgent, reviews):
                await client.aclose()

    async def _prepare(self, leadership: Leadership, reviews: KubeClient) -> None:
        """Check the rights, lead, and look at the cluster; PoiseError says in one sentence what is in the way."""
        try:
            await check_rights(reviews, self._namespace, RIGHTS)
            kinds = []
            if self._options.gangs:
                await check_rights(reviews, self._namespace, GANG_RIGHTS, " with --gangs")
                kinds = [(path, kind) for path, kind in OPTIONAL if await is_defined(reviews, path)]
                for path, kind in kinds:
                    await check_rights(reviews, self._namespace, rights_on(path), f" to schedule {kind}s")
            await leadership.acquire(lambda text: self._log.info("waiting-for-leadership", text=text))
        except ApiError as error:
            raise RequestError(f"{self._config.server}: {error.message}") from error
        except ApiUnavailableError as error:
            raise PoiseError(self._no_cluster(error.text)) from error
        self._start(leadership.hold())  # from now on: a look at a large cluster takes longer than a lease lasts
        self._mirror(NODES, self._view.node_event, labels=self._options.nodes)
        self._mirror("/api/v1/pods", self._view.pod_event)
        if self._options.gangs:
            self._mirror("/api/v1/namespaces", self._namespace_event)
            self._mirror("/apis/batch/v1/jobs", partial(self._owner_event, "Job"))
            for path, kind in kinds:
                self._mirror(path, partial(self._owner_event, kind))
        try:
            async with asyncio.timeout(SYNC_SECONDS):
                await asyncio.gather(*(mirror.first_list() for mirror in self._mirrors))
        except ApiError as error:
            raise RequestError(self._refused_list(error)) from error
        self._warn_of_no_nodes()
        self._note_unknown()
        self._log.info("leading", term=leadership.term, identity=self._identity, server=self._config.server)

    def _mirror(self, path: str, on_change: Callable[[str, Json], None], labels: str = "") -> None:
        mirror = Mirror(self._client, path, on_change=on_change, labels=labels)
        self._mirrors.append(mirror)
        self._start(mirror.run())

    def _not_synced(self) -> str:
        problem = next((each.problem for each in self._mirrors if not each.synced.is_set()), None)
        return self._no_cluster(f"it could not be read within {SYNC_SECONDS:g} s: {problem}")

    def _no_cluster(self, problem: str) -> str:
        """Say which cluster does not answer; of the request that found it out only what is of use to people."""
        source = f" ({self._config.source})" if self._config.source else ""
        return f"no Kubernetes cluster at {self._config.server}{source}: {_REQUEST.sub('', problem)}"

    def _refused_list(self, error: ApiError) -> str:
        what, _, said = error.message.partition(": ")
        if error.status == 400 and what == f"GET {NODES}" and self._options.nodes:
            return f"--nodes {self._options.nodes[:80]!r}: Kubernetes does not understand this selector: {said}"
        return f"{self._config.server}: {error.message}"

    def _warn_of_no_nodes(self) -> None:
        """Tell the operator that there is nothing to run on; nodes may come later."""
        if any(node.gpus for node in self._view.nodes.values()):
            return
        resource, labels = self._options.resource, self._options.nodes
        if labels:
            text = (
                f"no node has {resource} and the labels {labels}; jobs wait until one has:"
                f" see `kubectl get nodes -l '{labels}'`, and choose others with --nodes"
            )
        else:
            text = (
                f"no node has {resource}; jobs wait until one has: install the device plug-in of the GPUs,"
                " or name what it calls them with --gpu-resource"
            )
        self._log.warning("no-nodes", text=text)

    def _start(self, life: Coroutine[Any, Any, None]) -> None:
        """Run something until the back end is closed; a fault of it is one of the back end."""
        task = self._loop.create_task(life)
        self._tasks.add(task)

        def done(ended: asyncio.Task[None]) -> None:
            self._tasks.discard(ended)
            if not ended.cancelled() and (error := ended.exception()) is not None:
                self._fail(error)

        task.add_done_callback(done)

    def _fail(self, error: BaseException) -> None:
        # Writes may notice the end of the lease before those who renew it, who know the reason and end within seconds.
        if not self._is_closed and not isinstance(error, NotLeadingError):
            problem = str(error) if isinstance(error, LeadershipLostError) else repr(error)
            self._tell(BackendFailed(problem))

    async def _watch_over(self) -> None:
        """Look after everything that no event announces: silent nodes, refused gangs, reasons of those that wait."""
        next_retry, behind = 0.0, ""
        while True:
            if self._is_adopted:
                self._look_at_silent_nodes()
                self._report_nodes()
                if self._loop.time() >= next_retry:
                    next_retry = self._loop.time() + REPORT_AGAIN_SECONDS
                    self._gangs.retry_refused()
                await self._explain()
            problem = next((each.problem for each in self._mirrors if each.problem is not None), None) or ""
            if bool(problem) != bool(behind):
                say = self._log.warning if problem else self._log.info
                say("kubernetes-away" if problem else "kubernetes-back", text=problem or "all watches go on")
            behind = problem
            await asyncio.sleep(LOOK_SECONDS)

    # What the watches tell

    def _pod_changed(self, before: PodInfo | None, after: PodInfo | None) -> None:
        pod = after or before
        assert pod is not None
        if pod.labels.get(names.SERVICE) == self._terms.service:
            key = names.run_key(pod.labels)
            run = None if key is None else self._all.table.get(key)
            if run is not None:
                run.changed.set()
            elif after is not None and self._is_stray(after):
                # It was created when its run was given up, which this watch had not told by then.
                self._start(self._delete_stray(after))
        elif pod.scheduler == self._options.scheduler:
            if before is not None and (after is None or after.uid != before.uid):
                self._index.remove_pod(before.key)
            if after is not None:
                self._index.put_pod(after)
            self._gangs_changed()

    def _owner_event(self, kind: str, change: str, found: Json) -> None:
        uid = found["metadata"]["uid"]
        try:
            owner = None if change == "DELETED" else read_owner({"kind": kind, **found}, self._options.resource)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            # An object of a custom kind that cannot be read must not end the service, now or at each start.
            owner, meta = None, found["metadata"]
            if uid not in self._warned:
                text = f"{kind} {meta.get('namespace')}/{meta['name']} cannot be read: {error!r}; it is left alone"
                self._warned[uid] = text
                self._log.warning("owner-odd", text=text)
        if change == "DELETED":
            self._warned.pop(uid, None)
        if owner is None:
            self._index.remove_owner(uid)
        else:
            self._index.put_owner(owner)
        self._gangs_changed()

    def _gangs_changed(self) -> None:
        if self._is_adopted:  # before, all of them are looked at together
            self._gangs.look_at([each if isinstance(each, str) else each.key for each in self._index.changed()])

    def _namespace_event(self, change: str, found: Json) -> None:
        meta = found["metadata"]
        if change == "DELETED":
            self._tenants.pop(meta["name"], None)
            self._bad_weights.pop(meta["name"], None)
            return
        tenant = (meta.get("labels") or {}).get(names.TENANT) or meta["name"]
        self._tenants[meta["name"]] = tenant
        said = (meta.get("annotations") or {}).get(names.WEIGHT)
        if said is not None:
            try:
                weight = float(said)
                if not 1e-3 <= weight <= 1e3:
                    raise ValueError  # noqa: TRY301
            except ValueError:
                if self._bad_weights.get(meta["name"]) != said:
                    self._bad_weights[meta["name"]] = said
                    text = f"{names.WEIGHT}: expected a number from 0.001 to 1000, got {said[:40]!r}; it has no effect"
                    self._log.warning("namespace-weight", namespace=meta["name"], text=text)
            else:
                self._bad_weights.pop(meta["name"], None)
                self._tell(TenantWeighed(tenant, weight))

    def _tenant_of(self, namespace: str) -> str:
        return self._tenants.get(namespace, namespace)

    def _types_of(self, gang: Gang) -> tuple[tuple[str, ...], GangProblem | None]:
        changes, there = self._node_types
        if changes != self._view.node_changes:
            nodes = self._view.nodes.values()
            usable = (found for found in nodes if self._discovery.barrier_of(found) is None)
            typed = ((found, node.gpu_type) for found in usable if (node := self._discovery.node_of(found)))
            there = NodeTypes(typed, self._options.resource)
            self._node_types = self._view.node_changes, there
        types, problem = there.of(gang)
        if problem is not None and any(label in problem.text for label in self._discovery.type_labels):
            bare = [
                name for name, found in self._view.nodes.items() if found.gpus and self._discovery.type_label(found) is None
            ]
            if bare:  # which may be what it waits for
                hint = (
                    f"{min(bare)} has GPUs and no such label"
                    if len(bare) == 1
                    else f"{len(bare)} nodes have GPUs and no such label ({min(bare)} is one)"
                )
                problem = problem._replace(text=f"{problem.text}; {hint}")
        return types, problem

    def _is_lost(self, node: str) -> bool:
        known = self._known_nodes.get(node)
        return known is not None and known.reported is not None and known.reported.state is NodeState.LOST

    # Nodes

    def _report_nodes(self) -> None:
        """Report nodes about which something has changed."""
        dirty = sorted(self._dirty_nodes)
        self._dirty_nodes.clear()
        is_changed = False
        for name in dirty:
            found = self._view.nodes.get(name)
            known, node = self._known_nodes.get(name), None if found is None else self._discovery.node_of(found)
            self._warn_of(found)
            if known is None:
                if node is None:
                    continue
                known = self._known_nodes[name] = NodeHistory(node)
            elif node is not None:
                known.node = node
            is_silent = found is None or not found.is_ready
            known.silent_since = None if not is_silent else known.silent_since or self._loop.time()
            others = [pod for pod in self._view.at(name) if not self._is_ours(pod)]
            ours = {slot for run in self._all.table.at(name) for node_name, slot in run.gpus if node_name == name}
            closed = None if found is None else self._discovery.why_closed(found)
            now = observed(known.node, found, others, ours, self._why_lost(known), closed)
            if now != known.reported:
                is_changed |= known.reported is None or known.reported.node != now.node
                known.reported = now
                self._tell(NodeReport(now.node, now.state, time(), now.evidence, now.withheld))
        if is_changed:
            self._gangs.retry_refused()

    def _look_at_silent_nodes(self) -> None:
        """Look again at nodes that are not Ready, as time passes; forget those that are lost and were deleted."""
        for name, known in [*self._known_nodes.items()]:
            if known.silent_since is None:
                continue
            is_lost = known.reported is not None and known.reported.state is NodeState.LOST
            if is_lost and name not in self._view.nodes and not any(self._all.table.at(name)):
                del self._known_nodes[name]  # autoscalers make and delete nodes without end
                self._warned.pop(name, None)
            elif not is_lost or name in self._view.nodes:
                self._dirty_nodes.add(name)

    def _warn_of(self, found: NodeInfo | None) -> None:
        """Tell the operator once what is odd about a node."""
        problem = None if found is None else self._discovery.problem_of(found)
        if found is not None and problem is not None and self._warned.get(found.name) != problem:
            self._warned[found.name] = problem
            self._log.warning("node-odd", text=problem)

    def _why_lost(self, known: NodeHistory) -> str | None:
        """Say why nothing of ours can run on a silent node any more; None: something may.

        The agents in its pods have ended their runs when they have not been answered for a lease.
        """
        if known.silent_since is None or self._loop.time() - known.silent_since < with_slack(self._lease):
            return None
        for run in self._all.table.at(known.node.name):
            if run.order.request.pods is None and any(
                (link := self._runs.links.get(each)) is not None and link.lease_left() > 0
                for each in self._pods.links_at(run, known.node.name)
            ):
                return None
        silence = self._loop.time() - known.silent_since
        return f"it has not been Ready for {silence:.0f} s, longer than the lease of {self._lease:g} s of what ran there"

    def _is_ours(self, pod: PodInfo) -> bool:
        """Whether a pod belongs to an open run, whose GPUs the core knows of."""
        is_created = pod.labels.get(names.SERVICE) == self._terms.service
        if pod.uid in self._pods.unknown:
            return False
        key = names.run_key(pod.labels if is_created else pod.annotations)
        run = None if key is None else self._all.table.get(key)
        if run is None:
            return False
        # Numbers of jobs are those of one journal, and a pod that was bound may have been bound by another's.
        gang = None if is_created else pod.annotations.get(names.GANG_KEY, "")
        pods = run.order.request.pods
        return gang == (None if pods is None else pods.key)

    # Reasons

    async def _explain(self) -> None:
        """Say on pods and their owners why they wait: a few at a time, in turn."""
        waiting = [(key, each.job) for key, each in self._gangs.found.items() if each.job and key not in self._gangs.runs]
        incomplete = self._gangs.incomplete()
        self._reasons.retain({*self._gangs.problems, *(key for key, _ in waiting), *(gang.key for gang, _ in incomplete)})
        for key, problem in [*self._gangs.problems.items()]:
            gang = self._index.get(key)
            if gang is not None:
                self._reasons.note(gang, None, problem.code, problem.text)
        for gang, text in incomplete:
            self._reasons.note(gang, None, "incomplete", text)
        turn = self._turn % max(1, len(waiting))
        self._turn = turn + EXPLAINED
        chosen = [(key, job) for key, job in (waiting[turn:] + waiting[:turn])[:EXPLAINED] if job is not None]
        said = await asyncio.to_thread(lambda: [self._journal.explain(job) for _, job in chosen])
        for (key, job), reason in zip(chosen, said, strict=True):
            gang = self._index.get(key)
            if gang is not None and reason is not None:
                self._reasons.note(gang, job, *reason)

    def _tell_trouble(self, run: KubeRun) -> None:
        """Tell the operator, and those who look at the pods, why a run cannot go on."""
        assert run.failure is not None
        cause, text = run.failure
        order, pods = run.order, run.order.request.pods
        self._log.warning("run-trouble", job=order.job, epoch=order.epoch, cause=cause, text=text)
        if pods is None:
            found = [pod for link in links_of(order) if (pod := self._pods.pod(link)) is not None]
        else:
            gang = self._index.get(pods.key)
            found = [] if gang is None else [*gang.pods[:1]]
        self._reasons.tell_once(found, "run-trouble", f"Poise's job {order.job}: {text}")
