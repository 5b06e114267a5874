"""Checkpoints over machines: each run begins with exactly what the one before has kept, whatever fails."""

import asyncio
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.backends import PATIENCE, a_request, an_order, notice, until
from tests.remote import NODES, RemoteStage

from poise.service.agent import agent, checkpoint_keeper
from poise.service.agent.checkpoint_keeper import CheckpointKeeper
from poise.service.backends.api import DesiredState, RunBegan, RunEnded, RunEnding, RunOrder, RunPart, RunProgressed
from poise.service.backends.remote.identity import TOKEN_FILE
from poise.service.backends.remote.relay import CheckpointPlaces
from poise.service.wire.agent_messages import PartOrder
from poise.service.wire.archives import packed

COUNTS = """
import json, os, sys, time
from poise import worker

state = {"steps": [], "weight": "w" * int(sys.argv[1])}

def save(path):
    os.mkdir(path)
    with open(path + "/state.json", "w") as file:
        json.dump(state, file)

def load(path):
    global state
    with open(path + "/state.json") as file:
        state = json.load(file)
    print("loaded", len(state["steps"]), flush=True)

lease = worker.attach(save, load, checkpoint_every=0.1)
rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
above = os.environ["POISE_RUN_DIR"].rsplit("/", 5)[0]  # what all nodes have in common here
where = above + "/meeting-" + os.environ["POISE_RUN"].replace("/", "-")
os.makedirs(where, exist_ok=True)

def steps_of(other):
    try:
        with open(f"{where}/{other}") as file:
            return int(file.read())
    except FileNotFoundError:
        return -1

def meet(step):
    with open(f"{where}/{rank}.new", "w") as file:
        file.write(str(step))
    os.replace(f"{where}/{rank}.new", f"{where}/{rank}")
    while any(steps_of(other) < step for other in range(ranks)):
        time.sleep(0.001)

for step in lease.steps(10**6):
    meet(step)
    state["steps"].append(step)
    assert state["steps"] == list(range(step + 1)), "it did not resume exactly"
    time.sleep(0.01)
"""
"""A training that fails if it was not continued exactly where it was saved. Its ranks do each step together, as ranks do."""
HERE = {node.name: RunPart(node.name, node.gpu_type, (0,)) for node in NODES}
FIRST, SECOND = "v100-0", "v100-1"


def training(*nodes: str, epoch: int = 1, job: str = "1", weight: int = 10, **more: Any) -> RunOrder:
    """A run of the training on these nodes."""
    command = (sys.executable, "-c", COUNTS, str(weight))
    return an_order(job, a_request(command, gpus=len(nodes), **more), epoch=epoch, parts=tuple(HERE[each] for each in nodes))


class KeepingStage(RemoteStage):
    """A remote back end whose checkpoints are kept somewhere."""

    places = CheckpointPlaces()

    def open(self, **more: Any) -> Any:
        return super().open(checkpoints=self.places, **more)

    def leave(self, order: RunOrder, steps: int = 3) -> RunEnded:
        """Have a run do some steps, ask it to leave, and wait for that."""
        self.backend.launch(order)
        until(lambda: self.steps(order) >= steps or self.of(RunEnded, order.job, order.epoch))
        self.backend.stop(order.job, order.epoch, notice())
        return self.wait(RunEnded, order.job, order.epoch)

    def steps(self, order: RunOrder) -> float:
        """How many steps a run says that it has done itself."""
        found = [each.steps for each in self.of(RunProgressed, order.job, order.epoch)]
        return found[-1] - found[0] if found else -1.0

    def text(self, job: str = "1", rank: int = 0) -> str:
        return self.backend.log(job, rank, 0, 1 << 20).text.decode()

    def local(self, node: str, job: str = "1") -> set[str]:
        return set(os.listdir(self.folder / node / "jobs" / job / "checkpoint"))

    def kept(self, job: str = "1") -> Path:
        """Where the server keeps a job's checkpoints."""
        return self.folder / "server" / "jobs" / job / "kept"


