"""The engine: one thread that takes what has arrived, asks the core, commits, and only then acts and answers.

Read `turn` and `_process` first. Together they are the whole pipeline:

    1. take what has arrived: commands from the API, news from the back end, the time
    2. turn it into a batch of facts                                               batch.py
    3. ask the core, and apply facts and actions to the records                    service_state.py
    4. commit all of it in one transaction                                         storage/store.py
    5. dispatch: tell the back end what to stop and what to start
    6. answer the commands

Threads. HTTP handlers call `put`, the back end calls `_hear`; both only append to the inbox. Everything that changes the
state happens in the engine's thread, under `lock`. Readers (`service.py`) take the lock too. It is released while the core
plans, which can take seconds, and it is not held during commits and dispatch.

What a loss costs. The service may be killed at any instant (docs/design/0009-live.md). Before step 4: nothing has happened,
and clients that got no answer ask again. After it: at the next start the journal is replayed and the back end is handed
every run whose end is unknown. A commit that fails is handled the same way: the state in memory is thrown away and read back
from the store. The inbox is never stored: commands in it are refused, and news is found again in the back end's own files.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import accumulate, islice
from math import inf
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter, thread_time
from typing import assert_never

from poise.engine.journal import Header
from poise.engine.loop import collector_paused, freeze_heap
from poise.scheduler.model.errors import InvariantError, JournalError, PoiseError, PolicyError, RequestError
from poise.scheduler.model.event import Belated, Event, Woke
from poise.service.backends.api import (
    AllFound,
    BackendFailed,
    DesiredState,
    Finding,
    JobFinder,
    JobFound,
    JobGone,
    JobHeld,
    LiveBackend,
    NodeReport,
    NodeState,
    RunBegan,
    RunEnded,
    RunEnding,
    RunEvent,
    RunOrder,
    TenantWeighed,
)
from poise.service.server import service_api as api
from poise.service.server.batch import CANCELLED_AT_ONCE, BatchBuilder, is_lost_run, late_news
from poise.service.server.dependencies import Dependencies
from poise.service.server.records import JobRecord, RunRecord
from poise.service.server.recovery import (
    is_started_as_before,
    recover,
    renewed,
    set_aside,
    set_weight,
    wanted_header,
)
from poise.service.server.service_api import (
    Command,
    RefusalCode,
    RequestRefusedError,
    frees_room,
    fulfil,
    refuse,
)
from poise.service.server.service_state import JOB_ENDED, Batch, Outcome, ServiceState
from poise.service.server.shipped_archives import ENVIRONMENT_MISSING, EnvironmentGoneError
from poise.service.server.storage.store import Changes, StorageError
from poise.service.wire.environments import joined
from poise.service.wire.request import JobRequest, Submission
from poise.service.wire.views import Account, Role, SubmittedView

MOST_AT_ONCE = 512  # commands and pieces of news in one commit; a submission counts as many times as it has jobs
SLOW_CHAPTER = 60.0  # start a new chapter after this many seconds of decision time; bounds the replay at a restart
LONG_CHAPTER = 50_000  # start a new chapter after this many entries, for the same reason
MANY_ENDED = 100_000  # start a new chapter after this many jobs have ended in it: the core remembers each of them
RETRY_SECONDS = 1.0  # between two attempts to write to a disk that is full
GROWTH = 10_000  # new jobs after which the objects in memory are frozen: the garbage collector looks at them no more
LONGEST_WAIT = 3_600.0  # seconds without a look at the clock
LATE = 2.0  # seconds after which news is late: the core is told of it as of when it happened
JOIN_SECONDS = 1.0  # for how long after a node has joined others are waited for, so that all of them are one new chapter
REST = 8.0  # CPU time of a turn × this: for how long news waits for more news after it, so that many are decided together
LONGEST_REST = 0.5
STOPPING = "the service is stopping"
FINDER = Account(name="back-end", tenant="default", role=Role.ADMIN)
"""Who submits, cancels and weighs what the back end has found. Quotas are for people: what was created elsewhere exists."""

News = RunEvent | NodeReport
Item = Command | News | Finding | BackendFailed


class ServiceEngine:
    """The engine's thread, its inbox and its state. Tests call `open` and `turn` themselves, without the thread.

    trouble   why commands are refused now; None: they are accepted
    """

    def __init__(self, deps: Dependencies) -> None:
        self.deps = deps
        self.store = deps.store
        self.lock = threading.RLock()
        self.trouble: RequestRefusedError | None = RequestRefusedError(RefusalCode.NOT_READY, "the service is starting")
        self.failed: BaseException | None = None  # what the engine died of, if it did
        self.state: ServiceState
        self.backend: LiveBackend
        self.clock = deps.new_clock(self.store.last_time())
        self.began = self.clock.now()
        self._inbox: SimpleQueue[Item | None] = SimpleQueue()  # None only wakes the thread up
        self._closing, self._over, self._started = threading.Event(), threading.Event(), threading.Event()
        self._full: RequestRefusedError | None = None
        """Set while the disk is full but for the reserve: the refusal of commands that need room."""
        self._looked = -inf
        self._loss_reported: dict[str, float] = {}
        self._deciding = 0.0  # seconds of decision time in this chapter
        self._busy = inf, -inf  # when the last turn began to do something, and when it was done
        self._rest_until = -inf  # on the monotonic clock
        self._frozen = 0
        self._joining: dict[str, NodeReport] = {}  # nodes that are to be part of the cluster, as they were last reported
        self._join_at = inf  # when that chapter is due
        self._last = self.store.last_time()  # time of the last entry of the journal; entries never go back in time
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread; return once the state is recovered and runs are adopted, or raise what went wrong."""
        self._thread.start()
        self._started.wait()
        if self.failed is not None:
            self._thread.join()  # the back end is closed, and acts no more, before anybody can start another server
            raise self.failed

    def close(self) -> None:
        """Stop deciding. Jobs go on running."""
        self._closing.set()
        self._inbox.put(None)
        self._thread.join()

    def put(self, command: Command) -> None:
        """Enqueue a command, or refuse it at once. Called from any thread."""
        if self._closing.is_set():
            refuse(command, RequestRefusedError(RefusalCode.NOT_READY, STOPPING))
        elif self.trouble is not None and (self._full is None or not frees_room(command)):
            refuse(command, self.trouble)
        else:
            self._inbox.put(command)
            if self._over.is_set():  # that was too late for the engine to see it
                self._refuse(self._drain())

    def _hear(self, news: News | Finding | BackendFailed) -> None:
        """Enqueue news, dated by the service's clock. Called from any thread of the back end."""
        self._inbox.put(replace(news, at=self.clock.from_wall(news.at)) if isinstance(news, News) else news)

    def _run(self) -> None:
        try:
            self.open()
            self._started.set()
            while not self._closing.is_set():
                self.turn(self._timeout())
        except BaseException as error:  # whatever it is, it ends the service, and `start` or `serve` reports it
            self.failed = error
            self.trouble = RequestRefusedError(RefusalCode.NOT_READY, f"the engine has stopped: {error}")
            if self._started.is_set() or not isinstance(
                error, PoiseError
            ):  # else `start` raises a sentence that says it all
                self.deps.log.error("engine-stopped", problem=f"{type(error).__name__}: {error}")  # noqa: TRY400
        finally:
            self._started.set()
            self._over.set()
            self._refuse(self._drain())
            if hasattr(self, "backend"):
                self.backend.close()
            self.store.close()

    # The pipeline.

    @property
    def is_idle(self) -> bool:
        """Nothing has arrived, and it is time neither to wake the core nor to take in nodes."""
        return self._inbox.empty() and self._next_time() > self.clock.now()

    def _next_time(self) -> float:
        """When there is something to do even if nothing arrives."""
        wake = self.state.wake
        return min(inf if wake is None else wake, self._join_at, self.state.conditions.next_time())

    def _timeout(self) -> float | None:
        """Seconds until the core has to be woken, nodes taken in, or a full disk looked at; None: none of them."""
        if self._full is not None:
            return RETRY_SECONDS
        at = self._next_time()
        return None if at == inf else min(max(0.0, at - self.clock.now()), LONGEST_WAIT)

    def turn(self, timeout: float | None) -> None:
        """Process what has arrived, or arrives within `timeout` seconds; wake the core if it is time for that."""
        # 1. Take what has arrived.
        items = list(self._take(timeout))
        cpu = thread_time()
        commands = [each for each in items if isinstance(each, Command)]
        commands += self._commands_of(each for each in items if isinstance(each, Finding))
        began = self.clock.now()
        try:
            news = _news(items)
            if self._full is not None:
                self._process_on_full_disk(commands, news)
                return
            # In this order: late news as of when it happened, then the core's own wake-up call, then the present.
            news = self._process_late(news, began - LATE)
            self._wake_core()
            if news or commands:
                followups = self._process((self.clock.now(), [], [*news, *commands]))  # ends free GPUs for new jobs
                self._follow_up(followups)
            # A job may begin now, or the core has just ended one that others wait for.
            if self.state.conditions.next_time() <= (now := self.clock.now()):
                self._process((now, [], []))
            if self._join_at <= self.clock.now():
                self._take_in_nodes()
            # A restart has to decide the whole chapter again, and the core remembers every job of it.
            ended = len(self.state.scheduler.state.rows) - len(self.state.records)
            if self._deciding > SLOW_CHAPTER or self.store.chapter_length > LONG_CHAPTER or ended > MANY_ENDED:
                self._begin_chapter(None)
        except StorageError as error:
            self._survive_full_disk(error, commands)
        except Exception as error:
            self.trouble = RequestRefusedError(RefusalCode.NOT_READY, f"the engine has stopped: {error}")
            self._refuse(commands)
            raise
        if len(self.state.records) > self._frozen + GROWTH:
            self._frozen = len(self.state.records)
            freeze_heap()
        self._busy = began, self.clock.now()
        self._rest_until = monotonic() + min(REST * (thread_time() - cpu), LONGEST_REST)

    def _take(self, timeout: float | None) -> Iterator[Item]:
        """Take what has arrived. News waits for more for a moment: a decision costs the same for one piece and for many.

        Commands do not wait, because a user waits for the answer. Nor does the core when it has to be woken.
        """
        left = MOST_AT_ONCE
        rest_until = self._rest_until if timeout is None else min(self._rest_until, monotonic() + timeout)
        with suppress(Empty):
            item = self._inbox.get(timeout=timeout)
            while item is not None:
                yield item
                match item:
                    case api.SubmitJobs():
                        left -= len(item.submission.jobs)
                    case api.CancelJobs():
                        left -= CANCELLED_AT_ONCE
                    case NodeReport():
                        pass  # all nodes that have joined are one chapter, which takes the core through all jobs
                    case _:
                        left -= 1
                if left <= 0:
                    return
                if not isinstance(item, RunEvent):
                    rest_until = -inf
                rest = rest_until - monotonic()
                item = self._inbox.get(timeout=rest) if rest > 0 else self._inbox.get_nowait()

    def _commands_of(self, findings: Iterable[Finding]) -> Iterator[Command]:
        """What a user would have asked for of jobs that exist outside of Poise, and that the back end has found."""
        for each in findings:
            match each:
                case JobFound():
                    yield from self._found(each)
                case JobGone() if each.job in self.state.records:
                    yield api.ChangeJob(FINDER, each.job, api.Verb.CANCEL)
                case JobHeld() if each.job in self.state.records:
                    yield api.ChangeJob(FINDER, each.job, api.Verb.STOP if each.is_held else api.Verb.RELEASE)
                case AllFound():
                    for key, job in self.store.submissions.by(FINDER.name):
                        if job in self.state.records and key not in each.keys:
                            yield api.ChangeJob(FINDER, job, api.Verb.CANCEL)
                case TenantWeighed() if self.state.weight_of(each.tenant) != each.weight:
                    yield api.SetWeight(FINDER, each.tenant, each.weight)
                case JobGone() | JobHeld() | TenantWeighed():
                    pass  # the job has ended; the weight is known
                case _:
                    assert_never(each)

    def _found(self, found: JobFound) -> Iterator[Command]:
        """Submit a job that was found, unless it was before; its back end is told what became of that."""
        finder: JobFinder = self.backend  # type: ignore[assignment]  # a back end that finds jobs is one
        by = FINDER.model_copy(update={"tenant": found.tenant})
        known = self.store.submissions.known(found.key, by)
        if known:
            finder.accepted(found.key, known[0], is_over=known[0] not in self.state.records)
            return
        command = api.SubmitJobs(by, Submission(jobs=(found.request,), key=found.key))
        command.reply.add_done_callback(lambda reply: _tell_finder(finder, found.key, reply))
        try:
            self.state.admission.admit(found.request)
        except RequestRefusedError as error:
            refuse(command, error)
        else:
            yield command

    def _process(self, *arrived: tuple[float, Sequence[Event], Sequence[Command | News]]) -> list[Command]:
        """Take what arrived through steps 2 to 6; return the commands that have to follow.

        Each element is one entry of the journal: its time, facts of the engine's own, and what arrived. All are committed
        together, or none is; then StorageError is raised, nothing was dispatched or answered, and the state in memory must
        not be used again.
        """
        outcomes: list[Outcome] = []
        changes: list[Changes] = []
        followups: list[Command] = []
        for now, events, items in arrived:
            with self.lock:
                # 2. Turn it into facts.
                builder = BatchBuilder(self.state, self.deps, self._loss_reported, now)
                for event in events:
                    builder.batch.add(event)
                for item in items:
                    builder.take(item)
                builder.look_at_conditions()
                builder.note_empty_nodes()
                followups += builder.followups
                self._note_joining(builder.reports)
                # 3. Ask the core.
                outcome = self._decide(builder.batch)
            outcomes.append(outcome)
            if outcome.actions is not None or outcome.batch.touched or outcome.batch.nodes:
                changes.append(self.state.changes(outcome))
        # 4. Commit. If that fails, what follows does not happen: no run was started or stopped, no client was
        # answered, and `turn` goes back to what the store has.
        self._commit(changes)
        for outcome in outcomes:
            # 5. Dispatch. If the service dies from here on, the next start repeats it from the journal.
            self._dispatch(outcome)
            # 6. Answer. A client that gets no answer asks again; keys make a repeated submission harmless.
            for reply in outcome.batch.replies:
                reply()
        return followups

    def _decide(self, batch: Batch) -> Outcome:
        """Ask the core, unless the batch says nothing that concerns it: records may still have changed."""
        if not batch.events and not batch.notes:
            self.state.count(batch.touched)
            return Outcome(batch)
        began = perf_counter()
        outcome = self.state.apply(batch)
        took = perf_counter() - began
        self._deciding += took
        self.deps.metrics.decision.observe(took)
        self._last = batch.now
        return outcome

    def _commit(self, changes: Sequence[Changes]) -> None:
        if not changes:
            return
        began = perf_counter()
        self.store.commit(changes)
        self.deps.metrics.commit.observe(perf_counter() - began)
        self.deps.metrics.commits.inc()
        self.deps.metrics.entries.inc(sum(each.entry is not None for each in changes))
        with self.lock:
            for each in changes:
                self.state.committed(each)

    def _dispatch(self, outcome: Outcome) -> None:
        """Tell the back end what was decided: first which runs have to leave, then which begin in their place.

        Only after the commit. A crash before it or in the middle loses nothing: at the next start the back end is handed
        every run whose end is not known (`open_orders`), and carrying out an order twice is the same as once.
        """
        metrics, log = self.deps.metrics, self.deps.log
        for job, epoch, notice in outcome.stops:
            metrics.preempted.labels(notice.cause).inc()
            log.info("preempt", job=job, epoch=epoch, text=notice.text)
            self.backend.stop(job, epoch, notice)
        for job, epoch, reason in outcome.kills:
            self.backend.kill(job, epoch, reason)
        for (record, run), order in zip(outcome.launches, _orders(self.deps, self.state, outcome.launches), strict=True):
            if record.launches == 1:
                metrics.wait.observe(record.waited)
            metrics.launched.inc()
            log.info("launch", job=order.job, epoch=run.epoch, gpus=run.gpus)
            if order.request.exported is None:
                self.backend.launch(order)
            else:
                log.warning("environment-missing", job=order.job, sha256=order.request.exported)
                now = self.clock.now()
                self._inbox.put(RunEnded(order.job, run.epoch, now, RunEnding.FAILED, None, ENVIRONMENT_MISSING, ()))

    def _process_late(self, news: list[News], since: float) -> list[News]:
        """Tell the core of runs that ended and nodes that were lost before `since`, as of then; return the rest of the news.

        No job is charged for time in which the engine did not look. The core decides nothing about the past: it is woken
        for that afterwards.
        """
        late, rest = late_news(news, since)
        if not late:
            return news
        # A run that was lost comes after its node, whenever it ended, so the order is not always that of their times.
        moments = accumulate((each[-1].at for each in late), max, initial=self._last)
        self._process(*((moment, [Belated()], each) for moment, each in zip(islice(moments, 1, None), late, strict=True)))
        now, wake = self.clock.now(), self.state.wake
        self.state.wake = now if wake is None else min(wake, now)
        return rest

    def _wake_core(self) -> None:
        """Wake the core, if it is time, as of the very time that it named: rounds end then, not some milliseconds later.

        Nor later by as long as a plan took that was made meanwhile. But an engine that slept through it decides for now.
        """
        wake, now = self.state.wake, self.clock.now()
        if wake is not None and wake <= now:
            self.state.wake = None
            began, ended = self._busy
            is_timely = now - wake < LATE or began <= wake <= ended
            self._process((max(wake, self._last) if is_timely else now, [Woke()], []))

    def _follow_up(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, api.SetWeight | api.SetPolicy):
                self._begin_chapter(command)
            else:
                self.put(command)

    # Opening, and chapters of the journal.

    def open(self) -> None:
        """Recover the state from the store; hand the back end every run whose end is unknown; hear what became of them."""
        began = perf_counter()
        state, outcome = recover(self.deps, self.clock.now())
        self._deciding = perf_counter() - began
        if outcome is not None:
            changes = state.changes(outcome)
            self.store.commit([changes])
            state.committed(changes)
        self._replace_state(state)
        self._last = self.store.last_time()
        if state.damaged:  # go on without the jobs that cannot be read
            with self.lock:
                aside = set_aside(state, self.clock.now())
            self._last = aside.batch.now
            causes = {row.id: state.records[row.id].cause for row in aside.batch.aside}
            self._commit([state.changes(aside)])
            for row in aside.batch.aside:
                self.deps.log.error("job-damaged", job=row.id, tenant=row.tenant, problem=causes[row.id])
        self.backend = self.deps.new_backend(self._hear)
        with self.store.reporting_damage():
            orders = open_orders(self.deps, state)
        self.backend.adopt(orders)
        if outcome is not None:
            self._dispatch(outcome)
        # What ended meanwhile is processed before anything is decided; all else waits for its turn.
        items: list[Item] = []
        with suppress(Empty):
            while (item := self._inbox.get_nowait()) is not None:
                items.append(item)
        for each in items:  # commands were put before there was trouble; jobs that were found come after what has ended
            if isinstance(each, Command | Finding):
                self._inbox.put(each)
        for news in self._process_late(_news(items), self.clock.now()):
            self._inbox.put(news)
        if self._full is None:
            self._go_on()
        self.trouble = self._full
        header = self.state.header
        self.deps.log.info("ready", jobs=len(self.state.records), policy=header.policy, entries=self.store.last)

    def _go_on(self) -> None:
        """There is room on the disk: reserve some for when there is not, and go on as the service was started."""
        if not self.store.reserve.make():
            self.deps.log.warning("no-reserve", bytes=self.store.reserve.size)
        if not is_started_as_before(self.deps):
            self._begin_chapter(None, wanted_header(self.deps, self.state.header))

    def _replace_state(self, state: ServiceState) -> None:
        """From now on this is the state. Its core releases the lock while it plans, so that readers need not wait."""
        with self.lock:
            self.state = state
        state.scheduler.thinking = self._unlocked

    @contextmanager
    def _unlocked(self) -> Iterator[None]:
        self.lock.release()
        try:
            yield
        finally:
            self.lock.acquire()

    def _note_joining(self, reports: Iterable[NodeReport]) -> None:
        """Remember nodes that are not part of the cluster as they are, and forget those that are lost before they were.

        The first nodes of all are taken in at once, as nothing can run before. Later ones wait a moment for others, as each
        new chapter takes the core through all jobs.
        """
        wait = JOIN_SECONDS if self.state.header.cluster.nodes else 0.0
        for news in reports:
            self._joining.pop(news.node.name, None)
            place = self.state.places.get(news.node.name)
            if news.state is not NodeState.LOST and (place is None or place[1] != news.node):
                self._joining[news.node.name] = news
                self._join_at = min(self._join_at, news.at + wait)
        if not self._joining:
            self._join_at = inf

    def _take_in_nodes(self) -> None:
        """Begin a chapter with the nodes that have joined. Those that make no cluster with the others are left out."""
        joining, self._joining, self._join_at = self._joining, {}, inf
        try:
            self._begin_chapter(None, joining=joining)
        except RequestError as error:
            self.deps.log.error("nodes-refused", nodes=[*joining], problem=str(error))  # noqa: TRY400

    def _begin_chapter(
        self,
        command: api.SetWeight | api.SetPolicy | None,
        header: Header | None = None,
        joining: Mapping[str, NodeReport] | None = None,
    ) -> None:
        """Replace the core: with what a command sets, with another header, with more nodes, or as the chapter is long."""
        now, before = self.clock.now(), self.state
        if isinstance(command, api.SetWeight) and command.tenant not in before.counts.jobs:
            # A tenant without jobs: there is nothing to decide, so an entry with a note will do.
            with self.lock:
                batch = Batch(now)
                set_weight(before, command, batch)
                outcome = before.apply(batch)
        else:
            began = perf_counter()
            try:
                with collector_paused():
                    base = header or before.header
                    state, outcome = renewed(self.deps, before, base, now, command, self.lock, joining)
            except (RequestError, PolicyError) as error:
                if command is None:
                    raise
                refuse(command, RequestRefusedError(RefusalCode.WRONG, str(error)))
                return
            self.deps.metrics.decision.observe(perf_counter() - began)
            self._replace_state(state)
            self._deciding = 0.0
        self._last = now
        self._commit([self.state.changes(outcome)])
        if outcome.batch.chapter is not None:
            self.deps.log.info("chapter", policy=self.state.header.policy, jobs=len(self.state.records))
        self._dispatch(outcome)
        if command is not None:
            fulfil(command, None)

    # When a commit fails. The store keeps a reserve on the disk (docs/design/0010-hardening.md, "Full disk"), which is given
    # up piece by piece for what frees room: cancellations, holds, ends of runs. When that is gone too, all is refused.

    def _survive_full_disk(self, error: StorageError, commands: Sequence[Command]) -> None:
        """Go on with what frees room while the reserve lasts; then wait, refusing everything, until there is room.

        What was decided and could not be committed is forgotten, as after a crash.
        """
        if self._full is None:
            self.deps.log.error("storage-full", problem=str(error))
        while self.store.reserve.give():
            if self._open_on_full_disk(error, commands):
                return
        text = f"nothing can be kept at the moment, so nothing is decided; what runs goes on ({error})"
        self.trouble, self._full = RequestRefusedError(RefusalCode.STORAGE, text), None
        self._refuse(commands)
        state, outcome = recover(self.deps, self.clock.now())
        if outcome is None:  # readers see what was committed, not what could not be
            self._replace_state(state)
        while not self._closing.wait(RETRY_SECONDS):
            self._refuse(self._drain())
            if not self.store.has_room():
                continue
            if self._reopen() if self.store.reserve.make() else self._open_on_full_disk(error, ()):
                return

    def _open_on_full_disk(self, error: StorageError, commands: Sequence[Command]) -> bool:
        """Accept and start nothing from now on, but do what frees room; False if not even that can be committed."""
        text = f"the disk is full: nothing is taken on or started until there is room; cancel and hold work ({error})"
        self.trouble = self._full = RequestRefusedError(RefusalCode.STORAGE, text)
        if not self._reopen():
            return False
        self.store.checkpoint()
        self._refuse(command for command in commands if not frees_room(command))
        for command in commands:
            if frees_room(command):
                self._inbox.put(command)
        return True

    def _reopen(self) -> bool:
        """Recover as after a crash; False if the disk is still full."""
        try:
            self.store.refresh()
            self.backend.close()
            self.open()
        except StorageError:
            return False
        return True

    def _process_on_full_disk(self, commands: Sequence[Command], news: Sequence[News]) -> None:
        """Process ends of runs and what frees room, without a decision; then look whether there is room again."""
        self._refuse(command for command in commands if not frees_room(command))
        items: list[Command | News] = [each for each in news if isinstance(each, RunBegan | RunEnded | NodeReport)]
        items += [command for command in commands if frees_room(command)]  # of the news, progress is reported again
        if items:
            self._follow_up(self._process((self.clock.now(), [Belated()], items)))
            self.store.checkpoint()
        if monotonic() < self._looked + RETRY_SECONDS:
            return
        self._looked = monotonic()
        if self.store.reserve.make() and self.store.has_room():
            self.trouble = self._full = None
            self.state.wake = self.clock.now()
            self.deps.log.info("room-again")
            self._go_on()

    def _refuse(self, commands: Iterable[Command]) -> None:
        for command in commands:
            refuse(command, self.trouble or RequestRefusedError(RefusalCode.NOT_READY, STOPPING))

    def _drain(self) -> list[Command]:
        """Commands that have arrived meanwhile; news is dropped, as the back end tells it again when it is reopened."""
        commands: list[Command] = []
        with suppress(Empty):
            while True:
                item = self._inbox.get_nowait()
                if isinstance(item, Command):
                    commands.append(item)
        return commands


