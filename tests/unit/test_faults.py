"""Outages of nodes, drawn from a seed or read from a file, and planned drains."""

from math import inf
from pathlib import Path

import pytest

from poise.lab.simulator.outages import Drain, Outage, node_events, parse_drain, parse_outages
from poise.scheduler.model.cluster import parse_cluster
from poise.scheduler.model.errors import RequestError, TraceError, UnknownNameError
from poise.scheduler.model.event import NodeLost, NodeRestricted, NodeReturned

CLUSTER = parse_cluster("v100:8,k80:8")
DAY = 86_400.0


def drawn(
    spec: str, *, seed: int = 0, days: float = 100, start: float = 0.0, cluster: str = "gpu:40"
) -> list[Outage | Drain]:
    return parse_outages(spec, parse_cluster(cluster), start=start, horizon=days * DAY, seed=seed)


def test_the_same_seed_gives_the_same_outages_and_another_gives_others() -> None:
    assert drawn("mtbf=5d", seed=3) == drawn("mtbf=5d", seed=3) != drawn("mtbf=5d", seed=4)


def test_outages_of_a_node_do_not_depend_on_the_other_nodes() -> None:
    few = drawn("mtbf=5d", cluster="gpu:8")
    many = drawn("mtbf=5d", cluster="gpu:40")
    assert [each for each in many if each.node < 2] == few


def test_drawn_outages_begin_after_the_start_and_before_the_horizon() -> None:
    found = drawn("mtbf=1d,repair=6h", start=1000, days=20)
    assert found
    assert all(1000 <= each.time < 1000 + 20 * DAY for each in found)
    assert all(each.duration > 0 for each in found)


def test_outages_of_one_node_follow_each_other() -> None:
    found = drawn("mtbf=6h,repair=6h")
    for node in range(10):
        mine = [each for each in found if each.node == node]
        ends = [each.time + each.duration for each in mine]
        assert all(later.time >= end for end, later in zip(ends, mine[1:], strict=False))


def test_drawn_outages_have_the_means_asked_for() -> None:
    """1,000 node-days at 2 days up and half a day down: about 400 outages of 12 hours."""
    found = drawn("mtbf=2d,repair=12h")
    assert len(found) == pytest.approx(400, rel=0.15)
    assert sum(each.duration for each in found) / len(found) == pytest.approx(DAY / 2, rel=0.15)


def test_each_of_the_two_may_be_left_to_its_default() -> None:
    assert drawn("mtbf=30d,repair=4h") == drawn("mtbf=30d") == drawn("repair=4h")


WRONG_SPECS = {
    "mtbf=soon": "not a duration: 'soon'",
    "mtbf=": "not a duration: ''",
    "mtbf=-5": "not a duration: '-5'",
    "mtbf=0": "mtbf and repair are longer than 0 seconds",
    "mtbf=3d,repair=0s": "mtbf and repair are longer than 0 seconds",
}


@pytest.mark.parametrize("spec", WRONG_SPECS)
def test_a_specification_that_makes_no_sense_is_refused(spec: str) -> None:
    with pytest.raises(RequestError) as caught:
        drawn(spec)
    assert str(caught.value).startswith(f"faults {spec!r}: {WRONG_SPECS[spec]}")


@pytest.mark.parametrize("spec", ["mtb=3d", "mtbf=3d,,", "mtbf=3d,repairs=4h", "=3"])
def test_an_unknown_parameter_is_refused(spec: str) -> None:
    with pytest.raises(UnknownNameError, match="unknown fault parameter"):
        drawn(spec)


@pytest.mark.parametrize(("spec", "days"), [("mtbf=0.00001s,repair=0.00001s", 100), ("mtbf=30d", inf)])
def test_more_outages_than_anybody_can_mean_are_refused(spec: str, days: float) -> None:
    with pytest.raises(RequestError, match="more than 1,000,000 outages"):
        drawn(spec, days=days)


def read(tmp_path: Path, text: str | bytes) -> list[Outage | Drain]:
    path = tmp_path / "faults.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return parse_outages(str(path), CLUSTER, start=0, horizon=1, seed=0)


def test_a_file_says_which_node_is_lost_when_and_for_how_long(tmp_path: Path) -> None:
    text = '{"node": "k80-1", "time": 3600, "duration": 900}\n\n{"node": "v100-0", "time": 5, "duration": 0.5}\n'
    assert read(tmp_path, text) == [Outage(3600, 3, 900), Outage(5, 0, 0.5)]


