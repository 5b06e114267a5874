"""The live engine: one thread that takes wishes and news, asks the core, commits, and only then has things done.

docs/design/0009-live.md says why it is safe to kill it at any instant. A commit that fails leads to the same place as a
crash: what was decided is forgotten, and the state is read back from the store once something can be written again.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import inf
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter
from typing import NamedTuple

from poise.engine.journal import Header
from poise.engine.loop import collector_paused, freeze_heap
from poise.scheduler.model.errors import InvariantError, ReplayError, RequestError
from poise.scheduler.model.event import Belated, Woke
from poise.service.backends.api import BackendFailed, LiveBackend, RunBegan, RunEnded, RunEvent
from poise.service.server.batch import CANCELLED_AT_ONCE, Batch
from poise.service.server.commands import (
    AWAITED,
    CancelTenant,
    SetPolicy,
    SetWeight,
    SubmitJobs,
    Wish,
    frees_room,
    grant,
    refuse,
)
from poise.service.server.dependencies import Dependencies
from poise.service.server.dispatch import carry_out, held_runs, told_late
from poise.service.server.engine_api import RefusalCode, RequestRefusedError
from poise.service.server.recovery import is_as_asked, opened, renewed, restored, told_aside
from poise.service.server.service_state import CommittedReply, RunOrders, ServiceState
from poise.service.server.storage.damaged_jobs import set_aside as kept_aside
from poise.service.server.storage.store import Changes, DamageError, StorageError

MOST_AT_ONCE = 512
"""Wishes and pieces of news that one commit may hold; a submission counts as many times as it has jobs."""
SLOW_CHAPTER = 60.0
"""Seconds of deciding after which it does: so long a restart may take for the same."""
LONG_CHAPTER = 50_000
"""Entries after which the journal goes on in a new chapter."""
MANY_ENDED = 100_000
"""Jobs that have ended in a chapter, after which it does too."""
RETRY_SECONDS = 1.0
"""Between two looks whether something can be written again."""
GROWTH = 10_000
"""Jobs more than before at which what there is is taken to stay."""
LONGEST_WAIT = 3_600.0
"""Seconds without a look at the clock."""
LATE = 2.0
"""Seconds after which news counts as belated: it is told to the core as of when it happened."""
STOPPING = "the service is stopping"


class _Step(NamedTuple):
    """An instant that the core has been asked about, and that is not kept yet; None: nothing of it has to be."""

    instant: Batch
    answer: CommittedReply | None
    changes: Changes | None


def _weight(item: Wish | RunEvent | BackendFailed) -> int:
    """Of what a commit may hold."""
    match item:
        case SubmitJobs():
            return len(item.submission.jobs)
        case CancelTenant():
            return CANCELLED_AT_ONCE
        case _:
            return 1


class ServiceEngine:
    """The engine's thread. Everything that changes the situation happens in it, under `lock`."""

    def __init__(self, parts: Dependencies) -> None:
        self.parts = parts
        self.store = parts.store
        self.lock = threading.RLock()
        self.trouble: RequestRefusedError | None = RequestRefusedError(RefusalCode.NOT_READY, "the service is starting")
        self._inbox: SimpleQueue[Wish | RunEvent | BackendFailed | None] = SimpleQueue()
        self._closing = threading.Event()
        self._over = threading.Event()
        self._started = threading.Event()
        self._failed: BaseException | None = None
        self._full: RequestRefusedError | None = None
        """While room is short: what is said to those whose wishes need some."""
        self._looked = -inf
        self._losses: dict[str, float] = {}
        self._deciding = 0.0
        self._busy = inf, -inf
        """When the last turn began to do something, and when it was done."""
        self._aside = 0
        self.clock = parts.clock_of(self.store.last_moment())
        self.began = self.clock.now()
        self._last = self.store.last_moment()
        self.situation: ServiceState
        self.backend: LiveBackend
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Read the journal, take over what runs, and begin to decide; raises what goes wrong with that."""
        self._thread.start()
        self._started.wait()
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        """Decide nothing more; what runs goes on."""
        self._closing.set()
        self._inbox.put(None)
        self._thread.join()

    @property
    def failed(self) -> BaseException | None:
        """What the engine died of, if it did."""
        return self._failed

    def put(self, wish: Wish) -> None:
        """Want something."""
        if self._closing.is_set():
            refuse(wish, RequestRefusedError(RefusalCode.NOT_READY, STOPPING))
        elif self.trouble is not None and (self._full is None or not frees_room(wish)):
            refuse(wish, self.trouble)
        else:
            self._inbox.put(wish)
            if self._over.is_set():  # that was too late for the engine to see it
                self._refuse(self._drained())

    def _run(self) -> None:
        try:
            self.open()
            self._started.set()
            while not self._closing.is_set():
                self.turn(self._patience())
        except BaseException as error:  # whatever it is, it ends the service, and somebody has to be told
            self._failed = error
            self.trouble = RequestRefusedError(RefusalCode.NOT_READY, f"the engine has stopped: {error}")
            self.parts.log.error("engine-stopped", problem=f"{type(error).__name__}: {error}")  # noqa: TRY400
        finally:
            self._started.set()
            self._over.set()
            self._refuse(self._drained())
            if hasattr(self, "backend"):
                self.backend.close()
            self.store.close()

    def open(self) -> None:
        """Rebuild the state from the journal, and hand the back end each run whose end the journal does not know."""
        began = perf_counter()
        situation, answer = self._opened()
        self._deciding = perf_counter() - began
        if answer is not None:
            changes = situation.chapter(answer, self.parts.header)
            self.store.commit([changes])
            situation.kept(changes)
        self._look_at(situation)
        self._last = self.store.last_moment()
        self._set_aside()
        self.backend = self.parts.backend_of(self._hear)
        with self.store.legible():
            runs = held_runs(self.store, situation)
        self.backend.adopt(runs)
        if answer is not None:
            self._carry_out(answer.orders)
        self._look_back()
        if self._full is None:
            self._go_on()
        self.trouble = self._full
        now = self.situation
        self.parts.log.info("ready", jobs=len(now.records), policy=now.header.policy, entries=self.store.last)

    def _go_on(self) -> None:
        """There is room: keep some of it for when there is not, and go on as the service was started."""
        if not self.store.reserve.make():
            self.parts.log.warning("no-reserve", bytes=self.store.reserve.size)
        if not is_as_asked(self.parts):
            self._renew(None, self.parts.header)

    def _set_aside(self) -> None:
        """Go on without the jobs that cannot be read. What is left of their runs is ended, as of any run not ordered."""
        now, situation = self.clock.now(), self.situation
        asides = [kept_aside(row, problem, now) for row, problem in situation.damaged]
        if not asides:
            return
        with self.lock:
            _, changes = told_aside(situation, asides, now)
        self._last = now
        self._commit([changes])
        situation.damaged = []
        situation.wake = now  # nothing was decided then
        for each in asides:
            self.parts.log.error("job-damaged", job=each.row.id, tenant=each.row.tenant, problem=each.record.cause)

    def _hear(self, news: RunEvent | BackendFailed) -> None:
        """Take news from the back end, dated as the service has it."""
        self._inbox.put(
            news if isinstance(news, BackendFailed) else replace(news, at=self.clock.moment(news.at, earliest=0.0))
        )

    def _look_back(self) -> None:
        """Tell the core what ended while nobody looked, before it decides anything; the rest is heard in its turn."""
        heard: list[Wish | RunEvent | BackendFailed] = []
        with suppress(Empty):
            while (item := self._inbox.get_nowait()) is not None:
                heard.append(item)
        for wish in heard:  # whoever had looked before there was trouble; handled in their turn, or refused with the rest
            if isinstance(wish, Wish):
                self._inbox.put(wish)
        self._check(heard)
        for item in self._catch_up([each for each in heard if isinstance(each, RunEvent)], self.clock.now()):
            self._inbox.put(item)

    def _look_at(self, situation: ServiceState) -> None:
        """From now on this is how things are. While the core thinks about a plan, others may look."""
        with self.lock:
            self.situation = situation
        situation.scheduler.thinking = self._unlocked

    @contextmanager
    def _unlocked(self) -> Iterator[None]:
        self.lock.release()
        try:
            yield
        finally:
            self.lock.acquire()

    def _opened(self) -> tuple[ServiceState, CommittedReply | None]:
        """The situation as the journal has it; where this core would not have written it, as the records have it."""
        with self.store.legible(), collector_paused():
            try:
                return opened(self.parts, self.clock.now())
            except (ReplayError, DamageError) as error:
                what = "replay-differs" if isinstance(error, ReplayError) else "journal-damaged"
                self.parts.log.error(what, problem=str(error))  # noqa: TRY400
                return restored(self.parts, self.clock.now())

    @property
    def is_idle(self) -> bool:
        """Nothing has come in, and it is not time to wake the core."""
        wake = self.situation.wake
        return self._inbox.empty() and (wake is None or wake > self.clock.now())

    def _patience(self) -> float | None:
        """Seconds until the core wants to be woken; None: it does not."""
        if self._full is not None:
            return RETRY_SECONDS
        wake = self.situation.wake
        return None if wake is None else min(max(0.0, wake - self.clock.now()), LONGEST_WAIT)

    def _batch(self, timeout: float | None) -> Iterator[Wish | RunEvent | BackendFailed]:
        """What has come in, or comes in time."""
        left = MOST_AT_ONCE
        with suppress(Empty):
            item = self._inbox.get(timeout=timeout)
            while item is not None:
                yield item
                left -= _weight(item)
                if left <= 0:
                    return
                item = self._inbox.get_nowait()

    def turn(self, timeout: float | None) -> None:
        """Handle what has come in, or comes in time, and wake the core if it is time for that."""
        batch = list(self._batch(timeout))
        wishes = [each for each in batch if isinstance(each, Wish)]
        began = self.clock.now()
        try:
            self._check(batch)
            if self._full is not None:
                self._get_by(batch)
                return
            news = self._catch_up([each for each in batch if isinstance(each, RunEvent)], began - LATE)
            self._wake_up()
            if news or wishes:
                self._handle([*news, *wishes], self.clock.now())  # what ended comes first
            if self._is_long():
                self._renew(None)
        except StorageError as error:
            self._wait_for_room(error, wishes)
        except Exception as error:
            self.trouble = RequestRefusedError(RefusalCode.NOT_READY, f"the engine has stopped: {error}")
            self._refuse(wishes)
            raise
        if len(self.situation.records) > self._aside + GROWTH:
            self._aside = len(self.situation.records)
            freeze_heap()
        self._busy = began, self.clock.now()

    @staticmethod
    def _check(batch: "Iterable[Wish | RunEvent | BackendFailed]") -> None:
        for each in batch:
            if isinstance(each, BackendFailed):
                raise InvariantError(f"the back end has stopped: {each.problem}")

    def _is_long(self) -> bool:
        """A restart has to decide the whole chapter again, and the core remembers every job of it."""
        rows = len(self.situation.scheduler.state.rows)
        is_slow = self._deciding > SLOW_CHAPTER
        return is_slow or self.store.chapter_length > LONG_CHAPTER or rows - len(self.situation.records) > MANY_ENDED

    def _catch_up(self, news: list[RunEvent], since: float) -> list[RunEvent]:
        """Tell the core, as of when they ended, of runs that did so before `since`; what is left is of now."""
        late, rest = told_late(news, since)
        if not late:
            return news
        steps = [self._take(whole, max(whole[-1].at, self._last), Belated()) for whole in late]
        self._finish(steps)  # after a long break there are many: one commit does for all
        now, wake = self.clock.now(), self.situation.wake
        self.situation.wake = now if wake is None else min(wake, now)  # nothing was decided then, so it has to be now
        return rest

    def _wake_up(self) -> None:
        """Wake the core as of the very moment that it named: rounds end then, and not some milliseconds later.

        Nor later by as long as a plan took that was made meanwhile; but whoever slept through it decides for now.
        """
        wake, now = self.situation.wake, self.clock.now()
        if wake is not None and wake <= now:
            self.situation.wake = None
            began, ended = self._busy
            as_named = now - wake < LATE or began <= wake <= ended
            self._handle([], max(wake, self._last) if as_named else now, Woke())

    def _handle(self, batch: Sequence[Wish | RunEvent], now: float, *first: Belated | Woke) -> None:
        """One instant. All of it is kept before any of it is done or answered, or none of it is."""
        step = self._take(batch, now, *first)
        self._finish([step])
        for unfinished in step.instant.unfinished:
            self.put(unfinished)
        for wish in step.instant.chapters:
            self._renew(wish)

    def _take(self, batch: Sequence[Wish | RunEvent], now: float, *first: Belated | Woke) -> "_Step":
        """Ask the core; nothing is kept yet."""
        instant = Batch(self.situation, self.store, self.parts, self._losses, now)
        with self.lock:
            for fact in first:
                instant.facts.add(fact)
            for item in batch:
                instant.take(item)
            answer = self._ask(instant)
        if answer is not None and answer.actions is not None:  # else the journal has nothing of it
            self._last = now
        return _Step(instant, answer, None if answer is None else self.situation.changes(answer))

    def _finish(self, steps: "Sequence[_Step]") -> None:
        """Keep these instants; then do, and answer, what comes of them."""
        self._commit([step.changes for step in steps if step.changes is not None])
        for step in steps:
            if step.answer is not None:
                self._carry_out(step.answer.orders)
            step.instant.answer()

    def _ask(self, instant: "Batch") -> CommittedReply | None:
        facts = instant.facts
        if not facts.events and AWAITED not in facts.notes:
            return self.situation.note(instant.now, facts) if facts.touched else None
        began = perf_counter()
        answer = self.situation.ask(instant.now, facts)
        took = perf_counter() - began
        self._deciding += took
        self.parts.metrics.decision(took)
        return answer

    def _commit(self, instants: Sequence[Changes]) -> None:
        """Keep instants; raises StorageError if that is not possible, and then the situation is not to be used again."""
        if not instants:
            return
        began = perf_counter()
        self.store.commit(instants)
        self.parts.metrics.committed(perf_counter() - began, sum(each.entry is not None for each in instants))
        with self.lock:
            for each in instants:
                self.situation.kept(each)

    def _wait_for_room(self, error: StorageError, wishes: Sequence[Wish]) -> None:
        """Go on with what frees room, as long as there is some in reserve. Then refuse everything until there is more.

        What was decided is forgotten: it goes on as after a crash.
        """
        if self._full is None:
            self.parts.log.error("storage-full", problem=str(error))
        while self.store.reserve.give():
            if self._is_short_of_room(error, wishes):
                return
        text = f"nothing can be kept at the moment, so nothing is decided; what runs goes on ({error})"
        self.trouble, self._full = RequestRefusedError(RefusalCode.STORAGE, text), None
        self._refuse(wishes)
        self._forget()
        while not self._closing.wait(RETRY_SECONDS):
            self._refuse(self._drained())
            if self.store.has_room() and self._is_in_order_again(error):
                return

    def _is_in_order_again(self, error: StorageError) -> bool:
        """There is some room: enough for all, or for what frees more."""
        return self._is_open_again() if self.store.reserve.make() else self._is_short_of_room(error, ())

    def _is_short_of_room(self, error: StorageError, wishes: Sequence[Wish]) -> bool:
        """From now on nothing is taken on or begun; what frees room is done. False if not even that can be."""
        text = f"the disk is full: nothing is taken on or started until there is room; cancel and hold work ({error})"
        self.trouble = self._full = RequestRefusedError(RefusalCode.STORAGE, text)
        if not self._is_open_again():
            return False
        self.store.fold()
        self._refuse(wish for wish in wishes if not frees_room(wish))
        for wish in wishes:
            if frees_room(wish):
                self._inbox.put(wish)
        return True

    def _get_by(self, batch: "Sequence[Wish | RunEvent | BackendFailed]") -> None:
        """Take note of what ended and of what frees room, as of now; decide nothing. Look whether there is room again."""
        wishes = [each for each in batch if isinstance(each, Wish)]
        self._refuse(wish for wish in wishes if not frees_room(wish))
        news = [each for each in batch if isinstance(each, RunBegan | RunEnded)]  # progress is reported again
        facts = [*news, *(wish for wish in wishes if frees_room(wish))]
        if facts:
            self._handle(facts, self.clock.now(), Belated())
            self.store.fold()
        if monotonic() < self._looked + RETRY_SECONDS:
            return
        self._looked = monotonic()
        if self.store.reserve.make() and self.store.has_room():
            self.trouble = self._full = None
            self.situation.wake = self.clock.now()
            self.parts.log.info("room-again")
            self._go_on()

    def _forget(self) -> None:
        """Whoever looks is to see what was kept, not what could not be."""
        situation, answer = self._opened()
        if answer is None:
            self._look_at(situation)

    def _is_open_again(self) -> bool:
        try:
            self.store.look()
            self.backend.close()
            self.open()
        except StorageError:
            return False
        return True

    def _refuse(self, wishes: Iterable[Wish]) -> None:
        for wish in wishes:
            refuse(wish, self.trouble or RequestRefusedError(RefusalCode.NOT_READY, STOPPING))

    def _drained(self) -> list[Wish]:
        """Wishes that have come in meanwhile; news is found again in the back end itself."""
        wishes: list[Wish] = []
        with suppress(Empty):
            while True:
                item = self._inbox.get_nowait()
                if isinstance(item, Wish):
                    wishes.append(item)
        return wishes

    def _carry_out(self, orders: RunOrders) -> None:
        """Have the back end do what is committed."""
        carry_out(orders, self.situation, self.parts, self.backend)

    def _renew(self, wish: SetWeight | SetPolicy | None, header: Header | None = None) -> None:
        """Go on in a new chapter, with what is wished for, or as another header has it."""
        now = self.clock.now()
        if isinstance(wish, SetWeight) and wish.tenant not in self.situation.tally.jobs:  # there is nobody to decide about
            with self.lock:
                answer = self.situation.weigh(now, wish)
            self._last = now
            self._commit([self.situation.changes(answer)])
            self._carry_out(answer.orders)
            grant(wish.reply, None)
            return
        try:
            with collector_paused():
                before = self.situation
                situation, answer = renewed(self.parts, before, header or before.header, now, wish, self.lock)
        except RequestError as error:
            if wish is None:
                raise
            refuse(wish, RequestRefusedError(RefusalCode.WRONG, str(error)))
            return
        self._look_at(situation)
        self._last = now
        self._deciding = 0.0
        self._commit([situation.chapter(answer, self.parts.header)])
        self.parts.log.info("chapter", policy=situation.header.policy, jobs=len(situation.records))
        self._carry_out(answer.orders)
        if wish is not None:
            grant(wish.reply, None)
