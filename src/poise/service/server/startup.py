"""A live service from beginning to end: state directory, socket, accounts, engine, API."""

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

from poise.engine.journal import Header, read_header
from poise.scheduler.core.settings import Settings
from poise.scheduler.model.cluster import Cluster
from poise.scheduler.model.errors import JournalError, PoiseError, RequestError
from poise.service.backends.api import LiveBackend, OnEvent
from poise.service.backends.local.backend import LocalBackend
from poise.service.backends.local.isolation import Isolate, IsolationLevel, isolated
from poise.service.backends.local.orders import Isolation, LocalSettings, check_request
from poise.service.backends.local.state_dir import JOBS, highest_number, latest_epoch
from poise.service.backends.null import NullBackend
from poise.service.server.accounts import TokenStore
from poise.service.server.admission import Admission, core_of, known, live
from poise.service.server.dependencies import Dependencies
from poise.service.server.engine import ServiceEngine
from poise.service.server.http.app import ApiOptions, create_app
from poise.service.server.http.connections import raise_open_files_limit
from poise.service.server.http.guard import AllowedHosts
from poise.service.server.http.listener import BindAddress, Certificate, announced, bind, serve_http, url_of
from poise.service.server.logs import Logbook
from poise.service.server.metrics import Metrics
from poise.service.server.queue_view import SHARING
from poise.service.server.quotas import Allowance
from poise.service.server.service import LiveService
from poise.service.server.storage.mark import MARK
from poise.service.server.storage.schema import VERSION
from poise.service.server.storage.state_dir import FolderLock, open_folder
from poise.service.server.storage.store import LARGEST_CHECKED, Store
from poise.service.wire.request import JobRequest
from poise.service.wire.views import NodeList

# What a live service is put together from.

DEFAULT_POLICY = "max-min"
"""Of a service that never had another one."""


class AsRoot(StrEnum):
    """Whether a service that runs as root is wanted so (`--allow-root`), or warns of it."""

    ALLOWED = "allowed"
    WARNED = "warned"


class BackendKind(StrEnum):
    """What runs the jobs: processes of this machine, or nothing at all (for measurements of the service itself)."""

    LOCAL = "local"
    NULL = "null"


@dataclass(frozen=True, slots=True)
class Setup:
    """All choices of a live service but how it listens.

    state       a directory that is its owner's alone, and that this process has locked
    policy      None: the one that was in force when the service last ran
    devices     the UUIDs of real GPUs by node and slot; virtual ones have none
    allowance   what users may queue, keep and send
    isolate     what jobs are to be kept from
    as_root     whether root may run it without a word
    """

    state: Path
    cluster: Cluster
    policy: str | None
    placement: str
    settings: Settings
    backend: BackendKind
    log: Logbook
    metrics: Metrics = field(default_factory=Metrics)
    devices: Mapping[tuple[str, int], str] = field(default_factory=dict)
    allowance: Allowance = field(default_factory=Allowance)
    isolate: Isolate = Isolate.OFF
    as_root: AsRoot = AsRoot.WARNED


# How a live service is put together: the core, the store, the back end and the engine.

AS_ROOT = (
    "this service runs as root, and so does every job of every user: whoever may submit can do anything on this machine;"
    " run it as a user of its own, or say --allow-root"
)

NO_MARK = (
    f"{MARK} is missing or damaged: whether the journal has lost its end cannot be checked;"
    f" numbers of jobs go on after the highest in the journal and in {JOBS}/"
)


def open_engine(setup: Setup) -> LiveService:
    """An engine on the store of this state directory, ready to be started."""
    cluster = known(setup.cluster)
    isolation = _isolated(setup)
    hidden = None if isolation.level is Isolation.NONE else str(setup.state)
    check = partial(check_request, hidden=hidden) if setup.backend is BackendKind.LOCAL else _anything

    def backend_of(tell: OnEvent) -> LiveBackend:
        if setup.backend is BackendKind.NULL:
            return NullBackend(tell)
        settings = LocalSettings(isolation=isolation.level)
        return LocalBackend(cluster, setup.state, tell, devices=setup.devices, settings=settings)

    store, taken = Store(setup.state), highest_number(setup.state)
    _tell_of(store, setup.log)
    last = store.chapter()
    if last is None and taken and not store.is_to_be_restored:
        store.close()
        raise JournalError(
            f"{store.path}: empty, but {setup.state / JOBS} has jobs up to number {taken:,}, which may run;"
            " put the journal back, or move that folder away to begin anew"
        )
    policy = setup.policy or (DEFAULT_POLICY if last is None else read_header(last[0]).policy)
    header = Header("live", cluster, policy, setup.placement, live(setup.settings), 0)
    core_of(header)
    if taken > store.highest:
        # The journal was restored beside newer directories: whoever got such an id would find another job's checkpoints.
        setup.log.warning("jobs-not-in-journal", last=store.highest, highest=taken, next=taken + 1)
    parts = Dependencies(
        store=store,
        header=header,
        scheduler_of=core_of,
        intake_of=lambda each: Admission(each.cluster, check, each.policy),
        backend_of=backend_of,
        log=setup.log,
        metrics=setup.metrics,
        retries=setup.settings.retries,
        taken=taken,
        keeps_policy=setup.policy is None,
        allowance=setup.allowance,
        warnings=_warnings(setup, isolation),
        epoch_of=lambda job: latest_epoch(setup.state, job),
    )
    return LiveService(ServiceEngine(parts))


