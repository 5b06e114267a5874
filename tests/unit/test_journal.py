"""The journal as text: bytes that do not change, and what a reader makes of them. Damage is tested in test_cli_replay."""

import io
import json
import re
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from tests.builders import a_job, simulate
from tests.shell import poise

from poise.engine.journal import COMPLETE, INTERRUPTED, Header, JournalReader, JournalWriter, job_line, read_job
from poise.engine.loop import replay, run
from poise.scheduler.core.settings import Cadence, RetryRule, Settings
from poise.scheduler.model.action import (
    Abandon,
    Compute,
    JournalEntry,
    Launch,
    Preempt,
    PreemptionCause,
    Reject,
    Remark,
    Waited,
    WakeAt,
)
from poise.scheduler.model.cluster import Cluster, Node, Slots
from poise.scheduler.model.errors import JournalError, ReplayError
from poise.scheduler.model.event import (
    Cancelled,
    Colocated,
    Computed,
    Estimated,
    Failed,
    Finished,
    NodeLost,
    NodeRestricted,
    NodeReturned,
    Stopped,
    Submitted,
    Synchronised,
    Woke,
)
from poise.scheduler.model.job import Job
from poise.scheduler.model.micro_batches import Tasks
from poise.scheduler.model.speed import Estimate
from poise.scheduler.model.workload import Filling

HEADER = Header(
    trace="t.jsonl",
    cluster=Cluster((Node("n0", "v100", 4, "r0"), Node("n1", "k80", 64, "r1"))),
    policy="tiresias:limits=3/9+stable",
    placement="best-fit",
    settings=Settings(
        Cadence.ROUNDS,
        60.0,
        False,
        5.0,
        7.0,
        1,
        120.0,
        0.25,
        2.0,
        30.0,
        90.0,
        15.0,
        2,
        45.0,
        RetryRule.CAUSE,
        20.0,
        Filling.LAST,
    ),
    seed=42,
)
ENTRIES = (
    JournalEntry(
        0.0,
        (
            Estimated("k", Estimate(((1.0, 0.5, 0.25), (2.0, 2.0, 2.0)), 0.75)),
            Estimated("l", Estimate(((0.0, 0.0, 0.0), (1e-9, 1e-9, 1e-9)))),
            Colocated("l", "k", ((0.0, 0.0), (5e-10, 1.5))),
            Submitted(Job("a", 0.0, 2, 10.0), "k", 10.0),
            Submitted(Job("b", 0.0, 64, steps=5.0, model="m", gpu_types=("v100", "k80"), weight=2.0, priority=-1), "k", inf),
            Submitted(Job("c", 0.0, 999, 1.0), "l", 1.0),
        ),
        (
            Reject("c", "needs 999 GPUs"),
            Launch("a", 1, (Slots(0, 0b11),), Waited(0.0, 0.0, 0.0)),
            Launch("b", 1, (Slots(0, 0b1100), Slots(1, (1 << 64) - 1)), Waited(1.5, 2.5, 1e300)),
            WakeAt(60.0),
        ),
    ),
    JournalEntry(
        60.0,
        (
            Finished("a", 1),
            Failed("b", 1, "out of memory", 2.5),
            NodeLost(1),
            NodeReturned(1),
            NodeRestricted(1, (0, 2), True),
            Woke(),
        ),
        (
            Remark("no new shares"),
            Preempt("b", 2, PreemptionCause.OUTRANKED, "a"),
            Preempt("b", 3, PreemptionCause.MOVED, None),
            Abandon("b", "run 1 failed"),
        ),
    ),
    JournalEntry(60.0, (Stopped("b", 2, 0.1 + 0.2), Cancelled("b"), Failed("b", 1, "x", 0.0, final=True)), ()),
    JournalEntry(1e12, (), (Preempt("b", 1, PreemptionCause.UNPLANNED, None),)),
)
TEXT = """\
{"journal":2,"trace":"t.jsonl","policy":"tiresias:limits=3/9+stable","placement":"best-fit","seed":42,"settings":\
{"cadence":"rounds","round":60.0,"backfill":false,"restart_overhead":5.0,"minimum_run":7.0,"retries":1,"recompute":120.0,\
"credit":0.25,"patience":2.0,"packed_wait":30.0,"rack_wait":90.0,"defragment":15.0,"validation_gpus":2,\
"validation_time":45.0,"retry":"cause","backoff":20.0,"filling":"last"},"nodes":[["n0","v100",4,"r0"],["n1","k80",64,"r1"]]}
[0.0,[["estimated","k",[[[1.0,0.5,0.25],[2.0,2.0,2.0]],0.75]],["estimated","l",[[[0.0,0.0,0.0],[1e-09,1e-09,1e-09]],null]],\
["colocated","l","k",[[0.0,0.0],[5e-10,1.5]]],["submitted",{"id":"a","submitted":0.0,"gpus":2,"duration":10.0},"k",10.0],\
["submitted",{"id":"b","submitted":0.0,"gpus":64,"steps":5.0,"model":"m","weight":2.0,"priority":-1,\
"gpu_types":["v100","k80"]},"k",null],\
["submitted",{"id":"c","submitted":0.0,"gpus":999,"duration":1.0},"l",1.0]],[["reject","c","needs 999 GPUs"],\
["launch","a",1,[[0,3]],\
[0.0,0.0,0.0]],["launch","b",1,[[0,12],[1,18446744073709551615]],[1.5,2.5,1e+300]],["wakeat",60.0]]]
[60.0,[["finished","a",1],["failed","b",1,"out of memory",2.5,false],["nodelost",1],["nodereturned",1],\
["noderestricted",1,[0,2],true],["woke"]],\
[["remark","no new shares"],["preempt","b",2,"outranked","a"],["preempt","b",3,"moved",null],["abandon","b","run 1 failed"]]]
[60.0,[["stopped","b",2,0.30000000000000004],["cancelled","b"],["failed","b",1,"x",0.0,true]],[]]
[1000000000000.0,[],[["preempt","b",1,"unplanned",null]]]
{"end":"complete"}
"""
"""Files that people have kept must stay readable: change this only with a new version."""


