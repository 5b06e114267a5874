"""A hostile but truthful world: random facts at random moments, late, stale, repeated and about jobs nobody knows.

After every batch the whole state of the core is audited against a book that is kept from events and actions alone.
"""

from typing import Any

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.strategies import CAUSES, clusters, fitted, placements, policies, settings
from tests.whims import WHIMS, whim

from poise.engine.assembly import with_rounds
from poise.scheduler.core.rank_driver import RankDriver
from poise.scheduler.core.reasons import Code
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.core.settings import Settings
from poise.scheduler.model.action import Abandon, Action, Cancel, Compute, Launch, Preempt, Reject, WakeAt
from poise.scheduler.model.cluster import Cluster, Holding, Slots, gpu_count, merged
from poise.scheduler.model.event import (
    Cancelled,
    Computed,
    Estimated,
    Event,
    Failed,
    Finished,
    NodeLost,
    NodeRestricted,
    NodeReturned,
    Progressed,
    Stopped,
    Submitted,
    Synchronised,
    Woke,
)
from poise.scheduler.model.job import Job, Status
from poise.scheduler.model.micro_batches import Tasks
from poise.scheduler.model.plan import PreemptionRule
from poise.scheduler.model.speed import Estimate, Rates
from poise.scheduler.placement.strategies import placement_named
from poise.scheduler.policies.catalogue import policy_named

RATES = ((1.0, 1.0, 1.0), (2.0, 1.5, 1.0), (0.5, 0.5, 0.25), (0.0, 0.0, 0.0))
SECONDS = (0.5, 1.0, 40.0, 0.0)
"""Of a task, by type, as the rates go."""
SKEWS = (None, 0.2, 0.9)
DIVIDING = (1, 4)
"""Kinds of jobs whose rounds divide."""
STEPS = (1.0, 4.0, 20.0, float("inf"))
GHOST = "nobody knows this job"
WAITING = {Code.CAPACITY, Code.UNAVAILABLE, Code.FRAGMENTATION, Code.ORDER, Code.SHARE, Code.HELD}

which = st.integers(0, 10**6)


def divided(gang: int, numbers: list[int]) -> Estimate:
    """Of a job of twice as many tasks as its gang has GPUs."""
    seconds = tuple(SECONDS[number % len(SECONDS)] for number in numbers)
    tasks = Tasks(2 * gang, seconds, ((0.25, 0.25, 0.5),) * len(seconds), gang)

    def rates(gpus: int) -> Rates:
        mixes = [tuple(gpus * (each == kind) for each in range(len(seconds))) for kind in range(len(seconds))]
        found = Estimate((), tasks=tasks)
        return tuple((found.on(mix, 0), found.on(mix, 1), found.on(mix, 2)) for mix in mixes)  # type: ignore[arg-type]

    return Estimate(rates(gang), None, tuple((gpus, rates(gpus)) for gpus in {1, 2 * gang} - {gang}), tasks)


