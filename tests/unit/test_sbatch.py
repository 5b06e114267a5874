"""`#SBATCH` headers: what they become here, what is left out with a note, what is refused."""

from pathlib import Path
from typing import Any

import pytest

from poise.scheduler.model.errors import RequestError
from poise.service.wire.request import MOST_JOBS, JobRequest, PreemptionMode
from poise.service.wire.sbatch import completed, options, read_sbatch

HEAD = "#!/bin/bash\n"


def script(folder: Path, *lines: str, first: str = HEAD, body: str = "python train.py\n") -> Path:
    path = folder / "train.sbatch"
    path.write_text(first + "".join(f"#SBATCH {line}\n" for line in lines) + body)
    return path


def jobs(folder: Path, *lines: str, **more: str) -> tuple[JobRequest, ...]:
    return read_sbatch(script(folder, *lines, **more), (), {"SET": "1"}).requests()


def one(folder: Path, *lines: str, **more: str) -> JobRequest:
    (request,) = jobs(folder, "--gpus=1", *lines, **more)
    return request


def notes(folder: Path, *lines: str, **more: str) -> list[str]:
    path = script(folder, "--gpus=1", *lines, **more)
    return [note.removeprefix(f"{path}: ") for note in read_sbatch(path, (), {}).notes]


def refusal(folder: Path, *lines: str) -> str:
    path = script(folder, *lines)
    with pytest.raises(RequestError) as caught:
        read_sbatch(path, (), {}).requests()
    return str(caught.value).removeprefix(f"{path}:")


def test_a_script_is_run_by_the_interpreter_of_its_first_line(tmp_path: Path) -> None:
    path = script(tmp_path, "--gpus=1", first="#! /usr/bin/env python3 -u\n")
    (request,) = read_sbatch(path, ("--epochs", "2"), {}).requests()
    assert request.command == ("/usr/bin/env", "python3 -u", str(path), "--epochs", "2")


def test_without_an_interpreter_a_script_is_refused(tmp_path: Path) -> None:
    path = script(tmp_path, first="#SBATCH --gpus=1\n")
    with pytest.raises(RequestError, match="a script begins with its interpreter"):
        read_sbatch(path, (), {})


@pytest.mark.parametrize(
    ("lines", "want"),
    [
        (["--gres=gpu:v100:2"], (2, ("v100",))),
        (["--gres=gpu:2"], (2, ())),
        (["--gres=gpu"], (1, ())),
        (["--gres=gpu:a100"], (1, ("a100",))),
        (["--gres=craynetwork:1,gpu:V100:2", "--nodes=3"], (6, ("v100",))),
        (["--gpus=4"], (4, ())),
        (["-G v100:4", "-N 2"], (4, ("v100",))),
        (["-G4"], (4, ())),
        (["--gpus-per-node=k80:2", "-N2"], (4, ("k80",))),
        (["--gpus-per-task 2", "--ntasks 3"], (6, ())),
        (["--nodes=2", "--ntasks-per-node=2", "--gpus-per-task=1"], (4, ())),
        (["--nodes=2", "--tasks-per-node=3", "--gpus-per-task=v100:2"], (12, ("v100",))),
        (["--nodes=2", "--gpus-per-task=1"], (2, ())),
        (["--nodes=2", "--ntasks-per-node=2", "--gpus-per-task=1", "--ntasks=3"], (3, ())),
        (["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=3"], (6, ())),
        (["--gres=license:1"], (1, ())),
        ([], (1, ())),
    ],
)
def test_gpus_are_counted_over_all_nodes(lines: list[str], want: tuple[Any, ...], tmp_path: Path) -> None:
    (request,) = jobs(tmp_path, *lines)
    assert (request.gpus, request.gpu_types) == want


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5_400), ("1:30", 90), ("2:00:05", 7_205), ("1-2", 93_600), ("1-2:30", 95_400), ("1-2:30:10", 95_410),
     ("0", None), ("UNLIMITED", None)],
)  # fmt: skip
def test_time_is_read_as_slurm_writes_it(text: str, seconds: float | None, tmp_path: Path) -> None:
    assert one(tmp_path, f"--time={text}").max_duration == seconds


