"""`poise agent`: this machine as a node of a service on another one."""

import asyncio
import logging
import os
import socket
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from poise.cli.options import with_options
from poise.scheduler.model.cluster import Cluster, Node, parse_cluster
from poise.scheduler.model.errors import RequestError
from poise.service.client.config import state_folder
from poise.service.client.connection import tls_context

if TYPE_CHECKING:
    from poise.service.agent.agent import AgentConfig

AUTO = "auto"
TOKEN_VARIABLE = "POISE_AGENTS_TOKEN"
EPILOG = """\b
Examples:
  poise agent --server https://gpu1:8643 --token-file agents.token
  poise agent --server http://127.0.0.1:8643 --token-file agents.token --node n1 --gpus v100:4      virtual GPUs
"""
PREFIX = "POISE_AGENT"  # of variables that stand for options, as POISE_AGENT_SERVER does: manifests of pods like them

_OPTIONS = (
    click.option("--server", metavar="URL", help="Where `poise serve --backend remote` lets agents connect.  [required]"),
    click.option("--token-file", type=click.Path(path_type=Path), metavar="FILE",
        help="A copy of the service's STATE/agents.token; read again when it is replaced."
        f"  [default: the variable {TOKEN_VARIABLE}]"),
    click.option("--node", metavar="NAME", help="Name of this node.  [default: the host's name]"),
    click.option("--gpus", default=AUTO, show_default=True, metavar="TYPE:N",
        help="auto: the GPUs of this machine, which must be of one type. v100:4: virtual ones."),
    click.option("--rack", default="rack-0", show_default=True, metavar="NAME", help="Rack of this node."),
    click.option("--address", metavar="HOST",
        help="Under which other nodes reach this one.  [default: the address from which the server is reached]"),
    click.option("--port", type=click.IntRange(0, 65_535), default=0, show_default=True,
        help="Where agents of other nodes connect, for jobs over several nodes. 0: any that is free."),
    click.option("--listen", metavar="HOST",
        help="Address on which this agent listens for those of other nodes.  [default: --address; with --starter: all, if"
        " that is a name]"),
    click.option("--state", type=click.Path(path_type=Path), metavar="DIR",
        help="Orders, checkpoints and logs of runs on this node.  [default: ~/.local/state/poise/agent]"),
    click.option("--tls-ca", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE",
        help="Certificates that the server's is checked with, PEM.  [default: those of this machine]"),
    click.option("--isolate", type=click.Choice(["auto", "on", "off"]), default="auto", show_default=True,
        help="Hide the state directory and other processes from jobs, as `poise serve --isolate` does."),
    click.option("--once", is_flag=True,
        help="Exit after one run, once the server has its logs and checkpoints, as in a pod that is for one run."),
    click.option("--starter", type=click.Path(path_type=Path), metavar="DIR",
        help="Have runs started by the starter in another container, which shares DIR, processes and user with this one."),
    click.option("--install", type=click.Path(path_type=Path), metavar="DIR",
        help="Copy Poise into DIR for the container of a job, then exit."),
    click.option("--quiet", is_flag=True, help="Log warnings and errors alone."),
)  # fmt: skip


@click.command(epilog=EPILOG, context_settings={"auto_envvar_prefix": PREFIX})
@with_options(_OPTIONS)
def agent(quiet: bool, install: Path | None, **options: Any) -> int:  # noqa: ANN401
    """Run jobs on this machine for a service on another one, until SIGTERM or Ctrl-C.

    Runs go on when it stops, and the next agent of this node finds them, if it starts within the time that the service was
    given by --fence. After that they have ended, and start elsewhere.

    Each option can be given by a variable, such as POISE_AGENT_SERVER for --server.
    """
    if install is not None:
        from poise.service.agent.installation import install as install_package

        install_package(install)
        return 0
    from poise.service.agent.agent import Agent

    logging.basicConfig(format="poise: %(message)s", level=logging.WARNING if quiet else logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    config = _config(options)

    async def run() -> int:
        made = Agent(config)
        await made.run_until_signalled()
        return made.exit_code

    return asyncio.run(run())


def _config(options: dict[str, Any]) -> "AgentConfig":
    from poise.service.agent.agent import AgentConfig
    from poise.service.backends.local.gpus import discover
    from poise.service.backends.local.isolation import Isolate, isolated
    from poise.service.backends.local.orders import LocalSettings
    from poise.service.wire.agent_messages import NodeSpec

    if options["server"] is None:
        raise click.UsageError("Missing option '--server'.")
    if options["starter"] is not None and options["isolate"] == Isolate.ON:
        raise RequestError("--isolate on: runs in another container see what that container has; use --isolate off")
    server = urlsplit(options["server"])
    if server.scheme not in ("http", "https") or not server.hostname:
        raise RequestError(f"--server {options['server']!r}: expected http://HOST:PORT or https://HOST:PORT")
    if options["gpus"] == AUTO:
        machine = discover()
        node, devices = (
            _only(machine.cluster, "this machine has GPUs of several types, which an agent cannot serve yet"),
            machine.devices,
        )
    else:
        node, devices = _only(parse_cluster(f"{options['gpus']}@1024"), "--gpus: expected one type, as in v100:4"), {}
    name = options["node"] or socket.gethostname().split(".")[0]
    address = options["address"] or _own_address(server.hostname, server.port or 443)
    state = options["state"] or state_folder(os.environ) / "agent"
    spec = NodeSpec(
        name=name, gpu_type=node.gpu_type, gpus=node.gpus, rack=options["rack"], address=address, port=options["port"]
    )
    verify = True if options["tls_ca"] is None else tls_context(options["tls_ca"])
    found = isolated(Isolate.OFF if options["starter"] is not None else Isolate(options["isolate"]), state)
    return AgentConfig(
        options["server"].rstrip("/"), _token(options["token_file"]), spec, state,
        settings=LocalSettings(isolation=found.level, starter=options["starter"]),
        devices={slot: uuid for (_, slot), uuid in devices.items()}, verify=verify,
        token_file=options["token_file"], listen=_listen(options), once=options["once"],
    )  # fmt: skip


def _listen(options: dict[str, Any]) -> str | None:
    """Where to listen for other agents. The name of a pod may be known to no one, the pod itself included, for some time."""
    listen, address = options["listen"], options["address"]
    if listen is not None or address is None or options["starter"] is None:
        return listen  # type: ignore[no-any-return]
    try:
        ip_address(address)
    except ValueError:
        return ""
    return None


def _only(cluster: Cluster, problem: str) -> Node:
    """The one node of a cluster."""
    if len(cluster.nodes) > 1:
        raise RequestError(problem)
    return cluster.nodes[0]


def _token(path: Path | None) -> str:
    token = os.environ.get(TOKEN_VARIABLE, "") if path is None else path.read_text().strip()
    if not token:
        where = (
            f"the variable {TOKEN_VARIABLE} is not set; set it, or give --token-file" if path is None else f"{path}: empty"
        )
        raise RequestError(where)
    return token


def _own_address(host: str, port: int) -> str:
    """The address of this machine from which the server is reached. Nothing is sent to find out."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RequestError(f"--server: {host} cannot be found ({error.strerror or error}); give --address too") from None
