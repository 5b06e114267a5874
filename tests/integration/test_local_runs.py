"""Runs of real processes: how they begin, what they see, and how they fail."""

import errno
import json
import os
import select
import signal
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.backends import WAITS, LocalStage, a_request, an_order, python, until

from poise.scheduler.model.errors import RequestError
from poise.service.backends.api import RunBegan, RunEnded, RunEnding, RunPart
from poise.service.backends.local import orders, processes

SHOWS = """
import json, os, resource, sys
print(json.dumps({"env": dict(os.environ), "cwd": os.getcwd(), "group": os.getpgrp() == os.getpid(),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0], "cpu": resource.getrlimit(resource.RLIMIT_CPU)[0],
    "open": len(os.listdir("/proc/self/fd")), "stdin": sys.stdin.read()}))
"""


def shown(stage: LocalStage, job: str, replica: int = 0) -> dict[str, Any]:
    """What a replica said of itself."""
    line = next(line for line in stage.text(job, replica).splitlines() if line.startswith("{"))
    found = json.loads(line)
    assert isinstance(found, dict)
    return found


# What a replica sees


def test_replicas_are_numbered_as_torchrun_does_and_see_the_gpus_of_their_node(stage: LocalStage) -> None:
    parts = (RunPart("v100-0", "v100", (1, 3)), RunPart("k80-1", "k80", (2,)))
    request = a_request(SHOWS, gpus=3, replicas="gpu", micro_batches=6, checkpoint={"every": 30})
    stage.backend.launch(an_order("7", request, parts=parts, epoch=4))
    assert stage.wait(RunEnded, "7", 4).codes == (0, 0, 0)
    seen = [shown(stage, "7", rank)["env"] for rank in range(3)]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "CUDA_VISIBLE_DEVICES", "POISE_GPU_TYPE")
    assert [[env[name] for name in names] for env in seen] == [
        ["0", "3", "0", "2", "0", "1,3", "v100"],
        ["1", "3", "1", "2", "0", "1,3", "v100"],
        ["2", "3", "0", "1", "1", "10", "k80"],  # four V100 and four K80 come before it
    ]
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in seen}) == 1
    want = {
        "POISE_RUN": "7/4",
        "POISE_JOB": "7",
        "POISE_EPOCH": "4",
        "POISE_TENANT": "default",
        "POISE_RUN_DIR": str(stage.run_dir("7", 4)),
        "POISE_CHECKPOINT_DIR": str(stage.folder / "jobs" / "7" / "checkpoint"),
        "POISE_GPUS": "3",
        "POISE_LEASE_VERSION": "1",
        "POISE_CHECKPOINT_EVERY": "30.0",
        "POISE_MICRO_BATCHES": "6",
    }
    assert {name: seen[2][name] for name in want} == want


@pytest.mark.parametrize(("replicas", "speeds"), [("gpu", "1,1,0.25"), ("node", "2,0.25")])
def test_ranks_that_divide_a_step_know_how_fast_they_are(stage: LocalStage, replicas: str, speeds: str) -> None:
    parts = (RunPart("v100-0", "v100", (1, 3)), RunPart("k80-1", "k80", (2,)))
    request = a_request(SHOWS, gpus=3, replicas=replicas, micro_batches=6)
    order = replace(an_order("7", request, parts=parts), speeds={"v100": 8.0, "k80": 2.0})
    stage.backend.launch(order)
    stage.wait(RunEnded, "7")
    assert shown(stage, "7")["env"]["POISE_RANK_SPEEDS"] == speeds


def test_ranks_that_are_alike_or_a_gang_hear_nothing_of_speeds(stage: LocalStage) -> None:
    alike = (RunPart("v100-0", "v100", (1, 3)),)
    stage.backend.launch(an_order("1", a_request(SHOWS, gpus=2, replicas="gpu", micro_batches=6), parts=alike))
    mixed = (RunPart("v100-0", "v100", (0,)), RunPart("k80-1", "k80", (2,)))
    stage.backend.launch(an_order("2", a_request(SHOWS, gpus=2, replicas="gpu"), parts=mixed))
    for job in ("1", "2"):
        stage.wait(RunEnded, job)
        assert "POISE_RANK_SPEEDS" not in shown(stage, job)["env"]


