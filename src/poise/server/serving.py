"""A live service from beginning to end: state directory, socket, accounts, engine, API."""

import gc
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from socket import socket

from poise.model.errors import PoiseError, RequestError
from poise.server.accepting import ask_for_files
from poise.server.accounts import Accounts
from poise.server.api import Conditions, create_app
from poise.server.folder import FolderLock, open_folder
from poise.server.hosts import Hosts
from poise.server.listening import Address, Certificate, Listener, announced, bind, config_of, url_of
from poise.server.setup import Setup
from poise.server.starting import open_engine
from poise.server.surveying import SHARING
from poise.wire.views import Nodes

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
class Door:
    """How a service is reached; `names`: hosts that it is called by, beside the loopback ones."""

    address: Address
    certificate: Certificate | None = None
    names: tuple[str, ...] = ()
    exposure: Exposure = Exposure.SAFE
    admin: AdminToken = AdminToken.KEEP

    def check(self) -> Hosts:
        """Refuse what would show tokens to others; the names that the service answers to."""
        if self.certificate is not None:
            self.certificate.check()
        elif not self.address.is_loopback and self.exposure is Exposure.SAFE:
            text = "others could read tokens on the way; give --tls-cert and --tls-key, or say --insecure"
            raise RequestError(f"--listen {self.address}: {text}")
        everywhere = {"0.0.0.0", "::"}
        return Hosts.of(self.names if self.address.host in everywhere else (self.address.host, *self.names))

    def url(self, bound: socket) -> str:
        """What clients of this machine call: with TLS by the first of its names, which its certificate is for."""
        if self.certificate is None:
            return url_of(self.address, bound, "http")
        host = self.names[0] if self.names else self.address.host
        return url_of(Address(host, self.address.port), bound, "https")


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


def serve(setup: Setup, door: Door, ready: Callable[[Running], None]) -> None:
    """Run until SIGTERM or SIGINT. `ready` is called once requests are answered; jobs go on running after the end."""
    hosts = door.check()
    with ExitStack() as stack:
        state = open_folder(setup.state)
        stack.callback(FolderLock(state).release)
        ask_for_files(setup.cluster.gpus)
        bound = stack.enter_context(bind(door.address))
        accounts = Accounts(state)
        is_first = _token(accounts, door.admin)
        setup = replace(setup, state=state)
        engine = open_engine(setup)
        engine.start()
        stack.callback(engine.close)
        app = create_app(engine, accounts, Conditions(hosts, metrics=setup.metrics, log=setup.log))
        url = door.url(bound)
        sys.setswitchinterval(TURN_SECONDS)
        gc.freeze()  # what is there now stays: no need to look through it for cycles again and again
        stack.enter_context(announced(state, url))
        running = Running(url, os.getpid(), state, accounts.admin_file, is_first, engine.service().warnings)
        config = config_of(app, door.certificate, setup.log)
        Listener(config, lambda: ready(running), lambda: engine.failed is not None, setup.log).run([bound])
        if engine.failed is not None:
            setup.log.info("stopping")
            raise PoiseError(f"the engine stopped: {engine.failed}") from engine.failed
        setup.log.info("stopping", jobs_going_on=len(holders(engine.nodes())))


def holders(nodes: Nodes) -> set[str]:
    """Jobs that hold GPUs. Two that share one are named together there."""
    return {job for node in nodes.nodes for names in node.jobs if names is not None for job in names.split(SHARING)}


def _token(accounts: Accounts, admin: AdminToken) -> bool:
    """True if an admin's token was made."""
    if admin is AdminToken.RENEW:
        accounts.renew_admin()
        return True
    return accounts.ensure_admin()
