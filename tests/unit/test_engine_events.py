"""What the service tells of its jobs: counts, events, reasons and advice."""

from pathlib import Path

import pytest
from tests.machine import ALICE, BOB, FakeBackend, LingeringBackend, Service, a_request

from poise.scheduler.policies.catalogue import POLICIES, Capability
from poise.service.backends.api import RunEnded, RunEnding, RunOrder
from poise.service.server.engine import open_orders
from poise.service.server.service_api import JobFilter, Verb
from poise.service.wire.views import Account, EventRow, JobState, Role

ROOT = Account(name="root", tenant="ops", role=Role.ADMIN)


def events(service: Service, tenant: str | None = None, job: str | None = None) -> list[EventRow]:
    return list(service.engine.events(after=0, job=job, tenant=tenant, limit=1_000).events)


def end_untold(
    service: Service, job: str, how: RunEnding, cause: str | None = None, codes: tuple[int | None, ...] = (1,)
) -> None:
    """The job's run ends, and never said how far it was."""
    machine = service.machine
    key = next(each for each in machine.alive if each[0] == job)
    del machine.alive[key]
    machine.ended[key] = RunEnded(*key, machine.wall, how, None, cause, codes)
    machine.tell(machine.ended[key])
    machine.begin_waiting()
    service.settle()


class Unbegun(FakeBackend):
    """Runs are launched, and do not get as far as to begin."""

    def launch(self, order: RunOrder) -> None:
        self._machine.alive[order.job, order.epoch] = order


# GPUs of several types


def test_gpus_of_mixed_types_are_counted_by_type(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="hlas", cluster="v100:2,k80:2")
    [mixed] = service.submit(a_request(micro_batches=8, replicas="gpu", steps=4, duration=144_000.0))
    row = service.engine.show(mixed).job
    assert (row.gpus, row.gpu_type) == (4, "v100+k80")
    service.restart()
    assert service.engine.show(mixed).job.gpu_type == "v100+k80"
    [waits] = service.submit(a_request(gpus=2, gpu_types=("v100",)), by=BOB)
    assert service.engine.show(waits).job.gpus == 0
    evidence = service.engine.why(waits).evidence
    assert evidence[:2] == ("it can use v100; held of those: 2 GPUs", f"held by job {mixed} (tenant alice, 2 v100)")
    [either] = service.submit(a_request(gpus=2), by=BOB)
    assert service.engine.why(either).evidence[:2] == (
        "it can use v100, k80; held of those: 4 GPUs",
        f"held by job {mixed} (tenant alice, 2 v100 and 2 k80)",
    )


# Changes of policy and weights


def test_the_journal_says_who_changed_the_policy(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="las")
    service.submit(a_request())
    service.call(lambda engine: engine.set_policy(ROOT, "fifo"))
    service.policy = "srtf"
    service.restart()
    found = [(each.actor, each.tenant, each.text) for each in events(service) if each.kind == "policy-changed"]
    assert found == [
        ("root", None, "policy fifo from now on; before: las"),
        ("service", None, "policy srtf from now on; before: fifo"),
    ]


