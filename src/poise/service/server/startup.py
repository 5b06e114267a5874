"""Start-up: a live service from beginning to end.

`serve` is what `poise serve` runs: lock the state directory, bind the socket, open the accounts, start the engine, answer
requests until a signal. `open_service` puts it together: store, core, engine, back end, and what to tell the operator.
"""

import asyncio
import gc
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from socket import socket

from poise.engine import outside
from poise.engine.journal import Header, read_header
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.core.settings import Settings
from poise.scheduler.model.cluster import Cluster, Node
from poise.scheduler.model.errors import JournalError, PoiseError, PolicyError, RequestError
from poise.scheduler.policies.catalogue import Capability, capabilities_of
from poise.service.backends.api import LiveBackend, OnEvent
from poise.service.backends.kubernetes.backend import KubernetesBackend, KubernetesOptions, ServiceQueries
from poise.service.backends.kubernetes.manifests import checkpoint_problem
from poise.service.backends.local.backend import LocalBackend
from poise.service.backends.local.isolation import Isolate, IsolationLevel, isolated
from poise.service.backends.local.orders import Isolation, LocalSettings, check_request
from poise.service.backends.local.state_dir import JOBS, highest_number, latest_epoch
from poise.service.backends.null import NullBackend
from poise.service.backends.ray.backend import RayBackend, RayOptions
from poise.service.backends.remote.backend import LEASE_SECONDS, AgentAccess, RemoteBackend
from poise.service.backends.remote.relay import CheckpointPlaces
from poise.service.server.accounts import TokenStore
from poise.service.server.admission import Admission
from poise.service.server.dependencies import Dependencies, core_of, live_cluster, live_settings
from poise.service.server.engine import ServiceEngine
from poise.service.server.http.app import create_app
from poise.service.server.http.connections import raise_open_files_limit
from poise.service.server.http.guard import AllowedHosts, ApiOptions
from poise.service.server.http.listener import BindAddress, Certificate, announced, bind, serve_http, url_of
from poise.service.server.logs import Logbook
from poise.service.server.metrics import Metrics
from poise.service.server.queue_view import SHARING
from poise.service.server.quotas import Allowance
from poise.service.server.service import LiveService
from poise.service.server.shipped_archives import SHIP_BYTES, ShippedArchives
from poise.service.server.storage.schema import VERSION
from poise.service.server.storage.sidecar import MARK
from poise.service.server.storage.state_dir import FolderLock, open_folder
from poise.service.server.storage.store import LARGEST_CHECKED, Store
from poise.service.server.submission_notes import submission_notes
from poise.service.wire.request import JobRequest
from poise.service.wire.views import NodeList

MOST_REMOTE_GPUS = 100_000  # for how many GPUs there are files open if it is not known how many there will be
DEFAULT_POLICY = "max-min"  # policy of a service that never had another one
SWITCH_SECONDS = 0.001  # for how long a thread may go on while others wait: requests are answered while the engine decides
AS_ROOT = (
    "this service runs as root, and so does every job of every user: whoever may submit can do anything on this machine;"
    " run it as a user of its own, or say --allow-root"
)
NO_MARK = (
    f"{MARK} is missing or damaged: whether the journal has lost its end cannot be checked;"
    f" numbers of jobs go on after the highest in the journal and in {JOBS}/"
)


class BackendKind(StrEnum):
    """What runs the jobs.

    LOCAL    processes of this machine
    REMOTE   agents on other machines, which connect to this one
    RAY      the same, started by Poise on the nodes of a Ray cluster
    KUBERNETES   pods of a Kubernetes cluster, those that Poise creates and those that others leave to it
    NULL     nothing at all, for measurements of the service itself
    """

    LOCAL = "local"
    REMOTE = "remote"
    RAY = "ray"
    KUBERNETES = "kubernetes"
    NULL = "null"

    @property
    def has_agents(self) -> bool:
        """Whether runs are on other machines."""
        return self in (BackendKind.REMOTE, BackendKind.RAY, BackendKind.KUBERNETES)