def _isolated(setup: Setup) -> IsolationLevel:
    """What jobs are kept from; said in the log, with a warning where it is less than was wanted."""
    if setup.backend is not BackendKind.LOCAL:
        return IsolationLevel(Isolation.NONE, None)
    found = isolated(setup.isolate, setup.state)
    say = setup.log.info if found.problem is None else setup.log.warning
    say("isolation", level=found.level.value, text=found.text)
    return found


def _warnings(setup: Setup, isolation: IsolationLevel) -> tuple[str, ...]:
    """What whoever runs the service should know of how it was started."""
    said = []
    if setup.backend is BackendKind.LOCAL and os.geteuid() == 0 and setup.as_root is AsRoot.WARNED:
        setup.log.warning("running-as-root", text=AS_ROOT)
        said.append(AS_ROOT)
    if setup.backend is BackendKind.LOCAL and setup.isolate is not Isolate.OFF and isolation.problem is not None:
        said.append(isolation.text)
    return tuple(said)


def _tell_of(store: Store, log: Logbook) -> None:
    """What there is to say of a journal before anything is decided by it."""
    if store.migrated_from not in (0, VERSION):
        log.info("journal-migrated", before=store.migrated_from, now=VERSION)
    if store.lacks_mark:
        log.warning("journal-mark-missing", text=NO_MARK)
    if not store.is_checked:
        log.warning("journal-not-checked", bytes=store.path.stat().st_size, most=LARGEST_CHECKED)


def _anything(_request: JobRequest) -> None:
    """Where nothing is started, anything can be."""


TURN_SECONDS = 0.001
"""That a thread may go on while others wait: requests are answered while the engine decides."""


class AdminToken(StrEnum):
    """What is to become of the token that the first start made."""

    KEEP = "keep"
    RENEW = "renew"


class Exposure(StrEnum):
    """Whether tokens may cross a network unprotected."""

    SAFE = "safe"
    INSECURE = "insecure"


@dataclass(frozen=True, slots=True)
class BindOptions:
    """How a service is reached; `names`: hosts that it is called by, beside the loopback ones."""

    address: BindAddress
    certificate: Certificate | None = None
    names: tuple[str, ...] = ()
    exposure: Exposure = Exposure.SAFE
    admin: AdminToken = AdminToken.KEEP

    def check(self) -> AllowedHosts:
        """Refuse what would show tokens to others; the names that the service answers to."""
        if self.certificate is not None:
            self.certificate.context()
        elif not self.address.is_loopback and self.exposure is Exposure.SAFE:
            text = "others could read tokens on the way; give --tls-cert and --tls-key, or say --insecure"
            raise RequestError(f"--listen {self.address}: {text}")
        everywhere = {"0.0.0.0", "::"}
        return AllowedHosts.of(self.names if self.address.host in everywhere else (self.address.host, *self.names))

    def url(self, bound: socket) -> str:
        """What clients of this machine call: with TLS by the first of its names, which its certificate is for."""
        if self.certificate is None:
            return url_of(self.address, bound, "http")
        host = self.names[0] if self.names else self.address.host
        return url_of(BindAddress(host, self.address.port), bound, "https")


@dataclass(frozen=True, slots=True)
class Running:
    """A service that answers."""

    url: str
    pid: int
    state: Path
    token_file: Path
    is_first: bool
    """The token in the file was made just now."""
    warnings: tuple[str, ...] = ()


def serve(setup: Setup, door: BindOptions, ready: Callable[[Running], None]) -> None:
    """Run until SIGTERM or SIGINT. `ready` is called once requests are answered; jobs go on running after the end."""
    hosts = door.check()
    with ExitStack() as stack:
        state = open_folder(setup.state)
        stack.callback(FolderLock(state).release)
        raise_open_files_limit(setup.cluster.gpus)
        bound = stack.enter_context(bind(door.address))
        accounts = TokenStore(state)
        is_first = _token(accounts, door.admin)
        setup = replace(setup, state=state)
        engine = open_engine(setup)
        engine.start()
        stack.callback(engine.close)
        app = create_app(engine, accounts, ApiOptions(hosts, metrics=setup.metrics, log=setup.log))
        url = door.url(bound)
        sys.setswitchinterval(TURN_SECONDS)
        gc.freeze()  # what is there now stays: no need to look through it for cycles again and again
        stack.enter_context(announced(state, url))
        running = Running(url, os.getpid(), state, accounts.admin_file, is_first, engine.service().warnings)
        tls = None if door.certificate is None else door.certificate.context()
        serving = serve_http(
            app, bound, tls, log=setup.log, ready=lambda: ready(running), is_over=lambda: engine.failed is not None
        )
        asyncio.run(serving)
        if engine.failed is not None:
            setup.log.info("stopping")
            raise PoiseError(f"the engine stopped: {engine.failed}") from engine.failed
        setup.log.info("stopping", jobs_going_on=len(holders(engine.nodes())))


def holders(nodes: NodeList) -> set[str]:
    """Jobs that hold GPUs. Two that share one are named together there."""
    return {job for node in nodes.nodes for names in node.jobs if names is not None for job in names.split(SHARING)}


def _token(accounts: TokenStore, admin: AdminToken) -> bool:
    """True if an admin's token was made."""
    if admin is AdminToken.RENEW:
        accounts.renew_admin()
        return True
    return accounts.ensure_admin()
