"""`poise shares`: what tenants are entitled to and hold now; or, from a journal, what they were entitled to and got."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from poise.cli.live import answer, connected
from poise.cli.options import journal_file, json_option, print_json
from poise.cli.output import show_table
from poise.cli.queue import NONE, gpu_hours
from poise.engine.journal import Header, JournalReader
from poise.lab.analysis.tenant_usage import TenantUsage
from poise.lab.report.axes import amount
from poise.lab.report.page import HtmlTable
from poise.scheduler.model.errors import RequestError
from poise.scheduler.model.units import counted
from poise.service.wire.views import Shares

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
@json_option
def shares(journal: Path | None, weights: tuple[str, ...], as_json: bool) -> int:
    """Show what tenants are entitled to, hold and have received, under the running service.

    Of JOURNAL (a file, a directory that --out wrote, or the state of a service), what they were entitled to, and what they
    got. Entitlements are counted while a job waits, since only then they matter. GPU-hours by GPU type. Of a journal that
    is damaged, cut off or too new, what could be read is shown, with exit code 1.
    """
    if journal is None:
        wanted = [_parse_weight(text) for text in weights]
        with connected() as client:
            answer(client.set_weights(wanted), _show_live, as_json=as_json)
        return 0
    if weights:
        raise RequestError("--set changes the running service; leave JOURNAL out")
    with journal_file(journal) as file:
        return _from_journal(journal, file, as_json=as_json)


def _parse_weight(text: str) -> tuple[str, float]:
    tenant, equals, number = text.partition("=")
    try:
        return tenant, float(number)
    except ValueError:
        expected = f"{tenant}=WEIGHT, a number" if equals else "TENANT=WEIGHT"
        raise RequestError(f"--set: expected {expected}, got {text!r}") from None


def _show_live(found: Shares) -> None:
    promised = "" if found.policy is None or found.promise is None else f"; {found.policy} {found.promise}"
    show_table(shares_table(found), counted(len(found.tenants), "tenant") + promised)


def shares_table(shares: Shares) -> HtmlTable:
    """One row per tenant."""
    columns = ("TENANT", "WEIGHT", "ENTITLED", "HELD", "GPUS", "RUNNING", "WAITING", "GPU-HOURS", "PREEMPTIONS")
    rows = tuple(
        (
            each.tenant, amount(each.weight, "plain"),
            NONE if each.entitled is None else amount(each.entitled, "percent"), amount(each.held, "percent"),
            f"{each.gpus:,}", f"{each.running:,}", f"{each.waiting:,}",
            gpu_hours(each.gpu_seconds), f"{each.preemptions:,}",
        )
        for each in shares.tenants
    )  # fmt: skip
    return HtmlTable(columns, rows, words=("TENANT",))


def _from_journal(journal: Path, file: Path, *, as_json: bool) -> int:
    reader = JournalReader(file)
    usage = TenantUsage(reader.header.cluster)
    problem = reader.feed(usage.take)
    usage.close()
    if as_json:
        print_json(_document(journal, reader.header, usage))
    else:
        _show(reader.header, usage)
    if problem is not None:
        click.echo(f"poise: {problem}", err=True)
    return 0 if problem is None else 1


def _document(journal: Path, header: Header, usage: TenantUsage) -> dict[str, Any]:
    """Everything as JSON; GPU-hours by GPU type of the cluster."""
    tenants = [
        {
            "tenant": name,
            "entitled_gpus": list(each.now) or None,
            "contended_seconds": each.contended,
            "entitled_gpu_hours": each.entitled if each.now else None,
            "received_gpu_hours": each.received,
            "received_gpu_hours_in_all": each.held,
        }
        for name, each in usage.tenants.items()
    ]
    about = {"journal": str(journal), "policy": header.policy, "gpu_types": list(usage.types)}
    return {**about, "tenants": tenants, "trades": [asdict(each) for each in usage.trades]}


def _show(header: Header, usage: TenantUsage) -> None:
    show_table(_by_type(usage), f"{header.policy} on {header.cluster}: GPU-hours")
    if usage.trades:
        show_table(_trades(usage), "Trades: GPUs of the fast type, and the price of each in GPUs of the slow type")
    elif not any(each.now for each in usage.tenants.values()):
        click.echo("The journal says nothing of entitlements: its policy has none.")


def _by_type(usage: TenantUsage) -> HtmlTable:
    """One row per tenant and GPU type."""
    columns = ("tenant", "type", "entitled now", "entitled", "received", "received ÷ entitled", "received in all")
    rows = []
    for name, each in usage.tenants.items():
        for gpu_type, label in enumerate(usage.types):
            due, received = each.entitled[gpu_type] if each.now else None, each.received[gpu_type]
            now = amount(each.now[gpu_type], "plain") if each.now else NONE
            ratio = amount(received / due, "percent") if due else NONE
            numbers = (NONE if due is None else amount(due, "plain"), amount(received, "plain"), ratio)
            rows.append(("" if gpu_type else name, label, now, *numbers, amount(each.held[gpu_type], "plain")))
    return HtmlTable(columns, tuple(rows), words=("tenant", "type"))


def _trades(usage: TenantUsage) -> HtmlTable:
    columns = ("buyer", "seller", "fast", "slow", "GPUs", "price", "from", "until")
    rows = tuple(
        (
            each.buyer, each.seller, each.fast, each.slow, amount(each.gpus, "plain"), amount(each.price, "plain"),
            amount(each.since, "seconds"), amount(each.until, "seconds"),
        )
        for each in usage.trades
    )  # fmt: skip
    return HtmlTable(columns, rows, words=("buyer", "seller", "fast", "slow"))
