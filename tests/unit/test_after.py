"""Terms of `after`: ids and ranges of them are as few characters as they can be, and mean what they meant before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.scheduler.model.errors import RequestError
from poise.service.wire.after import MOST_AWAITED, AfterEnd, Term, ids_of, is_ids, ranges_of, term_of
from poise.service.wire.jobfile import read_draft, read_job_file

IDS = st.sets(st.integers(1, 60).map(str), min_size=1)


@given(jobs=IDS, end=st.sampled_from(AfterEnd))
def test_ranges_of_ids_are_read_as_these_ids(jobs: set[str], end: AfterEnd) -> None:
    term = Term(ranges_of(jobs), end)
    assert term_of(str(term)) == term
    assert set(ids_of(term)) == jobs
    assert list(ids_of(term)) == sorted(jobs, key=int)
    gaps = sum(str(int(job) + 1) not in jobs for job in jobs)
    assert len(term.words) == gaps


def test_a_thousand_ids_are_a_few_characters() -> None:
    assert ranges_of(map(str, range(12, 1_012))) == ("12-1011",)
    assert len(ids_of(term_of(f"1-{MOST_AWAITED}"))) == MOST_AWAITED


@pytest.mark.parametrize(
    ("term", "said"),
    [
        (f"1-{MOST_AWAITED + 1}", "a job waits for at most 10,000 others"),
        (f"1-6000,7000-{7000 + MOST_AWAITED - 6000}", "a job waits for at most 10,000 others"),
        ("9-3", "expected the lower id first, got '9-3'"),
        ("prep", "expected ids of jobs, such as 17 or 20-29, got 'prep'"),
        ("1-2-3", "expected ids of jobs, such as 17 or 20-29, got '1-2-3'"),
    ],
)
def test_what_stands_for_no_ids_is_refused_in_one_line(term: str, said: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        ids_of(term_of(term))
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("word", "want"), [("17", True), ("17-20", True), ("prep", False), ("prep-1", False), ("1-", False)]
)
def test_words_that_can_be_ids_are_taken_for_ids(word: str, want: bool) -> None:
    assert is_ids(word) is want


# In job files.


def test_a_job_file_says_when_its_jobs_start() -> None:
    found = read_job_file(
        "run: x\narray: 1,3,7%2\nafter: [17, 'prep:succeeded']\nbegin: 2033-05-18T03:33:20Z\ndeadline: 2033-05-19Z"
    )
    assert [each.env["ARRAY_INDEX"] for each in found] == ["1", "3", "7"]
    assert {(each.array_cap, each.array, each.after) for each in found} == {(2, None, ("17", "prep:succeeded"))}
    assert {each.begin for each in found} == {2e9}
    assert {each.array for each in read_draft("run: x\narray: 5%2").requests("a-key")} == {"a-key"}
    assert [each.env["ARRAY_INDEX"] for each in read_job_file("run: x\narray: [0, 2, 4-5]")] == ["0", "2", "4", "5"]
    assert read_job_file("run: x\nafter: 17:failed")[0].after == ("17:failed",)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("after: [1, '2:soon']", "job:2: after: expected ids or names of jobs, and ended, succeeded or failed, such as 17"),
        ("after: {job: 1}", "job:2: after: expected a list, got keys"),
        ("after:", "job:2: after: has no value; give one, or leave the key out"),
        ("begin: soon", "job:2: begin: expected a moment such as 16:00"),
        ("deadline: 60s", "job:2: deadline: expected a moment such as 16:00"),
        ("begin: 2033-05-18\ndeadline: 2033-05-17", "job:3: deadline: expected a moment after begin, which is 2033-05-1"),
        ("array: 5%0", "job:2: array: after % expected how many of its jobs may hold GPUs at once"),
        ("array: {a: 1}", "job:2: array: expected a single value, got keys"),
        ("array: 1-x", "job:2: array: expected indices such as 0-9"),
        ("array_cap: 2", "job:2: unknown key 'array_cap'; did you mean array?"),
    ],
)
def test_a_wrong_line_of_a_job_file_is_named(lines: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_job_file(f"run: x\n{lines}")
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
