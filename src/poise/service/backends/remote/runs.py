"""Runs over nodes: which part is on which node, how far each has come, and what the run as a whole has come to.

`RemoteRuns` is the logic of the remote back end, without threads or sockets: the engine's orders and the agents' messages go
in, orders to agents and events to the engine come out. Everything is called in one thread (`backend.py`).

A run of several nodes is launched in two steps. The part of rank 0 begins first, and its node chooses the port on which the
ranks meet; the others are ordered once that is known. The table in docs/design/0012-several-machines.md says what the run
has come to when all its parts have ended.
"""

import hashlib
import hmac
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from time import monotonic, time  # noqa: TID251 - events carry the time at which things happened

from poise import __version__
from poise.scheduler.model.cluster import Node
from poise.service.backends.api import (
    DesiredState,
    NodeReport,
    NodeState,
    OnEvent,
    RunBegan,
    RunEnded,
    RunEnding,
    RunNotice,
    RunOrder,
    RunPart,
    RunProgressed,
)
from poise.service.backends.local.orders import replicas_on
from poise.service.backends.remote.identity import ServiceIdentity
from poise.service.backends.remote.links import SILENT_PART, AgentLink, Contact, with_slack
from poise.service.backends.run_table import Gpu, Key, RunTable
from poise.service.wire import agent_messages as messages
from poise.service.wire.agent_messages import SOONEST, AgentNews, Hello, NodeSpec, PartEnded, PartOrder, Welcome
from poise.service.wire.request import RELAY

NODE_LOST = "node-lost"
POLL_PART = 0.2  # of a lease: how long a request for orders waits. Twice that is the longest between two renewals
REPORT_PART = 0.05  # seconds between two reports of a node, for each node: about 20 reports a second in all
WATCH_AGAIN = 10.0  # seconds after which a node is told again that a user reads a log
STARTING = "the service is starting; try again in a moment"
BROKEN = "another part of it has ended"  # what a part is told that has to end because of another one


