"""The agent: a session with the server, and the local back end that carries out what comes over it.

    hello ──▶ session: orders are polled for and handed to the local back end; its events go up as news
      ▲          │
      └──────────┘  whatever goes wrong with the session, there is a new one, and it begins with `adopt`

Everything here runs in one asyncio loop; the local back end has its own thread, and its events are posted to the loop. It
stays open while there is no session: runs are watched, and parts of one run hear of each other, also while the server is
away. Each answer of the server renews the lease of the node (`node_state.py`, `runner/fence.py`).
"""

import asyncio
import logging
import os
import signal
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError

from poise import __version__
from poise.scheduler.model.cluster import Cluster, Node
from poise.scheduler.model.errors import PoiseError
from poise.service.agent.checkpoint_keeper import CheckpointKeeper
from poise.service.agent.checkpoint_stores import PAUSES, ServerAccess, StoreAwayError, StoreProblemError
from poise.service.agent.gang import Gangs, PeerServer, serve_peers
from poise.service.agent.log_shipping import LogShipping
from poise.service.agent.node_checkpoints import NodeCheckpoints
from poise.service.agent.node_state import NodeStateDir
from poise.service.agent.one_run import OneRun, RunOverError
from poise.service.agent.report_times import ReportTimes
from poise.service.agent.tokens import AgentToken
from poise.service.backends.api import (
    BackendFailed,
    DesiredState,
    GangPart,
    RunBegan,
    RunEnded,
    RunEnding,
    RunNotice,
    RunOrder,
    RunPart,
    RunProgressed,
)
from poise.service.backends.local.backend import LocalBackend
from poise.service.backends.local.lease_files import now, one_line
from poise.service.backends.local.logs import LogFile
from poise.service.backends.local.orders import LocalSettings, NodeLease, ranks_here
from poise.service.backends.local.runner.fence import since_boot
from poise.service.backends.local.state_dir import StateDir
from poise.service.backends.run_table import Key
from poise.service.wire import agent_messages as messages
from poise.service.wire.agent_messages import MOST_NEWS, AgentNews, Hello, NodeSpec, PartOrder, Welcome
from poise.service.wire.request import Wire

LOG = logging.getLogger("poise.agent")
SOON, LATER = 0.1, 2.0  # seconds until the next try for a session: the shortest, and the longest
HOPELESS = 5.0  # the same if the server refuses this agent
ANSWER_SECONDS = 10.0  # how long to wait for an answer, beyond the time for which a request for orders is held
WITHHELD_GRACE = 10.0  # seconds until runs leave GPUs that others use: a node that has just begun may get them yet
TAKEN_SECONDS = 30.0  # for such a run to save its work
ANSWER_PART = 0.4  # of a lease: the most to wait for an answer, so that there is time for another connection
UNVERIFIED_SECONDS = 0.5  # until the next try if the server cannot tell whose token it is
ORPHANED_SECONDS = 300.0
"""How long an agent of one run waits for a server after its lease has ended, to hand in what the run has left."""
PASSING = frozenset({"starting", "session-over", "unverified"})
"""Refusals after which the next try comes at once."""

BROKEN = "another part of the run has ended"
A = TypeVar("A", bound=Wire)
Done = TypeVar("Done")


