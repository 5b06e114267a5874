"""A live engine without processes or threads: a pretend machine that outlives it, a clock of its own, crashes on demand."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any

from poise.engine.journal import Header, read_header
from poise.scheduler.core.settings import Settings
from poise.scheduler.model.cluster import Cluster, Node, parse_cluster
from poise.service.backends.api import (
    DesiredState,
    LogPart,
    NodeReport,
    NodeState,
    OnEvent,
    RunBegan,
    RunEnded,
    RunEnding,
    RunNotice,
    RunOrder,
    RunProgressed,
)
from poise.service.server.admission import Admission
from poise.service.server.dependencies import Dependencies, ServiceClock, core_of, live_cluster, live_settings
from poise.service.server.engine import ServiceEngine
from poise.service.server.logs import Logbook
from poise.service.server.metrics import Metrics
from poise.service.server.quotas import Allowance
from poise.service.server.service import LiveService
from poise.service.server.shipped_archives import ShippedArchives
from poise.service.server.storage.store import Changes, Store
from poise.service.wire.environments import sha256_of, text_of
from poise.service.wire.request import JobRequest, Submission
from poise.service.wire.views import Account, Role

ALICE = Account(name="alice", tenant="alice", role=Role.USER)
BOB = Account(name="bob", tenant="bob", role=Role.USER)


class CrashError(BaseException):
    """The service is gone, at this very instant."""


@dataclass
class Machine:
    """What is really there: it goes on whatever becomes of the service. Raises AssertionError if a job runs twice.

    leaving   runs that were asked to leave, where they take their time (`LingeringBackend`)
    lost      runs that were lost with a node, and of which nothing was said yet
    unaware   jobs whose runs report nothing of themselves
    waiting   runs that wait until those are gone who are on their GPUs, or the run of their job before them
    nodes     what is to be said of nodes, by name; said again to each new service
    """

    now: float = 1_000.0
    error: float = 0.0
    """Of the machine's clock."""
    leaving: set[tuple[str, int]] = field(default_factory=set)
    waiting: dict[tuple[str, int], RunOrder] = field(default_factory=dict)
    alive: dict[tuple[str, int], RunOrder] = field(default_factory=dict)
    lost: dict[tuple[str, int], RunOrder] = field(default_factory=dict)
    ended: dict[tuple[str, int], RunEnded] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    begun: dict[tuple[str, int], float] = field(default_factory=dict)
    unaware: set[str] = field(default_factory=set)
    finished: list[str] = field(default_factory=list)
    nodes: dict[str, NodeReport] = field(default_factory=dict)
    tell: OnEvent = lambda _news: None

    @property
    def wall(self) -> float:
        """What the machine's clock shows."""
        return self.now + self.error

    def start(self, order: RunOrder) -> None:
        key = (order.job, order.epoch)
        if key in self.alive or key in self.ended:
            return  # carried out before
        busy = {gpu for job, gpu in self.busy() if job != order.beside}
        assert not busy & gpus_of(order), f"GPUs of {key} are busy"
        assert order.job not in {job for job, _ in self.lost}, f"{order.job} goes on before its last run is known to be over"
        assert order.job not in {job for job, _ in self.alive}, f"{order.job} runs twice"
        assert order.job not in self.finished, f"{order.job} runs again though it has finished"
        if any(map(self.is_lost, nodes_of(order))):
            self.lost[key] = order
            self.bury(key)
        else:
            self._begin(order)

    def is_lost(self, node: str) -> bool:
        """Nothing can run there."""
        return node in self.nodes and self.nodes[node].state is NodeState.LOST

    def _begin(self, order: RunOrder) -> None:
        self.alive[order.job, order.epoch] = order
        self.say_begun(order.job, order.epoch)

    def say_begun(self, job: str, epoch: int) -> None:
        """Its processes are there, and unless it knows nothing of Poise it can leave when asked to."""
        self.tell(RunBegan(job, epoch, self.wall, self.begun.setdefault((job, epoch), self.steps.get(job, 0.0))))
        if job not in self.unaware:
            steps = self.steps.get(job, 0.0)
            self.report(job, steps=steps, checkpoint=steps, throughput=1.0)

    def report(self, job: str, *, steps: float, checkpoint: float | None, throughput: float | None) -> None:
        """The job's run says how far it is."""
        epoch = next(epoch for name, epoch in self.alive if name == job)
        self.tell(RunProgressed(job, epoch, self.wall, steps, None, checkpoint, throughput, None))

    def say(
        self, node: Node | str, state: NodeState = NodeState.UP, evidence: str = "", *, withheld: tuple[int, ...] = ()
    ) -> None:
        """A node is so from now on. What runs on one that is lost is over, and nobody says so before `bury`."""
        shape = self.nodes[node].node if isinstance(node, str) else node
        evidence = evidence or f"its agent says {state}"
        if state is NodeState.LOST:
            self.lost |= {key: order for key, order in self.alive.items() if shape.name in nodes_of(order)}
            self.alive = {key: order for key, order in self.alive.items() if key not in self.lost}
        self.nodes[shape.name] = NodeReport(shape, state, self.wall, evidence, withheld)
        self.tell(self.nodes[shape.name])

    def bury(self, *keys: tuple[str, int]) -> None:
        """Say of runs that were lost with a node that they are over; of all of them if none is named."""
        for key in keys or [*self.lost]:
            order = self.lost.pop(key)
            steps = self.steps.get(order.job)
            self.ended[key] = RunEnded(*key, self.wall, RunEnding.FAILED, steps, "node-lost", ())
            self.tell(self.ended[key])
        self.begin_waiting()

    def begin_waiting(self) -> None:
        """Those who can begin do."""
        for key, order in list(self.waiting.items()):
            busy = {job for job, gpu in self.busy() if gpu in gpus_of(order)} - {order.beside}
            if busy or any(job == order.job for job, _ in self.alive):
                continue
            del self.waiting[key]
            if order.job in self.finished:  # on its way out: nothing is left to be done
                self.tell(RunEnded(*key, self.wall, RunEnding.YIELDED, None, None, ()))
            else:
                self._begin(order)
        taken = Counter(gpu for _, gpu in self.busy())
        assert max(taken.values(), default=0) <= 2

    def busy(self) -> list[tuple[str, tuple[str, int]]]:
        """GPUs that processes are on, and whose."""
        return [(order.job, gpu) for order in self.alive.values() for gpu in gpus_of(order)]

    def end(self, job: str, how: RunEnding, *, cause: str | None = None, steps: float = 0.0, code: int = 0) -> None:
        """The job's run ends by itself, or because it was asked to."""
        key = next(each for each in self.alive if each[0] == job)
        del self.alive[key]
        self.steps[job] = self.steps.get(job, 0.0) + steps
        if how is RunEnding.FINISHED:
            self.finished.append(job)
        self.ended[key] = RunEnded(job, key[1], self.wall, how, self.steps[job], cause, (code,))
        self.tell(self.ended[key])
        self.leaving.discard(key)
        self.begin_waiting()