def test_the_journal_says_who_changed_a_weight(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.call(lambda engine: engine.set_weight(ROOT, "bob", 2.5))
    service.submit(a_request(), by=BOB)
    service.submit(a_request(), by=ALICE)
    service.call(lambda engine: engine.set_weight(ROOT, "bob", 0.5))
    service.restart()
    for found in (events(service), events(service, tenant="bob")):
        said = [(each.actor, each.tenant, each.text) for each in found if each.kind == "weight-changed"]
        assert said == [
            ("root", "bob", "weighs 2.5 from now on; before: 1"),
            ("root", "bob", "weighs 0.5 from now on; before: 2.5"),
        ]
    assert "weight-changed" not in {each.kind for each in events(service, tenant="alice")}
    assert {row.tenant: row.weight for row in service.engine.shares().tenants}["bob"] == 0.5


# What was lost


def test_lost_work_is_not_stated_where_it_is_unknown(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.machine.unaware = {"1"}
    [job] = service.submit(a_request())
    service.pass_time(50)
    assert service.engine.show(job).lost_gpu_seconds == 0.0
    end_untold(service, job, RunEnding.FAILED, "node-lost", (-9,))
    for _ in range(2):
        assert service.engine.show(job).lost_gpu_seconds is None
        assert service.engine.why(job).evidence[0] == "2 runs, 50 GPU-seconds received, preempted 0 times"
        service.restart()
    service.machine.unaware = set()
    service.machine.say_begun(job, 2)
    service.machine.end(job, RunEnding.FINISHED, steps=10.0)
    service.settle()
    assert service.engine.show(job).lost_gpu_seconds is None  # what is known of later runs does not make it known


def test_a_run_that_reports_nothing_and_finishes_loses_nothing(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.machine.unaware = {"1"}
    [job] = service.submit(a_request())
    service.pass_time(50)
    end_untold(service, job, RunEnding.FINISHED, codes=(0,))
    assert service.engine.show(job).lost_gpu_seconds == 0.0
    assert service.engine.why(job).evidence[0].endswith("0 GPU-seconds of work lost")


# How runs ended


def said_of(service: Service, job: str, kind: str) -> list[str]:
    return [each.text for each in events(service, job=job) if each.kind == kind]


@pytest.mark.parametrize(
    ("codes", "says"),
    [((3,), "exit code 3"), ((1, 1, -15), "exit codes 1, -15"), ((0, None), "exit code 0")],
)
def test_a_failed_run_is_told_with_its_exit_codes(tmp_path: Path, codes: tuple[int | None, ...], says: str) -> None:
    service = Service(tmp_path)
    [job] = service.submit(a_request(retry={"on_errors": 0}))
    end_untold(service, job, RunEnding.FAILED, "no-signature", codes)
    assert said_of(service, job, "failed") == [f"run 1 failed: no-signature ({says})"]
    assert service.engine.why(job).evidence[1] == f"1 failed run; the last: no-signature, {says}"


def test_no_next_run_is_announced_for_a_job_that_has_failed(tmp_path: Path) -> None:
    service = Service(tmp_path)
    [job] = service.submit(a_request())
    end_untold(service, job, RunEnding.FAILED, "import-error")
    assert [each.text for each in events(service, job=job)][-2:] == [
        "run 1 failed: import-error (exit code 1)",
        "run 1 failed: import-error, which no retry heals",
    ]


def test_a_run_whose_setup_failed_has_no_exit_code(tmp_path: Path) -> None:
    service = Service(tmp_path, backend=Unbegun)
    [job] = service.submit(a_request(setup=("false",)))
    end_untold(service, job, RunEnding.FAILED, "no-signature", (None,))
    assert said_of(service, job, "failed") == [
        "run 1 failed: no-signature (setup failed); the next one starts its command again"
    ]
    assert service.engine.why(job).evidence[1] == "1 failed run; the last: no-signature, setup failed"


def test_a_run_lost_with_its_runner_has_no_exit_code(tmp_path: Path) -> None:
    service = Service(tmp_path, backend=Unbegun)
    [job] = service.submit(a_request())
    end_untold(service, job, RunEnding.FAILED, "node-lost", (None,))
    assert said_of(service, job, "failed") == ["run 1 failed: killed; the next one starts its command again"]
    assert service.engine.why(job).evidence[1] == "1 failed run; the last: node-lost"


@pytest.mark.parametrize(
    ("steps", "says"),
    [(None, "starts its command again"), (0.0, "goes on from step 0"), (1_200_000.0, "goes on from step 1,200,000")],
)
def test_the_next_run_is_announced_in_the_jobs_own_steps(tmp_path: Path, steps: float | None, says: str) -> None:
    """The core counts a job that states its duration in seconds."""
    service = Service(tmp_path, policy="srtf", cluster="v100:1", backend=LingeringBackend)
    [long] = service.submit(a_request(duration=1_000.0))
    service.submit(a_request(duration=10.0))
    service.pass_time(20)
    assert service.machine.leaving == {(long, 1)}
    if steps is None:
        end_untold(service, long, RunEnding.YIELDED, "TERM", (-15,))
    else:
        service.machine.end(long, RunEnding.YIELDED, cause="TERM", steps=steps, code=-15)
        service.settle()
    assert said_of(service, long, "stopped") == [f"run 1 has left: TERM (exit code -15); the next one {says}"]


def test_the_reason_for_a_preemption_has_the_same_words_everywhere(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="srtf", cluster="v100:1", backend=LingeringBackend)
    [long] = service.submit(a_request(duration=1_000.0))
    [short] = service.submit(a_request(duration=10.0), by=BOB)
    service.pass_time(20)
    text = (
        f"preempted (outranked): job {short} ({short}, tenant bob) stands before it under the policy in force; "
        "it comes back by itself"
    )
    assert said_of(service, long, "preempted") == [text]
    assert service.engine.show(long).runs[0].cause == text
    service.restart()  # the worker may not have been told yet
    assert reasons(service) == {long: text, short: None}
    service.call(lambda engine: engine.change(ALICE, long, Verb.CANCEL))
    service.restart()
    assert reasons(service)[long] == service.engine.show(long).job.reason.text == "cancelled by its owner"


def reasons(service: Service) -> dict[str, str | None]:
    """Why runs are to end, as a back end is told that takes them over."""
    return {order.job: order.reason for order, _ in open_orders(service.loop.deps, service.loop.state)}


# How many there are of those that were asked for


@pytest.mark.parametrize(("unaware", "says"), [(set(), "writes its checkpoint"), ({"1"}, "does not save by poise.worker")])
def test_a_leaving_run_is_said_to_save_only_if_it_can(tmp_path: Path, unaware: set[str], says: str) -> None:
    service = Service(tmp_path, cluster="v100:1", backend=LingeringBackend)
    service.machine.unaware = unaware
    [job] = service.submit(a_request())
    service.engine.change(ALICE, job, Verb.STOP)
    service.settle()
    why = service.engine.why(job)
    assert (why.state, why.reason.code) == (JobState.CHECKPOINTING, "checkpointing")
    assert says in why.reason.text


def test_the_queue_counts_matching_jobs_by_state(tmp_path: Path) -> None:
    service = Service(tmp_path, cluster="v100:2")
    over = service.submit(a_request(app="one"), a_request(app="two"), by=ALICE)
    for job in over:
        service.machine.end(job, RunEnding.FINISHED)
        service.settle()
    service.submit(*[a_request(app="one", hold=True) for _ in range(3)], by=BOB)
    service.submit(a_request(app="one"), a_request(app="two", gpus=2), by=ALICE)

    def counts(states: frozenset[JobState] = frozenset(), **which: str) -> dict[str, int]:
        page = service.engine.queue(JobFilter(states, **which), limit=1, offset=0)
        assert page.total == sum(page.counts.values())
        return page.counts

    assert counts() == {"PENDING": 4, "RUNNING": 1}
    assert counts(tenant="bob") == {"PENDING": 3}
    assert counts(app="one") == {"PENDING": 3, "RUNNING": 1}
    assert counts(frozenset(JobState)) == {"PENDING": 4, "RUNNING": 1, "SUCCEEDED": 2}
    assert counts(frozenset({JobState.SUCCEEDED, JobState.RUNNING}), app="one") == {"RUNNING": 1, "SUCCEEDED": 1}
    assert counts(frozenset({JobState.SUCCEEDED}), tenant="bob") == {}
    assert service.engine.states() == {"PENDING": 4, "RUNNING": 1, "SUCCEEDED": 2}


# Jobs that share GPUs


def a_pair(service: Service) -> tuple[str, str]:
    """Two jobs on one GPU."""
    [first] = service.submit(a_request(model="LM", batch_size=80), by=ALICE)
    [second] = service.submit(a_request(model="ResNet-18", batch_size=128), by=BOB)
    service.pass_time(400)
    assert [service.engine.show(job).job.gpus for job in (first, second)] == [1, 1]
    return first, second


def test_a_gpu_that_two_jobs_share_is_one_gpu_with_two_holders(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="max-min+packed", cluster="v100:1")
    pair = a_pair(service)
    [node] = service.engine.nodes().nodes
    assert (node.free, node.jobs) == (0, ("+".join(pair),))
    assert {each.tenant: (each.gpus, each.held) for each in service.engine.shares().tenants} == {
        "alice": (1, 1.0),
        "bob": (1, 1.0),
    }
    [waits] = service.submit(a_request(model="VGG16", batch_size=32), by=ALICE)
    evidence = service.engine.why(waits).evidence
    assert evidence[0] == "it can use v100; held of those: 1 GPU"
    assert evidence[-1] == "tenant alice holds 1 of 1 GPU"
    service.engine.change(ALICE, pair[0], Verb.CANCEL)
    assert {each.tenant: each.gpus for each in service.engine.shares().tenants}["bob"] == 1


def test_a_job_that_leaves_for_another_partner_is_told_why(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="max-min+packed", cluster="v100:1")
    classes = [("LM", 80), ("Recommendation", 2048), ("ResNet-18", 128), ("ResNet-18", 128)]
    jobs = [service.submit(a_request(model=model, batch_size=size))[0] for model, size in classes]
    for _ in range(20):
        service.pass_time(400)
    told = {run.cause for job in jobs for run in service.engine.show(job).runs if run.cause}
    assert told
    assert all(each.partition(": ")[2].split()[0] in ("job", "another", "it") for each in told), told


# What would help


def test_a_job_over_its_tenants_share_is_told_what_would_help(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="philly:quotas=bob:3", cluster="v100:4")
    service.submit(a_request(preemption="never"))
    service.submit(*[a_request(gpus=3, preemption="never")], by=BOB)
    [job] = service.submit(a_request())
    why = service.engine.why(job)
    assert (why.reason.code, why.reason.text) == ("tenant-share", "would take tenant alice beyond its share of the cluster")
    assert why.advice == (
        "it starts when jobs of tenant alice that hold GPUs end, "
        "or an admin raises its share: poise shares --set alice=WEIGHT"
    )


def test_a_job_larger_than_its_tenants_quota_is_told_so(tmp_path: Path) -> None:
    """Its tenant holds nothing, and no weight changes a quota that is stated."""
    service = Service(tmp_path, policy="philly:quotas=alice:1/bob:3", cluster="v100:4")
    service.submit(a_request(gpus=3, preemption="never"), by=BOB)
    [job] = service.submit(a_request(gpus=2))
    why = service.engine.why(job)
    assert (why.reason.code, why.reason.text) == ("tenant-share", "would take tenant alice beyond its share of the cluster")
    assert why.advice == (
        "it starts when others leave enough GPUs idle, "
        "or an admin raises its share: poise use philly:quotas=..., which states it"
    )


def test_advice_to_ask_for_fewer_gpus_promises_no_start(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="fifo", cluster="v100:4")
    service.submit(a_request(gpus=3))
    service.submit(a_request(gpus=4))
    [job] = service.submit(a_request(gpus=2))
    assert service.engine.why(job).advice == "with 1 GPU it would fit into what is free now"
    [smaller] = service.submit(a_request())
    assert service.engine.why(smaller).reason.code == "behind-others"


@pytest.mark.parametrize("policy", POLICIES)
def test_an_elastic_job_is_told_which_policies_would_start_it_smaller(tmp_path: Path, policy: str) -> None:
    service = Service(tmp_path, policy=policy, cluster="v100:4")
    service.submit(a_request(gpus=3, preemption="never", duration=10_000.0))
    [job] = service.submit(a_request(gpus=2, min_gpus=1, max_gpus=2, duration=1_000.0), by=BOB)
    for _ in range(3):
        service.pass_time(600)
    is_elastic = Capability.ELASTIC in POLICIES[policy].can
    assert (service.engine.show(job).job.gpus == 1) == is_elastic
    if not is_elastic:
        assert service.engine.why(job).advice == (
            f"policy {policy} gives it 2 GPUs or none: submit it with -g 1, or ask an admin for optimus or themis"
        )
