"""Laws of the journal: any run can be written, read back as it was, written again as the same bytes, and replayed."""

import io
import json
import tempfile
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import World, named, worlds

from poise.engine.assembly import with_rounds
from poise.engine.journal import COMPLETE, INTERRUPTED, Header, JournalReader, JournalWriter
from poise.engine.loop import replay
from poise.lab.analysis.history import History
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.action import (
    Abandon,
    Action,
    Cancel,
    Compute,
    Entitled,
    JournalEntry,
    Launch,
    Preempt,
    PreemptionCause,
    Reject,
    Remark,
    Traded,
    Waited,
    WakeAt,
)
from poise.scheduler.model.cluster import MOST_GPUS, Cluster, Node, Slots
from poise.scheduler.model.event import (
    Attached,
    Belated,
    Cancelled,
    Carried,
    Colocated,
    Computed,
    Estimated,
    Event,
    Failed,
    Finished,
    Held,
    NodeLost,
    NodeRestricted,
    NodeReturned,
    Progressed,
    Released,
    Revealed,
    Stopped,
    Submitted,
    Synchronised,
    Woke,
)
from poise.scheduler.model.job import Job, Yields
from poise.scheduler.model.micro_batches import Tasks
from poise.scheduler.model.speed import Estimate
from poise.scheduler.placement.strategies import placement_named
from poise.scheduler.policies.catalogue import policy_named

names = st.text(st.characters(), max_size=8) | st.sampled_from(("a", '"', "\n", "\\", "]", "\u2028", "\udcff", "ü😀"))
amounts = st.floats(0, allow_nan=False, allow_infinity=False)
numbers = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**70)
maybe = st.none()

given_jobs = st.builds(
    Job,
    names,
    amounts,
    st.integers(1, 10**6),
    maybe | amounts,
    maybe | amounts,
    names,
    maybe | names,
    maybe | names,
    maybe | counts,
    amounts,
    st.integers(-(10**9), 10**9),
    maybe | amounts,
    st.lists(names, max_size=3).map(tuple),
    maybe | counts,
    maybe | counts,
    maybe | counts,
    maybe | names,
    amounts,
    st.sampled_from(Yields),
    amounts,
)
rates = st.lists(st.tuples(amounts, amounts, amounts), max_size=3).map(tuple)
resized = st.lists(st.tuples(counts, rates), max_size=2).map(tuple)
tasks = st.builds(Tasks, counts, st.lists(amounts, max_size=3).map(tuple), rates, counts)
estimates = st.builds(Estimate, rates, maybe | amounts, resized, maybe | tasks)
holdings = st.lists(st.builds(Slots, counts, counts), max_size=3).map(tuple)
waits = st.builds(Waited, amounts, amounts, amounts)

EVENTS: dict[type, st.SearchStrategy[Event]] = {
    Estimated: st.builds(Estimated, names, estimates),
    Colocated: st.builds(Colocated, names, names, st.lists(st.tuples(amounts, amounts), max_size=3).map(tuple)),
    Submitted: st.builds(Submitted, given_jobs, names, amounts | st.just(inf)),
    Revealed: st.builds(Revealed, names, amounts, st.lists(amounts, max_size=3).map(tuple)),
    Carried: st.builds(
        Carried,
        given_jobs,
        names,
        amounts | st.just(inf),
        counts,
        amounts,
        amounts,
        counts,
        numbers,
        holdings,
        st.booleans(),
        maybe | numbers,
    ),
    Attached: st.builds(Attached, names, counts),
    Finished: st.builds(Finished, names, counts),
    Failed: st.builds(Failed, names, counts, names, amounts, st.booleans()),
    Stopped: st.builds(Stopped, names, counts, amounts),
    Computed: st.builds(Computed, names, counts, holdings),
    Synchronised: st.builds(Synchronised, names, counts, amounts),
    Progressed: st.builds(Progressed, names, counts, amounts, numbers),
    Cancelled: st.builds(Cancelled, names),
    Held: st.builds(Held, names),
    Released: st.builds(Released, names),
    NodeLost: st.builds(NodeLost, counts),
    NodeReturned: st.builds(NodeReturned, counts),
    NodeRestricted: st.builds(
        NodeRestricted,
        counts,
        st.sets(st.integers(0, MOST_GPUS - 1), max_size=3).map(lambda found: tuple(sorted(found))),
        st.booleans(),
    ),
    Belated: st.just(Belated()),
    Woke: st.just(Woke()),
}
ACTIONS: dict[type, st.SearchStrategy[Action]] = {
    Launch: st.builds(Launch, names, counts, holdings, waits),
    Compute: st.builds(Compute, names, counts, holdings, waits),
    Preempt: st.builds(Preempt, names, counts, st.sampled_from(PreemptionCause), maybe | names),
    Reject: st.builds(Reject, names, names),
    Abandon: st.builds(Abandon, names, names),
    Cancel: st.builds(Cancel, names, names),
    Remark: st.builds(Remark, names),
    Traded: st.builds(Traded, names, names, names, names, amounts, amounts),
    Entitled: st.builds(Entitled, names, st.lists(amounts, max_size=3).map(tuple)),
    WakeAt: st.builds(WakeAt, numbers),
}
entries = st.lists(
    st.builds(
        JournalEntry,
        numbers,
        st.lists(st.one_of(*EVENTS.values()), max_size=4).map(tuple),
        st.lists(st.one_of(*ACTIONS.values()), max_size=4).map(tuple),
    ),
    max_size=5,
).map(lambda found: sorted(found, key=lambda entry: entry.now))
nodes = st.builds(Node, names, names, st.integers(1, 10**6), names)
by_type = st.dictionaries(names, amounts, max_size=2)
headers = st.builds(
    Header,
    names,
    st.builds(
        Cluster, st.lists(nodes, min_size=1, max_size=4, unique_by=lambda node: node.name).map(tuple), by_type, by_type
    ),
    names,
    names,
    st.builds(Settings, st.sampled_from(Cadence), st.floats(1e-9, 1e9), st.booleans(), amounts, amounts, counts),
    counts,
)