@pytest.fixture(params=["relay", "file", "shared"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KeepingStage]:
    """One for each way of checkpoint_keeper checkpoints."""
    at = {"relay": "relay", "file": f"file://{tmp_path}/kept", "shared": f"{tmp_path}/shared"}[request.param]
    yield from opened(tmp_path, CheckpointPlaces(at))


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[KeepingStage]:
    yield from opened(tmp_path, CheckpointPlaces(relay_bytes=1 << 20))


def opened(folder: Path, places: CheckpointPlaces) -> Iterator[KeepingStage]:
    KeepingStage.places = places
    made = KeepingStage(folder)
    yield made
    made.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_keeper, "PATIENCE", 0.5)
    monkeypatch.setattr(checkpoint_keeper, "RETRY_SECONDS", 0.05)


def test_each_run_begins_with_what_the_last_one_has_kept_on_whichever_node(stage: KeepingStage) -> None:
    seen = [stage.leave(training(node, epoch=epoch)) for epoch, node in enumerate([FIRST, SECOND, FIRST, "k80-0"], start=1)]
    assert [each.how for each in seen] == [RunEnding.YIELDED] * 4, stage.text()
    steps = [int(each.steps or 0) for each in seen]
    assert steps == sorted(set(steps))
    assert [line for line in stage.text().splitlines() if line.startswith("loaded")] == [
        f"loaded {each}" for each in steps[:-1]
    ]


def test_all_ranks_of_a_gang_begin_with_the_same_checkpoint(stage: KeepingStage) -> None:
    alone = stage.leave(training(SECOND))
    stage.leave(training(FIRST, epoch=2))  # from here on SECOND has an old checkpoint, and "k80-0" none
    last = stage.leave(training(FIRST, SECOND, "k80-0", epoch=3))
    assert last.how is RunEnding.YIELDED
    again = stage.leave(training(SECOND, "k80-0", epoch=4))
    assert again.how is RunEnding.YIELDED, stage.text(rank=1)
    assert (alone.steps or 0) < (last.steps or 0) < (again.steps or 0)
    for rank in (0, 1):
        assert f"loaded {int(last.steps or 0)}\n" in stage.text(rank=rank)


def test_progress_names_a_checkpoint_only_once_it_is_kept(relay: KeepingStage) -> None:
    order = training(FIRST)
    relay.backend.launch(order)
    until(lambda: any(each.checkpoint for each in relay.of(RunProgressed, "1")))
    named = int(next(each.checkpoint for each in relay.of(RunProgressed, "1") if each.checkpoint) or 0)
    assert any(int(path.name.split("-")[1]) >= named for path in relay.kept().glob("step-*.json"))
    assert relay.leave(order).how is RunEnding.YIELDED


def test_no_more_is_kept_than_a_worker_keeps(stage: KeepingStage) -> None:
    stage.leave(training(FIRST), steps=60)
    for folder in (stage.kept(), *stage.folder.glob("kept/*/1")):
        if folder.is_dir() and any(folder.iterdir()):
            assert 1 <= len(list(folder.glob("step-*.tar"))) <= 2
            assert len(list(folder.glob("step-*.json"))) == len(list(folder.glob("step-*.tar")))
    assert len([name for name in stage.local(FIRST) if name.startswith("step-")]) <= 2


def test_run_that_never_saved_has_nothing_to_keep(stage: KeepingStage) -> None:
    stage.backend.launch(an_order("1", a_request("print('done')"), parts=(HERE[FIRST],)))
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.steps) == (RunEnding.FINISHED, None)


def test_what_only_one_node_has_is_never_loaded(relay: KeepingStage) -> None:
    folder = relay.folder / FIRST / "jobs" / "1" / "checkpoint"
    (folder / "step-900").mkdir(parents=True)
    (folder / "step-900" / "state.json").write_text(json.dumps({"steps": list(range(900)), "weight": ""}))
    ended = relay.leave(training(FIRST))
    assert "loaded" not in relay.text()
    assert 0 < (ended.steps or 0) < 900


# What fails


def test_checkpoint_that_is_too_large_for_the_server_ends_its_run_with_a_cause(relay: KeepingStage, impatient: None) -> None:
    ended = relay.leave(training(FIRST, weight=2 << 20))
    assert (ended.how, ended.cause, ended.steps) == (RunEnding.FAILED, "checkpoint-too-large", 0.0)
    assert "more than the 1 MiB that go through the server" in relay.text()
    assert not any(each.checkpoint for each in relay.of(RunProgressed, "1"))
    assert not list(relay.kept().glob("*.tar"))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("file:///dev/null/kept", "cannot be used: NotADirectoryError"),
        ("/dev/null/kept", "/dev/null/kept"),
        ("no-such-protocol://bucket/x", "Protocol not known: no-such-protocol"),
    ],
)
def test_place_that_cannot_be_written_ends_a_run_before_it_begins(
    relay: KeepingStage, impatient: None, url: str, said: str
) -> None:
    relay.backend.launch(training(FIRST, checkpoint={"url": url}))
    ended = relay.wait(RunEnded, "1")
    assert (ended.how, ended.cause) == (RunEnding.FAILED, "checkpoint-place-unusable")
    assert said in relay.text()
    assert not relay.of(RunBegan, "1")