def written(header: Header, *entries: JournalEntry, end: str | None = COMPLETE) -> str:
    stream = io.StringIO()
    writer = JournalWriter(stream, header)
    for entry in entries:
        writer.record(entry)
    if end:
        writer.close(end)
    return stream.getvalue()


def reader(tmp_path: Path, text: str) -> JournalReader:
    path = tmp_path / "journal.jsonl"
    path.write_text(text, encoding="utf-8", newline="")
    return JournalReader(path)


def test_the_text_of_a_journal_is_what_it_always_was() -> None:
    assert written(HEADER, *ENTRIES) == TEXT


def test_a_journal_is_read_back_as_it_was(tmp_path: Path) -> None:
    found = reader(tmp_path, TEXT)
    assert found.header == HEADER
    assert tuple(found.entries()) == ENTRIES


ROWS = ((1.0, 0.5, 0.25), (2.0, 2.0, 2.0))
DIVIDED = JournalEntry(
    3.0,
    (
        Computed("a", 2, (Slots(0, 1), Slots(1, 6))),
        Synchronised("a", 2, 7.0),
        Estimated("k", Estimate(ROWS, None, (), Tasks(4, (0.5, 0.0), ((0.1, 0.1, 0.2), (0.0, 0.0, 0.0)), 2))),
        Estimated("l", Estimate(ROWS, 0.5, ((3, ROWS),), Tasks(1, (1.0, 1.0), ROWS))),
        Submitted(Job("b", 0.0, 2, 10.0, micro_batches=4, sync=0.1), "k", 10.0),
    ),
    (Compute("a", 3, (Slots(0, 1), Slots(1, 6)), Waited(0.0, 0.5, 0.0)),),
)
DIVIDED_TEXT = """\
[3.0,[["computed","a",2,[[0,1],[1,6]]],["synchronised","a",2,7.0],\
["estimated","k",[[[1.0,0.5,0.25],[2.0,2.0,2.0]],null,[],[4,[0.5,0.0],[[0.1,0.1,0.2],[0.0,0.0,0.0]],2]]],\
["estimated","l",[[[1.0,0.5,0.25],[2.0,2.0,2.0]],0.5,[[3,[[1.0,0.5,0.25],[2.0,2.0,2.0]]]],\
[1,[1.0,1.0],[[1.0,0.5,0.25],[2.0,2.0,2.0]],1]]],\
["submitted",{"id":"b","submitted":0.0,"gpus":2,"duration":10.0,"micro_batches":4,"sync":0.1},"k",10.0]],\
[["compute","a",3,[[0,1],[1,6]],[0.0,0.5,0.0]]]]
"""
"""Jobs whose steps divide into tasks; journals of others say nothing of them."""


