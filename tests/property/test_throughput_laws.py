"""What holds for every table, cluster and job."""

import csv
import io
import math
from dataclasses import fields, replace
from itertools import pairwise

from hypothesis import assume, given
from hypothesis import strategies as st

from poise.scheduler.model.cluster import Cluster, Node
from poise.scheduler.model.errors import ThroughputError
from poise.scheduler.model.job import Job
from poise.scheduler.model.speed import Locality
from poise.scheduler.throughput.measurements import Alone, Throughputs, Together
from poise.scheduler.throughput.speeds import Speeds
from poise.scheduler.throughput.table import JobClass, _parse

TYPES = ("v100", "k80", "a100", "h100")
RATES = st.just(0.0) | st.floats(0.001, 1e6)
LEVELS = st.sampled_from(Locality)
JOB_CLASSES = st.builds(JobClass, st.sampled_from(["LM", "ResNet-50", "vgg_16"]), st.none() | st.sampled_from([1, 16, 64]))
ALONE = st.builds(Alone, JOB_CLASSES, st.sampled_from(TYPES), st.sampled_from([1, 2, 4, 8]), LEVELS, RATES)
TOGETHER = st.builds(
    Together, JOB_CLASSES, JOB_CLASSES, st.sampled_from(TYPES), st.sampled_from([1, 2]), st.tuples(RATES, RATES)
)


@st.composite
def tables(draw: st.DrawFn) -> Throughputs:
    alone = draw(st.lists(ALONE, min_size=1, max_size=30, unique_by=lambda each: each[:4]))
    reference = draw(st.sampled_from(sorted({each.gpu_type for each in alone})))
    return Throughputs.of("t", reference, alone, draw(st.lists(TOGETHER, max_size=8)), {"vgg16": 0.74})


@st.composite
def clusters(draw: st.DrawFn, known: tuple[str, ...]) -> Cluster:
    types = draw(st.lists(st.sampled_from((*known, "gpu", "p40")), min_size=1, max_size=4, unique=True))
    return Cluster(tuple(Node(name, name, 4) for name in types), speeds={"p40": 0.5})


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    return Job(
        id="j",
        submitted=0.0,
        gpus=draw(st.integers(1, 16)),
        duration=draw(st.floats(0, 1e7)),
        steps=draw(st.none() | st.floats(0.001, 1e9)),
        model=draw(st.none() | st.sampled_from(["lm", "resnet50", "VGG-16", "bert"])),
        batch_size=draw(st.none() | st.sampled_from([1, 16, 32])),
        gpu_types=draw(st.sampled_from([(), ("v100",), ("k80", "v100"), ("v100", "K80")])),
    )


@st.composite
def divisible_jobs(draw: st.DrawFn) -> Job:
    return replace(draw(jobs()), micro_batches=draw(st.integers(1, 40)), sync=draw(st.just(0.0) | st.floats(1e-9, 1e-7)))


@st.composite
def settings_of_speeds(draw: st.DrawFn) -> Speeds:
    table = draw(tables())
    return Speeds(table, draw(clusters(table.gpu_types)))


@given(tables(), JOB_CLASSES, st.sampled_from(TYPES), st.integers(1, 64))
def test_rates_are_never_negative_and_zero_if_never_measured(
    table: Throughputs, job: JobClass, gpu_type: str, gpus: int
) -> None:
    row = table.row(*job, gpu_type, gpus)
    assert all(rate >= 0 for rate in row)
    assert row == tuple(table.rate(*job, gpu_type, gpus, level) for level in Locality)
    if not table.measures(*job, gpu_type):
        assert row == (0.0, 0.0, 0.0)


@given(tables(), JOB_CLASSES, st.sampled_from(TYPES), st.integers(1, 64))
def test_flat_table_has_equal_columns_and_the_same_packed_rate(
    table: Throughputs, job: JobClass, gpu_type: str, gpus: int
) -> None:
    packed = table.rate(*job, gpu_type, gpus, Locality.PACKED)
    assert table.flat().row(*job, gpu_type, gpus) == (packed, packed, packed)


@given(st.dictionaries(LEVELS, st.floats(0.001, 1e6), min_size=1), st.sampled_from([1, 2, 4]), st.integers(1, 16))
def test_wider_locality_is_never_faster_unless_it_was_measured_so(
    given_levels: dict[Locality, float], measured: int, gpus: int
) -> None:
    slower = dict(zip(sorted(given_levels), sorted(given_levels.values(), reverse=True), strict=True))
    table = Throughputs.of(
        "t", "v100", [Alone(JobClass("lm"), "v100", measured, level, rate) for level, rate in slower.items()]
    )
    packed, rack, cluster = table.row("lm", None, "v100", gpus)
    assert packed >= rack >= cluster > 0
    if gpus == 1:
        assert packed == cluster


@given(tables(), JOB_CLASSES, JOB_CLASSES, st.sampled_from(TYPES), st.sampled_from([1, 2]))
def test_pair_turned_round_has_its_rates_turned_round(
    table: Throughputs, one: JobClass, other: JobClass, gpu_type: str, gpus: int
) -> None:
    there, back = table.pair(one, other, gpu_type, gpus), table.pair(other, one, gpu_type, gpus)
    are_same = table._find(*one) == table._find(*other)
    assert there == (back if back is None or are_same else back[::-1])


