"""Names in the place of ids: what a word means, among jobs in memory and those that have ended."""

import json
from pathlib import Path
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.machine import ALICE, BOB, Service, a_request

from poise.service.server.naming import MOST_NAMED, Candidate, meant
from poise.service.server.service_api import JobFilter, Verb
from poise.service.server.storage.schema import checksum
from poise.service.wire.views import JobsCalled, JobState, NamedJob


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


def called(service: Service, word: str) -> list[str]:
    return [each.id for each in service.engine.called(word, ALICE.tenant).jobs]


def test_jobs_are_found_by_name_or_beginning_whether_they_have_ended_or_not(service: Service) -> None:
    ended, waiting = service.submit(a_request(name="fit-long"), a_request(name="fit-short", hold=True))
    service.call(lambda engine: engine.change(ALICE, ended, Verb.CANCEL))
    assert called(service, "fit-long") == called(service, "fit-l") == [ended]
    assert called(service, "fit") == [waiting], "one that has not ended comes first"
    service.restart()
    assert called(service, "fit-l") == [ended]
    assert called(service, "nothing") == called(service, "it-long") == []


def test_a_name_may_hold_what_means_something_in_a_pattern(service: Service) -> None:
    (job,) = service.submit(a_request(name="a_b"))
    service.submit(a_request(name="axb"))
    service.engine.cancel_all(ALICE, JobFilter(tenant=ALICE.tenant))
    service.settle()
    assert called(service, "a_") == [job]


def test_of_jobs_that_are_alike_those_of_the_asking_tenant_are_meant(service: Service) -> None:
    (mine,) = service.submit(a_request(name="fit"))
    (theirs,) = service.submit(a_request(name="fit"), by=BOB)
    assert called(service, "fit") == [mine]
    assert [each.id for each in service.engine.called("fit", "nobody").jobs] == [mine, theirs]


def test_no_job_of_others_takes_a_word_over_that_means_one_of_the_asking_tenant(service: Service) -> None:
    (mine,) = service.submit(a_request(name="fit-long"))
    service.call(lambda engine: engine.change(ALICE, mine, Verb.CANCEL))
    service.submit(a_request(name="fit-long"), a_request(name="fit"), by=BOB)
    assert called(service, "fit-long") == called(service, "fit") == [mine]


def test_a_damaged_record_has_no_name_and_hides_no_other(service: Service) -> None:
    one, two = service.submit(a_request(name="fit-one"), a_request(name="fit-two"))
    service.engine.cancel_all(ALICE, JobFilter(tenant=ALICE.tenant))
    service.settle()
    db = service.loop.store._db
    db.execute("UPDATE jobs SET record = '{', state = x'ff', record_sum = ? WHERE id = ?", (checksum(one), one))
    assert called(service, "fit") == [two]


def test_only_jobs_of_the_wanted_states_and_app_are_cancelled(service: Service) -> None:
    requests = a_request(app="a"), a_request(app="b"), a_request(app="a", hold=True)
    one, two, three = service.submit(*requests)
    waits = frozenset({JobState.PAUSED, JobState.PENDING})
    held = service.engine.show(three).job.state
    assert held in waits
    done = service.call(lambda engine: engine.cancel_all(ALICE, JobFilter(waits, ALICE.tenant, "a")))
    assert done.model_dump() == {"tenant": ALICE.tenant, "jobs": 1}
    states = {job: service.engine.show(job).job.state.is_final for job in (one, two, three)}
    assert states == {one: False, two: False, three: True}


NAMES = st.text("ab1", min_size=1, max_size=3)
JOBS = st.lists(
    st.builds(
        Candidate,
        id=st.integers(1, 99).map(str),
        name=NAMES,
        tenant=st.sampled_from(["mine", "theirs"]),
        state=st.sampled_from(list(JobState)),
    ),
    max_size=30,
)


@given(jobs=JOBS, word=NAMES)
def test_what_a_word_means_is_one_kind_of_match_and_no_better_one_is_left_out(jobs: list[Candidate], word: str) -> None:
    def rank(job: Candidate) -> tuple[bool, bool, bool]:
        return job.tenant != "mine", job.name != word, job.state.is_final

    found = meant(jobs, word, "mine")
    possible = [job for job in jobs if job.name == word or (job.name.startswith(word) and not word.isdecimal())]
    best = [job for job in possible if rank(job) == min(map(rank, possible))]
    exact = bool(best) and best[0].name == word
    listed = tuple(NamedJob(**job._asdict()) for job in best[:MOST_NAMED])
    assert found == JobsCalled(jobs=listed, total=len(best), exact=exact)


@pytest.mark.slow
def test_a_name_among_fifty_thousand_jobs_that_have_ended_takes_less_than_a_second(service: Service) -> None:
    (job,) = service.submit(a_request(name="one-of-many"))
    service.call(lambda engine: engine.change(ALICE, job, Verb.CANCEL))
    db = service.loop.store._db
    (row,) = db.execute("SELECT * FROM jobs WHERE id = ?", (job,)).fetchall()
    columns = [each[0] for each in db.execute("SELECT * FROM jobs").description]
    values = dict(zip(columns, row, strict=True))

    def copy(number: int) -> tuple[object, ...]:
        record = json.dumps(json.loads(values["record"]) | {"name": f"old-{number}"})
        changed = values | {"id": str(number), "number": None, "ended": values["ended"] - number, "record": record}
        return tuple(changed[name] for name in columns)

    db.execute("BEGIN")
    db.executemany(f"INSERT INTO jobs VALUES ({', '.join('?' * len(columns))})", map(copy, range(10, 50_010)))
    db.execute("COMMIT")
    began = perf_counter()
    assert called(service, "one-of") == [job]
    assert called(service, "old-10") != []
    assert called(service, "old-20000") == [], "it is not among those that ended last"
    seconds = perf_counter() - began
    assert seconds < 1.0