def _tell_finder(finder: JobFinder, key: str, reply: "Future[SubmittedView]") -> None:
    """Pass the answer to the submission of a job that was found on to the back end that has found it."""
    error = reply.exception()
    if error is None:
        finder.accepted(key, reply.result().jobs[0], is_over=False)
    else:
        # What is wrong with the job stays wrong until the cluster changes; anything else may pass.
        is_final = isinstance(error, RequestRefusedError) and error.fault is RefusalCode.WRONG
        finder.refused(key, str(error), is_final=is_final)


def _news(items: Iterable[Item]) -> list[News]:
    """The news among what arrived; raises InvariantError if the back end has failed."""
    for each in items:
        if isinstance(each, BackendFailed):
            raise InvariantError(f"the back end has stopped: {each.problem}")
    # A run that was lost with its node ends after that: what the core hears first says whether it failed by itself.
    return sorted((each for each in items if isinstance(each, News)), key=is_lost_run)


# Orders, which describe a run to the back end.


def open_orders(deps: Dependencies, state: ServiceState) -> list[tuple[RunOrder, DesiredState]]:
    """Every run whose end the journal does not know, and what is wanted of it.

    A run that has not begun, and whose environment is gone, must not begin: its job is given another run, which fails.
    """
    runs = [(record, run) for record in state.records.values() for run in record.open_runs()]
    orders = list(_orders(deps, state, runs))
    return [
        (order, run.grip if order.request.exported is None or run.began is not None else DesiredState.GONE)
        for order, (_, run) in zip(orders, runs, strict=True)
    ]