@given(st.lists(ALONE, min_size=1, max_size=20, unique_by=lambda each: each[:4]))
def test_table_written_as_csv_reads_back_the_same(alone: list[Alone]) -> None:
    text = io.StringIO()
    writer = csv.writer(text)
    text.write(f"# reference: {alone[0].gpu_type}\nmodel,batch_size,gpu_type,gpus,locality,steps_per_second\n")
    writer.writerows(
        (job.model, job.batch_size, gpu_type, gpus, level.name.lower(), repr(rate))
        for job, gpu_type, gpus, level, rate in alone
    )
    want = Throughputs.of("t", alone[0].gpu_type, alone)
    got = _parse(text.getvalue(), "t.csv", "t")
    assert (got.gpu_types, got.classes(), got._rows) == (want.gpu_types, want.classes(), want._rows)


@given(
    settings_of_speeds(),
    jobs() | divisible_jobs(),
    jobs() | divisible_jobs(),
    st.sets(st.sampled_from([each.name for each in fields(Job)])),
)
def test_jobs_of_one_kind_have_one_estimate(speeds: Speeds, one: Job, stranger: Job, changed: set[str]) -> None:
    other = replace(one, **{name: getattr(stranger, name) for name in changed})
    assume(_is_slow_enough(speeds, one) and _is_slow_enough(speeds, other))
    assert speeds.estimate(one) == speeds._estimated(one)
    if speeds.kind(one) == speeds.kind(other):
        assert speeds._estimated(one) == speeds._estimated(other)
    if not changed & {"model", "batch_size", "gpus", "gpu_types", "steps", "duration", "micro_batches", "sync"}:
        assert speeds.kind(one) == speeds.kind(other)
    assert speeds.resolve(one)[:2] == (speeds.kind(one), speeds.estimate(one))


def _is_slow_enough(speeds: Speeds, job: Job) -> bool:
    """Its steps leave time for something beside their synchronisation."""
    try:
        speeds.estimate(job)
    except ThroughputError:
        return False
    return True


@given(settings_of_speeds(), divisible_jobs())
def test_tasks_take_the_gang_as_long_as_a_step_of_the_rigid_job(speeds: Speeds, job: Job) -> None:
    """To within rounding of the table's rate; and at no distance are they faster than packed."""
    assume(_is_slow_enough(speeds, job))
    rigid, tasks = speeds.estimate(replace(job, micro_batches=None)).rates, speeds.estimate(job).tasks
    assert tasks is not None
    for kind, row in enumerate(rigid):
        mix = tuple(job.gpus if other == kind else 0 for other in range(len(rigid)))
        for level in Locality:
            wanted = min(row[level], row[Locality.PACKED])
            assert math.isclose(speeds.estimate(job).on(mix, level), wanted, rel_tol=1e-9)


@given(settings_of_speeds(), divisible_jobs())
def test_rates_of_divisible_jobs_are_those_of_their_tasks_and_grow_with_the_gpus(speeds: Speeds, job: Job) -> None:
    assume(_is_slow_enough(speeds, job))
    estimate = speeds.estimate(job)
    assert estimate.tasks is not None
    sizes = sorted((estimate.tasks.gang, *(gpus for gpus, _ in estimate.others)))
    assert len({*sizes}) == len(sizes) <= 2 * math.isqrt(estimate.tasks.count) + 1
    assert sizes[-1] <= estimate.tasks.count
    for gpus in sizes:
        for kind, row in enumerate(estimate.at(gpus)):
            mix = tuple(gpus if other == kind else 0 for other in range(len(estimate.rates)))
            assert row == tuple(estimate.on(mix, Locality.PACKED if gpus == 1 else level) for level in Locality)
    for fewer, more in pairwise(sizes):
        for few, many in zip(estimate.at(fewer), estimate.at(more), strict=True):
            assert few[Locality.PACKED] == 0.0 or few[Locality.PACKED] < many[Locality.PACKED]


@given(settings_of_speeds(), jobs())
def test_estimate_has_a_row_a_type_and_none_below_zero(speeds: Speeds, job: Job) -> None:
    estimate = speeds.estimate(job)
    assert len(estimate.rates) == len(speeds._types)
    allowed = {name.lower() for name in job.gpu_types}
    for gpu_type, row in zip(speeds._types, estimate.rates, strict=True):
        assert all(0 <= rate < float("inf") for rate in row)
        assert not allowed or gpu_type in allowed or row == (0.0, 0.0, 0.0)


@given(tables(), jobs())
def test_work_divided_by_the_rate_on_the_reference_is_the_duration(table: Throughputs, job: Job) -> None:
    cluster = Cluster((Node("a", table.reference, 4), Node("b", "gpu", 4)))
    by_duration = Job("j", 0.0, job.gpus, duration=job.duration, model=job.model, batch_size=job.batch_size)
    speeds = Speeds(table, cluster)
    steps, duration = speeds.steps(by_duration), by_duration.duration or 0.0
    for row in speeds.estimate(by_duration).rates:
        if row[Locality.PACKED] > 0:
            assert steps / row[Locality.PACKED] == duration, "to the last bit: ties and instants depend on it"