@pytest.mark.parametrize(
    "url",
    ["simplecache::file:///tmp", "file:///", "s3://", "s3:////", "s3://b c", pytest.param(f"/{'x' * 2_000}", id="long")],
)
def test_place_that_names_no_directory_for_jobs_is_refused_at_submission(url: str) -> None:
    with pytest.raises(ValueError, match="url"):
        training(FIRST, checkpoint={"url": url})


@pytest.mark.parametrize("url", [f"/dev/null/{'x' * 1_989}", f"file:///dev/null/{'x' * 1_982}"], ids=["path", "URL"])
def test_every_place_that_is_taken_has_room_for_the_name_of_a_job(relay: KeepingStage, impatient: None, url: str) -> None:
    """An order that could not be written down would keep its node from every later session."""
    job = "j" * 200
    relay.backend.launch(training(FIRST, job=job, checkpoint={"url": url}))
    assert relay.wait(RunEnded, job).cause == "checkpoint-place-unusable"


def test_url_into_the_state_directory_of_the_agent_is_refused(relay: KeepingStage, impatient: None) -> None:
    url = f"file://{relay.folder}/{FIRST}/jobs/2/checkpoint"
    relay.backend.launch(training(FIRST, checkpoint={"url": url}))
    assert relay.wait(RunEnded, "1").cause == "checkpoint-place-unusable"
    assert "lies in the state directory" in relay.text()


def test_place_that_breaks_while_a_run_is_there_ends_it_with_a_cause(tmp_path: Path, impatient: None) -> None:
    for stage in opened(tmp_path, CheckpointPlaces(f"file://{tmp_path}/kept")):
        first = stage.leave(training(FIRST))
        order = training(FIRST, epoch=2)
        stage.backend.launch(order)
        stage.wait(RunProgressed, "1", 2)
        (tmp_path / "kept").rename(tmp_path / "away")
        (tmp_path / "kept").touch()
        ended = stage.leave(order, steps=30)
        assert (ended.how, ended.cause) == (RunEnding.FAILED, "checkpoint-place-unusable")
        assert "its last checkpoint is not kept" in stage.text()
        (tmp_path / "kept").unlink()
        (tmp_path / "away").rename(tmp_path / "kept")
        again = stage.leave(training(SECOND, epoch=3))
        assert again.how is RunEnding.YIELDED
        assert (ended.steps or 0) >= (first.steps or 0)
        assert f"loaded {int(ended.steps or 0)}\n" in stage.text()


