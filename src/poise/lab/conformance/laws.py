"""The laws that every policy keeps, and the claims of a listing, each as a function from what happened to what is wrong.

A law is given a `CheckedPolicy`, which makes the policy anew for each run, and what happened in one world. It returns None
if the law is kept, else one sentence that names job, time and numbers. The same functions judge the catalogue in the
project's own tests.
"""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from types import FrameType
from typing import Any, NamedTuple

from poise.engine.journal import entry_line, read_entry
from poise.engine.loop import collector_paused
from poise.lab.conformance.play import Handover, Play, new_core, play, without_lengths
from poise.lab.conformance.worlds import World
from poise.lab.simulator.outages import Drain
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.core.settings import Cadence
from poise.scheduler.model.action import Action, Cancel, Compute, JournalEntry, Launch, Preempt, PreemptionCause
from poise.scheduler.model.cluster import Holding, gpu_count
from poise.scheduler.model.errors import InvariantError
from poise.scheduler.model.event import (
    Cancelled,
    Computed,
    Event,
    Failed,
    Finished,
    NodeLost,
    NodeRestricted,
    NodeReturned,
    Synchronised,
)
from poise.scheduler.model.job import Job
from poise.scheduler.model.plan import Order, Policy
from poise.scheduler.model.topology import Topology
from poise.scheduler.policies.listing import Capability, Listing, PolicyProperty


@dataclass(frozen=True)
class CheckedPolicy:
    """A policy to check: made anew for every run, since what one run did to it must not matter in the next.

    make      makes the policy
    live      makes it as the live service uses it
    listing   what it says of itself; None if its author wrote no listing
    can       what it can make use of, with its combinators
    """

    make: Callable[[], Policy]
    live: Callable[[], Policy]
    listing: Listing | None
    can: frozenset[Capability]

    def play(self, world: World, **how: Any) -> Play:  # noqa: ANN401 - as `play`
        """Run it in a world."""
        return play(self.make(), world, pairs=Capability.PAIRS in self.can, **how)

    def claims(self, claim: PolicyProperty) -> bool:
        """Say whether its listing makes this claim."""
        return self.listing is not None and claim in self.listing.claims


Judge = Callable[[CheckedPolicy, Play], str | None]


class Law(NamedTuple):
    """A law: its name, what it says, how it is judged, and the worlds and policies to which it applies."""

    name: str
    statement: str
    judge: Judge
    applies: Callable[[CheckedPolicy, World], bool] = lambda _subject, _world: True


# What every decision keeps


def who_may_hold(job: Job) -> range:
    """The numbers of GPUs that a job can do with."""
    if job.micro_batches is not None:
        return range(1, job.micro_batches + 1)
    return range(job.min_gpus or job.gpus, (job.max_gpus or job.gpus) + 1)


def without(held: dict[int, int], gpus: Holding) -> dict[int, int]:
    """These GPUs more, or these less."""
    return {node: mask for node in {*held, *dict(gpus)} if (mask := held.get(node, 0) ^ dict(gpus).get(node, 0))}


class HeldGpus:
    """Who holds which GPUs, as masks by node, which nodes are lost, and which GPUs are closed."""

    def __init__(self) -> None:
        self.by_job: dict[str, dict[int, int]] = {}
        self.lost: set[int] = set()
        self.closed: dict[int, int] = {}

    def read(self, fact: Event) -> None:
        """Take in an event."""
        match fact:
            case NodeLost(node):
                self.lost.add(node)
                self.by_job = {job: gpus for job, gpus in self.by_job.items() if node not in gpus}
            case NodeReturned(node):
                self.lost.discard(node)
            case NodeRestricted(node, closed):
                self.closed[node] = sum(1 << slot for slot in closed)
            case Computed(job, _, gpus):
                self.by_job[job] = without(self.by_job[job], gpus)
            case Finished() | Failed() | Cancelled() | Synchronised():
                self.by_job.pop(fact.job, None)
            case _:
                pass

    def carry_out(self, action: Action) -> str | None:
        """Carry out an action; say what is wrong with it."""
        if isinstance(action, Preempt | Cancel):
            self.by_job.pop(action.job, None)
        elif isinstance(action, Launch | Compute):
            if isinstance(action, Launch) and action.job in self.by_job:
                return f"job {action.job!r} is started while it runs"
            if any(self.closed.get(node, 0) & mask for node, mask in action.gpus):
                return f"job {action.job!r} is started on GPUs that are closed"
            self.by_job[action.job] = without(self.by_job.get(action.job, {}), action.gpus)
        return None

    def problem(self, full: list[int], *, may_share: bool) -> str | None:
        """Say whether some GPU is not there, lost, or held twice."""
        for node, slots in enumerate(full):
            holders = {job: gpus[node] for job, gpus in self.by_job.items() if node in gpus}
            if holders and node in self.lost:
                return f"{', '.join(holders)} hold GPUs of node {node}, which is lost"
            for job, mask in holders.items():
                if mask & ~slots:
                    return f"job {job!r} holds GPUs of node {node} that are not there"
                if not may_share and any(mask & other for one, other in holders.items() if one != job):
                    return f"job {job!r} shares GPUs of node {node} with another job"
        return None