def test_tasks_survive_writing_and_reading(tmp_path: Path) -> None:
    text = written(HEADER, DIVIDED)
    assert text.splitlines(keepends=True)[1] == DIVIDED_TEXT
    [found] = reader(tmp_path, text).entries()
    assert repr(found) == repr(DIVIDED)


def test_the_weight_of_a_tenant_is_written_where_it_is_not_one() -> None:
    line = '{"id":"a","submitted":0.0,"gpus":2,"tenant":"t","weight":6.0,"tenant_weight":3.0}'
    job = Job("a", 0.0, 2, tenant="t", weight=6.0, tenant_weight=3.0)
    assert job_line(job) == line
    assert read_job(line) == job
    assert "tenant_weight" not in job_line(replace(job, tenant_weight=1.0))
    assert read_job(line.replace(',"tenant_weight":3.0', "")).tenant_weight == 1.0


def test_an_estimate_with_too_many_fields_is_refused(tmp_path: Path) -> None:
    text = written(HEADER, DIVIDED).replace(",2]]],", ",2],9]],")
    assert text != written(HEADER, DIVIDED)
    with pytest.raises(JournalError, match=r"journal\.jsonl:2: not an entry of a journal"):
        tuple(reader(tmp_path, text).entries())


def test_a_setting_that_an_older_journal_does_not_have_is_the_default(tmp_path: Path) -> None:
    older = TEXT.replace(',"recompute":120.0,"credit":0.25', "")
    assert older != TEXT
    found = reader(tmp_path, older)
    assert found.header.settings == replace(HEADER.settings, recompute=Settings().recompute, credit=Settings().credit)
    assert tuple(found.entries()) == ENTRIES


def test_leftovers_are_filled_type_by_type_where_an_older_journal_does_not_say(tmp_path: Path) -> None:
    older = TEXT.replace(',"filling":"last"', "")
    assert older != TEXT
    assert reader(tmp_path, older).header.settings == replace(HEADER.settings, filling=Filling.BY_TYPE)


def test_what_is_read_is_of_the_same_types(tmp_path: Path) -> None:
    """Equal is not enough: a list, or a text in place of a name of a cause, would be equal in part."""
    for got, want in zip(reader(tmp_path, TEXT).entries(), ENTRIES, strict=True):
        assert repr(got) == repr(want)


def test_a_journal_of_nothing_is_a_journal(tmp_path: Path) -> None:
    assert tuple(reader(tmp_path, written(HEADER)).entries()) == ()


def test_an_interrupted_journal_is_whole(tmp_path: Path) -> None:
    assert tuple(reader(tmp_path, written(HEADER, *ENTRIES, end=INTERRUPTED)).entries()) == ENTRIES


def test_a_journal_that_was_cut_off_gives_what_there_is_and_says_so(tmp_path: Path) -> None:
    entries = reader(tmp_path, written(HEADER, *ENTRIES, end=None)).entries()
    assert tuple(next(entries) for _ in ENTRIES) == ENTRIES
    with pytest.raises(JournalError, match=r"journal\.jsonl:5: cut off here"):
        next(entries)


