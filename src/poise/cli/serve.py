"""`poise serve`: this machine as a service that runs training jobs."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from poise.cli.options import (
    DURATION,
    Command,
    choice_of,
    json_flag,
    print_json,
    with_options,
)
from poise.cli.outside import find_policy
from poise.lab.clusters import read_cluster
from poise.scheduler.core.settings import Cadence, RetryRule, Settings, check_round
from poise.scheduler.model.errors import RequestError
from poise.scheduler.placement.strategies import PLACEMENTS, placement_named
from poise.scheduler.policies.catalogue import policy_named
from poise.service.backends.kubernetes.names import OWN_TYPE_LABEL, PRODUCT_LABEL
from poise.service.client.config import state_folder
from poise.service.wire.request import DNS_LABEL, DNS_NAME, image_problem

if TYPE_CHECKING:
    from poise.scheduler.model.cluster import Cluster
    from poise.service.backends.remote.relay import CheckpointPlaces
    from poise.service.server.startup import BindOptions, Running, Setup

AUTO = "auto"
AGENTS_PORT = 8643
AGENTS_TOKEN = "agents.token"  # in the state directory
SHORTEST_FENCE, LONGEST_FENCE = 2.0, 86_400.0
KUBERNETES = "kubernetes"
OPTIONS_OF = {
    KUBERNETES: (
        "kubeconfig", "context", "namespace", "nodes", "image", "scheduler_name", "gpu_resource", "type_labels", "gangs",
        "tolerate", "pull_secrets", "runtime_class",
    ),
    "ray": ("ray", "agent_state"),
}  # fmt: skip
"""Parameters of options that mean nothing on other back ends than this one."""
_QUALIFIED = rf"({DNS_NAME}/)?[A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?"
_FORMS = (
    ("--namespace", "namespace", DNS_LABEL, "the name of a namespace: small letters, digits and `-`, at most 63"),
    ("--scheduler-name", "scheduler_name", DNS_NAME, "a name of Kubernetes: small letters, digits, `-` and `.`"),
    ("--gpu-resource", "gpu_resource", _QUALIFIED, "the name of a resource, such as nvidia.com/gpu"),
    ("--tolerate", "tolerate", _QUALIFIED, "the key of a taint, such as example.com/dedicated"),
    ("--pull-secret", "pull_secrets", DNS_NAME, "the name of a secret: small letters, digits, `-` and `.`"),
    ("--runtime-class", "runtime_class", DNS_NAME, "the name of a RuntimeClass, such as nvidia"),
    ("--gpu-type-label", "type_labels", _QUALIFIED, "the key of a label, such as cloud.google.com/gke-accelerator"),
)
"""What names of Kubernetes look like: option, parameter, pattern, and what is expected in words."""
PROTECTED = 0.1
"""Fraction of a round for which a job that just started is not preempted by default."""
MOST_ALLOWED = 1_000_000_000
"""The largest quota that can be set."""

EPILOG = """\b
Examples:
  poise serve --cluster v100:4,k80:8           virtual GPUs, on a machine without any
  poise serve --backend remote --agents 0.0.0.0:8643 --tls-cert cert.pem --tls-key key.pem --host-name gpu1
  poise serve --listen 0.0.0.0:8642 --tls-cert cert.pem --tls-key key.pem --host-name gpu1
