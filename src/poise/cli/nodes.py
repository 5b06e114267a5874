"""`poise nodes`, `drain` and `return`: how the nodes are, and taking them out of service."""

from collections.abc import Callable, Sequence
from time import sleep

import click

from poise.cli.live import answer, clock_time, connected, connected_for_long, document, until_interrupted
from poise.cli.options import examples, json_option, print_json
from poise.cli.output import show_table
from poise.cli.queue import NONE
from poise.lab.report.page import HtmlTable
from poise.scheduler.model.errors import PoiseError, RequestError, plain
from poise.scheduler.model.units import counted
from poise.service.client import Client
from poise.service.wire.views import NodeList, NodeRow, NodeRun

EVERY = 1.0
"""Seconds between two looks at nodes that are being emptied."""
COLUMNS = ("NODE", "TYPE", "GPUS", "FREE", "RACK", "STATE", "JOBS")
MORE_COLUMNS = (*COLUMNS[:-1], "SINCE", "JOBS", "WHY")
_WORDS = ("NODE", "TYPE", "RACK", "STATE", "SINCE", "JOBS", "WHY")

Command = Callable[[Client, str], NodeRow]


@click.command(epilog=examples("poise nodes", "poise nodes --json"))
@json_option
def nodes(as_json: bool) -> None:
    """Show the nodes: their GPUs, how many new runs may get, how the nodes are, and the jobs that hold GPUs there.

    A node is `up`; `unreachable` while nothing is heard of it; `lost` once nothing can run there; `draining` while runs
    leave it, and then `drained`. `withheld`: GPUs that others use. SINCE and WHY are there if there is something to say.
    """
    with connected() as client:
        answer(client.nodes(), _show_nodes, as_json=as_json)


def _show_nodes(found: NodeList) -> None:
    if not found.nodes:
        click.echo("no node has joined yet")
        return
    free, there = sum(map(_available, found.nodes)), sum(each.gpus for each in found.nodes)
    show_table(nodes_table(found), f"{counted(len(found.nodes), 'node')}, {counted(there, 'GPU')}, {free:,} free")


def _available(node: NodeRow) -> int:
    return node.free if node.available is None else node.available


def nodes_table(nodes: NodeList) -> HtmlTable:
    """One row per node; jobs by slot, each once."""
    rows: list[tuple[str, ...]] = []
    are_plain = True
    for each in nodes.nodes:
        leaving = (f"({job} leaves)" for job in filter(None, each.leaving))
        jobs = " ".join(dict.fromkeys((*filter(None, each.jobs), *leaving))) or NONE
        state = each.state.value if each.alive else "lost"  # a server that is too old to say more says that
        withheld = f", {len(each.withheld):,} withheld" if each.withheld else ""
        since = each.drained if each.drained is not None and each.alive else each.since
        why = _why(each)
        are_plain = are_plain and since is None and not why
        cells = (each.name, each.gpu_type, f"{each.gpus:,}", f"{_available(each):,}", each.rack, f"{state}{withheld}")
        rows.append((*cells, NONE if since is None else clock_time(since), jobs, why or NONE))
    if are_plain:
        rows = [(*row[:-3], row[-2]) for row in rows]
    return HtmlTable(COLUMNS if are_plain else MORE_COLUMNS, tuple(rows), words=_WORDS)


def _why(node: NodeRow) -> str:
    """Why a node is as it is."""
    drain = None
    if node.drained is not None:
        drain = f"drained by {node.drained_by}" + (f": {node.drain_reason}" if node.drain_reason else "")
    said = drain if node.alive and drain else node.evidence
    return plain("; ".join(dict.fromkeys(filter(None, (said, drain)))))


DRAIN_EPILOG = """\b
Examples:
  poise drain gpu-07 --reason "new driver"
  poise drain gpu-07 gpu-08 --no-wait
  poise return gpu-07
"""


@click.command(epilog=DRAIN_EPILOG)
@click.argument("names", nargs=-1, required=True, metavar="NODE...")
@click.option("--reason", metavar="TEXT", help="Why, for those whose jobs have to leave or wait.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until nothing runs there any more.")
@json_option
def drain(names: tuple[str, ...], reason: str | None, wait: bool, as_json: bool) -> int:
    """Take nodes out of service: nothing starts there any more; what runs there is saved and goes on elsewhere.

    A run that may not be preempted stays until its end, and one that cannot save its work yet until it can. Ctrl-C ends the
    waiting, not the drain; `poise return` ends that. Only operators may.
    """
    names = tuple(dict.fromkeys(names))
    with connected_for_long() as client:
        found, code = _for_each(client, names, lambda each, name: each.drain(name, reason=reason), as_json=as_json)
        waiting = DrainWatch(client, [each for each in found if isinstance(each, NodeRow)], to_stderr=as_json)
        interrupted = until_interrupted(waiting.wait if wait else waiting.show)
        if interrupted:
            click.echo(f"poise: the drain goes on; `poise return {' '.join(waiting.names)}` ends it", err=True)
        code = max(code, interrupted, 1 if waiting.given_back else 0)
        if as_json:
            print_json([waiting.document_of(each) if isinstance(each, NodeRow) else each for each in found])
    return code