def test_a_folder_stands_for_the_journal_in_it(tmp_path: Path) -> None:
    reader(tmp_path, TEXT)
    assert JournalReader(tmp_path).header == JournalReader(str(tmp_path / "journal.jsonl")).header


def test_a_number_that_json_does_not_have_is_not_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        written(HEADER, JournalEntry(float("nan"), (), ()))


def test_names_of_any_letters_fit_on_one_line(tmp_path: Path) -> None:
    names = ("a b", 'quo"te', "new\nline", "\r", "\u2028", "ü", "😀", "\x00", "\udcff", "]", "\\", "")
    entry = JournalEntry(0.0, tuple(Cancelled(name) for name in names), tuple(Reject(name, name) for name in names))
    text = written(replace(HEADER, trace="\n\udcff"), entry)
    assert text.isascii()
    assert len(text.splitlines()) == 3
    found = reader(tmp_path, text)
    assert found.header.trace == "\n\udcff"
    assert tuple(found.entries()) == (entry,)


def test_replay_reproduces_a_simulation_and_counts_it() -> None:
    jobs = [a_job("a", gpus=3, seconds=30), a_job("b", at=5, gpus=2, seconds=5), a_job("c", at=6, dies=(1.0,))]
    story = simulate(jobs, "srtf")
    again = simulate([], "srtf").scheduler
    replayed = replay(again, story.entries)
    assert replayed.instants == len(story.entries)
    assert replayed.events == sum(len(entry.events) for entry in story.entries)
    assert replayed.actions == sum(len(entry.actions) for entry in story.entries)
    assert again.decisions == story.scheduler.decisions


def test_replay_names_the_time_and_both_actions_where_they_differ() -> None:
    story = simulate([a_job("a"), a_job("b", at=5)], "fifo", "gpu:1")
    other = simulate([], "fifo", "gpu:2").scheduler
    with pytest.raises(ReplayError, match=r'at 5: the journal has nothing, the core answers \["launch","b"'):
        replay(other, story.entries)


def test_loop_records_every_entry_in_order_and_stops_when_asked() -> None:
    story = simulate([a_job("a"), a_job("b", at=5)], "fifo", "gpu:1")

    class Script:
        """A back end that tells a story once more."""

        def __init__(self) -> None:
            self.applied = 0

        def batches(self) -> list[tuple[float, tuple[object, ...]]]:
            return [(entry.now, entry.events) for entry in story.entries]

        def apply(self, now: float, actions: object) -> None:
            self.applied += 1

    entries: list[JournalEntry] = []
    script = Script()
    complete, seconds = run(simulate([], "fifo", "gpu:1").scheduler, script, entries.append)  # type: ignore[arg-type]
    assert complete
    assert seconds > 0
    assert entries == story.entries
    left = iter([True, True, False])
    entries, script = [], Script()
    complete, _ = run(simulate([], "fifo", "gpu:1").scheduler, script, entries.append, lambda: next(left))  # type: ignore[arg-type]
    assert not complete
    assert entries == story.entries[:2]
    assert script.applied == 2


def test_a_header_holds_everything_that_settings_hold() -> None:
    assert json.loads(TEXT.splitlines()[0])["settings"].keys() == set(Settings.__slots__)


def test_a_journal_that_goes_on_after_its_end_is_refused(tmp_path: Path) -> None:
    poise("simulate", "synthetic:jobs=3", "--out", str(tmp_path / "run"), "--quiet")
    journal = tmp_path / "run" / "journal.jsonl"
    journal.write_text(journal.read_text() + "[0.0,[],[]]\n")
    assert "something follows the end" in poise("replay", str(journal)).failure


