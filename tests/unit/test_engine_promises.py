"""What the policy in force promises: to tenants by `shares`, and to a job that waits by `why`."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.machine import ALICE, BOB, Service, a_request

from poise.scheduler.policies.catalogue import POLICIES, promise_of
from poise.scheduler.policies.promises import AmongJobs, AmongJobsAlike, AmongTenants, Claimant, Promise
from poise.service.wire.request import PreemptionMode, Submission

TENANTS = ("alice", "bob")


def a_crowd(tmp_path: Path, policy: str) -> Service:
    """Alice has three jobs, of which one weighs as much as three, and bob has one; four GPUs."""
    service = Service(tmp_path, policy=policy, cluster="v100:4")
    service.submit(a_request(duration=1e6), a_request(duration=1e6), a_request(duration=1e6, weight=3.0))
    service.submit(a_request(duration=1e6), by=BOB)
    return service


def entitled(service: Service) -> list[float | None]:
    found = {each.tenant: each.entitled for each in service.engine.shares().tenants}
    return [found[name] for name in TENANTS]


@pytest.mark.parametrize(
    ("policy", "parts"),
    [
        ("max-min", [5 / 6, 1 / 6]),
        ("max-min+agnostic", [5 / 6, 1 / 6]),
        ("stride", [5 / 6, 1 / 6]),
        ("isolated", [3 / 4, 1 / 4]),
        ("hierarchical", [1 / 2, 1 / 2]),
        ("hierarchical:weights=1/3", [1 / 4, 3 / 4]),
        ("gandiva-fair", [1 / 2, 1 / 2]),
        ("gandiva-fair:tickets=bob:3", [1 / 4, 3 / 4]),
        ("philly:quotas=bob:1", [3 / 4, 1 / 4]),
        ("fifo", [None, None]),
        ("srtf", [None, None]),
        ("makespan", [None, None]),
    ],
)
def test_tenants_are_entitled_to_what_the_policy_promises(policy: str, parts: list[float | None], tmp_path: Path) -> None:
    service = a_crowd(tmp_path, policy)
    found = service.engine.shares()
    assert entitled(service) == [None if each is None else pytest.approx(each) for each in parts]
    assert (found.policy, found.promise) == (policy, promise_of(policy).text)


def test_a_weight_counts_where_the_policy_looks_at_it(tmp_path: Path) -> None:
    service = a_crowd(tmp_path, "max-min")
    service.call(lambda engine: engine.set_weight(ALICE, "bob", 5.0))
    assert entitled(service) == [pytest.approx(0.5), pytest.approx(0.5)]


def test_held_jobs_entitle_their_tenant_to_nothing(tmp_path: Path) -> None:
    service = a_crowd(tmp_path, "max-min")
    service.submit(a_request(hold=True), by=BOB)
    assert entitled(service) == [pytest.approx(5 / 6), pytest.approx(1 / 6)]


claimants = st.dictionaries(
    st.text("abc", min_size=1, max_size=2),
    st.builds(Claimant, st.floats(0.01, 9), st.integers(0, 3), st.floats(0.01, 9)),
    max_size=4,
)


@given(claimants, st.sampled_from([AmongJobs(), AmongJobsAlike(), AmongTenants(), AmongTenants({"a": 2.0}, (3.0,))]))
def test_entitled_parts_sum_to_one_or_are_all_zero(tenants: dict[str, Claimant], promise: Promise) -> None:
    parts = promise.parts(tenants, 4)
    assert parts is not None
    assert parts.keys() == tenants.keys()
    assert sum(parts.values()) == pytest.approx(1.0) or not any(parts.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_says_what_it_promises(policy: str) -> None:
    assert promise_of(policy).text


# Why


def advice_for_the_last(tmp_path: Path, policy: str, *, preemption: PreemptionMode = PreemptionMode.RESTART) -> str | None:
    """What a job is told that waits while another one has both GPUs."""
    service = Service(tmp_path, policy=policy, cluster="v100:2")
    jobs = [service.submit(a_request(gpus=2, duration=1e6, preemption=preemption))[0] for _ in range(2)]
    service.pass_time(1)
    waits = next(job for job in jobs if service.engine.show(job).job.gpus == 0)
    found = service.engine.why(waits)
    assert found.reason.code == "capacity"
    return found.advice


FREE = "Nothing to do: it starts when enough GPUs are free"
TURN = "Nothing to do: it gets its turn at the end of a round (every 10s), or sooner if enough GPUs are free"


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("fifo", FREE),
        ("allox", FREE),
        ("srtf", f"{FREE}, or when it comes before jobs that run: these then make room for it"),
        ("max-min", TURN),
        ("max-min+agnostic", TURN),
        ("stride", TURN),
        (
            "makespan",
            f"{FREE}, or when policy makespan, which looks again at the end of a round (every 10s), gives it a turn",
        ),
    ],
)
def test_a_waiting_job_is_told_what_it_waits_for_under_each_policy(policy: str, said: str, tmp_path: Path) -> None:
    assert advice_for_the_last(tmp_path, policy) == said


def test_no_turn_is_promised_while_all_holders_are_pinned(tmp_path: Path) -> None:
    said = advice_for_the_last(tmp_path, "max-min", preemption=PreemptionMode.NEVER)
    assert said == f"{FREE}; the jobs that hold them now are not preempted"


def test_a_priority_without_effect_is_accepted_with_a_note(tmp_path: Path) -> None:
    service = Service(tmp_path)
    submission = Submission(jobs=(a_request(priority=3), a_request()), key="a-submission")
    said = (
        "priority 3 has no effect: no policy of the catalogue looks at priorities; --weight counts under policies that share"
    )
    for _ in range(2):  # also when it was taken before
        assert service.call(lambda engine: engine.submit(ALICE, submission)).notes == (said,)
    other = Submission(jobs=(a_request(),), key="another-one")
    assert service.call(lambda engine: engine.submit(ALICE, other)).notes == ()