class RefusedAgentError(Exception):
    """The server does not talk to an agent, or not now. `code` is one of `AgentRefusal`."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(eq=False, slots=True)
class PartState:
    """One part of a run: whether it was ordered, has begun, and how it ended."""

    part: RunPart
    ranks: int  # number of its replicas
    is_ordered: bool = False
    began: float | None = None
    ended: PartEnded | None = None
    is_given_up: bool = False  # those who started its agent say that it has ended

    @property
    def is_open(self) -> bool:
        """Whether its node may have processes of it."""
        return self.is_ordered and self.ended is None


@dataclass(eq=False, slots=True)
class RemoteRun:
    """One run, over all its nodes."""

    order: RunOrder
    desired: DesiredState
    parts: dict[str, PartState]
    sequence: int = 0
    waiters: list["RemoteRun"] = field(default_factory=list)
    awaited: set[Key] = field(default_factory=set)
    port: int = 0  # MASTER_PORT; 0: not known yet
    has_begun: bool = False
    begun: float | None = None  # steps from which it goes on
    kept: float | None = None  # steps of the last checkpoint that it has reported
    is_over: bool = False
    watched: float = -inf  # when its nodes were last told that a user reads its logs

    @classmethod
    def of(cls, order: RunOrder, desired: DesiredState) -> "RemoteRun":
        """Make the run of an order."""
        parts = {each.node: PartState(each, replicas_on(each, order.request)) for each in order.gpus}
        return cls(order, desired, parts)

    @property
    def key(self) -> Key:
        """Job and epoch."""
        return self.order.job, self.order.epoch

    @property
    def gpus(self) -> frozenset[Gpu]:
        """All its GPUs."""
        return frozenset((part.node, slot) for part in self.order.gpus for slot in part.slots)

    @property
    def must_end(self) -> bool:
        """Whether it was asked or told to end."""
        return self.desired is not DesiredState.RUN

    @property
    def wanted(self) -> DesiredState:
        """What is wanted of its parts: once one has ended without finishing, the others cannot go on alone."""
        ends = {part.ended.how for part in self.parts.values() if part.ended is not None}
        if "failed" in ends:
            return DesiredState.GONE
        return DesiredState.LEAVE if "yielded" in ends and self.desired is DesiredState.RUN else self.desired

    @property
    def first(self) -> PartState:
        """The part that has rank 0."""
        return self.parts[self.order.gpus[0].node]


class RemoteRuns:
    """All nodes and runs of a remote back end.

    service   what the service remembers of itself and its nodes
    nodes     that the cluster has had so far
    lease     seconds for which a node may run things without a word from the server
    place_of  where the checkpoints of a job are kept
    """

    def __init__(
        self,
        service: ServiceIdentity,
        nodes: Iterable[Node],
        on_event: OnEvent,
        *,
        lease: float,
        place_of: Callable[[RunOrder], str] = lambda _order: RELAY,
    ) -> None:
        self._service, self._on_event, self.lease = service, on_event, lease
        self._place_of = place_of
        self._known = {node.name: node for node in nodes}
        # A node that was not heard of yet may count on what an earlier server has told it.
        longest = max(lease, service.lease)
        self._until_shorter = monotonic() + with_slack(service.lease) if lease < service.lease else None
        service.give(longest)
        service.save_now()
        self.links = {name: AgentLink(name, longest, identity=service.nodes.get(name)) for name in self._known}
        self._sessions: dict[str, AgentLink] = {}
        self.table: RunTable[RemoteRun] = RunTable()
        self._is_open = False

    # Orders of the engine

    def adopt(self, runs: Sequence[tuple[RunOrder, DesiredState]]) -> None:
        """Take up what was ordered before a restart. From now on agents are welcome: their nodes say what became of it."""
        found = [RemoteRun.of(order, desired) for order, desired in runs]
        # Those that have to go come first: others may wait for their GPUs (`RunTable.blockers`).
        found.sort(key=lambda run: not run.must_end)
        for run in found:
            self.table.enter(run)
            for part in run.parts.values():
                part.is_ordered = True  # it may have been: its node knows
        self._is_open = True

    def launch(self, order: RunOrder) -> None:
        """Take up a new run."""
        if self.table.get((order.job, order.epoch)) is None:
            run = RemoteRun.of(order, DesiredState.RUN)
            self.table.enter(run)
            self._begin(run)

    def stop(self, key: Key, notice: RunNotice) -> None:
        """Ask a run to leave."""
        run = self.table.get(key)
        if run is None or run.desired is not DesiredState.RUN:
            return
        if any(not part.is_ordered for part in run.parts.values()):
            self.kill(key, notice.text)  # not all of it has been started, so it has done nothing that could be saved
            return
        run.desired = DesiredState.LEAVE
        for name, part in run.parts.items():
            if part.is_open:
                order = messages.StopOrder(
                    job=key[0], epoch=key[1], cause=notice.cause, text=notice.text, deadline=notice.deadline
                )
                self._send(name, order)

    def kill(self, key: Key, reason: str) -> None:
        """End a run that is not wanted any more."""
        run = self.table.get(key)
        if run is not None and run.desired is not DesiredState.GONE:
            run.desired = DesiredState.GONE
            self._end_rest(run, reason)

    def watch(self, job: str) -> None:
        """A user reads the logs of a job: have what is new of them sent soon."""
        for run in self.table.of(job):
            if self.report_every > SOONEST and monotonic() - run.watched > WATCH_AGAIN:
                run.watched = monotonic()
                for name, part in run.parts.items():
                    if part.is_open:
                        self._send(name, messages.WatchOrder(job=run.key[0], epoch=run.key[1]))

    @property
    def report_every(self) -> float:
        """Seconds between two reports of a node, which grow with the number of nodes: their sum is what costs."""
        return max(SOONEST, REPORT_PART * len(self._sessions))

    # What agents say

    def hello(self, hello: Hello, *, is_bound: bool = False) -> Welcome:
        """Open a session, which begins with all that is open on the node; RefusedAgentError if there can be none.

        is_bound   the agent's token is good for this node alone: such nodes do not join by themselves, they are expected
        """
        name = hello.node.name
        link = self.links.get(name)
        if hello.protocol != messages.PROTOCOL:
            text = f"its agent (Poise {hello.version}) speaks protocol {hello.protocol}, this server {messages.PROTOCOL}"
            self._note_refusal(link, f"{text}: install Poise {__version__} there")
            raise RefusedAgentError("agent-version", f"{text}; install Poise {__version__} on the node")
        if hello.service not in (None, self._service.identity):
            text = f"node {name} has runs of another service ({hello.service}); let that one end them first"
            self._note_refusal(link, text)
            raise RefusedAgentError("foreign-service", text)
        if link is None and is_bound and self._is_open:
            raise RefusedAgentError("not-wanted", f"node {name} is over: nothing is wanted of it any more")
        if link is None and not is_bound:
            link = self.links[name] = AgentLink(name, max(self.lease, self._service.lease))
        if link is None:
            raise RefusedAgentError("starting", STARTING)
        if link.identity not in (None, hello.identity) and link.contact is not Contact.LOST:
            raise RefusedAgentError("name-taken", f"another node is called {name}; give this one another name")
        link.identity, link.spec, link.refusal = hello.identity, hello.node, None
        if not self._is_open:
            raise RefusedAgentError("starting", STARTING)
        if link.is_expected:
            link.answered()  # the time until it came does not count: its lease begins now
        adoption = self._adoption(name)  # before anything changes
        self._sessions.pop(link.session or "", None)
        self._service.remember(name, hello.identity)
        session = link.open(adoption)
        self._sessions[session] = link
        link.is_expected, link.is_bound = False, is_bound
        self._introduce(name)
        return Welcome(
            service=self._service.identity,
            session=session,
            lease=self.lease,
            poll=POLL_PART * self.lease,
            version=__version__,
        )

    async def save(self) -> None:
        """Force to the disk which machines nodes are, and how long their leases; before a node is told anything."""
        await self._service.save()

    def _note_refusal(self, link: AgentLink | None, text: str) -> None:
        """Remember why the agent of a node was refused: once the node is lost, that is the reason."""
        if link is not None and link.refusal != text:
            link.refusal = text
            if link.contact is Contact.LOST:
                self._report(link, Contact.LOST, text, again=True)

    def link_of(self, session: str) -> AgentLink:
        """Return the link with this session; RefusedAgentError if it is over."""
        link = self._sessions.get(session)
        if link is None or link.session != session:
            raise RefusedAgentError("session-over", "this session is over; say hello again")
        return link

    def answered(self, link: AgentLink) -> None:
        """Note that the node gets an answer now, which renews its lease."""
        link.answered()
        if link.contact is Contact.UNREACHABLE and link.hint is None:
            self._report(link, Contact.REACHABLE, "its agent answers again")

    def hear(self, link: AgentLink, now: float, news: Sequence[AgentNews]) -> None:
        """Take news of a node. They are dated by how long ago they were: its clock may be wrong."""
        shift = time() - now
        for each in news:
            if isinstance(each, messages.NodeAdopted):
                self._adopted(link)
            elif isinstance(each, messages.NodeWithholds):
                assert link.spec is not None
                link.spec = link.spec.model_copy(update={"withheld": each.slots})
                if link.contact not in (Contact.JOINING, Contact.LOST):  # it will be reported with what it withholds
                    self._report(link, link.contact, "the GPUs that others use have changed", again=True)
            else:
                run = self.table.get((each.job, each.epoch))
                part = None if run is None else run.parts.get(link.name)
                if run is not None and part is not None and part.ended is None:
                    self._hear_part(run, part, each, shift)

    def look(self) -> None:
        """Look at all nodes: which have been silent for too long? Called several times a second."""
        if self._until_shorter is not None and monotonic() > self._until_shorter:
            self._until_shorter = None
            self._service.give(self.lease)
            for link in self.links.values():
                link.lease = self.lease
        soon = monotonic() - SILENT_PART * min(self.lease, self._service.lease)
        for link in [*self.links.values()]:
            if link.last_answer > soon:
                continue  # nearly all nodes, nearly always: this is called for a thousand of them four times a second
            if link.is_expected:
                continue
            if link.contact is not Contact.LOST and link.lease_left() <= 0:
                self._lose(link)
            elif link.contact is Contact.REACHABLE and link.silence() > SILENT_PART * link.lease:
                self._report(
                    link, Contact.UNREACHABLE, _with(f"no word from its agent for {link.silence():.0f} s", link.hint)
                )

    def hint(self, node: Node, text: str | None) -> None:
        """Take the word of those who start agents, that a node has this problem, or none.

        It is evidence, and keeps new runs from the node. It never ends any: what the node runs may go on without them, so
        the node is lost when its lease has ended, as ever. A node that has never joined has no runs, and is lost at once.
        """
        link = self.links.get(node.name)
        if link is None and text is not None and node.gpus > 0:
            self._known[node.name] = node
            link = self.links[node.name] = AgentLink(node.name, self.lease, contact=Contact.LOST)
        if link is None or link.hint == text:
            return
        link.hint = text
        if text is not None and link.contact is Contact.JOINING:
            link.evidence = text
        elif text is not None:
            contact = Contact.UNREACHABLE if link.contact is Contact.REACHABLE else link.contact
            self._report(link, contact, text, again=True)

    # Nodes that come and go: pods

    def expect(self, name: str) -> None:
        """A node of this name will join: its agent is being started. Call this before anything is launched there.

        Until its agent says hello for the first time it has no lease that could run out, as an image may take minutes to
        arrive, and orders for it wait. One that an earlier server has known may be running things: its lease counts from
        now. It is reported like other nodes, and stays known until it is forgotten, over losses too.
        """
        if name not in self.links:
            identity, longest = self._service.nodes.get(name), max(self.lease, self._service.lease)
            self.links[name] = AgentLink(
                name, longest, identity=identity, is_expected=identity is None, is_temporary=True,
                evidence="its agent is being started",
            )  # fmt: skip

    def give_up(self, name: str, evidence: str, cause: str) -> None:
        """Those who start agents know for certain that nothing of this node runs any more, as its pod has ended.

        Whatever is open there has failed now, of this cause, unless its end was reported; there is no lease to wait for.
        Runs that have yet to begin there cannot any more.

        evidence   why, for people
        cause      a signature of scheduler/model/failures.py
        """
        link = self.links.get(name)
        if link is not None:
            link.is_expected = False
            self._end_session(link)
            self._report(link, Contact.LOST, evidence)
        for run in self.table.at(name):
            part = run.parts[name]
            if part.ended is None and not run.is_over:
                part.is_ordered = part.is_given_up = True
                self._part_ended(run, part, self._lost_end(run, part).model_copy(update={"cause": cause}))

    def forget(self, name: str) -> bool:
        """Forget a node that never comes back; False: it has parts that have not ended, and is not forgotten.

        Nothing is left of it, here or on the disk. Its agent, should it still speak, is told that its session is over, and
        that it is not wanted any more (`hello`).
        """
        if any(run.parts[name].ended is None for run in self.table.at(name)):
            return False
        link = self.links.pop(name, None)
        if link is not None:
            self._end_session(link)
        self._known.pop(name, None)
        self._service.forget(name)
        return True

    def has_part(self, link: AgentLink, job: str) -> bool:
        """Whether a node has a part of a job that has not ended, so that its checkpoints and logs are its business."""
        return any(run.key[0] == job and run.parts[link.name].ended is None for run in self.table.at(link.name))

    def needs_files(self, link: AgentLink, tenant: str, sha256: str) -> bool:
        """Whether a node has a part of a job that these files were shipped with."""
        here = [run for run in self.table.at(link.name) if run.parts[link.name].ended is None]
        return any((run.order.tenant, run.order.request.files) == (tenant, sha256) for run in here)

    def has_heard_of(self, nodes: Iterable[str]) -> bool:
        """Whether all of these nodes have looked at their runs."""
        return all(self.links[each].contact is Contact.REACHABLE for each in nodes if each in self.links)

    def is_settled(self) -> bool:
        """Whether every node that has reported since the start has also looked at its runs."""
        return all(link.session is None or link.contact is not Contact.JOINING for link in self.links.values())

    # Nodes

    def _adoption(self, name: str) -> messages.AdoptOrder:
        parts = [
            messages.AdoptedPart(
                order=self._part_order(run, name), desired=run.wanted.value, may_begin=not self.table.blockers(run)
            )
            for run in self.table.at(name)
            if run.parts[name].is_open
        ]
        return messages.AdoptOrder(parts=tuple(parts))

    def _introduce(self, name: str) -> None:
        """Tell the other nodes of its runs where this node can be reached now."""
        for run in self.table.at(name):
            for each, part in run.parts.items():
                if each != name and part.is_open:
                    self._send(each, messages.PeersOrder(part=self._part_order(run, each)))

    def _send(self, name: str, order: messages.AgentOrder) -> None:
        """Send an order to a node, if it is known: pods are forgotten."""
        link = self.links.get(name)
        if link is not None:
            link.send(order)

    def _end_session(self, link: AgentLink) -> None:
        self._sessions.pop(link.session or "", None)
        link.close()

    def _adopted(self, link: AgentLink) -> None:
        """The node has looked at its runs, and takes orders.

        By now its lease is as long as this server says. A shorter one counts only once the longer ones have ended that an
        earlier server gave: a runner that stands still has not read it.
        """
        link.lease = max(self.lease, self._service.lease)
        if link.contact is not Contact.REACHABLE:
            before = link.contact
            self._report(link, Contact.REACHABLE, "its agent has joined" if before is Contact.JOINING else "it is back")

    def _lose(self, link: AgentLink) -> None:
        """The node's lease has ended: nothing runs there."""
        silence = f"no word from its agent for {link.silence():.0f} s: its lease of {link.lease:g} s has ended"
        self._end_session(link)
        if link.name in self._known or link.is_temporary:
            # A reason that is known already says more than silence.
            known = link.evidence if link.spec is None and link.contact is Contact.JOINING else _with(silence, link.hint)
            self._report(link, Contact.LOST, link.refusal or known)
        else:
            del self.links[link.name]  # it said hello and never joined
        for run in self.table.at(link.name):
            part = run.parts[link.name]
            if part.is_open:
                self._part_ended(run, part, self._lost_end(run, part))

    def _report(self, link: AgentLink, contact: Contact, evidence: str, *, again: bool = False) -> None:
        if link.contact is contact and not again:
            return
        link.contact, link.evidence = contact, evidence
        state = {Contact.REACHABLE: NodeState.UP, Contact.UNREACHABLE: NodeState.UNREACHABLE}.get(contact, NodeState.LOST)
        spec = link.spec
        if spec is not None:
            self._known[link.name] = Node(spec.name, spec.gpu_type, spec.gpus, spec.rack)
        withheld = () if spec is None else spec.withheld
        if link.name in self._known:  # a pod that has never joined is none of the cluster's
            self._on_event(NodeReport(self._known[link.name], state, time(), evidence, withheld))

    # From its launch to its beginning

    def _begin(self, run: RemoteRun) -> None:
        """Order the first part, once all that the run has to wait for is gone."""
        blockers = self.table.blockers(run)
        if blockers:
            run.awaited = {each.key for each in blockers}
            for each in blockers:
                each.waiters.append(run)
            return
        self._order(run, run.first)

    def _order(self, run: RemoteRun, part: PartState) -> None:
        name = part.part.node
        link = self.links.get(name)
        order = messages.LaunchOrder(part=self._part_order(run, name))
        part.is_ordered = True
        if link is None or link.contact is Contact.LOST:
            self._part_ended(run, part, self._lost_end(run, part))
        else:
            link.send(order)

    def _part_order(self, run: RemoteRun, name: str) -> PartOrder:
        order, first = run.order, run.order.gpus[0].node
        key = hmac.new(self._service.token.encode(), f"{order.job}/{order.epoch}".encode(), hashlib.sha256).hexdigest()
        specs = {each: link.spec for each in run.parts if (link := self.links.get(each)) is not None}
        peers = {each: _peer_url(spec) for each, spec in specs.items() if spec is not None and each != name}
        return PartOrder(
            job=order.job, epoch=order.epoch,
            gpus=tuple((part.node, part.gpu_type, part.slots) for part in order.gpus),
            request=order.request, tenant=order.tenant, ran=order.ran, beside=order.beside, speeds=dict(order.speeds),
            reason=order.reason, master=self._address(first), port=0 if name == first else run.port, peers=peers, key=key,
            kept_at=self._place_of(order),
        )  # fmt: skip

    def _address(self, name: str) -> str:
        link = self.links.get(name)
        return "127.0.0.1" if link is None or link.spec is None else link.spec.address

    # News of parts

    def _hear_part(
        self,
        run: RemoteRun,
        part: PartState,
        news: messages.PartBegan | messages.PartProgressed | PartEnded | messages.PartUnknown,
        shift: float,
    ) -> None:
        match news:
            case messages.PartBegan():
                self._part_began(run, part, news.at + shift, news)
            case messages.PartProgressed():
                if part is run.first and run.has_begun:  # rank 0 may be ahead of parts that are only starting
                    run.kept = news.checkpoint if news.checkpoint is not None else run.kept
                    self._on_event(
                        RunProgressed(
                            *run.key, news.at + shift, news.steps, news.total, news.checkpoint, news.throughput, news.loss
                        )
                    )
            case messages.PartUnknown():
                part.is_ordered = False
                if run.wanted is not DesiredState.RUN:
                    self._end_rest(run, BROKEN)
                elif part is run.first:
                    self._begin(run)
                elif run.port:
                    self._order(run, part)
            case PartEnded():
                failed_at = None if news.failed_at is None else news.failed_at + shift
                self._part_ended(run, part, news.model_copy(update={"at": news.at + shift, "failed_at": failed_at}))

    def _part_began(self, run: RemoteRun, part: PartState, at: float, news: messages.PartBegan) -> None:
        part.is_ordered = True
        if part is run.first and len(run.parts) > 1 and not news.port:
            return  # its agent could not read it, and says it again in its next session: the others have to know it
        part.began = at if part.began is None else part.began
        if part is run.first:
            run.port, run.begun = news.port, news.begun
            for each in run.parts.values():
                if not each.is_ordered and run.wanted is DesiredState.RUN:
                    self._order(run, each)
        began = [each.began for each in run.parts.values() if each.began is not None]
        if len(began) == len(run.parts) and not run.has_begun and not run.is_over:
            run.has_begun = True
            self._on_event(RunBegan(*run.key, max(began), run.begun))

    def _part_ended(self, run: RemoteRun, part: PartState, end: PartEnded) -> None:
        part.ended = end
        if run.is_over:
            return
        if all(not each.is_open for each in run.parts.values()):
            self._finish(run)
        elif end.how == "failed":
            self._end_rest(run, BROKEN)
        elif end.how == "yielded" and run.desired is DesiredState.RUN:
            # It left without being asked to: the others have as long as if they had been asked.
            run_key, deadline = run.key, run.order.request.checkpoint.deadline
            for name, each in run.parts.items():
                if each.is_open:
                    self._send(
                        name,
                        messages.StopOrder(
                            job=run_key[0], epoch=run_key[1], cause="lease-end", text=BROKEN, deadline=deadline
                        ),
                    )

    def _end_rest(self, run: RemoteRun, reason: str) -> None:
        """Kill the parts that are open; those that were not ordered never will be."""
        is_any_open = False
        for name, part in run.parts.items():
            if part.is_open:
                is_any_open = True
                self._send(name, messages.KillOrder(job=run.key[0], epoch=run.key[1], reason=reason))
        if not is_any_open:
            self._finish(run)

    def _lost_end(self, run: RemoteRun, part: PartState) -> PartEnded:
        """How a part ended whose node is lost. Whether any of its replicas was started there is not known."""
        codes, at = (None,) * part.ranks, time()
        return PartEnded(
            job=run.key[0], epoch=run.key[1], at=at, how="failed", steps=run.kept, cause=NODE_LOST, codes=codes, failed_at=at
        )

    def _finish(self, run: RemoteRun) -> None:
        """All parts are over: report what the run has come to, and begin what has waited for it."""
        run.is_over = True
        self.table.remove(run)
        began = [part.began for part in run.parts.values() if part.began is not None]
        if len(began) == len(run.parts) and not run.has_begun:
            self._on_event(RunBegan(*run.key, max(began), run.begun))
        end = merged_end(run)
        self._on_event(end)
        for waiter in run.waiters:
            waiter.awaited.discard(run.key)
            if waiter.is_over or waiter.first.is_ordered:
                continue
            if end.how is RunEnding.FINISHED and waiter.key[0] == run.key[0]:
                self.kill(waiter.key, "the job has finished on its way out")  # nothing is left to do
            elif not waiter.awaited:
                self._begin(waiter)