WRONG = {
    "a name that is a list": ('["finished","a",1]', '["finished",["a"],1]', "expected text, got ['a']"),
    "a number that is text": ('"gpus":2', '"gpus":"two"', "expected a whole number, got 'two'"),
    "a number that is a truth": ('"gpus":2', '"gpus":true', "expected a whole number, got True"),
    "a number beyond all floats": ('"duration":10.0', '"duration":1e999', "expected a finite number, got inf"),
    "a whole number beyond all floats": ('"duration":10.0', f'"duration":{10**400}', "expected a finite number, got 1000"),
    "slots that are a fraction": ("[[0,3]]", "[[0,1.5]]", "expected a whole number, got 1.5"),
    "slots from the other end": ("[0,2],true", "[-1,2],true", "expected a whole number of at least 0, got -1"),
    "slots twice": ("[0,2],true", "[2,2],true", "expected slots of a node, ascending, got [2, 2]"),
    "slots that fill the memory": ("[0,2],true", "[0,1000000000000],true", "expected slots of a node, ascending"),
    "a node from the other end": ('["nodelost",1]', '["nodelost",-1]', "expected a whole number of at least 0, got -1"),
    "slots below 0": ("[[0,3]]", "[[0,-3]]", "expected a whole number of at least 0, got -3"),
    "a truth that is a number": ('"x",0.0,true]', '"x",0.0,1]', "expected true or false, got 1"),
    "something that jobs do not have": ('"gpus":2', '"gpus":2,"mood":1', "'mood'"),
    "work without an end where there is one": ('"b",1,"out of memory",2.5', '"b",1,"x",null', "expected a finite number"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_value_of_another_kind_is_refused_with_its_line(what: str, tmp_path: Path) -> None:
    old, new, problem = WRONG[what]
    assert TEXT.count(old) == 1
    with pytest.raises(JournalError, match=r"journal\.jsonl:\d: not an entry of a journal: .*" + re.escape(problem)):
        tuple(reader(tmp_path, TEXT.replace(old, new)).entries())


def newer(lines: list[Any]) -> str:
    """The journal in a later version: new settings, new keys of jobs, new fields, new facts."""
    header = json.loads(TEXT.splitlines()[0])
    header |= {"journal": 3, "mood": "good", "settings": header["settings"] | {"tempo": 3}}
    return "\n".join(json.dumps(each) for each in [header, *lines, {"end": "complete"}]) + "\n"


def test_a_newer_journal_is_read_as_far_as_it_is_known_and_then_refused(tmp_path: Path) -> None:
    job = {"id": "a", "submitted": 0.0, "gpus": 1, "mood": "good"}
    lines = [
        [
            0.0,
            [["submitted", job, "k", 5.0, "extra"], ["dreamt", "a"]],
            [["launch", "a", 1, [[0, 1]], [0, 0, 0], 7]],
            "more",
        ],
        [5.0, [["finished", "a", 1]], [["sing", "a"]]],
    ]
    path = tmp_path / "journal.jsonl"
    path.write_text(newer(lines), encoding="utf-8")
    reader = JournalReader(path)
    assert reader.header == HEADER
    found: list[JournalEntry] = []
    with pytest.raises(JournalError, match="version 3; this Poise reads version 2; 2 events and actions"):
        found.extend(reader.entries())
    assert [entry.now for entry in found] == [0.0, 5.0]
    assert found[0].events == (Submitted(Job("a", 0.0, 1), "k", 5.0),)
    assert found[0].actions == (Launch("a", 1, (Slots(0, 1),), Waited(0, 0, 0)),)


@pytest.mark.parametrize("version", [0, -1, "2", None, 1.5])
def test_a_version_that_was_never_written_is_refused_at_once(version: object, tmp_path: Path) -> None:
    header = json.loads(TEXT.splitlines()[0]) | {"journal": version}
    path = tmp_path / "journal.jsonl"
    path.write_text(json.dumps(header) + "\n", encoding="utf-8")
    with pytest.raises(JournalError, match="this Poise reads version 2"):
        JournalReader(path)