class SessionOverError(Exception):
    """The server refused a request, by this code; there has to be another session."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """What an agent is started with.

    server    URL of the server's listener for agents
    node      what it announces itself as; the port is filled in
    devices   UUIDs of real GPUs by slot; virtual ones have none
    verify    TLS context or True: how the server's certificate is checked
    token_file  has the token, and is looked at again and again; None: it stays as it is
    listen    address on which to listen for other agents; None: that of the node; "": all
    once      end with the one run that the node is there for
    orphaned  seconds for which to wait for the server then, once the lease has ended
    """

    server: str
    token: str
    node: NodeSpec
    state: Path
    settings: LocalSettings = field(default_factory=LocalSettings)
    devices: Mapping[int, str] = field(default_factory=dict)
    verify: ssl.SSLContext | bool = True
    token_file: Path | None = None
    listen: str | None = None
    once: bool = False
    orphaned: float = ORPHANED_SECONDS


@dataclass(eq=False, slots=True)
class Preparation:
    """A part whose files are being fetched. `part` is the latest order for it."""

    part: PartOrder
    task: asyncio.Task[None]


class NewsQueue:
    """News of one session that are not confirmed, numbered from 1.

    Progress waits until it is time to report it, and only the latest of a run is kept. The first that says that a run can
    leave does not wait: the scheduler may need that.
    """

    def __init__(self) -> None:
        self._news: deque[AgentNews] = deque()
        self._first = 1
        self._progress: dict[Key, messages.PartProgressed] = {}  # what waits, by run
        self._can_leave: set[Key] = set()  # runs of which that was said
        self.arrived = asyncio.Event()

    def put(self, news: AgentNews) -> None:
        """Add a piece of news."""
        if isinstance(news, messages.PartProgressed):
            key = news.job, news.epoch
            self._progress[key] = news
            if key not in self._can_leave and news.checkpoint is not None and news.throughput is not None:
                self._can_leave.add(key)
                self.release({key})
            return
        if isinstance(news, messages.PartEnded):
            self.release({(news.job, news.epoch)})
            self._can_leave.discard((news.job, news.epoch))
        self._news.append(news)
        self.arrived.set()

    def release(self, keys: Iterable[Key] | None) -> None:
        """Send the progress of these runs, or of all, with the next news."""
        for key in [*self._progress] if keys is None else keys:
            if key in self._progress:
                self._news.append(self._progress.pop(key))
                self.arrived.set()

    def pending(self) -> tuple[int, tuple[AgentNews, ...]]:
        """Return the news that were not confirmed, and the number of the first of them."""
        return self._first, tuple(islice(self._news, MOST_NEWS))

    def confirm(self, seen: int) -> None:
        """Forget what the server has."""
        while self._news and self._first <= seen:
            self._news.popleft()
            self._first += 1
        if not self._news:
            self.arrived.clear()

    @property
    def is_empty(self) -> bool:
        """Whether the server knows everything."""
        return not self._news


class Agent:
    """The agent of one node."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._state = NodeStateDir(config.state)
        try:
            self._open_connections(config)
        except BaseException:
            self._state.close()  # or no other agent could have the directory, not even in this process
            raise
        self._loop = asyncio.get_running_loop()
        self._backend: LocalBackend | None = None
        self._news: NewsQueue | None = None
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._session: str | None = None
        self.problem: str | None = None  # why there is no session; None: there is one, or it is the first try
        self._times = ReportTimes()
        self._logs = LogShipping(self._files, self._send_logs)
        self._preparing: dict[Key, Preparation] = {}
        self._open: dict[Key, frozenset[int]] = {}  # GPUs of runs that the local back end has, and that are not over
        self._killed: set[Key] = set()  # of those, the ones that are not wanted any more
        self._progress: dict[Key, RunProgressed] = {}  # the latest of each run
        self._ending: dict[asyncio.Task[None], Key] = {}  # parts that are over, and whose last words are on their way
        self._begun: set[Key] = set()  # open runs whose replicas have started
        self._one = OneRun(self._state, self._files, config.settings.starter) if config.once else None
        self._is_leaving = False  # sent TERM, and there for one run
        self.exit_code = 0

    def _open_connections(self, config: AgentConfig) -> None:
        """Open what may fail: files of the node, and certificates that connections are checked with."""
        self._files = StateDir(self._state.path)
        self._gangs = Gangs(config.node.name, self._files, self._end_part)
        self._token = AgentToken(config.token, config.token_file)
        self._access = access = ServerAccess(config.server, self._token, config.verify, lambda: self._session)
        checkpoints = NodeCheckpoints(self._files, self._state.path)
        self._checkpoints = CheckpointKeeper(
            config.node.name, checkpoints, access, self._state.path, on_kept=self._tell_progress
        )
        self._http = httpx.AsyncClient(base_url=config.server, verify=config.verify)

    async def run(self) -> None:
        """Serve until cancelled. Runs go on afterwards, and the next agent of the node finds them.

        Returns once there is nothing left to do, if the agent is there for one run; `exit_code` then says how it went.
        """
        peers: PeerServer | None = None
        try:
            if self._one is not None and await self._one.is_over():
                return
            peers = await serve_peers(self._gangs.app(), self._config.node, self._config.listen)
            self._config = replace(self._config, node=self._config.node.model_copy(update={"port": peers.port}))
            pause = SOON
            while True:
                pause = await self._try_session(pause)
                self._news = self._session = None
                await self._end_if_orphaned()
                await asyncio.sleep(pause)
        except RunOverError as over:
            assert self._one is not None
            await self._one.finish()
            self.exit_code = over.code
        finally:
            await self._close(peers)

    async def _try_session(self, pause: float) -> float:
        """Hold a session as long as it lasts; return how long to wait for the next, given how long that was before."""
        try:
            await self._hold_session()
        except SessionOverError as error:
            if error.code in PASSING:
                return SOON
            self.problem = f"{error.code}: {error}"
            LOG.warning("%s", self.problem)
            if error.code == "not-wanted" and self._one is not None:
                await self._end_all()
                raise RunOverError(0) from None
            return HOPELESS
        except httpx.HTTPError as error:
            self.problem = f"no connection to {self._config.server}: {error!r}"
            if self._session is not None or pause == SOON:  # once, not at each try
                LOG.warning("%s", self.problem)
            return SOON if self._session is not None else min(pause * 2, LATER)
        except OSError as error:
            self.problem = f"{self._state.path}: {error}; the lease of this node is not renewed"
            LOG.warning("%s", self.problem)
            return LATER
        return pause

    async def _end_if_orphaned(self) -> None:
        """End an agent of one run that has had no server for so long that there is nothing left to hand in to one."""
        if self._one is not None and self._one.was_ordered and self._state.out_for() > self._config.orphaned:
            LOG.warning("the lease of this node has ended, and with it what ran here; %s", self.problem)
            await self._end_all()
            raise RunOverError(1)

    async def _end_all(self) -> None:
        """End what runs here, without a server to tell."""
        self._news = self._session = None
        if self._backend is None:
            return  # whatever there is was left by an earlier agent: the starter ends it
        settings = self._config.settings
        deadline = self._loop.time() + settings.term_seconds + settings.guard_seconds
        for key in [*self._preparing]:
            self._call_off(key)
        for key in self._open:
            self._backend.kill(*key, "it is not wanted any more")
        while self._open and self._loop.time() < deadline:
            await asyncio.sleep(SOON)

    async def _close(self, peers: PeerServer | None) -> None:
        """Close all that makes work for others before what it is done with: a run may end while the agent does."""
        try:
            if peers is not None:
                await peers.close()
            if self._backend is not None:
                await asyncio.to_thread(self._backend.close)
                await asyncio.sleep(0)  # what it has reported until then has been posted, and is heard before this returns
            left = [*(each.task for each in self._preparing.values()), *self._ending]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await self._gangs.close()
            await asyncio.to_thread(self._checkpoints.close)
            self._access.close()
            await self._http.aclose()
            self._files.close()
        finally:
            self._state.close()

    def withhold(self, slots: tuple[int, ...]) -> None:
        """Tell the server that from now on these GPUs are used by others. Called in the agent's loop."""
        if slots != self._config.node.withheld:
            self._config = replace(self._config, node=self._config.node.model_copy(update={"withheld": slots}))
            self._tell(messages.NodeWithholds(slots=slots))
            self._loop.call_later(WITHHELD_GRACE, self._leave_withheld)

    def _leave_withheld(self) -> None:
        """Ask runs to leave that have GPUs which others use: Ray may have given them away while its node was restarted."""
        withheld = set(self._config.node.withheld)
        for key, slots in self._open.items():
            if self._backend is not None and slots & withheld:
                self._backend.stop(*key, RunNotice("lease-end", "others use its GPUs now", TAKEN_SECONDS))
        for key, preparation in [*self._preparing.items()]:
            if self._slots(preparation.part) & withheld:
                self._call_off(key)

    async def run_until_signalled(self) -> None:
        """Serve until SIGTERM or SIGINT.

        An agent that is there for one run goes on until that has ended and the server knows: what it runs in is being ended,
        the run before it. A second signal ends it at once.
        """
        task = asyncio.current_task()
        assert task is not None

        def heed() -> None:
            if self._is_leaving or self._one is None or not (self._one.was_ordered or self._preparing):
                task.cancel()
            else:
                self._is_leaving = True
                self._leave()

        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, heed)
        with suppress(asyncio.CancelledError):
            await self.run()

    def _leave(self) -> None:
        """End what has not begun, and never will: what would start it goes away too. What runs is told so by itself."""
        for key in [*self._preparing]:
            self._call_off(key)
        for key in self._open.keys() - self._begun:
            self._killed.add(key)
            self._local.kill(*key, "the machine goes down")

    def _check_over(self) -> None:
        """End an agent that is there for one run, once the server knows how that has ended."""
        if self._one is None or not self._one.has_ended or self._open or self._preparing or self._ending:
            return
        if self._news is not None and self._news.is_empty:
            raise RunOverError(0)

    # The session

    async def _hold_session(self) -> None:
        """Say hello, then pass orders and news until something goes wrong, which is raised."""
        state = self._state
        state.check()
        service = state.service if await asyncio.to_thread(state.has_runs) else None
        hello = Hello(
            protocol=messages.PROTOCOL, version=__version__, node=self._config.node, identity=state.identity, service=service
        )
        sent = since_boot()
        welcome = await self._ask("hello", hello, Welcome, ANSWER_SECONDS)
        if state.belong_to(welcome.service):
            self._files.reopen()
        if state.has_run_out():
            # Their runs may have been started elsewhere since. Those that are still wanted here are ordered again.
            for key in [*self._preparing]:
                self._call_off(key)
        state.renew(sent, welcome.lease)
        self.problem = None
        LOG.info("node %s serves %s", self._config.node.name, self._config.server)
        self._news, self._session = NewsQueue(), welcome.session
        tasks = [
            self._loop.create_task(self._logs.run(self._times)),
            self._loop.create_task(self._report_progress(self._news)),
            self._loop.create_task(self._checkpoints.run()),
            self._loop.create_task(self._pass_orders(welcome)),
            self._loop.create_task(self._pass_news(welcome, self._news)),
        ]
        try:
            done, _ = await asyncio.wait([*tasks, self._failure], return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # a cancellation of the agent itself is not swallowed

    async def _pass_orders(self, welcome: Welcome) -> None:
        done = 0
        while True:
            request = messages.OrdersRequest(session=welcome.session, done=done)
            sent = since_boot()
            answer = await self._ask("orders", request, messages.OrdersAnswer, welcome.poll + _patience(welcome))
            self._renew(sent, welcome)
            self._times.every = answer.every
            for number, order in enumerate(answer.orders, answer.first):
                if number == done + 1:
                    await self._carry_out(order, welcome)
                    done = number

    async def _pass_news(self, welcome: Welcome, queue: NewsQueue) -> None:
        while True:
            await queue.arrived.wait()
            first, news = queue.pending()
            request = messages.NewsRequest(session=welcome.session, now=now(), first=first, news=news)
            sent = since_boot()
            answer = await self._ask("news", request, messages.NewsAnswer, _patience(welcome))
            self._renew(sent, welcome)
            queue.confirm(answer.seen)
            self._check_over()

    def _renew(self, sent: float, welcome: Welcome) -> None:
        """Renew the lease by an answer to what was sent then. After a gap, the next session says anew what may run here."""
        if self._state.has_run_out():
            raise SessionOverError("session-over", "the lease of this node has ended")
        self._state.renew(sent, welcome.lease)

    async def _renewing(self, work: Coroutine[Any, Any, None], welcome: Welcome) -> None:
        """Do something that may take longer than a lease, and renew the lease meanwhile, by news that say nothing."""
        task = self._loop.create_task(work)
        try:
            while not (await asyncio.wait([task], timeout=welcome.poll))[0]:
                request = messages.NewsRequest(session=welcome.session, now=now(), first=1, news=())
                sent = since_boot()
                await self._ask("news", request, messages.NewsAnswer, _patience(welcome))
                self._renew(sent, welcome)
        finally:
            task.cancel()
            await asyncio.wait([task])
        task.result()

    async def _report_progress(self, queue: NewsQueue) -> None:
        async for keys in self._times.reports():
            queue.release(keys)

    async def _ask(self, what: str, message: Wire, answer: type[A], seconds: float) -> A:
        body, kind = message.model_dump_json(), {"Content-Type": "application/json"}
        return await self._accepted(f"/agent/{what}", answer, content=body, headers=kind, timeout=seconds)

    async def _accepted(self, path: str, answer: type[A], **more: Any) -> A:  # noqa: ANN401 - of httpx
        """Ask, and again while the server cannot tell whose token it is: that must not end a session."""
        while True:
            try:
                return _answer(await self._post(path, **more), answer)
            except SessionOverError as error:
                if error.code != "unverified" or self._state.has_run_out():
                    raise
            await asyncio.sleep(UNVERIFIED_SECONDS)

    async def _post(self, path: str, **more: Any) -> httpx.Response:  # noqa: ANN401 - of httpx
        """Send a request, and again if the connection breaks: what the server has had before it drops.

        Otherwise a session would not outlive one answer that is lost, and on a bad line none would get anywhere.
        """
        headers = {"Authorization": f"Bearer {self._token()}", **more.pop("headers", {})}
        for pause in PAUSES:
            try:
                return await self._http.post(path, headers=headers, **more)
            except httpx.TimeoutException:  # has taken long enough
                raise
            except httpx.TransportError:
                await asyncio.sleep(pause)
        return await self._http.post(path, headers=headers, **more)

    async def _send_logs(self, pieces: Sequence[messages.LogPiece], text: bytes) -> tuple[int | None, ...]:
        """Send pieces of logs; return which byte of each the server wants next. None: it cannot keep it now."""
        if self._session is None:
            raise SessionOverError("session-over", "there is no session")
        head = messages.LogsRequest(session=self._session, pieces=tuple(pieces)).model_dump_json()
        body = head.encode() + b"\n" + text
        answer = await self._accepted("/agent/logs", messages.LogsAnswer, content=body, timeout=ANSWER_SECONDS)
        return answer.received

    # Orders

    async def _carry_out(self, order: messages.AgentOrder, welcome: Welcome) -> None:
        match order:
            case messages.AdoptOrder():
                await self._renewing(self._adopt(order, welcome), welcome)
            case messages.LaunchOrder():
                self._launch(order.part)
            case messages.PeersOrder():
                self._move_peers(order.part)
            case messages.StopOrder():
                if self._has((order.job, order.epoch)):
                    self._local.stop(order.job, order.epoch, RunNotice(order.cause, order.text, order.deadline))
            case messages.KillOrder():
                if self._has((order.job, order.epoch)):
                    self._killed.add((order.job, order.epoch))
                    self._local.kill(order.job, order.epoch, order.reason)
            case messages.WatchOrder():
                self._times.watch((order.job, order.epoch))

    def _has(self, key: Key) -> bool:
        """Whether the local back end has a part that is to end. Otherwise it is over, or will never begin, which is said."""
        if key in self._open:
            return True
        if not self._call_off(key) and key not in self._ending.values():
            self._tell(_unbegun(key))
        return False

    @property
    def _local(self) -> LocalBackend:
        if self._backend is None:
            raise PoiseError("the server's first order was not to adopt")
        return self._backend

    async def _adopt(self, order: messages.AdoptOrder, welcome: Welcome) -> None:
        """Open a new local back end, which looks at the directories of all runs, and end those that are not listed."""
        config, name = self._config, self._config.node.name
        if self._one is not None:
            if self._one.was_ordered and not order.parts:
                await self._end_all()
                raise RunOverError(0)
            self._one.reopen()
        if self._backend is not None:
            await asyncio.to_thread(self._backend.close)
        self._forget_all()
        spec = config.node
        cluster = Cluster((Node(spec.name, spec.gpu_type, spec.gpus, spec.rack),))
        settings = replace(
            config.settings, node_lease=NodeLease(self._state.lease_file, welcome.lease, self._state.leased_since)
        )
        devices = {(name, slot): device for slot, device in config.devices.items()}
        self._backend = backend = LocalBackend(cluster, self._state.path, self._hear, devices=devices, settings=settings)
        runs: list[tuple[RunOrder, DesiredState]] = []
        beginning: list[PartOrder] = []  # ordered before, but nothing of it is on the disk
        for part in order.parts:
            given, desired = part.order, DesiredState(part.desired)
            is_here = backend.has_run(given.job, given.epoch)
            can_begin = part.may_begin and (given.gpus[0][0] == name or given.port != 0)
            if can_begin and not is_here and desired is DesiredState.RUN:
                beginning.append(given)
            elif can_begin or is_here:
                runs.append((self._enter(given), desired))
                if desired is DesiredState.GONE:
                    self._killed.add((given.job, given.epoch))
            else:
                self._tell(messages.PartUnknown(job=given.job, epoch=given.epoch))
        self._logs.keep(self._open)
        self._gangs.keep(self._open)
        await asyncio.to_thread(backend.adopt, runs)
        for given in beginning:
            self._launch(given)
        # What `adopt` has reported was posted to this loop before it returned, so it is in the queue before this.
        await asyncio.sleep(0)
        self._tell(messages.NodeAdopted())
        if self._is_leaving:
            self._leave()
        self._loop.call_later(WITHHELD_GRACE, self._leave_withheld)

    def _forget_all(self) -> None:
        """Forget all runs, before the server says again which are open here. What was transferred for them is given up."""
        for task in (*(each.task for each in self._preparing.values()), *self._ending):
            task.cancel()
        for known in (self._preparing, self._progress, self._open, self._killed, self._begun):
            known.clear()
        self._checkpoints.forget_all()

    def _launch(self, part: PartOrder) -> None:
        """Begin a part once its files are here. An order that is given again changes nothing."""
        key = part.job, part.epoch
        if self._is_leaving and key not in self._open:
            self._tell(_unbegun(key))
        elif key not in self._open and key not in self._preparing:
            if self._one is not None:
                self._one.was_ordered = True
            self._preparing[key] = Preparation(part, self._loop.create_task(self._prepare(key)))
            self._gangs.expect(part)

    def _move_peers(self, part: PartOrder) -> None:
        """Note where the other parts are now, unless this one is over."""
        key = part.job, part.epoch
        if key in self._open:
            self._gangs.enter(part, self._order(part))
        elif key in self._preparing:
            self._preparing[key].part = self._preparing[key].part.model_copy(update={"peers": part.peers})

    async def _prepare(self, key: Key) -> None:
        """Have a part begin with what is kept, or end because that is not possible."""
        preparation = self._preparing[key]
        try:
            while self._checkpoints.has_earlier(key):
                await asyncio.sleep(SOON)
            await self._checkpoints.prepare(preparation.part)
        except StoreProblemError as error:
            await self._report_unstartable(preparation.part, str(error), error.cause)
        except Exception as error:  # of this part alone; the server would wait for it for ever
            LOG.exception("job %s: run %d cannot be prepared", *key)
            await self._report_unstartable(preparation.part, repr(error), one_line(f"fault of the agent: {error!r}"))
        else:
            if self._slots(preparation.part) & set(self._config.node.withheld):
                self._tell(_unbegun(key))  # others use its GPUs by now
                return
            # Only now do other nodes find the run here. So rank 0, which saves once all of them know at which step, cannot
            # have replaced what this node has just fetched.
            self._local.launch(self._enter(preparation.part))
        finally:
            if self._preparing.get(key) is preparation:
                del self._preparing[key]
                self._gangs.dismiss(key)

    def _call_off(self, key: Key) -> bool:
        """End a part whose files are still being fetched; False: there is none such."""
        preparation = self._preparing.pop(key, None)
        if preparation is None:
            return False
        preparation.task.cancel()
        self._gangs.dismiss(key)
        self._tell(_unbegun(key))
        return True

    async def _report_unstartable(self, part: PartOrder, problem: str, cause: str) -> None:
        """Report that a part could not begin, and say in its log why."""
        key, order = (part.job, part.epoch), self._order(part)
        ranks = ranks_here(order)
        self._logs.enter(key, ranks)
        self._say(part.job, ranks[0], f"cannot start: {problem}")
        with suppress(httpx.HTTPError, SessionOverError):
            await self._logs.finish(key)
        at = now()
        self._tell(
            messages.PartEnded(
                job=part.job, epoch=part.epoch, at=at, how="failed", steps=None, cause=cause, codes=(), failed_at=at
            )
        )

    def _say(self, job: str, rank: int, text: str) -> None:
        """Write a line of Poise's own to a replica's log, whose runner is not there or has ended."""
        with suppress(OSError):
            folder = self._files.open_logs(job)
            log = LogFile(folder, rank, self._config.settings.log_bytes, self._config.settings.log_files)
            try:
                log.title(text)
            finally:
                log.close()
                os.close(folder)

    def _order(self, part: PartOrder) -> RunOrder:
        gpus = tuple(RunPart(node, gpu_type, slots) for node, gpu_type, slots in part.gpus)
        here = GangPart(self._config.node.name, part.master, part.port)
        return RunOrder(
            part.job, part.epoch, gpus, part.request, part.tenant, part.ran, part.beside, part.speeds, part.reason, here
        )

    def _slots(self, part: PartOrder) -> frozenset[int]:
        """Return the GPUs of this node that a part has."""
        mine = (slots for node, _, slots in part.gpus if node == self._config.node.name)
        return frozenset(slot for slots in mine for slot in slots)

    def _enter(self, part: PartOrder) -> RunOrder:
        """Return the order for the local back end. From now on logs are shipped, checkpoints kept, files passed on."""
        order = self._order(part)
        self._open[part.job, part.epoch] = self._slots(part)
        self._checkpoints.enter(part)
        self._gangs.enter(part, order)
        self._logs.enter((part.job, part.epoch), ranks_here(order))
        return order

    def _end_part(self, key: Key, how: RunEnding) -> None:
        """Another part of a run has ended without finishing: this one cannot go on alone."""
        if self._call_off(key):
            return
        if how is RunEnding.FAILED:
            self._local.kill(*key, BROKEN)
        elif (deadline := self._gangs.deadline(key)) is not None:
            self._local.stop(*key, RunNotice("lease-end", BROKEN, deadline))

    # Events of the local back end

    def _hear(self, event: object) -> None:
        """Called in the thread of the local back end."""
        with suppress(RuntimeError):  # the loop is closed: the agent ends
            self._loop.call_soon_threadsafe(self._heard, event)

    def _heard(self, event: object) -> None:
        match event:
            case RunBegan():
                self._begun.add((event.job, event.epoch))
                port = self._local.master_port(event.job, event.epoch)
                self._tell(messages.PartBegan(job=event.job, epoch=event.epoch, at=event.at, port=port, begun=event.begun))
            case RunProgressed():
                self._progress[event.job, event.epoch] = event
                self._tell_progress((event.job, event.epoch))
            case RunEnded():
                self._gangs.ended((event.job, event.epoch), event.how)
                self._open.pop((event.job, event.epoch), None)
                self._begun.discard((event.job, event.epoch))
                ending = self._loop.create_task(self._report_end(event))
                self._ending[ending] = event.job, event.epoch
                ending.add_done_callback(self._ending.pop)
            case BackendFailed() if not self._failure.done():
                self._failure.set_exception(PoiseError(f"the local back end has stopped: {event.problem}"))

    def _tell_progress(self, key: Key) -> None:
        """Pass on what a run has reported last. Of its checkpoints, only those count that are kept."""
        event = self._progress.get(key)
        if event is not None:
            self._tell(
                messages.PartProgressed(
                    job=event.job, epoch=event.epoch, at=event.at, steps=event.steps, total=event.total,
                    checkpoint=self._checkpoints.newest(key, event.checkpoint), throughput=event.throughput, loss=event.loss,
                )
            )  # fmt: skip

    async def _report_end(self, event: RunEnded) -> None:
        """Report the end of a part; if something unforeseen prevents that, report that it has failed."""
        try:
            await self._tell_end(event)
        except SessionOverError:
            pass  # the next session reports the end again
        except Exception as error:  # of this part alone; the server would wait for it for ever
            LOG.exception("job %s: the end of run %d cannot be reported", event.job, event.epoch)
            self._checkpoints.forget((event.job, event.epoch))
            self._tell(
                messages.PartEnded(
                    job=event.job, epoch=event.epoch, at=event.at, how="failed", steps=None,
                    cause=one_line(f"fault of the agent: {error!r}"), codes=event.codes, failed_at=event.at,
                )
            )  # fmt: skip

    async def _tell_end(self, event: RunEnded) -> None:
        """Report the end of a part, once its last checkpoint is kept, and its last words are with the server.

        The next run may be on another node, and so may be who reads them.
        """
        key, failed_at, how, cause = (event.job, event.epoch), None, event.how, event.cause
        problem = await self._persist(lambda: self._checkpoints.finish(key, is_wanted=key not in self._killed))
        kept = self._checkpoints.kept_steps(key, event.steps)
        steps = event.steps if how is RunEnding.FINISHED else kept
        if problem is not None:
            self._say(event.job, 0, f"its last checkpoint is not kept: {problem}")
            if how is RunEnding.YIELDED and key not in self._killed:
                how, cause, failed_at = RunEnding.FAILED, problem.cause, event.at
        await self._persist(lambda: self._logs.finish(key))
        failed_at = failed_at or self._local.failed_at(*key)
        self._tell(
            messages.PartEnded(
                job=event.job, epoch=event.epoch, at=event.at, how=how.value, steps=steps, cause=cause,
                codes=event.codes, failed_at=failed_at,
            )
        )  # fmt: skip
        self._progress.pop(key, None)
        self._killed.discard(key)

    async def _persist(self, action: Callable[[], Awaitable[Done]]) -> Done:
        """Do something with the server, and again if that fails on the way; SessionOverError once there is no session."""
        while True:
            try:
                return await action()
            except (httpx.HTTPError, StoreAwayError):
                if self._session is None:
                    raise SessionOverError("session-over", "there is no session") from None
                await asyncio.sleep(SOON)

    def _tell(self, news: AgentNews) -> None:
        """Pass news on. Without a session they are dropped: the next one begins with a look at all runs."""
        if self._news is not None:
            self._news.put(news)
            if self._one is not None and isinstance(news, messages.PartEnded):
                self._one.ended(news)


def _unbegun(key: Key) -> messages.PartEnded:
    """The end of a part of which nothing was started, or is known."""
    return messages.PartEnded(
        job=key[0], epoch=key[1], at=now(), how="yielded", steps=None, cause=None, codes=(), failed_at=None
    )


def _patience(welcome: Welcome) -> float:
    """Seconds to wait for an answer of the server, on a connection that may lead nowhere any more."""
    return min(ANSWER_SECONDS, ANSWER_PART * welcome.lease)


def _answer(response: httpx.Response, kind: type[A]) -> A:
    """Read an answer of the server; SessionOverError if it refused, HTTPError if something between us did."""
    if response.is_success:
        try:
            return kind.model_validate_json(response.content)
        except ValidationError:
            raise httpx.RemoteProtocolError("that is no answer of a Poise server", request=response.request) from None
    try:
        refusal = messages.AgentRefusal.model_validate_json(response.content)
    except ValueError:
        response.raise_for_status()
        raise
    raise SessionOverError(refusal.code, refusal.detail)