def merged_end(run: RemoteRun) -> RunEnded:
    """What a run has come to whose parts have all ended, or were never begun."""
    ends = [part.ended for part in run.parts.values() if part.ended is not None]
    codes = tuple(_codes(run.parts.values()))
    at = max((end.at for end in ends), default=time())
    first = run.first.ended
    gone = [part.ended for part in run.parts.values() if part.is_given_up or (part.ended and part.ended.cause == NODE_LOST)]
    failed = [end for end in ends if end.how == "failed"]
    steps = run.kept if first is None or first.steps is None else first.steps
    has_left = run.desired is DesiredState.LEAVE and first is not None and first.how == "yielded"
    if run.desired is DesiredState.GONE or has_left:
        how, cause = RunEnding.YIELDED, None if first is None or first.how != "yielded" else first.cause
    elif failed:
        # A node that is gone is what the others failed of, whenever they did.
        root = min(failed, key=lambda end: (end not in gone, end.failed_at or end.at))
        how, cause = RunEnding.FAILED, root.cause
    elif len(ends) == len(run.parts) and all(end.how == "finished" for end in ends):
        how, cause = RunEnding.FINISHED, None
    else:
        how, cause = RunEnding.YIELDED, next((end.cause for end in ends if end.how == "yielded"), None)
    return RunEnded(*run.key, at, how, steps, cause, codes)


def _codes(parts: Iterable[PartState]) -> Iterator[int | None]:
    """Exit codes by rank; none at all if no replica is known to have been started."""
    given = [(part, () if part.ended is None else part.ended.codes) for part in parts]
    if any(codes for _, codes in given):
        for part, codes in given:
            yield from codes if len(codes) == part.ranks else (None,) * part.ranks


def _with(evidence: str, hint: str | None) -> str:
    return evidence if hint is None else f"{evidence}; {hint}"


def _peer_url(spec: NodeSpec) -> str:
    host = f"[{spec.address}]" if ":" in spec.address else spec.address
    return f"http://{host}:{spec.port}"
