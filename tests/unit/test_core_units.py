"""Gangs whose GPUs come in units, for instance pods of 4 GPUs, which cannot be divided over nodes: worked by hand."""

from dataclasses import replace
from io import BytesIO, StringIO

import pytest
from tests.builders import EVENTS, Story, a_cluster, a_job, nodes, simulate
from tests.whims import scripted

from poise.engine.journal import job_line, read_job
from poise.lab.experiment import divided, elastic
from poise.lab.simulator.outages import Drain, Outage
from poise.lab.traces.formats.poise import write_trace
from poise.lab.traces.parsing import TraceInput
from poise.lab.traces.registry import FORMATS
from poise.lab.traces.schema import Trace, TraceJob
from poise.scheduler.core.ledger import Ledger
from poise.scheduler.core.reasons import Code, Reason
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.action import JournalEntry, Launch, Preempt, PreemptionCause
from poise.scheduler.model.cluster import Cluster, Holding, NodeGpus, Slots
from poise.scheduler.model.errors import InvariantError, JournalError, RequestError, TraceError
from poise.scheduler.model.job import Job, Status
from poise.scheduler.model.plan import Claim, Plan
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.topology import Topology
from poise.scheduler.model.units import in_units
from poise.scheduler.placement.free_gpus import FreeGpus
from poise.scheduler.placement.strategies import PLACEMENTS
from poise.scheduler.policies.catalogue import POLICIES
from poise.scheduler.throughput.speeds import Speeds
from poise.scheduler.throughput.table import shipped


def pods(job: str, count: int, gpus: int, *, at: float = 0.0, seconds: float = 100.0, **given: object) -> TraceJob:
    """A job of so many pods with so many GPUs each."""
    each = a_job(job, at=at, gpus=count * gpus, seconds=seconds)
    return replace(each, job=replace(each.job, unit=gpus, **given))  # type: ignore[arg-type]


def counts(holding: Holding | None) -> dict[int, int]:
    """GPUs by node."""
    return {} if holding is None else {slots.node: slots.mask.bit_count() for slots in holding}


def first_place(story: Story, job: str) -> dict[int, int]:
    """GPUs by node of the job's first run."""
    return counts(story.runs_of(job)[0].gpus)


def reasons_at(jobs: list[TraceJob], job: str, moment: float, policy: str, cluster: Cluster, **given: object) -> Reason:
    """What the core says of a job at this moment, at which something happens."""
    found: list[Reason] = []

    def watch(core: Scheduler, entry: JournalEntry) -> None:
        if entry.now == moment:
            found.append(core.explain(job))

    simulate(jobs, policy, cluster, placement="consolidate", watch=watch, **given)  # type: ignore[arg-type]
    return found[-1]