@dataclass(frozen=True, slots=True)
class Setup:
    """All options of a live service except how it listens.

    state        a directory that only its owner can read, and that this process has locked
    cluster      None: what the nodes say that join
    agents       how runs get to other machines; None: they do not
    policy       None: the one that was in force when the service last ran
    find_policy  finds the one that was in force, if it is from outside of Poise
    devices      the UUIDs of real GPUs by node and slot; virtual ones have none
    allowance    what users may queue, keep and send
    isolate      what jobs are kept from
    ship_bytes   bytes of a working directory that may be shipped
    checkpoints  where those of runs on other machines are kept
    allow_root   do not warn if the service runs as root
    """

    state: Path
    cluster: Cluster | None
    policy: str | None
    placement: str
    settings: Settings
    backend: BackendKind
    log: Logbook
    metrics: Metrics = field(default_factory=Metrics)
    devices: Mapping[tuple[str, int], str] = field(default_factory=dict)
    allowance: Allowance = field(default_factory=Allowance)
    isolate: Isolate = Isolate.OFF
    allow_root: bool = False
    agents: AgentAccess | None = None
    fence: float = LEASE_SECONDS
    ship_bytes: int = SHIP_BYTES
    checkpoints: CheckpointPlaces = field(default_factory=CheckpointPlaces)
    ray: RayOptions = field(default_factory=RayOptions)
    kubernetes: KubernetesOptions = field(default_factory=KubernetesOptions)
    find_policy: Callable[[str], None] = outside.find


@dataclass(frozen=True, slots=True)
class BindOptions:
    """How a service is reached.

    names             host names that it answers to, beside the loopback ones
    insecure          tokens may cross a network unprotected
    new_admin_token   replace the token that the first start made
    agents            where agents of nodes connect; None: there are none
    """

    address: BindAddress
    certificate: Certificate | None = None
    names: tuple[str, ...] = ()
    insecure: bool = False
    new_admin_token: bool = False
    agents: BindAddress | None = None

    def check(self) -> AllowedHosts:
        """Refuse what would show tokens to others; return the names that the service answers to."""
        if self.certificate is not None:
            self.certificate.context()
        elif not self.insecure:
            text = "others could read tokens on the way; give --tls-cert and --tls-key, or say --insecure"
            for option, address in (("--listen", self.address), ("--agents", self.agents)):
                if address is not None and not address.is_loopback:
                    raise RequestError(f"{option} {address}: {text}")
        everywhere = {"0.0.0.0", "::"}
        return AllowedHosts.of(self.names if self.address.host in everywhere else (self.address.host, *self.names))

    def url(self, bound: socket) -> str:
        """What clients on this machine call; with TLS by the first of its names, which the certificate is for."""
        if self.certificate is None:
            return url_of(self.address, bound, "http")
        host = self.names[0] if self.names else self.address.host
        return url_of(BindAddress(host, self.address.port), bound, "https")

    def agents_url(self, bound: socket) -> str:
        """What agents call: by the first of the server's names, if there is one; they may be on other machines."""
        assert self.agents is not None
        host = self.names[0] if self.names else self.agents.host
        return url_of(BindAddress(host, self.agents.port), bound, "http" if self.certificate is None else "https")


@dataclass(frozen=True, slots=True)
class Running:
    """A service that answers. `is_first`: the token in the file was made just now. `agents`: the URL for agents, if any."""

    url: str
    pid: int
    state: Path
    token_file: Path
    is_first: bool
    warnings: tuple[str, ...] = ()
    agents: str | None = None


