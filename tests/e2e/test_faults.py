"""What goes wrong on a real machine, each with the outcome that docs/explanation/surviving-crashes.md states."""

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from uuid import uuid4

import pytest
from tests.e2e.service import EXAMPLES, WORKERS, Kind, Service, ended, until
from tests.shell import poise

from poise.engine.journal import read_entry
from poise.service.client import Client, UnavailableError
from poise.service.server.storage.sidecar import RESERVE
from poise.service.server.storage.store import Store
from poise.service.wire.views import JobDetail, JobState

pytestmark = pytest.mark.slow
Started = Callable[..., Service]
OFTEN = {"every": 0.1, "deadline": 1.0}
"""Checkpoints of a job that may be killed at any moment."""
TERM_SECONDS = 10.0
"""Between TERM and KILL (LocalSettings)."""
ROUND = 1.0
"""Seconds; the journal has an entry at least as often while jobs take turns."""
RETRIES = 2.5
"""Seconds in which a service that cannot write has tried again at least twice."""


def uninterrupted(*words: object) -> str:
    """What a program prints outside Poise, or as if it were."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("POISE_")} | {"POISE_EPOCH": "0"}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.splitlines()[-1]


def odd(service: Service, *words: object) -> tuple[str, ...]:
    return service.guarded(WORKERS / "odd.py", *words)


def last_line(client: Client, job: str) -> str:
    return client.log(job).splitlines()[-1]


def saved(client: Client, job: str, steps: float = 1) -> None:
    """Return once so many steps of a job would survive."""
    until(lambda: (client.show(job).checkpoint_steps or 0) >= steps, f"job {job} has not got that far")


def is_under_way(detail: JobDetail, epoch: int) -> bool:
    """That run of the job is there, and has saved something."""
    return detail.runs[-1].epoch == epoch and (detail.checkpoint_steps or 0) > detail.runs[-1].begun


def turns(client: Client, jobs: list[str]) -> int:
    return sum(client.show(job).preemptions for job in jobs)


def adjoining(detail: JobDetail) -> None:
    """Every run begins with what was kept before it."""
    reached = 0.0
    for run in detail.runs:
        assert run.begun == reached, detail
        reached = reached if run.kept is None else run.kept
    assert detail.steps == reached


# Disk full


@dataclass(frozen=True)
class Disk:
    """A disk that can be filled, and emptied again."""

    fill: Callable[[Service], None]
    empty: Callable[[Service], None]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Disk]:
    """A file system of 8 MB under the state directory: once it is full, nobody can write anything there."""
    state = tmp_path / "state"
    state.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs", str(state)], check=False, capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    filler = state / "filler"

    def fill(_: Service) -> None:
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(b"x" * 4096):
                pass

    yield Disk(fill, lambda _: filler.unlink())
    subprocess.run(["umount", "--lazy", str(state)], check=True)


@pytest.fixture
def small_files() -> Disk:
    """Files of the server, its log included, cannot grow: everybody else can still write."""

    def limit(service: Service, most: int) -> None:
        resource.prlimit(service.server.pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    return Disk(lambda service: limit(service, 100), lambda service: limit(service, resource.RLIM_INFINITY))


@pytest.mark.parametrize("kind", ["small_disk", "small_files"])
def test_full_disk_refuses_submissions_and_lets_jobs_go_on(
    kind: str, request: pytest.FixtureRequest, a_service: Started
) -> None:
    disk: Disk = request.getfixturevalue(kind)
    service = a_service("--cluster", "v100:2")
    client = service.up()
    service.let(100)
    long = client.submit(command=service.held(400, 0.02, "long"), checkpoint=OFTEN)
    short = client.submit(command=service.counting(60, 0.02, "short"), checkpoint=OFTEN)
    waits, other = (client.submit(command=service.counting(1, 0.0, name)) for name in ("waits", "other"))
    saved(client, long.id)
    saved(client, short.id)
    [before] = service.replicas(long.id)
    disk.fill(service)
    service.let(300)  # it goes on, and is there for as long as the disk is full
    with pytest.raises(UnavailableError, match=r"the disk is full|nothing can be kept at the moment"):
        client.submit(command=service.counting(1, 0.0, "refused"))
    assert re.search("the disk is full|nothing can be kept", poise("submit", "--", sys.executable, "-V").failure)
    if kind == "small_disk":  # there is a reserve for what frees room, and it is used for nothing else
        assert poise("cancel", waits.id).out == f"{waits.id} CANCELLED\n"
        other.hold()
        assert client.events(after=-5, job=other.id, limit=5).events[-1].kind == "held"
    until(lambda: not client.service().ready, "it takes itself to be ready")
    filled = monotonic()
    until(lambda: not service.replicas(short.id) and monotonic() > filled + RETRIES, "the short job has not ended")
    assert not client.service().ready
    assert service.replicas(long.id) == [before]
    if kind == "small_disk":  # ends are taken down, and nothing is begun
        until(lambda: client.show(short.id).job.state is JobState.SUCCEEDED, "its end is not known")
        assert not client.show(other.id).runs
        assert "the disk is full" in poise("release", other.id).failure
    disk.empty(service)
    service.let(400)
    until(lambda: client.service().ready, "it does not get over it")
    if kind == "small_disk":
        reserve = service.state / RESERVE
        assert reserve.stat().st_blocks * 512 == reserve.stat().st_size == (8 << 20) // 16
        other.release()
    after = client.submit(command=service.counting(3, 0.0, "after"))
    assert [after.id, long.id, short.id] == ["5", "1", "2"]  # nothing is left of those that were refused
    assert ended(client, after.id).steps == 3
    assert client.show(short.id).job.state is JobState.SUCCEEDED
    assert ended(client, other.id).steps == 1
    detail = ended(client, long.id)
    assert (len(detail.runs), detail.steps, detail.lost_gpu_seconds) == (1, 400, 0)
    assert last_line(client, long.id) == uninterrupted(EXAMPLES / "count_steps.py", "--steps", 400, "--seed", "long")
    assert service.violations == ""
    assert service.log.count("storage-full") == (kind == "small_disk")  # said once, where it can be said


# A clock that is set back


def test_clock_that_is_set_back_neither_stops_nor_repeats_time(tmp_path: Path, a_service: Started) -> None:
    shift = tmp_path / "shift"
    shift.write_text("0")
    began = monotonic()
    command = (sys.executable, str(WORKERS / "skewed.py"), str(tmp_path))
    service = a_service("--cluster", "v100:1", "--round", ROUND, command=command)
    client = service.up()
    jobs = [client.submit(command=service.counting(400, 0.025, name), checkpoint=OFTEN).id for name in ("a", "b")]
    until(lambda: turns(client, jobs) > 1, "the jobs do not take turns")
    before = turns(client, jobs)
    shift.write_text("-3600")  # while server and jobs run
    until(lambda: turns(client, jobs) > before + 1, "the jobs do not take turns any more")
    killed = monotonic()
    service.kill()
    service.start()  # now the journal ends an hour ahead of the clock, and nobody can say how long nothing was written
    service.ready()
    unknown = monotonic() - killed + 2 * ROUND
    details = [ended(client, job) for job in jobs]
    elapsed = monotonic() - began
    for job, detail, seed in zip(jobs, details, ("a", "b"), strict=True):
        assert last_line(client, job) == uninterrupted(EXAMPLES / "count_steps.py", "--steps", 400, "--seed", seed)
        adjoining(detail)
        assert 400 * 0.025 - unknown <= detail.job.ran <= elapsed
        assert detail.job.finished is not None
        assert detail.job.ran + detail.job.waited == pytest.approx(detail.job.finished - detail.job.submitted)
        assert detail.job.finished - detail.job.submitted <= elapsed
    service.kill()
    store = Store(service.state)
    moments = [read_entry(document).now for document in store.entries(1)]
    store.close()
    assert moments == sorted(moments)
    assert moments[-1] - moments[0] <= elapsed


# Workers that do not do as they are told


def test_worker_that_ignores_term_is_killed_after_the_deadline_and_its_gpus_are_free_only_then(a_service: Started) -> None:
    service = a_service("--cluster", "v100:1")
    client = service.up()
    deaf = client.submit(command=odd(service, 60, 0.02, "deaf", 30), checkpoint=OFTEN)
    until(lambda: "deaf" in client.log(deaf.id), "it still listens")
    deaf.hold()
    other = client.submit(command=service.counting(10, 0.02, "other"))
    until(lambda: other.state is JobState.STARTING, "it is not its turn")
    assert "until those who had its GPUs have left" in client.why(other.id).reason.text
    lease = service.run_file(deaf.id, 1, "lease.json")
    assert lease["seconds"] == OFTEN["deadline"]
    ended(client, other.id)
    assert service.run_file(other.id, 1, "runner.json")["began"] >= lease["ends"] + TERM_SECONDS
    deaf.release()
    detail = ended(client, deaf.id)
    first, second = detail.runs
    assert (first.how, first.codes) == ("yielded", (-signal.SIGKILL,))
    assert (first.cause or "").endswith("ended by KILL")
    assert 0 < (first.kept or 0) <= 30
    assert second.begun == first.kept
    assert last_line(client, deaf.id) == uninterrupted(WORKERS / "odd.py", 60, 0)
    assert service.violations == ""


def test_checkpoint_that_fails_at_lease_end_is_told_and_the_one_before_it_counts(a_service: Started) -> None:
    service = a_service("--cluster", "v100:1", "--round", "1s")
    client = service.up()
    job = client.submit(command=odd(service, 400, 0.02, "unsaved", 20), checkpoint=OFTEN)
    until(lambda: client.show(job.id).steps > 40, "it does not get on")
    other = client.submit(command=service.counting(10, 0.02, "other"), checkpoint=OFTEN)
    assert ended(client, other.id).failures == 0
    detail = ended(client, job.id)
    first, *later = detail.runs
    assert (first.how, first.codes) == ("failed", (73,))
    assert "model-checkpoint-error" in (first.cause or "")
    assert 0 < (first.kept or 0) <= 20
    assert (first.lost or 0) > 0
    assert (detail.lost_gpu_seconds or 0) >= (first.lost or 0)
    assert later[0].begun == first.kept
    assert all(run.how in {"yielded", "finished"} for run in later)
    told = [each.text for each in client.events(after=0, job=job.id, limit=500).events]
    assert any("model-checkpoint-error" in text for text in told), told
    assert "No space left on device" in client.log(job.id)
    assert last_line(client, job.id) == uninterrupted(WORKERS / "odd.py", 400, 0)


@pytest.mark.parametrize("kind", Kind)
def test_run_that_is_killed_again_and_again_goes_on_from_its_checkpoints(kind: Kind, a_service: Started) -> None:
    """More often than failures are forgiven (4): it is no fault of the job."""
    service = a_service("--cluster", "v100:1")
    client = service.up()
    if kind is Kind.FIRST and "level=full" not in service.log:
        pytest.skip("runs have no pid namespace here")
    service.let(0)
    job = client.submit(command=service.held(400, 0.02, "killed"), checkpoint=OFTEN)
    for count in range(1, 7):
        service.let(count * 50)
        until(lambda count=count: is_under_way(client.show(job.id), count), "it does not get on")  # type: ignore[misc]
        until(lambda: any(each.kill() for each in service.processes() if each.kind is kind), "nothing can be killed")
    service.let(400)
    detail = ended(client, job.id)
    cause, codes = ("node-lost", (None,)) if kind is Kind.RUNNER else ("killed", (-signal.SIGKILL,))
    assert [(run.how, run.cause, run.codes) for run in detail.runs[:-1]] == [("failed", cause, codes)] * 6
    adjoining(detail)
    assert detail.job.restarts == detail.failures == 6
    assert last_line(client, job.id) == uninterrupted(EXAMPLES / "count_steps.py", "--steps", 400, "--seed", "killed")
    assert service.violations == ""


# Servers and machines that go down


def test_server_that_is_told_to_stop_leaves_jobs_running_and_finds_them_again(a_service: Started) -> None:
    service = a_service("--cluster", "v100:1")
    client = service.up()
    service.let(100)
    job = client.submit(command=service.held(500, 0.02, "kept"), checkpoint=OFTEN)
    saved(client, job.id)
    [before] = service.replicas(job.id)
    assert service.stop() == 0
    steps = service.run_file(job.id, 1, "progress.json")["steps"]
    service.let(400)
    until(lambda: service.run_file(job.id, 1, "progress.json")["steps"] > steps, "it does not go on by itself")
    service.start()
    assert client.show(job.id).job.state is JobState.RUNNING
    assert service.replicas(job.id) == [before]
    service.let(500)
    detail = ended(client, job.id)
    assert [run.epoch for run in detail.runs] == [1]
    assert (detail.failures, detail.lost_gpu_seconds) == (0, 0)
    assert last_line(client, job.id) == uninterrupted(EXAMPLES / "count_steps.py", "--steps", 500, "--seed", "kept")


@pytest.mark.parametrize("policy", ["fifo", "las"], ids=["the same", "another"])
def test_run_that_ends_while_the_server_is_down_is_charged_until_it_ended(policy: str, a_service: Started) -> None:
    """Also if the next server is started with another policy: what ended is known before anything is decided."""
    service = a_service("--cluster", "v100:2", "--round", "1s", "--policy", "fifo")
    client = service.up()
    service.let(1)
    job = client.submit(command=service.held(20, 0.01, "ends"), checkpoint=OFTEN)
    other = client.submit(command=service.held(40, 0.01, "goes on"), checkpoint=OFTEN)
    until(lambda: all(service.run_file(each.id, 1, "progress.json") for each in (job, other)), "they have not begun")
    service.kill()
    service.let(20)
    until(lambda: bool(service.run_file(job.id, 1, "exit.json")), "it has not ended")
    sleep(4.0)
    service.options = (*service.options[:-1], policy)
    client = service.up()
    service.let(40)
    detail = ended(client, job.id)
    ran = service.run_file(job.id, 1, "exit.json")["at"] - detail.runs[0].started
    assert detail.gpu_seconds == pytest.approx(ran, abs=0.5)
    assert len(ended(client, other.id).runs) == 1


def test_machine_that_goes_down_comes_back_to_jobs_that_go_on_from_their_checkpoints(a_service: Started) -> None:
    service = a_service("--cluster", "v100:2")
    client = service.up()
    service.let(50)
    seeds = {client.submit(command=service.held(100, 0.02, name), checkpoint=OFTEN).id: name for name in "abc"}
    for job in list(seeds)[:2]:
        saved(client, job, 10)
    os.kill(service.server.pid, signal.SIGSTOP)  # so that it sees nothing of what follows
    for each in service.processes():
        each.kill()
    service.kill()
    until(lambda: not service.processes(), "something is left")
    for file in service.state.glob("jobs/*/runs/*/runner.json"):  # another boot
        file.write_text(file.read_text().replace(Path("/proc/sys/kernel/random/boot_id").read_text().strip(), str(uuid4())))
    service.let(100)
    service.start()
    for job, seed in seeds.items():
        detail = ended(client, job)
        adjoining(detail)
        assert last_line(client, job) == uninterrupted(EXAMPLES / "count_steps.py", "--steps", 100, "--seed", seed)
    first, second, third = ([(run.how, run.cause) for run in client.show(job).runs] for job in seeds)
    assert first == second == [("failed", "node-lost"), ("finished", None)]
    assert third == [("finished", None)]
    assert all((client.show(job).runs[0].kept or 0) >= 10 for job in list(seeds)[:2])
    assert service.violations == ""


def test_second_server_on_a_state_directory_is_refused(a_service: Started) -> None:
    service = a_service("--cluster", "v100:1")
    client = service.up()
    second = subprocess.run(
        [*service.command, "serve", "--state", service.state, "--listen", "127.0.0.1:0", "--cluster", "v100:1"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert (second.returncode, second.stdout) == (2, "")
    assert second.stderr.splitlines()[-1].endswith(
        f"another server holds it (process {service.server.pid}); stop that one, or name another"
    )
    assert client.service().ready