# What a job may ask for


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"gpus": 6, "unit": 4}, "job 'a': gpus: expected a multiple of unit, which is 4; got 6"),
        ({"gpus": 8, "unit": 4, "min_gpus": 2}, "job 'a': min_gpus: expected a multiple of unit, which is 4; got 2"),
        ({"gpus": 8, "unit": 4, "max_gpus": 9}, "job 'a': max_gpus: expected a multiple of unit, which is 4; got 9"),
        ({"gpus": 8, "unit": 0}, "job 'a': unit: expected at least 1 GPU, got 0"),
        ({"gpus": 8, "unit": 4, "micro_batches": 8}, "job 'a': unit: expected 1 beside micro_batches, .*; got 4"),
    ],
)
def test_a_job_asks_for_whole_units(given: dict[str, int], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        Job("a", 0.0, **given)  # type: ignore[arg-type]


def test_a_job_without_units_is_written_as_before_and_one_with_units_is_read_back() -> None:
    plain, whole = Job("a", 0.0, 8), Job("a", 0.0, 8, unit=4, min_gpus=4)
    assert "unit" not in job_line(plain)
    assert '"unit":4' in job_line(whole)
    assert [read_job(job_line(each)) for each in (plain, whole)] == [plain, whole]
    with pytest.raises(JournalError, match="gpus: expected a multiple of unit"):
        read_job('{"id":"a","submitted":0.0,"gpus":6,"unit":4}')


def test_jobs_that_differ_in_units_are_of_different_kinds() -> None:
    speeds = Speeds(shipped(), nodes(6, 6))
    plain, whole = Job("a", 0.0, 8, 60.0, min_gpus=4), Job("b", 0.0, 8, 60.0, min_gpus=4, unit=4)
    assert speeds.kind(whole) == speeds.kind(plain) + "/u4"
    assert [gpus for gpus, _ in speeds.estimate(plain).others] == [4, 5, 6, 7]
    assert [gpus for gpus, _ in speeds.estimate(whole).others] == [4]


def test_a_job_has_no_speed_on_a_type_whose_nodes_are_too_small_for_its_units() -> None:
    speeds = Speeds(shipped(), a_cluster("v100:6@3,p100:4"))
    packed = speeds.estimate(Job("a", 0.0, 4, 60.0, unit=4)).packed
    assert packed[0] == 0
    assert packed[1] > 0


# Traces


def read(text: str) -> list[TraceJob]:
    poise = next(each for each in FORMATS if each.name == "poise")
    return poise.read(TraceInput("pods.jsonl", BytesIO(text.encode())))


def test_a_trace_states_units_and_is_written_with_them() -> None:
    jobs = read('{"job": "a", "submitted": 0, "gpus": 8, "unit": 4, "duration": 60}\n')
    assert jobs[0].job.unit == 4
    assert read("job,submitted,gpus,unit,duration\na,0,8,4,60\nb,0,8,,60\n")[0] == jobs[0]
    stream = StringIO()
    write_trace(Trace("pods", tuple(jobs)), stream)
    assert read(stream.getvalue()) == jobs


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ('"gpus": 6, "unit": 4', "pods.jsonl:1: gpus: expected a multiple of unit, which is 4, got 6"),
        ('"gpus": 8, "unit": 4, "min_gpus": 2', "pods.jsonl:1: min_gpus: expected a multiple of unit, which is 4, got 2"),
        ('"gpus": 8, "unit": 0', "pods.jsonl:1: unit: expected a whole number from 1 to 1,000,000, got 0"),
        ('"unit": 4, "micro_batches": 8', "pods.jsonl:1: unit: expected 1 beside micro_batches, .*, got 4"),
    ],
)
def test_a_trace_with_divided_units_is_refused_with_line_and_column(columns: str, problem: str) -> None:
    with pytest.raises(TraceError, match=problem):
        read(f'{{"job": "a", "submitted": 0, "duration": 60, {columns}}}\n')


def test_elastic_and_dividing_options_leave_units_whole() -> None:
    trace = Trace("pods", (pods("a", 2, 4), a_job("b", gpus=2)))
    assert [each.job.min_gpus for each in elastic(trace).jobs] == [4, 1]
    assert [each.job.micro_batches for each in divided(trace, 2).jobs] == [None, 4]


# Placement


@pytest.mark.parametrize(
    ("name", "free", "want"),
    [
        ("count", (5, 3, 6, 8), {0: 4, 2: 4}),
        ("consolidate", (5, 3, 6, 8), {3: 8}),
        ("consolidate", (5, 3, 6, 7), {0: 4, 2: 4}),
        ("consolidate", (3, 3, 6, 7), {2: 4, 3: 4}),
        ("consolidate", (3, 3, 3, 7), {}),
        ("pack", (5, 3, 6, 7), {0: 4, 2: 4}),
        ("best-fit", (5, 3, 6, 7), {0: 4, 2: 4}),
        ("spread", (5, 3, 6, 8), {3: 8}),
        ("spread", (5, 3, 6, 7), {0: 4, 2: 4}),
    ],
)
def test_two_pods_of_four_are_never_placed_as_three_and_five(name: str, free: tuple[int, ...], want: dict[int, int]) -> None:
    gpus = FreeGpus(Topology(nodes(8, 8, 8, 8)))
    for node, left in enumerate(free):
        gpus.take((Slots(node, 0xFF & ~((1 << left) - 1)),) if left < 8 else ())
    assert counts(PLACEMENTS[name](gpus.in_units(0, 4), 0, 8, Locality.CLUSTER)) == want


def test_the_ledger_refuses_a_holding_that_divides_a_unit() -> None:
    ledger = Ledger(Topology(nodes(8, 8)))
    divided_holding = (Slots(0, 0b111), Slots(1, 0b11111))
    with pytest.raises(InvariantError, match="takes GPUs in units of 4 and is to get 3 on node 0, 5 on node 1"):
        ledger.open(0, divided_holding, 8, 8, unit=4)
    ledger.open(0, divided_holding, 8, 8)
    with pytest.raises(InvariantError, match="in units of 4"):
        ledger.join(1, 0, 4)
    with pytest.raises(InvariantError, match="in units of 2"):
        ledger.lend(2, (Slots(0, 0b1000),), 2)


