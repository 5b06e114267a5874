"""Who held which GPUs when, as columns: nothing is lost on the way, and what is put together keeps its time."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import nodes

from poise.lab.analysis.history import History, JobHistory, RunEnd, RunInterval
from poise.lab.report.timeline import ENDS, Track, coarsened, first_rows
from poise.scheduler.model.cluster import Holding, Slots
from poise.scheduler.model.event import Submitted
from poise.scheduler.model.job import Job

CLUSTER = nodes(4, 2, 4)
GPUS = 10


def a_history(*stints: RunInterval, submitted: float = 0.0) -> History:
    """Jobs named in stints; a job's tenant is its first letter."""
    found = History(CLUSTER)
    for name in dict.fromkeys(stint.job for stint in stints):
        found.jobs[name] = JobHistory(Submitted(Job(name, submitted, 2, 10.0, tenant=name[0]), "k", 20.0))
    found.runs += stints
    return found


def hold(job: str, start: float, end: float, *slots: tuple[int, int], ended: RunEnd = RunEnd.FINISHED) -> RunInterval:
    return RunInterval(job, start, end, tuple(Slots(*each) for each in slots), ended)


def told(track: Track) -> list[tuple[str, int, int, float, float]]:
    columns = (track.row, track.rows, track.start, track.end)
    rest = zip(*(column.tolist() for column in columns), strict=True)
    return [(track.jobs[job], *values) for job, values in zip(track.job.tolist(), rest, strict=True)]


def test_rows_are_the_gpus_of_the_nodes_in_order() -> None:
    assert first_rows(CLUSTER) == [0, 4, 6, 10]
    track = Track.of(a_history(hold("a", 0, 1, (0, 0b1000)), hold("b", 0, 1, (1, 0b10)), hold("c", 0, 1, (2, 0b1))))
    assert track.row.tolist() == [3, 5, 6]


@pytest.mark.parametrize(
    ("slots", "want"),
    [
        ([(0, 0b1111)], [(0, 4)]),
        ([(0, 0b1011)], [(0, 2), (3, 1)]),
        ([(0, 0b1100), (1, 0b11), (2, 0b0001)], [(2, 5)]),
        ([(0, 0b0001), (1, 0b10), (2, 0b1010)], [(0, 1), (5, 1), (7, 1), (9, 1)]),
    ],
)
def test_a_stint_is_a_block_for_each_run_of_neighbouring_rows(
    slots: list[tuple[int, int]], want: list[tuple[int, int]]
) -> None:
    track = Track.of(a_history(hold("a", 5, 7, *slots)))
    assert list(zip(track.row.tolist(), track.rows.tolist(), strict=True)) == want


def test_blocks_are_by_start_and_count_from_the_first_submission() -> None:
    stints = (hold("b", 120, 130, (0, 1)), hold("a", 110, 140, (0, 2)), hold("a", 150, 150, (0, 2)))
    track = Track.of(a_history(*stints, submitted=100.0))
    assert told(track) == [("a", 1, 1, 10.0, 40.0), ("b", 0, 1, 20.0, 30.0)]


def test_tenants_gangs_and_ends_are_kept() -> None:
    track = Track.of(
        a_history(hold("x1", 0, 1, (0, 1), ended=RunEnd.FAILED), hold("y1", 0, 1, (0, 2)), hold("x2", 1, 2, (0, 1)))
    )
    assert [track.tenants[place] for place in track.owner.tolist()] == ["x", "y", "x"]
    assert [ENDS[place] for place in track.ended.tolist()] == [RunEnd.FAILED, RunEnd.FINISHED, RunEnd.FINISHED]
    assert track.gpus.tolist() == [2, 2, 2]


def test_jobs_that_share_gpus_get_a_half_each_while_others_keep_whole_rows() -> None:
    stints = (hold("a", 0, 100, (0, 3)), hold("b", 10, 20, (0, 3)), hold("c", 30, 40, (0, 3)), hold("d", 100, 120, (0, 3)))
    lanes = dict(zip("abcd", Track.of(a_history(*stints)).lane.tolist(), strict=True))
    assert lanes == {"a": 1, "b": 2, "c": 2, "d": 0}


def test_a_history_without_stints_is_an_empty_track() -> None:
    track = Track.of(a_history())
    assert (len(track.start), len(track.lane), track.jobs) == (0, 0, ())


holdings = st.dictionaries(st.integers(0, 2), st.integers(1, 3), min_size=1).map(
    lambda masks: tuple(Slots(node, mask) for node, mask in sorted(masks.items()))
)


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Several jobs in turn, over and over, on one of two sets of GPUs that may have some in common; now and then a pair."""
    found, now = [], 0.0
    either: list[Holding] = [draw(holdings), draw(holdings)]
    for name in draw(st.lists(st.sampled_from(["x1", "x2", "y1", "z1"]), min_size=1, max_size=60)):
        now += draw(st.sampled_from([0.0, 0.5, 30.0]))
        end = now + draw(st.sampled_from([0.25, 1.0, 50.0]))
        gpus = draw(st.sampled_from(either))
        found.append(RunInterval(name, now, end, gpus, draw(st.sampled_from(ENDS))))
        if draw(st.integers(0, 3)) == 0:
            found.append(RunInterval("shares", now, (now + end) / 2, gpus, RunEnd.FINISHED))
        now = end
    return a_history(*found)


def held(track: Track) -> float:
    return float(((track.end - track.start) * track.rows).sum())


@given(histories())
def test_blocks_hold_as_long_as_the_stints_did(history: History) -> None:
    want = sum((stint.end - stint.start) * sum(mask.bit_count() for _, mask in stint.gpus) for stint in history.runs)
    assert held(Track.of(history)) == pytest.approx(want)


@given(histories(), st.integers(1, 40))
def test_coarsened_keeps_the_time_held_and_overlaps_nothing(history: History, most: int) -> None:
    track = Track.of(history)
    fewer, length = coarsened(track, most)
    assert held(fewer) == pytest.approx(held(track))
    assert (np.diff(fewer.start) >= 0).all()
    assert fewer.end.max() <= track.end.max() + 1e-9
    for row in range(GPUS):
        for lanes in ((0, 1), (0, 2)):
            on = (fewer.row <= row) & (row < fewer.row + fewer.rows) & np.isin(fewer.lane, lanes)
            assert (fewer.start[on][1:] >= fewer.end[on][:-1] - 1e-9).all()
    if length == 0:
        assert fewer is track
    else:
        assert len(track.start) > most


def test_coarsened_leaves_long_blocks_alone_and_says_that_several_jobs_are_one() -> None:
    stints = [hold(f"x{n}", n, n + 0.9, (0, 1)) for n in range(100)] + [hold("y", 100, 100_000, (0, 1))]
    fewer, length = coarsened(Track.of(a_history(*stints)), 10)
    assert 10 < length < 1000
    assert len(fewer.start) <= 10
    assert (fewer.start[-1], fewer.end[-1], fewer.jobs[fewer.job[-1]]) == (100, 100_000, "y")
    assert fewer.job[0] == len(fewer.jobs) + fewer.tenants.index("x")


def test_a_track_is_small_when_sent_to_another_process() -> None:
    stints = [hold(f"job-{n}", n, n + 5, (0, 1 << n % 4)) for n in range(2000)]
    assert len(pickle.dumps(Track.of(a_history(*stints)))) < 2000 * 70