def gpus_of(order: RunOrder) -> set[tuple[str, int]]:
    return {(part.node, slot) for part in order.gpus for slot in part.slots}


def nodes_of(order: RunOrder) -> set[str]:
    return {part.node for part in order.gpus}


class FakeBackend:
    """Implements `LiveBackend`; a run that is asked to leave does so at once."""

    def __init__(self, machine: Machine, tell: OnEvent, crash: Callable[[], None]) -> None:
        self._machine = machine
        self._crash = crash
        machine.tell = tell

    def adopt(self, runs: Sequence[tuple[RunOrder, DesiredState]]) -> None:
        machine = self._machine
        known_runs = {(order.job, order.epoch) for order, _ in runs}
        assert not machine.alive.keys() - known_runs, "processes that the journal does not know of"
        for order, grip in runs:
            key = (order.job, order.epoch)
            if key in machine.ended:
                machine.tell(machine.ended[key])
            elif key in machine.lost and grip is not DesiredState.RUN:
                machine.bury(key)
            elif key in machine.alive and grip is DesiredState.RUN:
                machine.say_begun(*key)
            elif key in machine.alive:
                machine.end(order.job, RunEnding.YIELDED)
            elif grip is not DesiredState.RUN:
                machine.tell(RunEnded(*key, machine.wall, RunEnding.YIELDED, machine.steps.get(order.job, 0.0), None, ()))
        for report in machine.nodes.values():
            machine.tell(report)
        for order, grip in runs:
            if grip is DesiredState.RUN and (order.job, order.epoch) not in {**machine.ended, **machine.lost}:
                machine.start(order)

    def launch(self, order: RunOrder) -> None:
        self._crash()
        self._machine.start(order)

    def stop(self, job: str, epoch: int, notice: RunNotice) -> None:
        assert notice.text
        self._stop(job, epoch)

    def kill(self, job: str, epoch: int, reason: str) -> None:
        assert reason
        self._stop(job, epoch)

    def _stop(self, job: str, epoch: int) -> None:
        self._crash()
        machine = self._machine
        if (job, epoch) in machine.lost:
            machine.bury((job, epoch))
        elif (job, epoch) in machine.alive:
            machine.end(job, RunEnding.YIELDED, steps=1.0)

    def log(self, job: str, replica: int, offset: int, limit: int) -> LogPart:
        return LogPart(f"{job}:{replica}".encode()[offset : offset + limit], offset, offset + limit)

    def close(self) -> None:
        self._machine.tell = lambda _news: None