def test_scripts_of_slurms_know_the_id_of_their_job(stage: LocalStage) -> None:
    stage.run("7", SHOWS, env={"SLURM_JOB_NAME": "fit"})
    stage.run("8", SHOWS)
    stage.wait(RunEnded, "7")
    stage.wait(RunEnded, "8")
    assert shown(stage, "7")["env"]["SLURM_JOB_ID"] == "7"
    assert "SLURM_JOB_ID" not in shown(stage, "8")["env"]


def test_real_gpus_go_by_the_names_of_their_devices(stage: LocalStage) -> None:
    stage.backend.close()
    stage.open(devices={("v100-0", 1): "GPU-abc", ("v100-0", 3): "GPU-def"})
    stage.run("1", SHOWS, 1, 3)
    stage.wait(RunEnded, "1")
    assert shown(stage, "1")["env"]["CUDA_VISIBLE_DEVICES"] == "GPU-abc,GPU-def"


def test_secrets_of_a_jobs_environment_are_not_kept_beyond_its_run(stage: LocalStage) -> None:
    order = stage.begun("1", WAITS, env={"WANDB_API_KEY": "s3cret"})
    path = stage.run_dir("1") / "order.json"
    assert json.loads(path.read_text())["environment"]["WANDB_API_KEY"] == "s3cret"
    stage.backend.kill("1", order.epoch, "cancelled")
    stage.wait(RunEnded, "1")
    until(lambda: "s3cret" not in path.read_text())
    left = json.loads(path.read_text())
    assert {name.split("_")[0] for name in left["environment"]} == {"POISE", "MASTER"}
    assert left["begun"] == 0.0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_replica_sees_nothing_of_the_server_but_a_harmless_part_of_its_environment(stage: LocalStage) -> None:
    secrets = {"POISE_TOKEN": "s3cret", "AWS_SECRET_ACCESS_KEY": "s3cret", "SSH_AUTH_SOCK": "/tmp/agent"}
    harmless = {"PATH": os.environ["PATH"], "HOME": "/home/ann", "LANG": "C.UTF-8", "LC_TIME": "de_DE.UTF-8", "TZ": "UTC"}
    stage.backend.close()
    stage.open(environ={**secrets, **harmless})
    stage.run("1", SHOWS, env={"LR": "0.1", "TZ": "Asia/Tokyo", "RANK": "9"})
    stage.wait(RunEnded, "1")
    seen = shown(stage, "1")
    assert not set(secrets) & set(seen["env"])
    assert {**harmless, "LR": "0.1", "TZ": "Asia/Tokyo", "RANK": "0"}.items() <= seen["env"].items()
    assert "s3cret" not in (stage.run_dir("1") / "order.json").read_text()
    assert seen["open"] == 4  # input, output, errors, and the directory that it lists
    assert seen["stdin"] == ""
    assert seen["group"]


def test_replica_runs_where_it_should_and_within_its_limits(stage: LocalStage, tmp_path: Path) -> None:
    stage.run("1", SHOWS, cwd=str(tmp_path), limits={"open_files": 77, "cpu_seconds": 99})
    stage.run("2", SHOWS)
    stage.wait(RunEnded, "1")
    stage.wait(RunEnded, "2")
    assert (shown(stage, "1")["cwd"], shown(stage, "1")["files"], shown(stage, "1")["cpu"]) == (str(tmp_path), 77, 99)
    assert shown(stage, "2")["cwd"] == str(stage.folder / "jobs" / "2" / "work")


def test_replica_that_wants_more_memory_than_it_may_have_fails_of_that(stage: LocalStage) -> None:
    stage.run("1", "x = bytearray(1 << 30)", limits={"memory": 256 << 20})
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.cause, ended.codes) == (RunEnding.FAILED, "cpu-out-of-memory", (1,))


def test_replica_that_uses_up_its_cpu_time_fails_of_that(stage: LocalStage) -> None:
    stage.run("1", "while True: pass", limits={"cpu_seconds": 1})
    ended = stage.wait(RunEnded, "1")
    assert (ended.cause, ended.codes) == ("cpu-seconds", (-signal.SIGXCPU,))


def test_command_is_never_seen_by_a_shell(stage: LocalStage, tmp_path: Path) -> None:
    nasty = f"$(touch {tmp_path}/pwned); `touch {tmp_path}/pwned` > {tmp_path}/pwned"
    stage.run("1", python("import sys; print(sys.argv[1])", nasty))
    stage.wait(RunEnded, "1")
    assert nasty in stage.text("1")
    assert not (tmp_path / "pwned").exists()