def serve(setup: Setup, options: BindOptions, ready: Callable[[Running], None]) -> None:
    """Run until SIGTERM or SIGINT. `ready` is called once requests are answered; jobs go on running after the end."""
    hosts = options.check()
    with ExitStack() as stack:
        state = open_folder(setup.state)
        lock = FolderLock(state)
        stack.callback(lock.release)
        setup = replace(setup, kubernetes=replace(setup.kubernetes, lock=lock.name or ""))
        raise_open_files_limit(MOST_REMOTE_GPUS if setup.cluster is None else setup.cluster.gpus)
        bound = stack.enter_context(bind(options.address))  # before the engine: a port that is taken must change nothing
        tls = None if options.certificate is None else options.certificate.context()
        if options.agents is not None:
            for_agents = stack.enter_context(bind(options.agents, "--agents"))
            setup = replace(setup, agents=AgentAccess(for_agents, options.agents_url(for_agents), tls))
        accounts = TokenStore(state)
        is_first = accounts.ensure_admin(renew=options.new_admin_token)
        service = open_service(replace(setup, state=state))
        service.start()
        stack.callback(service.close)
        app = create_app(service, accounts, ApiOptions(hosts, metrics=setup.metrics, log=setup.log))
        url = options.url(bound)
        sys.setswitchinterval(SWITCH_SECONDS)
        gc.freeze()  # what is there now stays: no need to look through it for cycles again and again
        stack.enter_context(announced(state, url))
        agents = None if setup.agents is None else setup.agents.url
        running = Running(url, os.getpid(), state, accounts.admin_file, is_first, service.service().warnings, agents)
        serving = serve_http(
            app, bound, tls, log=setup.log, ready=lambda: ready(running), is_over=lambda: service.failed is not None
        )
        asyncio.run(serving)
        if service.failed is not None:
            setup.log.info("stopping")
            remedy = "; start with another --policy; jobs that run go on" if isinstance(service.failed, PolicyError) else ""
            raise PoiseError(f"the engine stopped: {service.failed}{remedy}") from service.failed
        setup.log.info("stopping", jobs_going_on=len(holders(service.nodes())))


def holders(nodes: NodeList) -> set[str]:
    """Jobs that hold GPUs. Two that share one are named together there."""
    return {job for node in nodes.nodes for names in node.jobs if names is not None for job in names.split(SHARING)}


def open_service(setup: Setup) -> LiveService:
    """A service on the store of this state directory, ready to be started."""
    isolation, warnings = _isolation(setup)
    hidden = None if isolation.level is Isolation.NONE else str(setup.state)
    # What other machines have is not known here, and where nothing is started, any request will do.
    on_machine = partial(check_request, hidden=hidden) if setup.backend is BackendKind.LOCAL else lambda _request: None
    in_pods = partial(check_pods, setup.checkpoints.at)
    check = in_pods if setup.backend is BackendKind.KUBERNETES else partial(check_no_image, on_machine)
    store, highest = _open_store(setup)
    last = store.chapter()
    before = None if last is None else read_header(last[0])
    policy = setup.policy or (DEFAULT_POLICY if before is None else before.policy)
    if before is not None:
        _find_before(before.policy, setup)
    cluster = live_cluster(setup.cluster or (Cluster(()) if before is None else before.cluster))

    def known_nodes() -> tuple[Node, ...]:
        """Nodes of the cluster in force, to which some may have joined, and of the one that was asked for."""
        chapter = store.chapter()
        in_force = () if chapter is None else read_header(chapter[0]).cluster.nodes
        return tuple({node.name: node for node in (*in_force, *cluster.nodes)}.values())

    def new_backend(on_event: OnEvent) -> LiveBackend:
        match setup.backend:
            case BackendKind.NULL:
                return NullBackend(on_event)
            case BackendKind.LOCAL:
                settings = LocalSettings(isolation=isolation.level)
                return LocalBackend(cluster, setup.state, on_event, devices=setup.devices, settings=settings)
            case BackendKind.REMOTE:
                assert setup.agents is not None
                return RemoteBackend(
                    known_nodes(), setup.state, on_event, setup.agents, lease=setup.fence, checkpoints=setup.checkpoints
                )
            case BackendKind.RAY:
                assert setup.agents is not None
                return RayBackend(
                    known_nodes(), setup.state, on_event, setup.agents, setup.ray, setup.log, lease=setup.fence,
                    checkpoints=setup.checkpoints,
                )  # fmt: skip
            case BackendKind.KUBERNETES:
                assert setup.agents is not None
                journal = ServiceQueries(lambda: store.highest, service.reason)
                return KubernetesBackend(
                    known_nodes(), setup.state, on_event, setup.agents, setup.kubernetes, setup.log, journal,
                    lease=setup.fence, checkpoints=setup.checkpoints,
                )  # fmt: skip

    header = Header("live", cluster, policy, setup.placement, live_settings(setup.settings), 0)
    new_scheduler = whole_gpus_core if setup.backend is BackendKind.KUBERNETES else core_of
    new_scheduler(header)  # options that make no core are refused here, before anything is changed
    deps = Dependencies(
        store=store, header=header, new_scheduler=new_scheduler, new_backend=new_backend,
        new_admission=lambda each: Admission(each.cluster, check, each.policy),
        log=setup.log, metrics=setup.metrics, retries=setup.settings.retries, highest_job=highest,
        keeps_policy=setup.policy is None, keeps_cluster=setup.cluster is None, allowance=setup.allowance, warnings=warnings,
        latest_epoch=lambda job: latest_epoch(setup.state, job),
        files=ShippedArchives(setup.state, setup.ship_bytes, setup.allowance.tenant_bytes),
        notes=partial(submission_notes, places=setup.checkpoints if setup.backend.has_agents else None),
    )  # fmt: skip
    service = LiveService(ServiceEngine(deps))
    return service