def _with_environment(deps: Dependencies, tenant: str, request: JobRequest) -> JobRequest:
    """The request with the environment that its submitter brought along; as it is, if that is gone."""
    if request.exported is None:
        return request
    try:
        return joined(request, deps.files.environment(tenant, request.exported))
    except EnvironmentGoneError:
        return request


def _orders(deps: Dependencies, state: ServiceState, runs: Sequence[tuple[JobRecord, RunRecord]]) -> Iterator[RunOrder]:
    """What to start, where, and beside which other job. A request that still names an environment has lost it."""
    requests, core = deps.store.submissions.requests([record.job.id for record, _ in runs]), state.scheduler.state
    for record, run in runs:
        job = record.job.id
        try:
            request = _with_environment(deps, record.job.tenant, JobRequest.model_validate_json(requests[job]))
        except (KeyError, ValueError) as error:
            raise JournalError(f"job {job}: what was submitted makes no sense any more: {error!r:.100}") from error
        row = core.rows.get(job, -1)
        partner = core.ledger.partner.get(row)
        beside = None if partner is None else core.columns.ids[partner]
        # Only a job whose steps divide into micro-batches has speeds: those that the decision to start it was based on.
        tasks = core.estimate(row).tasks if row >= 0 and run is record.current else None
        types = () if tasks is None else zip(core.topology.types, tasks.seconds, strict=True)
        speeds = {name: 1.0 / seconds for name, seconds in types if seconds > 0}
        # Why a run has to end, in the words that its worker gets.
        reasons = {DesiredState.LEAVE: run.cause, DesiredState.GONE: record.cause or run.cause or JOB_ENDED}
        yield RunOrder(
            job, run.epoch, state.run_parts(run), request, record.job.tenant, record.busy, beside, speeds,
            reasons.get(run.grip),
        )  # fmt: skip
