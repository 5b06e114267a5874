"""`poise serve`: this machine as a service that runs training jobs."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from poise.cli.options import (
    DURATION,
    Command,
    check_round,
    choice_of,
    json_flag,
    print_json,
    read_cluster,
    with_options,
)
from poise.scheduler.core.settings import Cadence, RetryRule, Settings
from poise.scheduler.model.errors import RequestError
from poise.scheduler.placement.strategies import PLACEMENTS, placement_named
from poise.scheduler.policies.catalogue import policy_named
from poise.service.client.config import state_folder

if TYPE_CHECKING:
    from poise.service.server.startup import BindOptions, Running, Setup

AUTO = "auto"
PROTECTED = 0.1
"""Fraction of a round for which a job that just started is not preempted by default."""
MOST_ALLOWED = 1_000_000_000
"""The largest quota that can be set."""

EPILOG = """\b
Examples:
  poise serve --cluster v100:4,k80:8           virtual GPUs, on a machine without any
  poise serve --listen 0.0.0.0:8642 --tls-cert cert.pem --tls-key key.pem --host-name gpu1
"""


def _quota(name: str, default: int, text: str) -> Callable[[Command], Command]:
    """A quota of users. Operators and admins have none."""
    return click.option(
        name, type=click.IntRange(0, MOST_ALLOWED), default=default, show_default=True, metavar="N", help=f"{text} 0: any."
    )


_OPTIONS = (
    click.option("--cluster", default=AUTO, show_default=True, metavar="SPEC",
        help="auto: the GPUs of this machine. v100:4,k80:8 or a file: virtual ones."),
    click.option("--state", type=click.Path(path_type=Path), metavar="DIR",
        help="Journal, jobs, logs and tokens.  [default: ~/.local/state/poise]"),
    click.option("--listen", default="127.0.0.1:8642", show_default=True, metavar="HOST:PORT",
        help="Port 0: any that is free."),
    click.option("--policy",
        help="NAME, NAME:key=value,..., NAME+COMBINATOR.  [default: the one in force before; at first, max-min]"),
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
    click.option("--workers", type=click.Choice(["local", "null"]), default="local", show_default=True,
        help="null: nothing is run; to measure the service."),
    click.option("--tls-cert", type=click.Path(path_type=Path), metavar="FILE", help="Certificate with its chain, PEM."),
    click.option("--tls-key", type=click.Path(path_type=Path), metavar="FILE", help="Its private key, PEM."),
    click.option("--host-name", "names", multiple=True, metavar="NAME",
        help="A name that clients call this server by; may be repeated."),
    click.option("--isolate", type=click.Choice(["auto", "on", "off"]), default="auto", show_default=True,
        help="Hide the state directory and other processes from jobs. auto: as far as this machine allows; "
        "on: or do not start."),
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
def serve(as_json: bool, **options: Any) -> int:  # noqa: ANN401
    """Run training jobs on this machine until SIGTERM or Ctrl-C. Jobs that run go on when it stops, and it finds them again.

    At the first start a token is made. Every request needs one, also from this machine; the other commands find it by
    themselves.
    """
    from poise.service.server.startup import serve as run

    run(_setup(options), _bind(options), lambda running: _announce(running, as_json=as_json, quiet=options["quiet"]))
    return 0


def _setup(options: dict[str, Any]) -> "Setup":
    from poise.service.backends.local.isolation import Isolate
    from poise.service.server.logs import Level, Logbook, LogFormat
    from poise.service.server.quotas import MIB, Allowance
    from poise.service.server.startup import BackendKind, Setup

    if options["policy"] is not None:
        policy_named(options["policy"])
    placement_named(options["placement"])
    devices: Mapping[tuple[str, int], str] = {}
    if options["cluster"] == AUTO:
        from poise.service.backends.local.gpus import discover

        machine = discover()
        cluster, devices = machine.cluster, machine.devices
    else:
        cluster = read_cluster(options["cluster"])
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
        placement=options["placement"],
        settings=_settings(options),
        backend=BackendKind(options["workers"]),
        log=Logbook(form=LogFormat(options["log_format"]), least=Level.WARNING if options["quiet"] else Level.INFO),
        devices=devices,
        isolate=Isolate(options["isolate"]),
        allow_root=options["allow_root"],
        allowance=allowance,
    )


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
    from poise.service.server.startup import BindOptions

    chain, key = options["tls_cert"], options["tls_key"]
    if (chain is None) != (key is None):
        raise RequestError("--tls-cert and --tls-key go together; give both")
    return BindOptions(
        BindAddress.parse(options["listen"]),
        None if chain is None else Certificate(chain, key),
        options["names"],
        insecure=options["insecure"],
        new_admin_token=options["new_admin_token"],
    )


def _announce(running: "Running", *, as_json: bool, quiet: bool) -> None:
    if as_json:
        where = {"state": str(running.state), "token_file": str(running.token_file)}
        print_json({"url": running.url, "pid": running.pid, **where})
    if quiet:
        return
    click.echo(f"poise: answers at {running.url}; state in {running.state}", err=True)
    if running.is_first:
        click.echo(f"poise: an admin's token was made: {running.token_file}", err=True)
    for warning in running.warnings:
        click.echo(f"poise: WARNING: {warning}", err=True)