def test_files_of_a_job_are_its_owners_alone(stage: LocalStage) -> None:
    stage.run("1")
    stage.wait(RunEnded, "1")
    for path in [stage.folder / "jobs", *(stage.folder / "jobs").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("job", ["../1", "", ".", "..", "a/b", ".hidden", "a\n", "a" * 300])
def test_id_that_is_no_name_is_refused(stage: LocalStage, job: str) -> None:
    with pytest.raises(RequestError, match="cannot name a directory"):
        stage.backend.launch(an_order(job, a_request()))
    with pytest.raises(RequestError, match="cannot name a directory"):
        stage.backend.log(job, 0, 0, 10)


# How a run fails


def test_failed_run_tells_what_it_died_of(stage: LocalStage) -> None:
    stage.run("1", "import no_such_module")
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.cause, ended.codes, ended.steps) == (RunEnding.FAILED, "import-error", (1,), None)


def test_cause_that_the_worker_wrote_down_is_taken(stage: LocalStage) -> None:
    stage.run(
        "1",
        "import json, os, sys\n"
        "with open(os.environ['POISE_RUN_DIR'] + '/failure.json', 'w') as file:\n"
        "    json.dump({'version': 1, 'cause': 'model-checkpoint-error', 'text': 'disk'}, file)\n"
        "sys.exit(73)",
    )
    ended = stage.wait(RunEnded, "1")
    assert (ended.cause, ended.codes) == ("model-checkpoint-error", (73,))


def test_first_replica_that_fails_takes_the_others_with_it(stage: LocalStage) -> None:
    text = f"import os, sys\nif os.environ['RANK'] == '1': sys.exit(9)\n{WAITS}"
    stage.run("1", text, 0, 1, 2, gpus=3, replicas="gpu")
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.codes) == (RunEnding.FAILED, (-15, 9, -15))


def test_replica_that_is_killed_from_outside_fails_as_killed(stage: LocalStage) -> None:
    stage.begun("1")
    os.kill(stage.said("1", "runner.json")["replicas"][0]["pid"], signal.SIGKILL)
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.cause, ended.codes) == (RunEnding.FAILED, "killed", (-9,))


def test_program_that_vanished_before_the_start_fails_the_run(stage: LocalStage) -> None:
    stage.run("1", ("/no/such/program",))
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.cause, ended.codes) == (RunEnding.FAILED, "program-missing", (127,))
    assert "cannot start: /no/such/program: No such file or directory" in stage.text("1")
    assert not stage.of(RunBegan, "1")


def test_working_directory_that_vanished_fails_the_run(stage: LocalStage) -> None:
    stage.run("1", "", cwd="/no/such/directory")
    assert stage.wait(RunEnded, "1").cause == "working-directory-missing"
    assert "the working directory /no/such/directory: No such file or directory; `poise submit --ship`" in stage.text("1")


def test_file_that_is_no_program_fails_the_run(stage: LocalStage, tmp_path: Path) -> None:
    (tmp_path / "script").write_text("print()")
    stage.run("1", (str(tmp_path / "script"),))
    ended = stage.wait(RunEnded, "1")
    assert (ended.cause, ended.codes) == ("permission-error", (126,))


def test_longest_argument_and_variable_that_are_taken_can_be_handed_over(stage: LocalStage) -> None:
    argument, variable = "x" + "€" * 43_690, "xx" + "€" * 43_689
    assert len(argument.encode()) == len(f"A={variable}".encode()) == orders.MOST_BYTES
    request = a_request(
        python("import os, sys; print(len(sys.argv[1]), len(os.environ['A']))", argument), env={"A": variable}
    )
    orders.check_request(request)
    stage.backend.launch(an_order("1", request))
    assert stage.wait(RunEnded, "1").how is RunEnding.FINISHED
    assert f"{len(argument)} {len(variable)}" in stage.text("1")
    with pytest.raises(RequestError, match="A has"):
        orders.check_request(a_request("", env={"A": variable + "x"}))


def test_disk_that_is_full_fails_the_launch(stage: LocalStage, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("poise.service.backends.local.state_dir.put", full)
    stage.run("1")
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.cause, ended.codes) == (RunEnding.FAILED, "storage-full", ())
    monkeypatch.undo()
    stage.run("1", epoch=2)
    assert stage.wait(RunEnded, "1", 2).how is RunEnding.FINISHED