class LingeringBackend(FakeBackend):
    """A run that is asked to leave stays until the test ends it; the next run on its GPUs waits for that."""

    def adopt(self, runs: Sequence[tuple[RunOrder, DesiredState]]) -> None:
        machine = self._machine
        machine.waiting.clear()
        assert not machine.alive.keys() - {(order.job, order.epoch) for order, _ in runs}
        for order, grip in runs:
            key = (order.job, order.epoch)
            if key in machine.ended:
                machine.tell(machine.ended[key])
            elif key in machine.alive:
                machine.say_begun(*key)
                machine.leaving |= set() if grip is DesiredState.RUN else {key}
            elif grip is not DesiredState.RUN:
                machine.tell(RunEnded(*key, machine.wall, RunEnding.YIELDED, None, None, ()))
            else:
                machine.waiting[key] = order
        machine.begin_waiting()

    def launch(self, order: RunOrder) -> None:
        self._crash()
        key = (order.job, order.epoch)
        if key not in self._machine.alive and key not in self._machine.ended:
            self._machine.waiting[key] = order
            self._machine.begin_waiting()

    def _stop(self, job: str, epoch: int) -> None:
        self._crash()
        machine, key = self._machine, (job, epoch)
        if key in machine.alive:
            machine.leaving.add(key)
        elif key in machine.waiting:
            del machine.waiting[key]
            machine.tell(RunEnded(*key, machine.wall, RunEnding.YIELDED, None, None, ()))
            machine.begin_waiting()


@dataclass
class Service:
    """One service over its life: `engine` is replaced at each restart.

    cluster    "": what the nodes say that join
    crash_at   how many commits, launches and stops from now the service is gone; None: it is not
    """

    directory: Path
    policy: str | None = "las"
    cluster: str = "v100:2"
    settings: Settings = field(default_factory=lambda: Settings(round=10.0, retries=2))
    machine: Machine = field(default_factory=Machine)
    crash_at: int | None = None
    check: Callable[[JobRequest], None] = lambda _request: None
    backend: type[FakeBackend] = FakeBackend
    allowance: Allowance = field(default_factory=Allowance)

    def __post_init__(self) -> None:
        self._numbers = count()
        self.start()

    def start(self) -> None:
        """Come up, over whatever the one before left."""
        machine, store = self.machine, CrashingStore(self.directory, self._tick)
        last = store.chapter()
        policy = self.policy or ("las" if last is None else read_header(last[0]).policy)
        if self.cluster:
            cluster = parse_cluster(self.cluster)
        else:
            cluster = Cluster(()) if last is None else read_header(last[0]).cluster
        header = Header("live", live_cluster(cluster), policy, "consolidate", live_settings(self.settings), 0)
        self.loop = ServiceEngine(
            Dependencies(
                store=store,
                header=header,
                new_scheduler=core_of,
                new_admission=lambda each: Admission(each.cluster, self.check, each.policy),
                new_backend=lambda tell: self.backend(machine, tell, self._tick),
                log=Logbook(StringIO()),
                metrics=Metrics(),
                retries=self.settings.retries,
                keeps_policy=self.policy is None,
                keeps_cluster=not self.cluster,
                allowance=self.allowance,
                files=ShippedArchives(self.directory, tenant_most=self.allowance.tenant_bytes),
                new_clock=partial(ServiceClock, wall=lambda: machine.wall, steady=lambda: machine.now),
            )
        )
        self.engine = LiveService(self.loop)
        self.loop.open()

    def _tick(self) -> None:
        if self.crash_at is not None:
            self.crash_at -= 1
            if self.crash_at < 0:
                self.crash_at = None
                raise CrashError

    def settle(self) -> None:
        """Let the engine handle all that has come in, and come up again if it crashes on the way."""
        for _ in range(100):
            try:
                self.loop.turn(0.0)
                if self.loop.is_idle:
                    return
            except CrashError:
                self.restart()
        raise AssertionError("the engine finds no rest")

    def restart(self) -> None:
        """The service is gone, and comes back."""
        self.machine.tell = lambda _news: None
        self.loop.store.close()
        while True:
            try:
                self.start()
            except CrashError:
                continue
            return

    def pass_time(self, seconds: float) -> None:
        """Time goes by, and the engine notices."""
        self.machine.now += seconds
        self.settle()

    def submit(
        self, *requests: JobRequest, by: Account = ALICE, key: str | None = None, exported: Mapping[str, str] | None = None
    ) -> list[str]:
        """Jobs, as a client would: again with the same key if the service went away meanwhile.

        exported   the environment that all of them are submitted with
        """
        environments = () if exported is None else (dict(exported),)
        if exported is not None:
            sha256 = sha256_of(text_of(exported))
            requests = tuple(each.model_copy(update={"exported": sha256}) for each in requests)
        submission = Submission(jobs=requests, key=key or f"submission-{next(self._numbers)}", environments=environments)
        for _ in range(10):
            reply = self.engine.submit(by, submission)
            self.settle()
            if reply.done():
                return list(reply.result().jobs)
        raise AssertionError("the submission is never answered")

    def call(self, method: Callable[[LiveService], Any]) -> Any:
        """Call a method that changes something, once; return its answer."""
        reply = method(self.engine)
        self.settle()
        return reply.result(0)


class CrashingStore(Store):
    """Is gone before or after a commit."""

    def __init__(self, directory: Path, tick: Callable[[], None]) -> None:
        super().__init__(directory)
        self._tick = tick

    def commit(self, changes: Sequence[Changes]) -> None:
        self._tick()
        super().commit(changes)
        self._tick()


def a_request(**given: Any) -> JobRequest:
    return JobRequest(**({"command": ("train",)} | given))