def _find_before(policy: str, setup: Setup) -> None:
    """Find the policy that was in force. If it is gone and another one is asked for, the jobs' records have to do."""
    try:
        setup.find_policy(policy)
    except PoiseError as error:
        if setup.policy is None:
            remedy = "start from the folder that has it, or choose another with --policy; jobs that run go on"
            raise RequestError(f"the policy that was in force cannot be found: {error}; {remedy}") from None
        setup.log.warning("policy-gone", text=f"the policy that was in force cannot be found: {error}")


def whole_gpus_core(header: Header) -> Scheduler:
    """Make a core for Kubernetes, which gives a GPU to one pod only: policies that put two jobs on one are refused."""
    if Capability.PAIRS in capabilities_of(header.policy):
        raise RequestError(
            f"policy {header.policy!r} puts two jobs on one GPU, and Kubernetes gives a GPU to one pod only; choose another"
            " (`poise policies`), such as max-min or gandiva-fair"
        )
    return core_of(header)


def check_pods(checkpoints: str, request: JobRequest) -> None:
    """Check that a job names its container image, and can keep its checkpoints there or where the service keeps them."""
    if request.pods is not None:
        return
    if request.image is None:
        raise RequestError("image: is missing; jobs of this service run in containers: say --image, such as pytorch/pytorch")
    own = request.checkpoint.url
    problem = checkpoint_problem(request.pod, own or checkpoints)
    if problem is not None:
        raise RequestError(f"checkpoint.url: {problem}" if own else problem)


def check_no_image(on_machine: Callable[[JobRequest], None], request: JobRequest) -> None:
    """Check a job that runs as processes of a machine, which has to have what it needs."""
    if request.image is not None:
        raise RequestError("image: this service runs jobs as processes of its machines, not in containers; leave it out")
    on_machine(request)


def _open_store(setup: Setup) -> tuple[Store, int]:
    """The store, and the highest number of a job of which there is a directory; the log says what is odd about them."""
    store, highest, log = Store(setup.state), highest_number(setup.state), setup.log
    if store.migrated_from not in (0, VERSION):
        log.info("journal-migrated", before=store.migrated_from, now=VERSION)
    if store.lacks_mark:
        log.warning("journal-mark-missing", text=NO_MARK)
    if not store.is_checked:
        log.warning("journal-not-checked", bytes=store.path.stat().st_size, most=LARGEST_CHECKED)
    if store.chapter() is None and highest and not store.is_repaired:
        store.close()
        raise JournalError(
            f"{store.path}: empty, but {setup.state / JOBS} has jobs up to number {highest:,}, which may run;"
            " put the journal back, or move that folder away to begin anew"
        )
    if highest > store.highest:
        # The journal was restored beside newer directories: a job with such an id would find another job's checkpoints.
        log.warning("jobs-not-in-journal", last=store.highest, highest=highest, next=highest + 1)
    return store, highest


def _isolation(setup: Setup) -> tuple[IsolationLevel, tuple[str, ...]]:
    """What jobs are kept from; and warnings for the operator, where that is less than was asked for or may surprise."""
    if setup.backend is not BackendKind.LOCAL:
        return IsolationLevel(Isolation.NONE, None), ()
    found, warnings = isolated(setup.isolate, setup.state), []
    log = setup.log.info if found.problem is None else setup.log.warning
    log("isolation", level=found.level.value, text=found.text)
    if os.geteuid() == 0 and not setup.allow_root:
        setup.log.warning("running-as-root", text=AS_ROOT)
        warnings.append(AS_ROOT)
    if setup.isolate is not Isolate.OFF and found.problem is not None:
        warnings.append(found.text)
    return found, tuple(warnings)