def wrong_gpus(
    subject: CheckedPolicy, played: Play, is_trial: Callable[[Holding], bool] = lambda _gpus: False
) -> str | None:
    """Say which decision gives GPUs that are not there, that are lost, closed or held, or that the job cannot use."""
    topology = Topology(played.world.cluster)
    jobs = {job.id: job for job in played.jobs}
    held = HeldGpus()
    may_share = Capability.PAIRS in subject.can
    for now, events, actions in played.entries:
        for fact in events:
            held.read(fact)
        for action in actions:
            problem = held.carry_out(action)
            if problem is None and isinstance(action, Launch | Compute):
                kinds = {topology.type_of[slots.node] for slots in action.gpus}
                tasks = played.speeds.estimate(jobs[action.job]).tasks
                enough = range(1, 2) if is_trial(action.gpus) else who_may_hold(jobs[action.job])
                if gpu_count(action.gpus) not in enough:
                    problem = f"job {action.job!r} is started on {gpu_count(action.gpus)} GPUs"
                elif len(kinds) != 1 if tasks is None else not kinds.issubset(tasks.types):
                    problem = f"job {action.job!r} is started on GPUs of types that it cannot use together"
            if problem is not None:
                return f"at {now:g} s {problem}"
        if (problem := held.problem(topology.full, may_share=may_share)) is not None:
            return f"at {now:g} s {problem}"
    return None


def never_ends(_subject: CheckedPolicy, played: Play) -> str | None:
    """Say which job has not ended although every node that was lost is back: it waits or runs for ever."""
    left = played.unended
    if not left:
        return None
    started = {action.job for entry in played.entries for action in entry.actions if isinstance(action, Launch | Compute)}
    never = [job for job in left if job not in started]
    what = f"{never[0]!r} is never started" if never else f"{left[0]!r} does not end"
    return f"job {what}, and nothing else is to come ({len(left)} of {len(played.jobs)} jobs are left)"


# The same again


def differs(one: tuple[JournalEntry, ...], other: tuple[JournalEntry, ...]) -> str | None:
    """The first difference of two journals, in words."""
    for first, second in zip(one, other, strict=False):
        if first != second:
            if first.now != second.now or first.events != second.events:
                return f"after the same decisions, the next event is at {first.now:g} s and at {second.now:g} s"
            return f"at {first.now:g} s: {_words(first.actions)}; and the other time: {_words(second.actions)}"
    return None if len(one) == len(other) else f"one run has {len(one)} decisions, the other {len(other)}"


def _words(actions: tuple[Action, ...]) -> str:
    """Actions in short."""
    said = [f"{type(each).__name__.lower()} {getattr(each, 'job', '')}".strip() for each in actions]
    return ", ".join(said[:4]) + (", …" if len(said) > 4 else "") if said else "nothing"


def not_repeatable(subject: CheckedPolicy, played: Play) -> str | None:
    """Say where a second run of the same world differs."""
    return differs(played.entries, subject.play(played.world).entries)


def not_replayed(subject: CheckedPolicy, played: Play) -> str | None:
    """Say where a new core answers otherwise to the events of the journal, as written and read."""
    core = new_core(subject.make(), played.world)
    for entry in played.entries:
        written = read_entry(entry_line(entry))
        got = core.handle(written.now, written.events)
        if got != written.actions:
            return f"at {entry.now:g} s the journal has {_words(written.actions)}; replayed: {_words(got)}"
    return None


def renamed(value: Any, names: dict[str, str]) -> Any:  # noqa: ANN401 - any part of a journal
    """The same journal with other names of jobs; an id stands in `job`, `beneficiary` and in the job itself."""
    if isinstance(value, JournalEntry):
        return JournalEntry(value.now, renamed(value.events, names), renamed(value.actions, names))
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(renamed(each, names) for each in value)
    for field in ("job", "beneficiary"):
        old = getattr(value, field, None)
        if isinstance(old, str):
            value = replace(value, **{field: names[old]})
        elif old is not None:
            value = replace(value, job=replace(old, id=names[old.id]))
    return value