def written(header: Header, found: list[JournalEntry], end: str = COMPLETE) -> str:
    stream = io.StringIO()
    writer = JournalWriter(stream, header)
    for entry in found:
        writer.record(entry)
    writer.close(end)
    return stream.getvalue()


def read(text: str) -> tuple[Header, list[JournalEntry]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        path.write_bytes(text.encode("ascii"))
        reader = JournalReader(path)
        return reader.header, list(reader.entries())


def test_every_kind_of_event_and_action_is_drawn() -> None:
    assert set(EVENTS) == set(Event.__args__)
    assert set(ACTIONS) == set(Action.__args__)


@given(headers, entries, st.sampled_from((COMPLETE, INTERRUPTED)))
def test_what_is_written_is_read_back_and_written_again_as_the_same_bytes(
    header: Header, found: list[JournalEntry], end: str
) -> None:
    text = written(header, found, end)
    assert len(text.splitlines()) == len(found) + 2
    again, same = read(text)
    assert (again, same) == (header, found)
    assert repr(same) == repr(found)
    assert written(again, same, end) == text


def fresh(header: Header) -> Scheduler:
    return Scheduler(
        header.cluster,
        with_rounds(policy_named(header.policy), header.settings),
        placement_named(header.placement),
        header.settings,
    )


@settings(max_examples=settings().max_examples * 5 // 8)
@given(worlds(policy=named))
def test_a_run_that_went_through_a_file_replays_exactly(world: World) -> None:
    story = world.played()
    header = Header("t", world.cluster, world.policy, world.placement, world.settings, 0)
    header, found = read(written(header, story.entries))
    assert found == story.entries
    assert replay(fresh(header), found).instants == len(found)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Everything inside a document: what holds it, and where."""
    for at, each in enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ():
        yield value, at
        yield from places(each)


anything: st.SearchStrategy[Any] = (
    maybe | st.booleans() | names | st.integers() | numbers | st.just([]) | st.just({}) | st.just([[0, -1]])
)


@given(worlds(policy=named), anything, st.data())
def test_whatever_stands_in_a_journal_what_can_be_read_is_read(world: World, value: object, data: st.DataObject) -> None:
    story = world.played()
    header = Header("t", world.cluster, world.policy, world.placement, world.settings, 0)
    lines = written(header, story.entries).splitlines()
    at = data.draw(st.integers(1, len(lines) - 1))
    document = json.loads(lines[at])
    holder, place = data.draw(st.sampled_from(list(places(document))))
    holder[place] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        path.write_text("\n".join([*lines[:at], json.dumps(document), *lines[at + 1 :], ""]), encoding="utf-8")
        reader = JournalReader(path)
        history = History(reader.header.cluster)
        problem = reader.feed(history.take)
        history.close()
    assert history.end >= max((entry.now for entry in story.entries[: at - 1]), default=-inf)
    assert problem is None or str(path) in str(problem)
