"""The live engine: one thread that takes wishes and news, asks the core, commits, and only then has things done.

docs/design/0009-live.md says why it is safe to kill it at any instant. A commit that fails leads to the same place as a
crash: what was decided is forgotten, and the state is read back from the store once something can be written again.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import perf_counter

from poise.core.scheduler import Scheduler
from poise.engine.collector import set_aside
from poise.engine.journal import Header
from poise.engine.live import Grip, News, RunEnded, RunOrder, Tell, World
from poise.model.errors import RequestError
from poise.model.event import Belated, Woke
from poise.server.clock import Clock
from poise.server.instant import Instant
from poise.server.intake import Intake
from poise.server.logs import Logbook
from poise.server.metrics import Metrics
from poise.server.opening import opened, renewed
from poise.server.records import Record
from poise.server.seam import Fault, RefusedError
from poise.server.situation import Orders, Situation
from poise.server.store import Changes, StorageError, Store
from poise.server.wishes import Adopt, Weigh, Wish, grant, refuse
from poise.wire.request import Request

MOST_AT_ONCE = 512
"""Wishes and pieces of news that one commit may hold."""
LONG_CHAPTER = 50_000
"""Entries after which the journal goes on in a new chapter."""
RETRY_SECONDS = 1.0
"""Between two looks whether something can be written again."""
GROWTH = 10_000
"""Jobs more than before at which what there is is taken to stay."""
LATE = 2.0
"""Seconds after which news counts as belated: it is told to the core as of when it happened."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is put together from. `header`: cluster, policy and settings as they are wanted now."""

    store: Store
    header: Header
    scheduler_of: Callable[[Header], Scheduler]
    intake_of: Callable[[Header], Intake]
    world_of: Callable[[Tell], World]
    log: Logbook
    metrics: Metrics
    retries: int
    clock_of: Callable[[float], Clock] = Clock


