"""Laws of gangs whose GPUs come in units, which no two nodes can share, in random worlds and under every policy."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import event, given
from hypothesis import strategies as st
from tests.strategies import ORDERS, STABLE, VARIANTS, World, choices, clusters, policies, worlds

from poise.engine.assembly import with_rounds
from poise.engine.journal import entry_line, read_entry
from poise.lab.traces.schema import TraceJob
from poise.scheduler.core.claim_shapes import WaitCause
from poise.scheduler.core.ledger import Ledger
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.core.settings import Cadence
from poise.scheduler.model.action import JournalEntry, Launch
from poise.scheduler.model.cluster import Cluster, Slots, gpu_count
from poise.scheduler.model.errors import InvariantError
from poise.scheduler.model.job import Job, Status
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.topology import Topology
from poise.scheduler.placement.free_gpus import FreeGpus, lowest_slots
from poise.scheduler.placement.strategies import PLACEMENTS, placement_named
from poise.scheduler.policies.catalogue import POLICIES
from poise.scheduler.policies.listing import PolicyProperty

UNITS = (1, 2, 4, 1, 2, 3, 8)


def whole(gpus: int, unit: int) -> int:
    """The GPUs of a node as far as they are whole units."""
    return gpus - gpus % unit


def in_units(each: TraceJob, unit: int) -> TraceJob:
    """The same job with about as many GPUs, in units."""
    if unit == 1:
        return each
    job = each.job
    least, gpus = (gpus and max(whole(gpus, unit), unit) for gpus in (job.min_gpus, job.gpus))
    most = job.max_gpus and whole(job.max_gpus + unit - 1, unit)
    changes = {"gpus": gpus, "min_gpus": least, "max_gpus": most, "unit": unit, "micro_batches": None, "sync": 0.0}
    return replace(each, job=replace(job, **changes))  # type: ignore[arg-type]


@st.composite
def unit_worlds(
    draw: st.DrawFn,
    *,
    policy: st.SearchStrategy[str] = policies,
    cadence: st.SearchStrategy[Cadence] | None = None,
    plain: bool = False,
    forever: bool = False,
) -> World:
    """A random world in which the GPUs of some gangs come in units."""
    more = {} if cadence is None else {"cadence": cadence}
    world = draw(worlds(policy=policy, plain=plain, forever=forever, **more))  # type: ignore[arg-type]
    drawn = draw(st.lists(st.sampled_from(UNITS), min_size=len(world.jobs), max_size=len(world.jobs)))
    return replace(world, jobs=[in_units(each, unit) for each, unit in zip(world.jobs, drawn, strict=True)])


def can_do_with(job: Job) -> Sequence[int]:
    """Numbers of GPUs of a run that is no trial."""
    if job.micro_batches is not None:
        return range(1, job.micro_batches + 1)
    return range(job.min_gpus or job.gpus, (job.max_gpus or job.gpus) + 1, job.unit)


@given(unit_worlds(forever=True))
def test_on_every_node_a_job_gets_whole_units_and_all_of_its_gang_or_nothing(world: World) -> None:
    story = world.played()
    jobs = {each.job.id: each.job for each in world.jobs}
    for _, launch in story.actions(Launch):
        job = jobs[launch.job]
        assert not any(slots.mask.bit_count() % job.unit for slots in launch.gpus)
        if job.unit > 1 or not story.is_trial(launch.gpus):
            assert gpu_count(launch.gpus) in can_do_with(job)
        if len(launch.gpus) > 1 and job.unit > 1:
            event("units on several nodes")


@given(unit_worlds())
def test_every_job_in_units_comes_to_its_end_if_lost_nodes_return(world: World) -> None:
    story = world.played()
    for each in world.jobs:
        assert story.status(each.job.id).is_final, each.job
        if each.job.unit > 1:
            event(story.status(each.job.id).name)


@given(unit_worlds(forever=True))
def test_a_gang_in_units_is_rejected_exactly_if_the_empty_cluster_has_no_place_for_it(world: World) -> None:
    story = world.played()
    state = story.scheduler.state
    for each in world.jobs:
        job = each.job
        if job.unit == 1:
            continue
        is_rejected = story.status(job.id) is Status.REJECTED
        able = [kind for kind, row in enumerate(story.speeds.estimate(job).rates) if row[Locality.PACKED] > 0]
        empty = FreeGpus(Topology(world.cluster))
        empty.take(state.pool.slots)
        places = (PLACEMENTS["count"](empty.in_units(kind, job.unit), kind, job.gpus, Locality.CLUSTER) for kind in able)
        assert is_rejected == all(place is None for place in places)


def assert_no_waiting_gang_fits(scheduler: Scheduler, entry: JournalEntry) -> None:
    state = scheduler.state
    for shape in state.waiting_shapes.values():
        for gpu_type in shape.types:
            free = (
                mask.bit_count() for node, mask in enumerate(state.free.masks) if state.topology.type_of[node] == gpu_type
            )
            has = sum(whole(gpus, shape.unit) for gpus in free)
            assert has < shape.gang, f"{entry}: {has} GPUs of type {gpu_type} are idle in units of {shape.unit}"


CONSERVING = [
    spec
    for spec in (*ORDERS, *STABLE)
    if PolicyProperty.WORK_CONSERVING in POLICIES[spec.split("+")[0].split(":")[0]].claims
]


@given(unit_worlds(policy=st.sampled_from(CONSERVING), cadence=st.just(Cadence.EVENTS), plain=True))
def test_a_work_conserving_order_leaves_no_room_for_a_waiting_gang_in_units(world: World) -> None:
    world.played(assert_no_waiting_gang_fits)


@given(unit_worlds(policy=st.sampled_from((*ORDERS, *VARIANTS))))
def test_a_gang_waits_for_fragmentation_exactly_if_it_fits_by_number_and_not_in_place(world: World) -> None:
    def watch(scheduler: Scheduler, _entry: JournalEntry) -> None:
        state = scheduler.state
        for shape in state.waiting_shapes.values():
            if shape.tasks is not None or shape.is_over_share:
                continue
            by_number = any(state.free.idle[kind] >= shape.gang for kind in shape.types)
            cause = shape.classify(state.free, state.placement)
            if cause is WaitCause.CAPACITY:
                assert not by_number
            elif shape.locality is Locality.CLUSTER:
                free = list(enumerate(state.free.masks))
                has = [
                    sum(whole(mask.bit_count(), shape.unit) for node, mask in free if state.topology.type_of[node] == kind)
                    for kind in shape.types
                ]
                assert (cause is WaitCause.ORDER) == (max(has) >= shape.gang)
                if cause is WaitCause.FRAGMENTATION:
                    event("fragmentation of units")

    world.played(watch)


@given(unit_worlds())
def test_a_journal_with_units_is_read_as_it_was_written_and_leads_to_the_same_actions(world: World) -> None:
    story = world.played()
    how = with_rounds(world.how, world.settings)
    again = Scheduler(world.cluster, how, placement_named(world.placement), world.settings)
    for entry in story.entries:
        read = read_entry(entry_line(entry))
        assert read == entry
        assert again.handle(read.now, read.events) == entry.actions


# Placement


@st.composite
def questions(draw: st.DrawFn) -> tuple[FreeGpus, int, int, int]:
    """Some GPUs are held or closed; how many free ones of a type, in which units?"""
    cluster: Cluster = draw(clusters())
    topology = Topology(cluster)
    free = FreeGpus(topology)
    for node, full in enumerate(topology.full):
        taken, closed = draw(choices(range(9), (0, 0, 0, 1, 3)))
        mask = lowest_slots(full, min(taken, full.bit_count()))
        free.take((Slots(node, mask),) if mask else ())
        free.restrict(node, closed & full)
    gpu_type, unit, units = draw(choices(range(len(topology.types)), (2, 3, 4, 8), range(1, 5)))
    return free, gpu_type, unit, unit * units


@given(questions(), st.sampled_from(sorted(PLACEMENTS)), st.sampled_from(Locality))
def test_a_placement_gives_whole_units_of_free_gpus_of_one_type(
    question: tuple[FreeGpus, int, int, int], name: str, asked: Locality
) -> None:
    free, gpu_type, unit, gang = question
    holding = PLACEMENTS[name](free.in_units(gpu_type, unit), gpu_type, gang, asked)
    has = [whole(mask.bit_count(), unit) for node, mask in enumerate(free.masks) if free.topology.type_of[node] == gpu_type]
    if holding is None:
        assert sum(has) < gang or asked is not Locality.CLUSTER
        return
    assert gpu_count(holding) == gang
    assert [slots.node for slots in holding] == sorted({slots.node for slots in holding})
    assert free.are_free(holding)
    assert all(free.topology.type_of[slots.node] == gpu_type for slots in holding)
    assert all(slots.mask.bit_count() % unit == 0 for slots in holding)
    if name != "count":
        assert free.topology.locality(holding) <= asked


@given(questions(), st.sampled_from(("consolidate", "pack")))
def test_consolidate_takes_the_fewest_nodes_that_hold_the_units(question: tuple[FreeGpus, int, int, int], name: str) -> None:
    free, gpu_type, unit, gang = question
    holding = PLACEMENTS[name](free.in_units(gpu_type, unit), gpu_type, gang, Locality.CLUSTER)
    sizes = sorted(
        (whole(mask.bit_count(), unit) for node, mask in enumerate(free.masks) if free.topology.type_of[node] == gpu_type),
        reverse=True,
    )
    fewest = next((count for count in range(1, len(sizes) + 1) if sum(sizes[:count]) >= gang), None)
    assert (None if holding is None else len(holding)) == fewest


@given(questions(), st.sampled_from(sorted(PLACEMENTS)), st.sampled_from(Locality))
def test_units_of_one_gpu_are_no_units_at_all(question: tuple[FreeGpus, int, int, int], name: str, asked: Locality) -> None:
    free, gpu_type, _, gang = question
    assert free.in_units(gpu_type, 1) is free
    ledger = Ledger(free.topology)
    holding = PLACEMENTS[name](free, gpu_type, gang, asked)
    if holding is not None and any(slots.mask.bit_count() % 2 for slots in holding):
        ledger.open(0, holding, gang, gang)
        ledger.close(0)
        try:
            ledger.open(0, holding, gang, gang, unit=2)
        except InvariantError as error:
            assert "in units of 2" in str(error)  # noqa: PT017 - the same as with pytest.raises, in a property
        else:
            raise AssertionError("the ledger lets a unit be divided")