def test_a_file_may_have_drains_too_of_all_gpus_or_of_some(tmp_path: Path) -> None:
    text = '{"node": "k80-1", "time": 60, "duration": 9, "drain": true}\n'
    text += '{"node": "k80-0", "time": 60, "duration": 9, "drain": true, "slots": [2, 0]}\n'
    text += '{"node": "k80-0", "time": 60, "duration": 9, "drain": false}\n'
    assert read(tmp_path, text) == [Drain(60, 3, 9, (0, 1, 2, 3)), Drain(60, 2, 9, (0, 2)), Outage(60, 2, 9)]


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        ("k80-1@1h..3h", Drain(103_600, 3, 7200, (0, 1, 2, 3))),
        ("v100-0:3,0@0..1h30m", Drain(100_000, 0, 5400, (0, 3))),
        ("v100-0@90..", Drain(100_090, 0, inf, (0, 1, 2, 3))),
    ],
)
def test_a_drain_says_which_node_and_from_when_to_when_after_the_start(spec: str, want: Drain) -> None:
    assert parse_drain(spec, CLUSTER, start=100_000) == want


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("", "expected NODE@FROM..UNTIL, such as v100-0@1h..3h"),
        ("v100-0", "expected NODE@FROM..UNTIL"),
        ("v100-0@1h", "expected NODE@FROM..UNTIL"),
        ("@1h..2h", "expected NODE@FROM..UNTIL"),
        ("v100-7@1h..2h", "unknown node 'v100-7'; did you mean v100-"),
        ("v100-0@noon..2h", "not a duration: 'noon'"),
        ("v100-0@1h..nan", "not a duration: 'nan'"),
        ("v100-0@..2h", "not a duration: ''"),
        ("v100-0@2h..1h", "it ends before it begins"),
        ("v100-0@1h..1h", "it ends before it begins"),
        ("v100-0:4@1h..2h", "expected slots of v100-0, which are 0 to 3"),
        ("v100-0:-1@1h..2h", "expected slots of v100-0"),
        ("v100-0:@1h..2h", "expected whole numbers after the colon, got ''"),
        ("v100-0:a@1h..2h", "expected whole numbers after the colon, got 'a'"),
    ],
)
def test_a_drain_that_cannot_be_is_refused(spec: str, complaint: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_drain(spec, CLUSTER, start=0)
    assert complaint in str(caught.value)


def test_drains_that_overlap_are_one_restriction_after_the_other_and_outages_come_first() -> None:
    """A stay of two slots from 0 to 40 s, a drain of two from 10 to 30 s, one slot in both; the node is lost at 30 s."""
    found = node_events([Drain(0, 1, 40, (0, 1), leaves=False), Drain(10, 1, 20, (1, 2)), Outage(30, 1, 5)])
    assert found == [
        (0, NodeRestricted(1, (0, 1), drained=False)),
        (10, NodeRestricted(1, (0, 1, 2), drained=True)),
        (30, NodeLost(1)),
        (30, NodeRestricted(1, (0, 1), drained=False)),
        (35, NodeReturned(1)),
        (40, NodeRestricted(1, (), drained=False)),
    ]
    assert node_events([Drain(0, 0, 5, (0,)), Drain(5, 0, 5, (0,))]) == [
        (0, NodeRestricted(0, (0,), drained=True)),
        (10, NodeRestricted(0, (), drained=False)),
    ]


def test_an_empty_file_has_no_outages(tmp_path: Path) -> None:
    assert read(tmp_path, "") == read(tmp_path, "\n \n") == []


def test_a_file_with_an_equals_sign_in_its_name_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mtbf=3d"
    path.write_text('{"node": "v100-0", "time": 5, "duration": 1}\n')
    assert parse_outages(str(path), CLUSTER, start=0, horizon=1, seed=0) == [Outage(5, 0, 1)]


SHAPE = 'expected {"node": NAME, "time": SECONDS, "duration": SECONDS}'
WRONG_LINES = {
    "garbage": ("lorem ipsum", SHAPE),
    "a list": ("[1, 2, 3]", SHAPE),
    "a number": ("17", SHAPE),
    "brackets without end": ("[" * 100_000, SHAPE),
    "no time": ('{"node": "v100-0", "duration": 9}', SHAPE),
    "a time in words": ('{"node": "v100-0", "time": "noon", "duration": 9}', SHAPE),
    "no node": ('{"time": 5, "duration": 9}', SHAPE),
    "an unknown node": ('{"node": "v100-7", "time": 5, "duration": 9}', "node: unknown node 'v100-7'; did you mean v100-"),
    "a node by number": ('{"node": 0, "time": 5, "duration": 9}', "node: unknown node '0'"),
    "a node that is a list": ('{"node": [], "time": 5, "duration": 9}', "unknown node '[]'"),
    "no duration": ('{"node": "v100-0", "time": 5, "duration": 0}', "expected a finite time and a finite duration above 0"),
    "NaN": ('{"node": "v100-0", "time": NaN, "duration": 9}', "expected a finite time and a finite duration above 0"),
    "infinity": ('{"node": "v100-0", "time": 5, "duration": Infinity}', "expected a finite time"),
    "a drain in words": ('{"node": "v100-0", "time": 5, "duration": 9, "drain": "yes"}', "drain: expected true or false"),
    "no such slot": (
        '{"node": "v100-0", "time": 5, "duration": 9, "drain": true, "slots": [4]}',
        "slots: expected slots of v",
    ),
    "slots in words": ('{"node": "v100-0", "time": 5, "duration": 9, "drain": true, "slots": "0"}', "got '0'"),
    "half a slot": ('{"node": "v100-0", "time": 5, "duration": 9, "drain": true, "slots": [0.5]}', "got [0.5]"),
    "overflow": ('{"node": "v100-0", "time": 1e999, "duration": 9}', "expected a finite time"),
}


@pytest.mark.parametrize("what", WRONG_LINES)
def test_a_wrong_line_is_refused_with_its_place(what: str, tmp_path: Path) -> None:
    text, want = WRONG_LINES[what]
    with pytest.raises(TraceError) as caught:
        read(tmp_path, '{"node": "v100-0", "time": 5, "duration": 9}\n' + text + "\n")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'faults.jsonl'}:2: ")
    assert want in message
    assert "\n" not in message


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"faults\.jsonl:1: expected UTF-8 text, got the byte 0xff"):
        read(tmp_path, b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="none: No such file or directory"):
        parse_outages(str(tmp_path / "none"), CLUSTER, start=0, horizon=1, seed=0)
    with pytest.raises(TraceError, match="Is a directory"):
        parse_outages(str(tmp_path), CLUSTER, start=0, horizon=1, seed=0)