def depends_on_names(subject: CheckedPolicy, played: Play) -> str | None:
    """Say where other ids of the same jobs change more than what they are called: equal jobs may come in any order."""
    old = [job.id for job in played.jobs]
    names = dict(zip(old, Random(len(old)).sample(old, len(old)), strict=True))
    jobs = tuple(replace(each, job=replace(each.job, id=names[each.job.id])) for each in played.world.jobs)
    other = subject.play(replace(played.world, jobs=jobs))
    return differs(tuple(renamed(entry, names) for entry in played.entries), other.entries)


# No clock, no randomness, no input or output

_CLOCKS = {"time", "posix", "_socket", "_io", "_posixsubprocess", "_thread"}
"""Modules in C whose functions ask the world around."""
_OF_TODAY = {"now", "today", "utcnow"}


def impure(subject: CheckedPolicy, played: Play) -> str | None:
    """Say which line asks a clock, draws global random numbers, reads, writes or prints while a decision is made."""
    found: list[str] = []

    def look(frame: FrameType, event: str, function: Any) -> None:  # noqa: ANN401 - as Python hands it over
        if event == "c_call" and not found and (called := _called(function)):
            found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} calls {called}")

    core = new_core(subject.make(), played.world)
    for entry in played.entries:
        try:
            with _profiled(look):
                core.handle(entry.now, entry.events)
        except InvariantError:  # it decides otherwise than before, so that the events are impossible; `replay` says so
            return None
        if found:
            return f"at {entry.now:g} s {found[0]}"
    return None