# Admission


@pytest.mark.parametrize(
    ("job", "cluster", "problem"),
    [
        (pods("a", 1, 4), nodes(2, 3), "needs 4 GPUs on one node; the largest node that it can use has 3 (gpu)"),
        (
            pods("a", 3, 4),
            nodes(6, 6),
            "needs 3 × 4 GPUs, each 4 on one node, of one type; the cluster has room for 2 × 4 (gpu)",
        ),
        (
            pods("a", 1, 8, gpu_types=("k80",)),
            a_cluster("v100:8@8,k80:8@4"),
            "needs 8 GPUs on one node; the largest node that it can use has 4 (k80)",
        ),
    ],
)
def test_a_gang_for_which_no_nodes_have_room_is_rejected_in_one_sentence(
    job: TraceJob, cluster: Cluster, problem: str
) -> None:
    story = simulate([job], "fifo", cluster, placement="consolidate")
    assert story.scheduler.explain("a") == Reason(Code.REJECTED, problem)


def test_gpus_of_the_validation_pool_have_no_room_for_units_and_jobs_in_units_are_not_tried() -> None:
    pool = replace(EVENTS, validation_gpus=1, validation_time=10.0)
    story = simulate([pods("a", 2, 4), a_job("b", gpus=2)], "fifo", nodes(8, 8), placement="consolidate", settings=pool)
    assert story.starts["a"] == 0
    assert story.status("a") is Status.FINISHED
    assert len(story.runs_of("b")) == 2
    full = simulate([pods("a", 4, 4)], "fifo", nodes(8, 8), placement="consolidate", settings=pool)
    assert full.status("a") is Status.REJECTED


# Waiting

SMALL = [a_job("x", gpus=3, seconds=50), a_job("y", gpus=3, seconds=80)]


def test_a_gang_that_fits_by_number_and_not_in_units_waits_for_fragmentation() -> None:
    jobs = [*SMALL, pods("pods", 2, 4, at=1)]
    story = simulate(jobs, "fifo", nodes(6, 6), placement="spread")
    assert first_place(story, "x") == {0: 3}
    assert first_place(story, "y") == {1: 3}
    assert story.starts["pods"] == 80
    assert first_place(story, "pods") == {0: 4, 1: 4}
    [launch] = [action for _, action in story.actions(Launch) if action.job == "pods"]
    assert launch.waited == (0, 30, 49)  # six GPUs are free before x ends, and nine after


def test_the_reason_says_in_which_parts_a_gang_is_needed() -> None:
    jobs = [*SMALL, pods("pods", 2, 4, at=1)]
    reason = reasons_at(jobs, "pods", 50.0, "fifo", nodes(6, 6))
    assert reason.code is Code.FRAGMENTATION
    want = "needs 2 × 4 GPUs, each 4 on one node; free now: 9 gpu, but so spread over nodes that there is room for 1 × 4"
    assert reason.text == want
    busy = reasons_at([*SMALL, pods("pods", 2, 4)], "pods", 0.0, "fifo", nodes(6, 6))
    assert busy == Reason(Code.CAPACITY, "needs 2 × 4 GPUs, each 4 on one node; free now: 6 gpu")


def test_the_reason_names_the_order_and_lost_nodes_too() -> None:
    ahead = [a_job("big", gpus=12, at=1), pods("pods", 1, 4, at=2), a_job("x", gpus=3)]
    reason = reasons_at(ahead, "pods", 2.0, "fifo", nodes(6, 6))
    assert reason.code is Code.ORDER
    assert reason.text == (
        "needs 1 × 4 GPUs, each 4 on one node, and would fit (free now: 9 gpu), but jobs ahead of it come first"
    )
    lost = reasons_at([pods("pods", 2, 4, at=2)], "pods", 2.0, "fifo", nodes(4, 4, 2, 2), outages=[Outage(1.0, 0, 5.0)])
    assert lost == Reason(Code.UNAVAILABLE, "needs 2 × 4 GPUs, each 4 on one node; free now: 8 gpu; n0 is lost")
    packed = reasons_at(
        [a_job("x", gpus=3), pods("pods", 2, 4, at=2)],
        "pods",
        2.0,
        "fifo",
        nodes(8, 8),
        settings=replace(EVENTS, packed_wait=10.0),
        outages=[Drain(1.0, 1, 90.0, (0, 1, 2, 3), leaves=False)],
    )
    assert packed.code is Code.FRAGMENTATION
    assert packed.text.startswith(
        "needs 2 × 4 GPUs, each 4 on one node, and these on as few nodes as possible; free now: 9 gpu"
    )