class Book:
    """What runs where, from events and actions. `left` is what rounds that are computed task by task have yet to start."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[int, Holding]] = {}
        self.left: dict[str, int] = {}
        self.tasks: dict[str, int] = {}
        self.stopping: list[tuple[str, int]] = []
        self.lost: set[int] = set()
        self.closed: dict[int, int] = {}
        self.ended: set[str] = set()

    def read(self, fact: Event) -> None:
        self.note(fact)
        self.left = {job: left for job, left in self.left.items() if job in self.running}

    def note(self, fact: Event) -> None:  # noqa: C901 - one case per event
        match fact:
            case Computed(job, epoch, gpus) if self.running.get(job, (0, ()))[0] == epoch:
                held = dict(self.running[job][1])
                held |= {node: held[node] & ~mask for node, mask in gpus}
                self.running[job] = (epoch, tuple(Slots(node, mask) for node, mask in held.items() if mask))
            case Synchronised(job, epoch) if self.running.get(job, (0, ()))[0] == epoch:
                del self.running[job]
            case Finished(job, epoch) if self.running.get(job, (0, ()))[0] == epoch:
                del self.running[job]
                self.ended.add(job)
            case Failed(job, epoch) if self.running.get(job, (0, ()))[0] == epoch:
                del self.running[job]
            case Cancelled(job):
                self.running.pop(job, None)
                self.ended.add(job)
            case NodeLost(node):
                self.lost.add(node)
                for job, (epoch, gpus) in list(self.running.items()):
                    if any(slots.node == node for slots in gpus):
                        del self.running[job]
                        self.stopping.append((job, epoch))
            case NodeReturned(node):
                self.lost.discard(node)
            case NodeRestricted(node, closed):
                self.closed[node] = sum(1 << slot for slot in closed)
            case _:
                pass

    def carry_out(self, now: float, action: Action) -> None:
        match action:
            case Launch(job, epoch, gpus):
                assert job not in self.running
                assert job not in self.ended
                self.running[job] = (epoch, gpus)
            case Compute(job, epoch, gpus):
                assert job not in self.ended
                assert (job in self.running) == (job in self.left)
                before, held = self.running.get(job, (epoch, ()))
                assert before == epoch
                self.running[job] = (epoch, merged((*held, *gpus)))
                self.left[job] = self.left.get(job, self.tasks[job]) - gpu_count(gpus)
                assert self.left[job] >= 0
            case Preempt(job, epoch):
                assert job not in self.left, "tasks are never preempted"
                assert self.running.pop(job)[0] == epoch
                self.stopping.append((job, epoch))
            case Reject(job) | Abandon(job):
                assert job not in self.running
                self.ended.add(job)
            case Cancel(job):
                assert job not in self.ended
                self.running.pop(job, None)
                self.left.pop(job, None)
                self.ended.add(job)
            case WakeAt(time):
                assert time > now


class HostileWorld(RuleBasedStateMachine):
    """Facts in any order that could happen."""

    @initialize(cluster=clusters(), policy=policies, placement=placements, how=settings(guidelines=True))
    def begin(self, cluster: Cluster, policy: str, placement: str, how: Settings) -> None:
        self.now = 0.0
        self.book = Book()
        self.names: list[str] = []
        self.kinds: set[str] = set()
        self.types = len(cluster.gpu_types)
        self.nodes = len(cluster.nodes)
        self.settings = fitted(how, cluster)
        answer = whim(policy) if policy in WHIMS else policy_named(policy)
        self.scheduler = Scheduler(cluster, with_rounds(answer, how), placement_named(placement), self.settings)

    def tell(self, *facts: Event) -> None:
        for fact in facts:
            self.book.read(fact)
        for action in self.scheduler.handle(self.now, facts):
            self.book.carry_out(self.now, action)

    def some_run(self, number: int) -> tuple[str, int]:
        names = sorted(self.book.running)
        name = names[number % len(names)]
        return name, self.book.running[name][0]

    def is_over(self, name: str) -> bool:
        """A run that may come to its end: of a round only once all of its tasks are done."""
        return name not in self.book.left or not (self.book.left[name] or self.book.running[name][1])

    def submission(self, number: int) -> list[Event]:
        """A job of some kind, with the estimate of its kind if that is new, or by chance an estimate that replaces it."""
        number, kind = divmod(number, 6)
        number, gpus = divmod(number, 9)
        number, steps = divmod(number, len(STEPS))
        least, most = (1, gpus + 3) if kind == 5 else (None, None)
        name, label = f"j{len(self.names)}", f"kind {kind} of {gpus + 1}"
        facts: list[Event] = []
        if label not in self.kinds or number % 5 == 0:
            self.kinds.add(label)
            rates = tuple(RATES[(kind + number * i) % len(RATES)] for i in range(self.types))
            others = tuple((count, rates) for count in range(1, most + 1) if count != gpus + 1) if most else ()
            estimate = Estimate(rates, SKEWS[kind % len(SKEWS)], others)
            if kind in DIVIDING:
                estimate = divided(gpus + 1, [kind + number * i for i in range(self.types)])
            facts.append(Estimated(label, estimate))
        self.names.append(name)
        tasks = self.book.tasks[name] = 2 * (gpus + 1) if kind in DIVIDING else 0
        job = Job(name, self.now, gpus + 1, min_gpus=least, max_gpus=most, micro_batches=tasks or None)
        return [*facts, Submitted(job, label, STEPS[steps])]

    @rule(seconds=st.sampled_from((0.25, 1.0, 2.0, 3.0, 7.5, 60.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(numbers=st.lists(which, min_size=1, max_size=3))
    def jobs_arrive(self, numbers: list[int]) -> None:
        self.tell(*(fact for number in numbers for fact in self.submission(number)))

    @precondition(lambda self: self.book.running)
    @rule(number=which)
    def run_finishes(self, number: int) -> None:
        name, epoch = self.some_run(number)
        if self.is_over(name):
            self.tell(Finished(name, epoch))

    @precondition(lambda self: self.book.left)
    @rule(number=which, off=st.sampled_from((0, 0, 0, -1, 1)))
    def tasks_are_computed(self, number: int, off: int) -> None:
        """All those of a job on one node; or, as it may be told, of a run that is over."""
        names = sorted(self.book.left)
        name = names[number % len(names)]
        epoch, gpus = self.book.running[name]
        if gpus:
            self.tell(Computed(name, epoch + off, (gpus[number % len(gpus)],)))

    @precondition(lambda self: self.book.left)
    @rule(number=which)
    def round_is_synchronised(self, number: int) -> None:
        over = [name for name in sorted(self.book.left) if self.is_over(name)]
        if over:
            name = over[number % len(over)]
            self.tell(Synchronised(name, self.book.running[name][0], 1.0))

    @precondition(lambda self: self.book.running)
    @rule(number=which, steps=st.sampled_from((0.0, 1.0)), final=st.booleans(), cause=st.sampled_from(CAUSES))
    def run_fails(self, number: int, steps: float, final: bool, cause: str) -> None:
        self.tell(Failed(*self.some_run(number), cause, steps, final))

    @precondition(lambda self: self.book.running)
    @rule(number=which, off=st.sampled_from((0, 0, -1, 1)))
    def run_reports_its_loss(self, number: int, off: int) -> None:
        """Perhaps one that is over."""
        name, epoch = self.some_run(number)
        self.tell(Progressed(name, epoch + off, 1.0, 0.5), Progressed(GHOST, 1, 0.0, 1.0))

    @precondition(lambda self: self.book.running)
    @rule(number=which, off=st.sampled_from((-1, 1, 5)))
    def news_of_other_runs_arrives(self, number: int, off: int) -> None:
        """Of a run that is over, or of one that never was; one that has not said that it stopped might yet have finished."""
        name, epoch = self.some_run(number)
        if (name, epoch + off) in self.book.stopping:
            return
        self.tell(Finished(name, epoch + off), Failed(name, epoch + off, "died", 0.0))
        assert name in self.book.running or self.scheduler.explain(name).code in WAITING

    @precondition(lambda self: self.book.stopping)
    @rule(number=which, again=st.booleans(), steps=st.sampled_from((0.0, 0.5, 2.0)))
    def news_of_a_stop_arrives(self, number: int, again: bool, steps: float) -> None:
        """Perhaps late, when the job runs elsewhere already; perhaps twice."""
        at = number % len(self.book.stopping)
        name, epoch = self.book.stopping[at] if again else self.book.stopping.pop(at)
        self.tell(Stopped(name, epoch, steps))

    @precondition(lambda self: self.names)
    @rule(number=which)
    def owner_cancels(self, number: int) -> None:
        """Whatever became of the job."""
        self.tell(Cancelled(self.names[number % len(self.names)]))

    @rule()
    def news_of_nobody_arrives(self) -> None:
        self.tell(Finished(GHOST, 1), Failed(GHOST, 1, "died", 0.0), Stopped(GHOST, 1, 0.0), Cancelled(GHOST))

    @rule(number=which)
    def node_is_lost(self, number: int) -> None:
        """Perhaps one that is lost already."""
        self.tell(NodeLost(number % self.nodes))

    @rule(number=which)
    def node_returns(self, number: int) -> None:
        """Perhaps one that was never away."""
        self.tell(NodeReturned(number % self.nodes))

    @rule(number=which, closed=st.sets(st.integers(0, 7)), drained=st.booleans())
    def node_is_restricted(self, number: int, closed: set[int], drained: bool) -> None:
        """Or opened, be it lost or not."""
        node = number % self.nodes
        slots = tuple(sorted(slot for slot in closed if self.scheduler.state.topology.full[node] >> slot & 1))
        self.tell(NodeRestricted(node, slots, drained))

    @rule(number=which)
    def everything_happens_at_once(self, number: int) -> None:
        ends = [Finished(*self.some_run(number))] if self.book.running and self.is_over(self.some_run(number)[0]) else []
        lost, back = NodeLost(number % self.nodes), NodeReturned((number // 7) % self.nodes)
        self.tell(*ends, lost, back, *self.submission(number), Woke())

    @rule()
    def core_wakes(self) -> None:
        self.tell(Woke())

    @invariant()
    def state_agrees_with_the_book(self) -> None:
        if hasattr(self, "scheduler"):
            audit(self.scheduler, self.book)


def audit(scheduler: Scheduler, book: Book) -> None:
    """The whole state of the core, looked at from outside."""
    state = scheduler.state
    running = {state.columns.ids[row] for row in (*state.active, *state.suspended) if state.running(row)}
    assert not set(state.active).intersection(state.suspended)
    assert list(state.active) == sorted(state.active)
    assert running == set(book.running)
    for name, row in state.rows.items():
        status = Status(state.columns.status[row])
        assert (row in state.active or row in state.suspended) == (not status.is_final)
        code = scheduler.explain(name).code
        assert (code in WAITING) == (status is Status.WAITING)
        assert (code is Code.RUNNING) == (status is Status.RUNNING)
    audit_gpus(scheduler, book)
    audit_waiting(scheduler)
    audit_order(scheduler)


def audit_gpus(scheduler: Scheduler, book: Book) -> None:
    state = scheduler.state
    held = [0] * len(state.topology.full)
    kept = [state.pool.on(node) for node in range(len(held))]
    for name, (epoch, gpus) in book.running.items():
        row = state.rows[name]
        assert state.of(row) == gpus
        assert state.columns.epoch[row] == epoch
        count = sum(slots.mask.bit_count() for slots in gpus)
        assert count == state.columns.gpus[row]
        most = state.columns.most[row]
        if name in book.left:
            assert count <= most
            assert state.columns.ready[row] == book.left[name]
        else:
            assert count == 1 if row in state.suspended else state.columns.least[row] <= count <= most
            assert state.columns.ready[row] == state.columns.tasks[row] == book.tasks[name]
        assert (row in state.suspended) == state.pool.tries(row) == any(kept[node] & mask for node, mask in gpus)
        assert (row in state.suspended) != (row in state.placement_view.holdings), "policies do not see jobs on trial"
        kinds = {state.topology.type_of[slots.node] for slots in gpus}
        tasks = state.estimate(row).tasks
        assert len(kinds) == 1 if tasks is None else kinds.issubset(tasks.types)
        for node, mask in gpus:
            assert not held[node] & mask
            held[node] |= mask
    assert state.divisible == sum(state.columns.tasks[row] > 0 for row in (*state.active, *state.suspended))
    for node, full in enumerate(state.topology.full):
        assert state.free.alive[node] == (node not in book.lost)
        closed, unheld = book.closed.get(node, 0), 0 if node in book.lost else full & ~held[node] & ~kept[node]
        assert state.free.masks[node] == unheld & ~closed
        assert state.free.withheld[node] == unheld & closed
        holders = [
            name for name, (_, gpus) in book.running.items() if any(each == node and mask & closed for each, mask in gpus)
        ]
        assert sorted(map(state.rows.__getitem__, holders)) == state.ledger.holders(node, closed)
        if node in state.draining:
            assert all(name in book.left or state.pool.tries(state.rows[name]) for name in holders)
        assert not held[node] or node not in book.lost


def audit_waiting(scheduler: Scheduler) -> None:
    state = scheduler.state
    waiting: dict[int, int] = {}
    for row in state.active:
        if not state.running(row):
            index = state.shape_of[row].index
            waiting[index] = waiting.get(index, 0) + 1
    assert {index: shape.waiting for index, shape in state.waiting_shapes.items()} == waiting
    assert all(state.running(row) for row in state.protected)


def audit_order(scheduler: Scheduler) -> None:
    """The lanes hold just the active jobs, and in order, but for runs whose rank cannot matter yet."""
    answering: Any = scheduler._driver
    if not isinstance(answering, RankDriver):
        return
    state = scheduler.state
    lanes: Any = answering._index
    ranks = answering._order.preemption is PreemptionRule.BY_RANK
    assert not answering._unranked or not answering._contended
    assert all(state.running(row) for row in answering._unranked)
    running = [row for row in state.active if state.running(row) and row not in answering._unranked]
    waiting = [row for row in state.active if not state.running(row)]
    for row in range(len(lanes.ranks)):
        assert lanes.waits(row) == (row in waiting)
        assert lanes.runs(row) == (row in running and ranks)
    for shape in state.waiting_shapes.values():
        mine = [row for row in waiting if state.shape_of[row] is shape]
        head = lanes.head(shape)
        assert head[-1] in mine
        assert head[:3] == min((*lanes.ranks[row][1:3], lanes.ranks[row].value) for row in mine)
    if ranks:
        keys = sorted((lanes.running_key(row, 100.0) for row in running), reverse=True)
        assert list(lanes.running_behind((-1, 0), 100.0)) == [key[-1] for key in keys]


TestHostileWorld = HostileWorld.TestCase
TestHostileWorld.settings = hypothesis_settings(stateful_step_count=40)