@pytest.mark.parametrize(
    ("text", "indices"),
    [("0-3", "0 1 2 3"), ("1,3,5", "1 3 5"), ("0-15:4", "0 4 8 12"), ("7", "7"), ("5,1-2,2", "1 2 5")],
)
def test_arrays_are_lists_ranges_and_steps(text: str, indices: str, tmp_path: Path) -> None:
    found = jobs(tmp_path, "-J sweep", f"--array={text}", "--gpus=1")
    assert " ".join(job.env["SLURM_ARRAY_TASK_ID"] for job in found) == indices
    assert [job.name for job in found] == [f"sweep-{index}" for index in indices.split()]
    assert {job.app for job in found} == {"sweep"}
    first, last = indices.split()[0], indices.split()[-1]
    for job in found:
        assert job.env["ARRAY_INDEX"] == job.env["SLURM_ARRAY_TASK_ID"]
        assert (job.env["SLURM_ARRAY_TASK_MIN"], job.env["SLURM_ARRAY_TASK_MAX"]) == (first, last)
        assert job.env["ARRAY_COUNT"] == job.env["SLURM_ARRAY_TASK_COUNT"] == str(len(found))


def test_the_rest_that_means_something_is_taken_over(tmp_path: Path) -> None:
    got = one(tmp_path, "-J 'my job'", "--chdir=/data", "-A vision", "--export=NONE,A=1,SET,UNSET", "--hold", "--requeue")
    assert (got.name, got.cwd, got.tenant, got.hold, got.preemption) == (
        "my-job",
        "/data",
        "vision",
        True,
        PreemptionMode.RESTART,
    )
    assert got.env == {"A": "1", "SET": "1", "SLURM_JOB_NAME": "my-job", "SLURM_SUBMIT_DIR": str(Path.cwd())}


def test_a_script_is_not_preempted_unless_it_says_that_it_may_be_requeued(tmp_path: Path) -> None:
    assert one(tmp_path).preemption is PreemptionMode.NEVER
    assert one(tmp_path, "--no-requeue").preemption is PreemptionMode.NEVER
    assert one(tmp_path, "--requeue", "--no-requeue").preemption is PreemptionMode.NEVER
    assert one(tmp_path, "--no-requeue", "--requeue").preemption is PreemptionMode.RESTART


def test_a_script_without_lines_for_slurm_is_preempted_as_any_other_job(tmp_path: Path) -> None:
    (request,) = jobs(tmp_path)
    assert "preemption" not in request.model_fields_set
    assert request.preemption is PreemptionMode.CHECKPOINT


def test_a_script_without_a_name_is_called_as_its_file(tmp_path: Path) -> None:
    assert one(tmp_path).name == "train.sbatch"


def test_what_means_nothing_here_is_left_out_with_a_note(tmp_path: Path) -> None:
    assert notes(tmp_path) == []
    found = notes(tmp_path, "--partition=gpu", "-o out.log", "--mem-per-gpu=8G", "--frobnicate now", "--exclusive", "-c 4")
    assert [note.split(" is ignored")[0] for note in found] == [
        "--partition", "--output", "--mem-per-gpu", "--frobnicate", "--exclusive", "--cpus-per-task",
    ]  # fmt: skip
    assert found[1] == "--output is ignored: `poise logs JOB` has what the job prints"
    assert notes(tmp_path, "--ntasks-per-node=2") == ["--ntasks-per-node is ignored"]  # --gpus says how many
    path = script(tmp_path, "--gpus-per-task=1", "--ntasks-per-node=2")
    assert read_sbatch(path, (), {}).notes == ()


@pytest.mark.parametrize(
    ("option", "export", "env"),
    [
        ("--gpus=1", None, {}),
        ("--export=ALL", "all", {}),
        ("--export=ALL,A=1", "all", {"A": "1"}),
        ("--export=NONE", "none", {}),
        ("--export=SET,UNSET", "none", {"SET": "here"}),
    ],
)
def test_what_export_says_of_the_environment_is_kept(
    option: str, export: str | None, env: dict[str, str], tmp_path: Path
) -> None:
    found = read_sbatch(script(tmp_path, option), (), {"SET": "here"})
    assert found.fields.get("export") == export
    assert {name: value for name, value in found.env.items() if not name.startswith("SLURM_")} == env
    assert found.notes == ()


def test_what_a_script_will_miss_is_noted(tmp_path: Path) -> None:
    body = "# srun is not run\nsrun python x.py ${SLURM_JOB_ID} $SLURM_NTASKS\n"
    assert notes(tmp_path, body=body) == [
        "it uses SLURM_NTASKS, which is not set here",
        "it runs srun; Poise starts the replicas itself (`replicas: gpu` for one per GPU)",
    ]