def test_job_that_ran_for_as_long_as_it_may_fails_for_good(stage: LocalStage) -> None:
    stage.run("1", WAITS, max_duration=0.2)
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.cause, ended.codes) == (RunEnding.FAILED, "max-duration", (-15,))
    stage.backend.launch(an_order("2", a_request(WAITS, max_duration=60), ran=59.8))
    assert stage.wait(RunEnded, "2").cause == "max-duration"
    stage.backend.launch(an_order("3", a_request(WAITS, max_duration=60), ran=60))
    assert stage.wait(RunEnded, "3").cause == "max-duration"
    assert not stage.of(RunBegan, "3")


# Setup


def test_setup_is_run_once_before_the_first_run(stage: LocalStage) -> None:
    for epoch in (1, 2):
        stage.run("1", "print('training'); raise SystemExit(75)", epoch=epoch, setup=python("print('setting up')"))
        assert stage.wait(RunEnded, "1", epoch).how is RunEnding.YIELDED
    assert [line for line in stage.text("1").splitlines() if not line.startswith("---")] == [
        "setting up",
        "training",
        "training",
    ]


def test_setup_that_fails_fails_the_run_and_is_tried_again(stage: LocalStage) -> None:
    for epoch in (1, 2):
        stage.run("1", "print('training')", epoch=epoch, setup=python("raise PermissionError('no')"))
        ended = stage.wait(RunEnded, "1", epoch)
        assert (ended.how, ended.cause, ended.codes) == (RunEnding.FAILED, "permission-error", (None,))
    assert not [news for news in stage.news if isinstance(news, RunBegan)]
    assert stage.text("1").count("setup ended with exit code 1") == 2


def test_setup_that_hangs_is_ended_with_its_lease(stage: LocalStage) -> None:
    stage.run("1", "", setup=python(f"print('hanging', flush=True)\n{WAITS}"))
    stage.says("1", "hanging")
    stage.backend.kill("1", 1, "cancelled")
    assert stage.wait(RunEnded, "1").how is RunEnding.YIELDED


ODD_FILES = """
import os, sys, time
path = os.environ["POISE_RUN_DIR"] + "/progress.json"
if sys.argv[1] == "directory":
    os.mkdir(path)
elif sys.argv[1] == "pipe":
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR)
else:
    os.symlink("/dev/zero", path)
print("done", flush=True)
time.sleep(1.5)
"""


@pytest.mark.parametrize("kind", ["directory", "pipe", "link"])
def test_whatever_a_job_makes_of_its_report_the_back_end_goes_on(stage: LocalStage, kind: str) -> None:
    stage.begun("1", (*python(ODD_FILES), kind))
    stage.says("1", "done")
    stage.run("2", python("print('hello')"), 1)
    assert stage.wait(RunEnded, "2").how is RunEnding.FINISHED
    assert stage.wait(RunEnded, "1").how is RunEnding.FINISHED


def test_run_that_cannot_be_watched_does_not_run(stage: LocalStage, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", full)
        stage.run("1", WAITS)
        assert stage.wait(RunEnded, "1").how is RunEnding.FAILED
    until(lambda: not stage.processes())
    stage.begun("1", WAITS, epoch=2)


def test_runner_that_dies_before_it_starts_leaves_the_pipe_of_its_successor_alone(
    stage: LocalStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process and its pipe end in the same instant, and the run is begun another time before both are heard of."""
    spawn, unwatch = processes.spawn, stage.backend._loop.unwatch
    spawned: list[tuple[int, int, int]] = []
    has_ended: list[bool] = []

    def first_dies(path: str, environment: dict[str, str]) -> tuple[int, int, int]:
        spawned.append(spawn(path, environment))
        if len(spawned) == 1:
            os.kill(spawned[0][0], signal.SIGKILL)
            os.waitid(os.P_PIDFD, spawned[0][1], os.WEXITED | os.WNOWAIT)
        return spawned[-1]

    def noting(handle: int) -> None:
        if len(spawned) == 2 and handle == spawned[1][2]:
            has_ended.append(bool(select.select([handle], [], [], 0)[0]))
        unwatch(handle)

    monkeypatch.setattr(processes, "spawn", first_dies)
    monkeypatch.setattr(stage.backend._loop, "unwatch", noting)
    stage.run("1")
    assert stage.wait(RunEnded, "1").how is RunEnding.FINISHED
    assert has_ended == [True]