def test_numbers_of_parts_are_written_out() -> None:
    assert in_units(8, 4) == "2 × 4 GPUs, each 4 on one node"
    assert in_units(3, 1) == "3 × 1 GPU, each 1 on one node"


# Preemption


def test_victims_are_those_whose_gpus_make_whole_units() -> None:
    """The two furthest back would leave 3 GPUs of one node and 5 of the other, so the pods get one node whole.

    Who loses its place there and stands ahead of the job on the 3 GPUs takes those.
    """
    jobs = [
        a_job("ahead", gpus=5, seconds=10),
        a_job("three", gpus=3, seconds=900),
        a_job("rest", gpus=3, at=1, seconds=800),
        a_job("five", gpus=5, at=1, seconds=1000),
        pods("pods", 2, 4, at=5, seconds=20),
    ]
    story = simulate(jobs, "srtf", nodes(8, 8), placement="consolidate")
    assert [first_place(story, job) for job in ("ahead", "three", "rest", "five")] == [{0: 5}, {0: 3}, {1: 3}, {1: 5}]
    assert story.starts["pods"] == 5
    assert first_place(story, "pods") == {1: 8}
    stopped = {(action.job, action.beneficiary) for now, action in story.actions(Preempt) if now == 5}
    assert stopped == {("five", "pods"), ("rest", None), ("three", "rest")}


def test_no_job_is_preempted_for_a_gang_whose_units_it_cannot_make() -> None:
    """Both that stand behind leave two GPUs each, beside two of a job that stands ahead."""
    jobs = [
        a_job("a0", gpus=2, seconds=10),
        a_job("b0", gpus=2, seconds=1000),
        a_job("a1", gpus=2, seconds=10),
        a_job("b1", gpus=2, seconds=1000),
        pods("pods", 1, 4, at=5, seconds=20),
    ]
    story = simulate(jobs, "srtf", nodes(4, 4), placement="spread")
    assert [first_place(story, job) for job in ("a0", "b0", "a1", "b1")] == [{0: 2}, {0: 2}, {1: 2}, {1: 2}]
    assert [now for now, _ in story.actions(Preempt)] == [10.0]
    assert story.starts["pods"] == 10


def test_only_as_many_are_preempted_as_the_units_need() -> None:
    jobs = [a_job(f"s{n}", gpus=2, seconds=1000 + n) for n in range(8)] + [pods("pods", 2, 4, at=5, seconds=20)]
    story = simulate(jobs, "srtf", nodes(8, 8), placement="consolidate")
    assert len([action for now, action in story.actions(Preempt) if now == 5]) == 4


# Moving


def test_with_defragmentation_jobs_move_for_units_without_any_wait_for_locality() -> None:
    jobs = [a_job("fill", gpus=7, seconds=1), a_job("a", seconds=100), a_job("b", seconds=100), pods("pods", 3, 4, at=20)]
    how = replace(EVENTS, defragment=10.0)
    story = simulate(jobs, "fifo", nodes(8, 8), placement="consolidate", settings=how)
    assert first_place(story, "a") != first_place(story, "b")
    assert story.starts["pods"] == 20
    assert {action.why for _, action in story.actions(Preempt)} == {PreemptionCause.MOVED}
    still = simulate(jobs, "fifo", nodes(8, 8), placement="consolidate")
    assert still.starts["pods"] == 100