def test_a_script_that_asks_for_no_gpu_is_told_what_it_gets_once_options_are_known(tmp_path: Path) -> None:
    path = script(tmp_path)
    read = read_sbatch(path, (), {})
    assert completed(read).notes == (f"{path}: it asks for no GPU; it gets 1, the least there is",)
    assert completed(read.overridden({"gpus": 2}, {})).notes == ()


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("afterok:12", ("12:succeeded",)),
        ("afterok:12:13,afterany:prep", ("12,13:succeeded", "prep:ended")),
        ("afternotok:12:13", ("12:failed", "13:failed")),  # each of them, not one of them
    ],
)
def test_dependencies_name_the_jobs_and_how_they_end(text: str, after: tuple[str, ...], tmp_path: Path) -> None:
    assert one(tmp_path, f"--dependency={text}").after == after


def test_a_script_may_begin_later_has_a_deadline_and_a_cap(tmp_path: Path) -> None:
    found = jobs(tmp_path, "--gpus=1", "--begin=2026-11-20T16:00Z", "--deadline=2026-11-20T17:00Z", "--array=5-9%2")
    assert [(each.begin, each.deadline, each.array_cap) for each in found] == [(1_795_190_400.0, 1_795_194_000.0, 2)] * 5
    assert notes(tmp_path, "--deadline=2026-11-20T17:00Z") == [
        "--deadline is told to policies that look at deadlines; a job that cannot meet it is not removed"
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--dependency=after:12", "2: --dependency: expected afterok:ID, afternotok:ID or afterany:ID"),
        ("--dependency=afterok", "2: --dependency: expected afterok:ID"),
        ("--dependency=afterok:1?afterok:2", "2: --dependency: expected afterok:ID"),
        ("-d singleton", "2: --dependency: expected afterok:ID"),
        ("--constraint=v100", "2: --constraint: features of nodes are not known here"),
        ("--begin=teatime", "2: --begin: expected a moment such as 16:00"),
        ("--deadline=soon", "2: --deadline: expected a moment such as 16:00"),
        ("--test-only", "2: --test-only: it would be submitted all the same"),
        ("--array=0-9%0", "2: --array: after % expected how many of its jobs may hold GPUs at once"),
        ("--array=9-0", "2: --array: expected indices such as 0-9"),
        ("--array=a", "2: --array: expected indices such as 0-9"),
        (f"--array=0-{MOST_JOBS}", "2: --array: more than the 1,000 jobs"),
        ("--array=0-999999999", "2: --array: more than the 1,000 jobs"),
        ("--gpus=v100:1,a100:2", "2: --gpus: expected GPUs such as 2 or v100:2"),
        ("--gres=gpu:a100:99999999999", "2: --gres: expected at most 100,000 GPUs, got 'a100:99999999999'"),
        ("--gres=gpu:a:1,gpu:b:1", "2: --gres: expected GPUs such as 2 or v100:2"),
        ("--gres=gpu:2 --nodes=1-4", "2: --nodes: expected one whole number, got '1-4'"),
        ("--time=soon", "2: --time: expected MINUTES"),
        ("--time=1:2:3:4", "2: --time: expected MINUTES"),
        ("--export=A-B", "2: --export: expected NAME or NAME=VALUE, got 'A-B'"),
        ("hetjob", "2: #SBATCH: expected an option, got 'hetjob'"),
        ("--comment 'x", "2: #SBATCH: no closing quotation"),
    ],
)
def test_what_would_do_harm_or_makes_no_sense_is_refused(line: str, said: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, line).startswith(said)


def test_options_end_at_the_first_command_and_comments_are_none(tmp_path: Path) -> None:
    text = "#!/bin/sh\n# a\n##SBATCH --off\n\n#SBATCH --a=1 -J x # why\n#SBATCH -Jy --quiet -N2\necho\n#SBATCH --late\n"
    assert [(each.name, each.value, each.line) for each in options(text, "f")] == [
        ("a", "1", 5), ("job-name", "x", 5), ("job-name", "y", 6), ("quiet", "", 6), ("nodes", "2", 6),
    ]  # fmt: skip
    assert one(tmp_path, "-J x", "-J y").name == "y"