"""


def _quota(name: str, default: int, text: str) -> Callable[[Command], Command]:
    """A quota of users. Operators and admins have none."""
    return click.option(
        name, type=click.IntRange(0, MOST_ALLOWED), default=default, show_default=True, metavar="N", help=f"{text} 0: any."
    )


_OPTIONS = (
    click.option("--cluster", default=AUTO, show_default=True, metavar="SPEC",
        help="auto: the GPUs of this machine; on other back ends, the nodes that join. v100:4,k80:8 or a file: "
        "virtual ones."),
    click.option("--state", type=click.Path(path_type=Path), metavar="DIR",
        help="Journal, jobs, logs and tokens.  [default: ~/.local/state/poise]"),
    click.option("--listen", default="127.0.0.1:8642", show_default=True, metavar="HOST:PORT",
        help="Port 0: any that is free."),
    click.option("--policy",
        help="NAME, NAME:key=value,..., NAME+COMBINATOR, MODULE:ATTRIBUTE.  [default: the one in force before; at first, "
        "max-min]"),
    click.option("--allow-policy", "allowed", multiple=True, metavar="MODULE:ATTRIBUTE",
        help="Let `poise use` choose this policy from outside of Poise as well. May be given more than once."),
    click.option("--placement", default="consolidate", show_default=True, metavar="NAME",
        help=f"One of {', '.join(PLACEMENTS)}."),
    click.option("--round", "round_", type=DURATION, default=360.0, show_default=True, help="Length of a round."),
    click.option("--cadence", type=choice_of(Cadence), default=Cadence.ROUNDS.value, show_default=True,
        help="When running jobs may be preempted: at the end of rounds, at every change, or both."),
    click.option("--restart-overhead", type=DURATION, default=0.0, show_default=True,
        help="Believed time without progress at each start."),
    click.option("--minimum-run", type=DURATION,
        help="A job that just started is not preempted for this long.  [default: a tenth of a round]"),
    click.option("--retries", type=click.IntRange(0, 1_000), default=4, show_default=True,
        help="Failed runs of a job that are forgiven."),
    _quota("--user-jobs", 10_000, "Jobs of one user's token that have not ended."),
    _quota("--user-rate", 20_000, "Jobs that one user's token may submit in an hour."),
    _quota("--user-mib", 256, "MiB that one user's token may submit in an hour, and keep in jobs that have not ended."),
    _quota("--tenant-jobs", 20_000, "Jobs of one tenant that have not ended."),
    _quota("--tenant-mib", 512, "MiB of what was submitted, of jobs of one tenant that have not ended."),
    click.option("--backend", "--workers", "backend", type=click.Choice(["local", "remote", "ray", "kubernetes", "null"]),
        default="local", show_default=True,
        help="Where jobs run: on this machine; on machines whose `poise agent` connects; on a Ray or Kubernetes "
        "cluster; nowhere, to measure the service."),
    click.option("--agents", default="127.0.0.1:8643", show_default=True, metavar="HOST:PORT",
        help="Where agents connect, with --backend remote, ray or kubernetes."),
    click.option("--checkpoints", default="relay", show_default=True, metavar="PLACE",
        help="Where runs on other machines keep checkpoints: a path that all nodes share, a URL such as s3://bucket/folder, "
        "relay: through the server."),
    click.option("--ship-mib", type=click.IntRange(1, 1 << 20), default=64, show_default=True, metavar="N",
        help="MiB of a working directory that is shipped with jobs, at most."),
    click.option("--relay-mib", type=click.IntRange(1, 1 << 20), default=256, show_default=True, metavar="N",
        help="MiB of a checkpoint that goes through the server, at most."),
    click.option("--fence", type=DURATION, default=60.0, show_default=True,
        help="A node that is cut off ends its runs after this long, and only then do they start elsewhere."),
    click.option("--address", "ray", metavar="HOST:PORT",
        help="Of the head node of the Ray cluster, with --backend ray.  [default: as Ray finds it]"),
    click.option("--agent-state", type=click.Path(path_type=Path), metavar="DIR",
        help="On the nodes of the Ray cluster, for the state of agents.  [default: ~/.local/state/poise/ray]"),
    click.option("--kubeconfig", type=click.Path(path_type=Path), metavar="FILE",
        help="Kubeconfig of the API server.  [default: $KUBECONFIG; in a pod, its service account; ~/.kube/config]"),
    click.option("--context", metavar="NAME", help="Context of the kubeconfig to use.  [default: its current one]"),
    click.option("--namespace", metavar="NAME",
        help="Namespace in which Poise creates pods and holds its lease.  [default: that of the context]"),
    click.option("--nodes", default="", metavar="SELECTOR", help="Kubernetes nodes to use, by labels: pool=gpu,tier!=prod."),
    click.option("--image", default="poise", show_default=True, metavar="NAME",
        help="Container image of Poise, which the agents in pods run."),
    click.option("--scheduler-name", default="poise", show_default=True, metavar="NAME",
        help="Schedule pods of others that have this schedulerName."),
    click.option("--gpu-resource", default="nvidia.com/gpu", show_default=True, metavar="NAME",
        help="Extended resource that stands for a GPU."),
    click.option("--tolerate", multiple=True, metavar="KEY",
        help="Use Kubernetes nodes in spite of a taint of this key; may be repeated."),
    click.option("--pull-secret", "pull_secrets", multiple=True, metavar="NAME",
        help="imagePullSecret for --image, added to each pod of a job; may be repeated."),
    click.option("--runtime-class", metavar="NAME",
        help="runtimeClassName of job pods, where GPUs need one, such as nvidia on k3s."),
    click.option("--gpu-type-label", "type_labels", multiple=True, metavar="KEY",
        help="Node label that names the GPU product, such as cloud.google.com/gke-accelerator, read before "
        f"{PRODUCT_LABEL}; may be repeated. {OWN_TYPE_LABEL} comes before both."),
    click.option("--gangs/--no-gangs", default=True, show_default=True,
        help="Schedule pods that others create, by --scheduler-name. --no-gangs needs fewer rights."),
    click.option("--tls-cert", type=click.Path(path_type=Path), metavar="FILE", help="Certificate with its chain, PEM."),
    click.option("--tls-key", type=click.Path(path_type=Path), metavar="FILE", help="Its private key, PEM."),
    click.option("--host-name", "names", multiple=True, metavar="NAME",
        help="A name that clients call this server by; may be repeated."),
    click.option("--isolate", type=click.Choice(["auto", "on", "off"]), default="auto", show_default=True,
        help="Hide the state directory and other processes from jobs. auto: as far as this machine allows; "
        "on: or do not start. With --backend remote, an option of agents."),
    click.option("--allow-root", is_flag=True, help="Every job runs as root if the service does: do not warn of that."),
    click.option("--insecure", is_flag=True, help="Listen to other machines without TLS: tokens can be read on the way."),
    click.option("--new-admin-token", is_flag=True,
        help="Make the token in STATE/admin.token anew; the old one is worthless."),
    click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True,
        help="Of the log on stderr."),
    click.option("--quiet", is_flag=True, help="Log warnings and errors alone."),
    json_flag("One line on stdout once it answers: url, pid, state, token_file."),
)  # fmt: skip


@click.command(epilog=EPILOG)
@with_options(_OPTIONS)
@click.pass_context
def serve(ctx: click.Context, /, as_json: bool, **options: Any) -> int:  # noqa: ANN401
    """Run training jobs until SIGTERM or Ctrl-C. Jobs that run go on when it stops, and it finds them again.

    At the first start a token is made. Every request needs one, also from this machine; the other commands find it by
    themselves.
    """
    from poise.service.server.startup import serve as run

    is_in_pods = options["backend"] == KUBERNETES
    _check_options_of_others(ctx)
    if is_in_pods:
        _check_kubernetes(options)
    setup, bind = _setup(options), _bind(options)
    if is_in_pods:
        _warn_of_agents(setup, bind)
    run(setup, bind, lambda running: _announce(running, as_json=as_json, quiet=options["quiet"], is_in_pods=is_in_pods))
    return 0


def _check_kubernetes(options: dict[str, Any]) -> None:
    """Refuse what has no meaning on Kubernetes, or no form that it takes."""
    if options["cluster"] != AUTO:
        text = "the nodes of Kubernetes are read from the cluster; leave it out, or choose them with --nodes"
        raise RequestError(f"--cluster: {text}")
    for option, name, pattern, expected in _FORMS:
        given = options[name]
        for text in given if isinstance(given, tuple) else (given,):
            if text is not None and not re.fullmatch(pattern, text):
                raise RequestError(f"{option} {text[:60]!r}: expected {expected}")
    if (problem := image_problem(options["image"])) is not None:
        raise RequestError(f"--image: {problem}")


def _check_options_of_others(ctx: click.Context) -> None:
    """Refuse options of other back ends than the chosen one: whoever gives one believes that jobs run there."""
    for backend, names in OPTIONS_OF.items():
        for each in ctx.command.params if backend != ctx.params["backend"] else ():
            if each.name in names and ctx.get_parameter_source(each.name) is ParameterSource.COMMANDLINE:
                is_off = ctx.params[each.name] is False
                raise RequestError(f"{(each.secondary_opts if is_off else each.opts)[0]} goes with --backend {backend}")


def _warn_of_agents(setup: "Setup", bind: "BindOptions") -> None:
    """Warn of an address that agents in pods cannot reach, as it means each machine itself."""
    from poise.service.server.http.listener import BindAddress

    assert bind.agents is not None
    host = bind.names[0] if bind.names else bind.agents.host
    if BindAddress(host, bind.agents.port).is_loopback or host in ("0.0.0.0", "::"):
        text = (
            f"agents in pods cannot reach this server at {host}: say --agents 0.0.0.0:{bind.agents.port or AGENTS_PORT},"
            " and with --host-name the name or address by which pods reach this machine"
        )
        setup.log.warning("agents-unreachable", text=text)


def _setup(options: dict[str, Any]) -> "Setup":
    from poise.service.backends.kubernetes.backend import KubernetesOptions
    from poise.service.backends.local.isolation import Isolate
    from poise.service.backends.ray.backend import RayOptions
    from poise.service.backends.ray.messages import DEFAULT_ADDRESS
    from poise.service.server.logs import Level, Logbook, LogFormat
    from poise.service.server.quotas import MIB, Allowance
    from poise.service.server.startup import BackendKind, Setup

    if options["policy"] is not None:
        find_policy(options["policy"])
        policy_named(options["policy"])
    for each in options["allowed"]:
        find_policy(each)
    placement_named(options["placement"])
    devices: Mapping[tuple[str, int], str] = {}
    kind = BackendKind(options["backend"])
    cluster: Cluster | None
    if options["cluster"] != AUTO:
        cluster = read_cluster(options["cluster"])
    elif kind.has_agents:
        cluster = None
    else:
        from poise.service.backends.local.gpus import discover

        machine = discover()
        cluster, devices = machine.cluster, machine.devices
    if not SHORTEST_FENCE <= options["fence"] <= LONGEST_FENCE:
        raise RequestError(
            f"--fence {options['fence']:g}: expected {SHORTEST_FENCE:g} to {LONGEST_FENCE:g} seconds; an agent that is "
            "restarted needs some of them"
        )
    allowance = Allowance(
        user_jobs=options["user_jobs"],
        tenant_jobs=options["tenant_jobs"],
        user_rate=options["user_rate"],
        user_bytes=options["user_mib"] * MIB,
        tenant_bytes=options["tenant_mib"] * MIB,
    )
    return Setup(
        state=options["state"] or state_folder(os.environ),
        cluster=cluster,
        policy=options["policy"],
        find_policy=find_policy,
        placement=options["placement"],
        settings=_settings(options),
        backend=kind,
        log=Logbook(form=LogFormat(options["log_format"]), least=Level.WARNING if options["quiet"] else Level.INFO),
        devices=devices,
        isolate=Isolate(options["isolate"]),
        allow_root=options["allow_root"],
        allowance=allowance,
        fence=options["fence"],
        checkpoints=_places(options),
        ship_bytes=options["ship_mib"] << 20,
        kubernetes=KubernetesOptions(
            kubeconfig=options["kubeconfig"],
            context=options["context"],
            namespace=options["namespace"],
            nodes=options["nodes"],
            image=options["image"],
            certificate=options["tls_cert"],
            scheduler=options["scheduler_name"],
            resource=options["gpu_resource"],
            gangs=options["gangs"],
            tolerate=options["tolerate"],
            pull_secrets=options["pull_secrets"],
            type_labels=options["type_labels"],
            runtime_class=options["runtime_class"],
        ),
        ray=RayOptions(options["ray"] or DEFAULT_ADDRESS, options["agent_state"], options["tls_cert"], options["isolate"]),
    )


def _places(options: dict[str, Any]) -> "CheckpointPlaces":
    from poise.service.backends.remote.relay import CheckpointPlaces
    from poise.service.client.submission import validated
    from poise.service.wire.request import Checkpoint

    try:
        given = validated(Checkpoint, url=options["checkpoints"])
    except RequestError:
        expected = "expected relay, an absolute path that all nodes share, or a URL such as s3://bucket/folder"
        raise RequestError(f"--checkpoints: {expected}, got {options['checkpoints'][:60]!r}") from None
    assert given.url is not None
    return CheckpointPlaces(given.url, options["relay_mib"] << 20)


def _settings(options: dict[str, Any]) -> Settings:
    length = options["round_"]
    check_round(length)
    protected = PROTECTED * length if options["minimum_run"] is None else options["minimum_run"]
    return Settings(
        cadence=Cadence(options["cadence"]),
        round=length,
        restart_overhead=options["restart_overhead"],
        minimum_run=protected,
        retries=options["retries"],
        retry=RetryRule.CAUSE,
    )


def _bind(options: dict[str, Any]) -> "BindOptions":
    from poise.service.server.http.listener import BindAddress, Certificate
    from poise.service.server.startup import BackendKind, BindOptions

    chain, key, has_agents = options["tls_cert"], options["tls_key"], BackendKind(options["backend"]).has_agents
    if (chain is None) != (key is None):
        raise RequestError("--tls-cert and --tls-key go together; give both")
    return BindOptions(
        BindAddress.parse(options["listen"]),
        None if chain is None else Certificate(chain, key),
        options["names"],
        insecure=options["insecure"],
        new_admin_token=options["new_admin_token"],
        agents=BindAddress.parse(options["agents"], "--agents", AGENTS_PORT) if has_agents else None,
    )


def _announce(running: "Running", *, as_json: bool, quiet: bool, is_in_pods: bool) -> None:
    """Say where the service answers. Agents in pods (`is_in_pods`) have tokens of their own, not that of the file."""
    token = running.state / AGENTS_TOKEN
    if as_json:
        where = {"state": str(running.state), "token_file": str(running.token_file)}
        agents = {} if running.agents is None else {"agents": running.agents}
        if agents and not is_in_pods:
            agents["agents_token_file"] = str(token)
        print_json({"url": running.url, "pid": running.pid, **where, **agents})
    if quiet:
        return
    click.echo(f"poise: answers at {running.url}; state in {running.state}", err=True)
    if running.agents is not None:
        what, by = ("agents in pods", "the service-account tokens of their pods") if is_in_pods else ("agents", token)
        click.echo(f"poise: {what} connect to {running.agents}, with {by}", err=True)
    if running.is_first:
        click.echo(f"poise: an admin's token was made: {running.token_file}", err=True)
    for warning in running.warnings:
        click.echo(f"poise: WARNING: {warning}", err=True)