@pytest.mark.parametrize("policy", ["max-min", "hlas", "themis", "gandiva", "gandiva-fair", "optimus"])
def test_a_planner_that_counts_gpus_gets_its_gang_a_place_by_moving_others(policy: str) -> None:
    """Nine of twelve GPUs are free, on nodes of 3 and 6."""
    how = Settings(cadence=Cadence.BOTH, round=30.0)
    jobs = [a_job("x", gpus=3, seconds=500), a_job("y", gpus=1, seconds=500), pods("pods", 2, 4, at=1, seconds=50)]
    story = simulate(jobs, policy, nodes(6, 6), placement="spread", settings=how)
    assert story.starts["pods"] < 400, policy
    for run in story.runs_of("pods"):
        assert set(counts(run.gpus).values()) == {4}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_of_the_catalogue_runs_pods_beside_other_jobs(policy: str) -> None:
    how = Settings(cadence=Cadence.BOTH, round=20.0)
    mixed = [
        a_job("one", gpus=1, seconds=60),
        a_job("five", gpus=5, at=1, seconds=60),
        pods("pods", 2, 4, at=2, seconds=60),
        pods("big", 1, 8, at=3, seconds=30),
        pods("grows", 1, 2, at=4, seconds=60, max_gpus=6),
    ]
    story = simulate(mixed, policy, nodes(8, 6, 4), placement="consolidate", settings=how)
    for each in mixed:
        assert story.status(each.job.id) is Status.FINISHED, each.job.id
        for run in story.runs_of(each.job.id):
            assert not any(gpus % each.job.unit for gpus in counts(run.gpus).values())


# Plans that name nodes


def test_a_site_that_divides_a_unit_is_replaced_by_any_place() -> None:
    site = (NodeGpus(0, 3), NodeGpus(1, 5))
    plan = Plan.changing((Claim(0, gpus=8, site=site),))
    story = simulate([pods("pods", 2, 4)], scripted({0.0: plan}), nodes(8, 8), placement="consolidate", until=50.0)
    assert first_place(story, "pods") == {0: 8}


def test_a_number_that_is_not_whole_units_is_rounded_down_but_not_below_the_fewest() -> None:
    plan = Plan.changing((Claim(0, gpus=7), Claim(1, gpus=5)))
    jobs = [pods("a", 2, 4, min_gpus=4), pods("b", 2, 4)]
    story = simulate(jobs, scripted({0.0: plan}), nodes(8, 8), placement="consolidate", until=50.0)
    assert first_place(story, "a") == {0: 4}
    assert first_place(story, "b") == {1: 8}


def test_an_elastic_gang_takes_fewer_units_where_not_all_find_a_place() -> None:
    plan = Plan.changing((Claim(0, gpus=3), Claim(1, gpus=8, site=(NodeGpus(0, 3), NodeGpus(1, 5)))))
    jobs = [a_job("x", gpus=3), pods("pods", 2, 4, min_gpus=4)]
    story = simulate(jobs, scripted({0.0: plan}), nodes(6, 6), placement="consolidate", until=50.0)
    assert first_place(story, "pods") == {1: 4}


def test_a_running_gang_stays_where_it_is_if_a_plan_would_divide_its_units() -> None:
    first, then = Plan.changing((Claim(0),)), Plan.changing((Claim(0, site=(NodeGpus(0, 3), NodeGpus(1, 5))),))
    jobs = [pods("pods", 2, 4), a_job("later", at=10)]
    story = simulate(jobs, scripted({0.0: first, 10.0: then}), nodes(8, 8), placement="consolidate", until=50.0)
    assert story.preemptions == 0
    assert len(story.runs_of("pods")) == 1


def test_a_job_joins_another_only_on_gpus_that_are_whole_units_of_it() -> None:
    """The host has 3 + 5 GPUs, of which two pods of 4 cannot be made."""
    apart = Plan.changing((Claim(0, site=(NodeGpus(0, 3), NodeGpus(1, 5)), beside=1),))
    together = Plan.changing((Claim(0, site=(NodeGpus(0, 4), NodeGpus(1, 4)), beside=1),))
    jobs = [a_job("host", gpus=8, seconds=90), pods("guest", 2, 4)]
    for plan, joins in ((apart, False), (together, True)):
        story = simulate(jobs, scripted({0.0: plan}), nodes(6, 6), placement="consolidate", until=50.0)
        assert bool(story.runs_of("guest")) == joins


def test_jobs_behind_a_gang_that_no_nodes_have_room_for_are_planned_for_as_if_it_were_not_there() -> None:
    """Node 0 is lost for long: 8 GPUs are left, as 5 + 3, and the gang would need 8."""
    jobs = [pods("pods", 1, 8, at=2), a_job("x", gpus=4, at=3, seconds=10)]
    for policy in ("optimus", "gandiva", "themis", "hlas", "gandiva-fair", "max-min"):
        story = simulate(
            jobs, policy, nodes(8, 5, 3), placement="consolidate", outages=[Outage(1.0, 0, 10_000.0)], until=500.0
        )
        assert story.starts == {"x": 3.0}, policy
        assert story.scheduler.explain("pods").code is Code.UNAVAILABLE
