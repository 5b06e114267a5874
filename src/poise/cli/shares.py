"""`poise shares`: what tenants are entitled to and hold now; or, from a journal, what they were, traded and got."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from poise.cli.live import connected, document, echo_json
from poise.cli.output import show_table
from poise.cli.queue import shares_table
from poise.engine.journal import NAME, Header, JournalReader
from poise.lab.analysis.tenant_usage import Tenant, TenantUsage
from poise.lab.report.axes import amount
from poise.lab.report.page import HtmlTable
from poise.scheduler.model.errors import RequestError
from poise.scheduler.model.units import counted

# The live half of `poise shares`.


def live_shares(weights: tuple[str, ...], *, as_json: bool) -> int:
    """Change the weights that are given, then show all tenants."""
    wanted = [_weight(text) for text in weights]
    with connected() as client:
        found = client.set_weights(wanted)
    if as_json:
        echo_json(document(found))
    else:
        promised = "" if found.policy is None or found.promise is None else f"; {found.policy} {found.promise}"
        show_table(shares_table(found), counted(len(found.tenants), "tenant") + promised)
    return 0


def _weight(text: str) -> tuple[str, float]:
    tenant, equals, number = text.partition("=")
    try:
        return tenant, float(number)
    except ValueError:
        expected = f"{tenant}=WEIGHT, a number" if equals else "TENANT=WEIGHT"
        raise RequestError(f"--set: expected {expected}, got {text!r}") from None


# The journal of a live service, for verbs that study journals.


@contextmanager
def as_journal(path: Path) -> Iterator[Path]:
    """A file or directory as it is; of a service's state directory, its last chapter as a journal file."""
    from poise.service.server.storage.replay import last_chapter, store_of  # most journals are none of a service

    store = store_of(path)
    if store is None:
        yield path
        return
    with TemporaryDirectory(prefix="poise-") as folder:
        file = Path(folder) / NAME
        with file.open("w") as stream:
            stream.writelines(f"{line}\n" for line in last_chapter(store))
        yield file


EPILOG = """\b
Examples:
  poise shares
  poise shares --set vision=2
  poise simulate jobs.jsonl --cluster v100:4,k80:8 --policy gandiva-fair --out run1 && poise shares run1
"""


@click.command(epilog=EPILOG)
@click.argument("journal", required=False, type=click.Path(path_type=Path))
@click.option(
    "--set", "weights", multiple=True, metavar="TENANT=WEIGHT", help="Change a tenant's weight in the running service."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def shares(journal: Path | None, weights: tuple[str, ...], as_json: bool) -> int:
    """Show what the tenants of the running service are entitled to, hold and have received.

    Of JOURNAL (a file, a directory that --out wrote, or the state of a service), what they were entitled to, and what they
    got. Entitlements are counted while anybody waits, since only then they matter. GPU-hours by GPU type. Of a journal that
    is damaged, cut off or too new, what could be read is shown, with exit code 1.
    """
    if journal is None:
        return live_shares(weights, as_json=as_json)
    if weights:
        raise RequestError("--set changes the running service; leave JOURNAL out")
    with as_journal(journal) as file:
        return _of_journal(journal, file, as_json=as_json)


def _of_journal(journal: Path, file: Path, *, as_json: bool) -> int:
    reader = JournalReader(file)
    usage = TenantUsage(reader.header.cluster)
    problem = reader.feed(usage.take)
    usage.close()
    if as_json:
        click.echo(json.dumps(journal_document(journal, reader.header, usage), allow_nan=False))
    else:
        _show(reader.header, usage)
    if problem is not None:
        click.echo(f"poise: {problem}", err=True)
    return 0 if problem is None else 1


def journal_document(journal: Path, header: Header, usage: TenantUsage) -> dict[str, Any]:
    """Everything as JSON; GPU-hours by type of the cluster."""
    return {
        "journal": str(journal),
        "policy": header.policy,
        "gpu_types": list(usage.types),
        "tenants": [{"tenant": name, **_tenant(each)} for name, each in usage.tenants.items()],
        "trades": [asdict(each) for each in usage.trades],
    }


def _tenant(each: Tenant) -> dict[str, Any]:
    return {
        "entitled_gpus": list(each.now) or None,
        "contended_seconds": each.contended,
        "entitled_gpu_hours": each.entitled if each.now else None,
        "received_gpu_hours": each.received,
        "received_gpu_hours_in_all": each.held,
    }


def _show(header: Header, usage: TenantUsage) -> None:
    show_table(_by_type(usage), f"{header.policy} on {header.cluster}: GPU-hours")
    if usage.trades:
        show_table(_trades(usage), "Trades: GPUs of the fast type, and the price of each in GPUs of the slow type")
    elif not any(each.now for each in usage.tenants.values()):
        click.echo("The journal says nothing of entitlements: its policy has none.")


def _by_type(usage: TenantUsage) -> HtmlTable:
    """A row a tenant and type."""
    columns = ("tenant", "type", "entitled now", "entitled", "received", "received ÷ entitled", "received in all")
    rows = []
    for name, each in usage.tenants.items():
        for gpu_type, label in enumerate(usage.types):
            due = each.entitled[gpu_type] if each.now else None
            rows.append(
                (
                    name if not gpu_type else "",
                    label,
                    amount(each.now[gpu_type], "plain") if each.now else "–",
                    "–" if due is None else amount(due, "plain"),
                    amount(each.received[gpu_type], "plain"),
                    amount(each.received[gpu_type] / due, "percent") if due else "–",
                    amount(each.held[gpu_type], "plain"),
                )
            )
    return HtmlTable(columns, tuple(rows), words=("tenant", "type"))


def _trades(usage: TenantUsage) -> HtmlTable:
    columns = ("buyer", "seller", "fast", "slow", "GPUs", "price", "from", "until")
    rows = tuple(
        (
            each.buyer,
            each.seller,
            each.fast,
            each.slow,
            amount(each.gpus, "plain"),
            amount(each.price, "plain"),
            amount(each.since, "seconds"),
            amount(each.until, "seconds"),
        )
        for each in usage.trades
    )
    return HtmlTable(columns, rows, words=("buyer", "seller", "fast", "slow"))