class Loop:
    """The engine's thread. Everything that changes the situation happens in it, under `lock`."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.store = parts.store
        self.lock = threading.RLock()
        self.trouble: RefusedError | None = RefusedError(Fault.NOT_READY, "the service is starting")
        self._inbox: SimpleQueue[Wish | News | None] = SimpleQueue()
        self._closing = threading.Event()
        self._started = threading.Event()
        self._failed: BaseException | None = None
        self._losses: dict[str, float] = {}
        self._aside = 0
        self.clock = parts.clock_of(self.store.last_moment())
        self.began = self.clock.now()
        self._last = self.store.last_moment()
        self.situation: Situation
        self.world: World
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
            refuse(wish, RefusedError(Fault.NOT_READY, "the service is stopping"))
        elif self.trouble is not None:
            refuse(wish, self.trouble)
        else:
            self._inbox.put(wish)

    def _run(self) -> None:
        try:
            self.open()
            self._started.set()
            while not self._closing.is_set():
                self.turn(self._patience())
        except BaseException as error:  # whatever it is, it ends the service, and somebody has to be told
            self._failed = error
            self.trouble = RefusedError(Fault.NOT_READY, f"the engine has stopped: {error}")
            self.parts.log.error("engine-stopped", problem=f"{type(error).__name__}: {error}")  # noqa: TRY400
        finally:
            self._started.set()
            if hasattr(self, "world"):
                self.world.close()
            self.store.close()

    def open(self) -> None:
        """The situation as the journal has it; and the world, with every run that the journal does not know the end of."""
        situation, changes, orders = opened(self.parts, self.clock.now())
        with self.lock:
            self.situation = situation
        if changes is not None:
            self.store.commit([changes])
            situation.kept(changes)
        self._last = self.store.last_moment()
        self.world = self.parts.world_of(self._inbox.put)
        self.world.adopt(self._held_runs(situation))
        self._carry_out(orders)
        self.trouble = None
        self.parts.log.info("ready", jobs=len(situation.records), policy=situation.header.policy, entries=self.store.last)

    def _held_runs(self, situation: Situation) -> list[tuple[RunOrder, Grip]]:
        return [
            (self._order(situation, record, run.epoch), run.grip)
            for record in situation.records.values()
            for run in record.open_runs()
        ]

    def _order(self, situation: Situation, record: Record, epoch: int) -> RunOrder:
        run = record.run(epoch)
        if run is None:
            raise StorageError(f"run {epoch} of job {record.job.id} is not known")
        request = Request.model_validate_json(self.store.request(record.job.id) or "")
        beside = situation.partner(record.job.id)
        return RunOrder(record.job.id, epoch, situation.parts(run), request, record.job.tenant, record.ran, beside)

    @property
    def is_idle(self) -> bool:
        """Nothing has come in, and it is not time to wake the core."""
        wake = self.situation.wake
        return self._inbox.empty() and (wake is None or wake > self.clock.now())

    def _patience(self) -> float | None:
        """Seconds until the core wants to be woken; None: it does not."""
        wake = self.situation.wake
        return None if wake is None else max(0.0, wake - self.clock.now())

    def _batch(self, timeout: float | None) -> Iterator[Wish | News]:
        """What has come in, or comes in time."""
        try:
            item = self._inbox.get(timeout=timeout)
            for _ in range(MOST_AT_ONCE - 1):
                if item is None:
                    return
                yield item
                item = self._inbox.get_nowait()
        except Empty:
            return
        if item is not None:
            yield item

    def turn(self, timeout: float | None) -> None:
        """Handle what has come in, or comes in time, and wake the core if it is time for that."""
        batch = list(self._batch(timeout))
        late = [each for each in batch if isinstance(each, RunEnded) and each.at < self.clock.now() - LATE]
        for news in sorted(late, key=lambda each: each.at):
            self._handle([news], self.clock.moment(news.at, earliest=self._last), Belated())
            self.situation.wake = self.clock.now()  # nothing was decided then, so it has to be now
        self._wake_up()
        rest = [each for each in batch if each not in late]
        if rest:
            self._handle(rest, self.clock.now())
        if self._is_long():
            self._renew(None)
        if len(self.situation.records) > self._aside + GROWTH:
            self._aside = len(self.situation.records)
            set_aside()

    def _wake_up(self) -> None:
        """Wake the core as of the very moment that it named: rounds end then, and not some milliseconds later."""
        wake, now = self.situation.wake, self.clock.now()
        if wake is not None and wake <= now:
            self.situation.wake = None
            self._handle([], max(wake, self._last) if now - wake < LATE else now, Woke())

    def _is_long(self) -> bool:
        chapter = self.store.chapter()
        return chapter is not None and self.store.last - chapter[2] > LONG_CHAPTER

    def _handle(self, batch: Sequence[Wish | News], now: float, *first: Belated | Woke) -> None:
        """One instant. All of it is kept before any of it is done or answered, or none of it is."""
        instant = Instant(self.situation, self.store, self.parts, self._losses, now)
        self._last = now
        with self.lock:
            for fact in first:
                instant.facts.add(fact)
            for item in batch:
                instant.take(item)
            changes, orders = self._ask(instant)
        if changes is not None and not self._commit(changes, batch):
            return
        self._carry_out(orders)
        instant.answer()
        for wish in instant.chapters:
            self._renew(wish)

    def _ask(self, instant: "Instant") -> tuple[Changes | None, Orders]:
        facts = instant.facts
        if facts.events:
            began = perf_counter()
            changes, orders = self.situation.ask(instant.now, facts)
            self.parts.metrics.decision(perf_counter() - began)
            return changes, orders
        return (self.situation.note(instant.now, facts) if facts.touched else None), Orders()

    def _commit(self, changes: Changes, batch: Sequence[Wish | News]) -> bool:
        """Keep an instant; if that fails everybody who wanted something is told, and the state is read back."""
        began = perf_counter()
        try:
            self.store.commit([changes])
        except StorageError as error:
            self._wait_for_room(error, [each for each in batch if isinstance(each, Wish)])
            return False
        self.parts.metrics.committed(perf_counter() - began, int(changes.entry is not None))
        with self.lock:
            self.situation.kept(changes)
        return True

    def _wait_for_room(self, error: StorageError, wishes: Sequence[Wish]) -> None:
        text = f"nothing can be kept at the moment, so nothing is decided; what runs goes on ({error})"
        self.trouble = RefusedError(Fault.STORAGE, text)
        self.parts.log.error("storage-full", problem=str(error))
        for wish in (*wishes, *self._drained()):
            refuse(wish, self.trouble)
        self.world.close()
        while not self._closing.wait(RETRY_SECONDS):
            if self.store.has_room():
                self.open()
                return

    def _drained(self) -> list[Wish]:
        """Wishes that have come in meanwhile; news is found again in the world itself."""
        wishes: list[Wish] = []
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, Wish):
                wishes.append(item)
        return wishes

    def _carry_out(self, orders: Orders) -> None:
        """Have the world do what is committed."""
        for job, epoch, notice in orders.leaves:
            self.parts.metrics.preempted(notice.cause)
            self.parts.log.info("preempt", job=job, epoch=epoch, text=notice.text)
            self.world.leave(job, epoch, notice)
        for job, epoch, reason in orders.kills:
            self.world.kill(job, epoch, reason)
        for job, run in orders.launches:
            record = self.situation.records[job]
            if record.launches == 1:
                self.parts.metrics.waited(record.waited)
            self.parts.metrics.launched()
            self.parts.log.info("launch", job=job, epoch=run.epoch, gpus=run.gpus)
            self.world.launch(self._order(self.situation, record, run.epoch))

    def _renew(self, wish: Weigh | Adopt | None) -> None:
        """Go on in a new chapter, under another policy or with another weight."""
        try:
            with self.lock:
                situation, changes, orders = renewed(self.parts, self.situation, self.clock.now(), wish)
            if not self._commit(changes, [] if wish is None else [wish]):
                return
        except RequestError as error:
            if wish is not None:
                refuse(wish, RefusedError(Fault.WRONG, str(error)))
            return
        with self.lock:
            self.situation = situation
        self.parts.log.info("chapter", policy=situation.header.policy, jobs=len(situation.records))
        self._carry_out(orders)
        if wish is not None:
            grant(wish.reply, None)