@click.command("return", epilog=examples("poise return gpu-07", "poise return gpu-07 gpu-08"))
@click.argument("names", nargs=-1, required=True, metavar="NODE...")
@json_option
def return_(names: tuple[str, ...], as_json: bool) -> int:
    """Give nodes back that were drained: they take new runs again. Only operators may."""
    with connected() as client:
        found, code = _for_each(client, tuple(dict.fromkeys(names)), Client.return_node, as_json=as_json)
    if as_json:
        print_json([document(each) if isinstance(each, NodeRow) else each for each in found])
    for each in found if not as_json else ():
        if isinstance(each, NodeRow):
            text = "takes new runs" if each.alive else f"takes new runs once it is back: {each.evidence}"
            click.echo(plain(f"{each.name} {each.state}: {text}"))
    return code


def _for_each(
    client: Client, names: Sequence[str], command: Command, *, as_json: bool
) -> tuple[list[NodeRow | dict[str, str]], int]:
    """Send a command for each node, whatever becomes of the others; the answers, and the exit code of the worst."""
    found: list[NodeRow | dict[str, str]] = []
    code = 0
    for name in names:
        try:
            found.append(command(client, name))
        except PoiseError as error:
            click.echo(plain(f"poise: {error}" if len(names) == 1 else f"poise: {name}: {error}"), err=True)
            found.append({"node": name, "error": str(error)})
            code = max(code, 2 if isinstance(error, RequestError) else 1)
    return found, code


class DrainWatch:
    """Tells what still runs on nodes that are drained, and when they are empty.

    given_back   nodes that were returned meanwhile
    """

    def __init__(self, client: Client, nodes: Sequence[NodeRow], *, to_stderr: bool) -> None:
        self._client = client
        self._nodes = {node.name: node for node in nodes}
        self._to_stderr = to_stderr
        self.given_back: set[str] = set()

    @property
    def names(self) -> list[str]:
        """Nodes that are drained."""
        return [name for name in self._nodes if name not in self.given_back]

    def document_of(self, node: NodeRow) -> object:
        """A node as it was last seen, for programs."""
        return document(self._nodes[node.name])

    def show(self) -> None:
        """Tell what is there now."""
        for node in self._nodes.values():
            if node.emptied is not None:
                self._say(f"{node.name} is empty")
                continue
            self._say(f"{node.name} is drained; {counted(len(node.runs), 'run')} still there")
            for run in node.runs:
                self._say(f"  {_where(run)} {_future(run)}")

    def wait(self) -> None:
        """Tell what is there, then what leaves; return once all nodes are empty, or given back."""
        self.show()
        while any(self._nodes[name].emptied is None for name in self.names):
            sleep(EVERY)
            now = {node.name: node for node in self._client.nodes().nodes}
            for name in self.names:
                self._compare(self._nodes[name], now[name])
                self._nodes[name] = now[name]

    def _compare(self, before: NodeRow, now: NodeRow) -> None:
        if now.drained is None:
            self.given_back.add(now.name)
            self._say(f"{now.name} was given back before it was empty")
            return
        there = {(run.job, run.epoch): run for run in now.runs}
        for run in before.runs:
            after = there.get((run.job, run.epoch))
            if after is None:
                self._say(f"  {_where(run)} has left {now.name}")
            elif _future(after) != _future(run):
                self._say(f"  {_where(after)} {_future(after)}")
        if now.emptied is not None and before.emptied is None:
            self._say(f"{now.name} is empty")

    def _say(self, text: str) -> None:
        click.echo(plain(text), err=self._to_stderr)


def _where(run: NodeRun) -> str:
    slots = ", ".join(map(str, run.slots))
    return f"job {run.job} ({run.name}, tenant {run.tenant}) on GPU{'s' * (len(run.slots) > 1)} {slots}"


def _future(run: NodeRun) -> str:
    return "was asked to leave, and leaves" if run.leaving else f"is still there: {run.stays or 'it was not asked to leave'}"