def test_damaged_checkpoint_is_dropped_and_the_one_before_is_used(relay: KeepingStage) -> None:
    relay.leave(training(FIRST), steps=40)
    newest, before = sorted((int(path.name.split("-")[1]) for path in relay.kept().glob("*.tar")), reverse=True)
    archive = next(relay.kept().glob(f"step-{newest}-*.tar"))
    text = bytearray(archive.read_bytes())
    text[len(text) // 2] ^= 1
    archive.write_bytes(text)
    failed = relay.leave(training(SECOND, epoch=2))
    assert (failed.how, failed.cause) == (RunEnding.FAILED, "model-checkpoint-error")
    assert "has other contents than were written; the next run begins with the one before" in relay.text()
    assert relay.leave(training(SECOND, epoch=3)).how is RunEnding.YIELDED
    assert f"loaded {before}\n" in relay.text()


def test_checkpoint_that_a_rank_cannot_load_is_not_loaded_by_the_next_run_elsewhere(relay: KeepingStage) -> None:
    relay.leave(training(FIRST), steps=40)
    newest, before = sorted((int(path.name.split("-")[1]) for path in relay.kept().glob("*.tar")), reverse=True)
    breaks = COUNTS.replace("    global state\n", f"    global state\n    assert not path.endswith('step-{newest}')\n")
    command = (sys.executable, "-c", breaks, "10")
    parts = (HERE[FIRST], HERE[SECOND])
    relay.backend.launch(an_order("1", a_request(command, gpus=2), epoch=2, parts=parts))
    assert relay.wait(RunEnded, "1", 2).how is RunEnding.FAILED
    assert relay.leave(training("k80-0", epoch=3)).how is RunEnding.YIELDED
    assert f"loaded {before}\n" in relay.text()


def test_end_is_reported_once_a_server_that_was_away_has_the_last_checkpoint(relay: KeepingStage) -> None:
    order = training(FIRST)
    relay.backend.launch(order)
    until(lambda: relay.steps(order) > 3)
    relay.backend.stop("1", 1, notice())
    until(lambda: not relay.processes(FIRST) or relay.of(RunEnded, "1"))
    relay.backend.close()
    relay.open()
    relay.backend.adopt([] if relay.of(RunEnded, "1") else [(order, DesiredState.LEAVE)])
    ended = relay.wait(RunEnded, "1")
    assert ended.how is RunEnding.YIELDED
    assert relay.leave(training(SECOND, epoch=2)).how is RunEnding.YIELDED
    assert f"loaded {int(ended.steps or 0)}\n" in relay.text()


def test_new_agent_keeps_what_a_run_has_left_while_there_was_none(relay: KeepingStage) -> None:
    order = training(FIRST)
    relay.backend.launch(order)
    until(lambda: relay.steps(order) > 3)
    relay.agents[FIRST].stop()
    run = relay.folder / FIRST / "jobs" / "1" / "runs" / "1"
    lease = json.loads((run / "lease.json").read_text()) | {"ends": 0.0, "seconds": 60.0, "mode": "checkpoint"}
    (run / "lease.new").write_text(json.dumps(lease))
    (run / "lease.new").rename(run / "lease.json")
    until(lambda: not relay.processes(FIRST))
    newest = max(int(name[5:]) for name in relay.local(FIRST) if name.startswith("step-"))
    relay.agents[FIRST] = relay.agent(NODES[0])
    ended = relay.wait(RunEnded, "1")
    assert (ended.how, ended.steps) == (RunEnding.YIELDED, float(newest))
    assert next(relay.kept().glob(f"step-{newest}-1.json"))


@pytest.mark.parametrize("why", ["not wanted", "others use its GPUs"])
def test_run_that_is_called_off_while_its_checkpoint_is_fetched_never_begins(
    relay: KeepingStage, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(agent, "WITHHELD_GRACE", 0.0)
    relay.leave(training(FIRST))
    pipes = [*relay.kept().glob("step-*.tar")]
    for each in pipes:
        each.unlink()
        os.mkfifo(each)  # the server waits there for a writer that never comes
    relay.backend.launch(training(SECOND, epoch=2))
    until(lambda: (relay.folder / SECOND / "fetching" / "1").exists())
    if why == "not wanted":
        relay.backend.kill("1", 2, why)
    else:
        relay.agents[SECOND].call(lambda each: each.withhold((0,)))
    assert relay.wait(RunEnded, "1", 2).how is RunEnding.YIELDED
    assert not relay.of(RunBegan, "1", 2)
    for each in pipes:  # let the server's thread go, whichever it waits at or is about to open
        writer = os.open(each, os.O_RDWR | os.O_NONBLOCK)
        each.unlink()
        os.close(writer)


def test_run_whose_gpus_others_have_taken_while_its_files_were_fetched_never_begins(
    relay: KeepingStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = CheckpointKeeper.prepare

    async def prepare_while_others_come(keeper: CheckpointKeeper, part: PartOrder) -> None:
        await prepare(keeper, part)
        relay.agents[FIRST].call(lambda each: each.withhold((0,)))
        await asyncio.sleep(0.1)

    monkeypatch.setattr(CheckpointKeeper, "prepare", prepare_while_others_come)
    relay.backend.launch(training(FIRST))
    assert relay.wait(RunEnded, "1").how is RunEnding.YIELDED
    assert not relay.of(RunBegan, "1")


@pytest.mark.parametrize("method", ["prepare", "finish"])
def test_fault_of_an_agent_ends_the_run_that_it_concerns(
    relay: KeepingStage, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async def fail(*_given: object, **_more: object) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(CheckpointKeeper, method, fail)
    ended = relay.leave(training(FIRST))
    assert (ended.how, ended.cause) == (RunEnding.FAILED, "fault of the agent: RuntimeError('unforeseen')")
    monkeypatch.undo()
    assert relay.leave(training(FIRST, epoch=2)).how is RunEnding.YIELDED


def test_part_of_which_its_node_knows_nothing_can_be_ended(relay: KeepingStage) -> None:
    relay.backend.launch(training(FIRST))
    relay.wait(RunProgressed, "1")
    relay.agents[FIRST].call(lambda each: each._open.clear())
    relay.backend.stop("1", 1, notice())
    assert relay.wait(RunEnded, "1").how is RunEnding.YIELDED


def test_archive_without_a_checkpoint_ends_the_run_that_would_begin_with_it(relay: KeepingStage, tmp_path: Path) -> None:
    relay.leave(training(FIRST), steps=10)
    for mark in relay.kept().glob("step-*.json"):
        fields = json.loads(mark.read_text())
        name = f"ranks-{fields['step']}.json"
        (tmp_path / name).write_text("{}")
        text = b"".join(packed(tmp_path, [name]).blocks())
        mark.with_suffix(".tar").write_bytes(text)
        fields.update(bytes=len(text), sha256=hashlib.sha256(text).hexdigest())
        mark.write_text(json.dumps(fields))
    ended = relay.leave(training(SECOND, epoch=2))
    assert (ended.how, ended.cause) == (RunEnding.FAILED, "checkpoint-place-unusable")
    assert "is empty" in relay.text()


def test_full_disk_of_the_server_is_the_cause_of_runs_that_cannot_be_kept(tmp_path: Path, impatient: None) -> None:
    server = tmp_path / "server"
    server.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "tmpfs", str(server)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no disk of its own: {mounted.stderr.strip()}")
    try:
        for stage in opened(tmp_path, CheckpointPlaces()):
            ended = stage.leave(training(FIRST, weight=4 << 20))
            assert (ended.how, ended.cause, ended.steps) == (RunEnding.FAILED, "storage-full", 0.0)
            assert not list(stage.kept().glob("*.tar"))
            assert not list(stage.kept().glob("part-*"))
            again = stage.leave(training(SECOND, epoch=2, weight=10))
            assert again.how is RunEnding.YIELDED
    finally:
        subprocess.run(["umount", str(server)], check=True)


def test_only_names_of_checkpoints_are_taken(relay: KeepingStage) -> None:
    token = (relay.folder / "server" / TOKEN_FILE).read_text().strip()
    session = next(link.session for link in relay.backend._runs.links.values() if link.session)
    with httpx.Client(base_url=relay.url, headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE) as client:
        names = ("x", "step-1-1.tar.part", "..%2f..%2ftoken", "step-01-1.tar", "step-1-1.zip", "epoch-.json")
        for method, name in product(("PUT", "GET", "DELETE"), names):
            answer = client.request(method, f"/agent/checkpoints/1/{name}", params={"session": session})
            assert answer.status_code in (400, 404), answer.text
        for job in ("..", ".hidden", "a b"):
            answer = client.put(f"/agent/checkpoints/{job}/step-1-1.tar", params={"session": session}, content=b"x")
            assert answer.status_code in (400, 404)
        assert client.put("/agent/checkpoints/1/step-1-1.tar", params={"session": "0" * 32}, content=b"x").status_code == 410
        large = client.put("/agent/checkpoints/1/step-1-1.tar", params={"session": session}, content=b"x" * (1 << 20 | 1))
        assert (large.status_code, large.json()["code"]) == (413, "too-large")
    assert not list(relay.kept().glob("*"))


def test_upload_that_is_broken_off_leaves_nothing_and_is_no_error_of_the_server(
    relay: KeepingStage, caplog: pytest.LogCaptureFixture
) -> None:
    token = (relay.folder / "server" / TOKEN_FILE).read_text().strip()
    session = next(link.session for link in relay.backend._runs.links.values() if link.session)
    host, port = relay.url.removeprefix("http://").split(":")
    head = (
        f"PUT /agent/checkpoints/1/step-1-1.tar?session={session} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Length: 100000\r\n\r\n".encode() + b"x" * 50_000)
        until(lambda: relay.kept().exists() and any(relay.kept().iterdir()))
    until(lambda: not any(relay.kept().iterdir()))
    assert not caplog.records