@contextmanager
def _profiled(look: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    before = sys.getprofile()
    with collector_paused():  # what others have the collector call, such as a clock, is no doing of the policy
        sys.setprofile(look)
        try:
            yield
        finally:
            sys.setprofile(before)


def _called(function: Any) -> str:  # noqa: ANN401 - anything that is called
    """The name of a function that asks the world around; empty if it does not."""
    name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    module = getattr(function, "__module__", None) or ""
    if module in _CLOCKS:
        return f"{module}.{name}"
    if module == "builtins" and name in ("open", "input", "print"):
        return name
    kind = type(owner)
    if isinstance(owner, type) and owner.__module__ == "datetime" and name in _OF_TODAY:
        return f"{owner.__name__}.{name}"
    if owner is getattr(random, "_inst", None) or isinstance(owner, random.SystemRandom):
        return f"random.{name}"
    if kind.__module__.startswith("numpy.random") and kind.__name__ == "RandomState":
        return f"numpy.random.{name}"
    return f"{kind.__name__}.{name}" if kind.__module__ == "_io" and kind.__name__ != "StringIO" else ""


# Oddities


def fails_without_lengths(subject: CheckedPolicy, played: Play) -> str | None:
    """Say which job does not end if lengths of jobs are not known."""
    return never_ends(subject, subject.play(played.world, tell=without_lengths))


def fails_after_handover(subject: CheckedPolicy, played: Play) -> str | None:
    """Say what goes wrong if a new core takes over in the middle, which knows where jobs stand and nothing else."""
    last = len(played.entries) - 1
    if last < 1:
        return None
    live = replace(subject, make=subject.live)
    middle = last // 2
    went_on = live.play(played.world, handover=Handover(middle, subject.live()))
    return never_ends(subject, went_on)


def looks_at_more(subject: CheckedPolicy, played: Play) -> str | None:
    """Say what the policy looks at without saying so in its listing: deadlines, or priorities."""
    for name, capability, plain in (("deadline", Capability.DEADLINES, None), ("priority", Capability.PRIORITIES, 0)):
        if capability in subject.can or all(getattr(job, name) == plain for job in played.jobs):
            continue
        change: dict[str, Any] = {name: plain}
        jobs = tuple(replace(each, job=replace(each.job, **change)) for each in played.world.jobs)
        other = subject.play(replace(played.world, jobs=jobs))
        for one, two in zip(played.entries, other.entries, strict=False):
            if one.actions != two.actions:
                return f"at {one.now:g} s: {_words(one.actions)}; where no job has a {name}: {_words(two.actions)}"
    return None


# Claims of the listing


def preempts(_subject: CheckedPolicy, played: Play) -> str | None:
    """Say which run is preempted for another job. Moves that settings ask for, drains and trials do not count."""
    divides = {job.id for job in played.jobs if job.micro_batches is not None}
    settings = played.world.settings
    may = {PreemptionCause.MOVED: settings.defragment > 0, PreemptionCause.VALIDATED: settings.validation_gpus > 0}
    may[PreemptionCause.DRAINED] = any(isinstance(each, Drain) for each in played.world.outages)
    for now, _, actions in played.entries:
        for action in actions:
            if not isinstance(action, Preempt):
                continue
            is_outranked = action.why in (PreemptionCause.OUTRANKED, PreemptionCause.UNPLANNED)
            if is_outranked or (action.job not in divides and not may.get(action.why, False)):
                return f"at {now:g} s job {action.job!r} is preempted ({action.why})"
    return None


def out_of_order(subject: CheckedPolicy, played: Play) -> str | None:
    """Say which job starts before one that was submitted earlier. In one decision, shares start jobs in any order."""
    first: dict[str, int] = {}
    for number, entry in enumerate(played.entries):
        for action in entry.actions:
            if isinstance(action, Launch | Compute):
                first.setdefault(action.job, number)
    queue = [job.id for job in played.jobs if job.id in first]
    for one, two in pairwise(queue):
        if first[one] > first[two]:
            return f"job {two!r} starts before job {one!r}, which was submitted earlier"
    if isinstance(played.policy.answer, Order) and list(first) != queue:
        return f"jobs start in the order {', '.join(first)}"
    return None


def room_for_a_gang(core: Scheduler) -> str | None:
    """Say which waiting gang would fit on idle GPUs."""
    state = core.state
    for shape in state.waiting_shapes.values():
        for gpu_type in shape.types:
            if state.free.idle[gpu_type] >= shape.gang:
                name = state.topology.types[gpu_type]
                return (
                    f"{state.free.idle[gpu_type]} GPUs of type {name} are idle while a gang of {shape.gang} waits for them"
                )
    return None


def leaves_idle(subject: CheckedPolicy, played: Play) -> str | None:
    """Say where GPUs are idle that a waiting gang could use."""
    found: list[str] = []

    def watch(core: Scheduler, entry: JournalEntry) -> None:
        problem = None if found else room_for_a_gang(core)
        if problem is not None:
            found.append(f"at {entry.now:g} s {problem}")

    subject.play(played.world, watch=watch)
    return found[0] if found else None


def needs_lengths(subject: CheckedPolicy, played: Play) -> str | None:
    """Say where a decision differs if lengths of jobs are not known."""
    blind = new_core(subject.make(), played.world)
    for now, events, actions in played.entries:
        got = blind.handle(now, without_lengths(events))
        if got != actions:
            return f"at {now:g} s: {_words(actions)}; where lengths are not known: {_words(got)}"
    return None


def _is_plain(_subject: CheckedPolicy, world: World) -> bool:
    return world.is_plain


def _is_plain_at_events(_subject: CheckedPolicy, world: World) -> bool:
    return world.is_plain and world.settings.cadence is Cadence.EVENTS


def _has_listing(subject: CheckedPolicy, _world: World) -> bool:
    return subject.listing is not None


def _has_work_to_do(_subject: CheckedPolicy, world: World) -> bool:
    return any((each.job.duration or 0.0) > 0 for each in world.jobs)


RAISES = "raises nothing"
LAWS = (
    Law("gpus", "gives GPUs that are there, are free, and are enough for the job", wrong_gpus),
    Law("ends", "every job comes to its end if the nodes that were lost return", never_ends),
    Law("repeatable", "the same world gives the same journal twice", not_repeatable),
    Law("pure", "asks no clock, draws no random numbers, reads and writes nothing", impure, _has_work_to_do),
    Law("replay", "the events of a journal, written and read, lead to its actions again", not_replayed),
    Law("names", "ids of jobs mean nothing: equal jobs may come in any order", depends_on_names),
    Law("unknown lengths", "every job ends, also where lengths of jobs are not known", fails_without_lengths),
    Law("handover", "a new core takes over in the middle, and every job comes to its end", fails_after_handover),
    Law("stated", "looks at deadlines and priorities only if its listing says so", looks_at_more, _has_listing),
)
"""What every policy keeps in every world, besides raising nothing."""


def claimed(
    claim: PolicyProperty, judge: Judge, applies: Callable[[CheckedPolicy, World], bool] = lambda _subject, _world: True
) -> Law:
    """The law that a claim is."""
    return Law(name_of(claim), str(claim), judge, applies)


def name_of(claim: PolicyProperty) -> str:
    """What a claim is called among the laws: `claims no-preemption`."""
    return f"claims {claim.name.lower().replace('_', '-')}"


CLAIMS = {
    PolicyProperty.NO_PREEMPTION: claimed(PolicyProperty.NO_PREEMPTION, preempts),
    PolicyProperty.IN_ORDER: claimed(PolicyProperty.IN_ORDER, out_of_order, _is_plain),
    PolicyProperty.WORK_CONSERVING: claimed(PolicyProperty.WORK_CONSERVING, leaves_idle, _is_plain_at_events),
    PolicyProperty.NO_DURATIONS: claimed(PolicyProperty.NO_DURATIONS, needs_lengths),
}
"""Claims of a listing that runs in such worlds show; `poise audit` measures those about sharing."""
