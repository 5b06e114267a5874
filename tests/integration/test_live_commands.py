"""The live verbs over the real API with an engine in memory: what people see, what programs read, what is refused."""

import csv
import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.fake_engine import Api, Call, Kept, an_api, calls, done
from tests.shell import poise

from poise.service.client import Client
from poise.service.server.http.guard import ApiOptions
from poise.service.server.logs import Logbook
from poise.service.wire.environments import sha256_of, text_of
from poise.service.wire.request import JobRequest
from poise.service.wire.views import JobState, NodeCondition, NodeList, NodeRow, NodeRun


class Bridge(httpx.BaseTransport):
    """From a client to an API, without a network."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        headers = {name: value for name, value in request.headers.items() if name != "host"}
        call = Call(request.method, request.url.raw_path.decode(), headers, (request.read(),))
        (reply,) = calls(self._api.app, [call])
        return httpx.Response(reply.status, headers=reply.headers, content=reply.body)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_venv: None) -> Api:
    """A service with job-0 of tenant mine and job-1 of tenant theirs; commands talk to it as its admin."""
    made = an_api(tmp_path, ApiOptions(log=Logbook(io.StringIO())))
    as_role(made, monkeypatch, "admin")
    monkeypatch.chdir(tmp_path)
    return made


def as_role(api: Api, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    def from_config(**_: float) -> Client:
        return Client("http://localhost", api.tokens[role], transport=Bridge(api), patience=0.0)

    monkeypatch.setattr(Client, "from_config", from_config)


def kept(api: Api, job: str) -> JobRequest:
    return api.engine.jobs[job].request


def test_submit_says_the_id_the_state_the_reason_and_what_to_type_next(api: Api, tmp_path: Path) -> None:
    said = poise("submit", "-n", "fit", "-g", "2", "--type", "V100,a100", "--env", "A=1", "--", "./fit.sh", "--lr", "0.1")
    assert (said.code, said.err) == (0, "")
    assert said.out == (
        "submitted job-2 fit: PENDING, no GPU is free\nnext: poise why job-2 · poise logs -f job-2 · poise queue\n"
    )
    got = kept(api, "job-2")
    assert (got.command, got.cwd) == ((str(tmp_path / "fit.sh"), "--lr", "0.1"), str(tmp_path))
    assert (got.name, got.gpus, got.gpu_types, got.env) == ("fit", 2, ("v100", "a100"), {"A": "1"})


def test_every_option_of_submit_is_a_field_of_the_request(api: Api) -> None:
    words = (
        "--gpus 1..4 --replicas gpu --steps 1e3 --duration 2h --model ResNet-50 --batch-size 64 --tenant vision",
        "--app tuning --weight 2 --priority -3 --preemption restart --checkpoint-every 10m --deadline 30s --retries 3",
        "--max-duration 1d --hold --cwd /data --export none",
    )
    options = " ".join(words).split()
    assert poise("submit", *options, "--json", "--", "python", "x.py").json == {"jobs": ["job-2"]}
    assert kept(api, "job-2") == JobRequest.model_validate(
        {
            "command": ("python", "x.py"), "gpus": 4, "min_gpus": 1, "max_gpus": 4, "replicas": "gpu", "steps": 1e3,
            "duration": 7_200.0, "model": "ResNet-50", "batch_size": 64, "tenant": "vision", "app": "tuning", "weight": 2.0,
            "priority": -3, "preemption": "restart", "checkpoint": {"every": 600.0, "deadline": 30.0},
            "retry": {"on_errors": 3}, "max_duration": 86_400.0, "hold": True, "cwd": "/data",
            "export": "none",
        }
    )  # fmt: skip


def test_options_win_over_the_file_also_where_the_command_uses_them(api: Api, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "run: train --lr ${LR}\nenv: {LR: 0.1}\ngpus: 1..2\ncheckpoint: {every: 5m, deadline: 9s}\nname: file\n"
    )
    assert poise("submit", "job.yaml", "--env", "LR=0.5", "-g", "8", "--deadline", "7", "--json").code == 0
    got = kept(api, "job-2")
    assert (got.command, got.env, got.gpus, got.min_gpus) == (("train", "--lr", "0.5"), {"LR": "0.5"}, 8, None)
    assert (got.checkpoint.every, got.checkpoint.deadline, got.name) == (300.0, 7.0, "file")


def test_a_sweep_is_one_submission_and_its_jobs_share_an_app(api: Api) -> None:
    said = poise("submit", "-n", "s", "--sweep", "LR=0.1,0.01", "--sweep", "SEED=1,2", "--", "fit", "${LR}", "${HOME}")
    assert said.out.splitlines()[0] == "submitted 4 jobs of app s: job-2 job-3 job-4 job-5"
    assert "poise queue --app s" in said.out
    assert [kept(api, f"job-{number}").command for number in (2, 5)] == [
        ("fit", "0.1", "${HOME}"),
        ("fit", "0.01", "${HOME}"),
    ]
    assert poise("submit", "--array", "25", "--", "fit").out.count("…") == 1
    assert kept(api, "job-30").env == {"ARRAY_INDEX": "24", "ARRAY_COUNT": "25"}


def test_arrays_of_one_script_without_a_name_are_apps_of_their_own(api: Api) -> None:
    said = [poise("submit", "--array", "2", "--", "python", "fit.py").out for _ in range(2)]
    first, second = kept(api, "job-2").app, kept(api, "job-4").app
    assert kept(api, "job-3").app == first != second
    assert re.fullmatch(r"fit-[0-9a-f]{4}", str(first))
    assert f"2 jobs of app {first}:" in said[0]
    assert f"poise queue --app {second}" in said[1]
    assert poise("cancel", "--app", str(first), "--json").json == [
        {"job": "job-2", "state": "CANCELLED"},
        {"job": "job-3", "state": "CANCELLED"},
    ]


def test_a_script_of_slurms_is_submitted_with_its_arguments_and_notes(api: Api, tmp_path: Path) -> None:
    (tmp_path / "s.sbatch").write_text("#!/bin/bash\n#SBATCH --gres=gpu:k80:2 -p batch\necho $1\n")
    said = poise("submit", "s.sbatch", "--", "a", "b")
    assert (said.code, said.err) == (0, "note: s.sbatch: --partition is ignored\n")
    got = kept(api, "job-2")
    assert (got.command, got.gpus, got.name) == (("/bin/bash", str(tmp_path / "s.sbatch"), "a", "b"), 2, "s.sbatch")


def test_an_array_of_a_script_of_slurms_has_slurms_variables_whoever_asks_for_it(api: Api, tmp_path: Path) -> None:
    (tmp_path / "s.sbatch").write_text("#!/bin/bash\n#SBATCH --gpus=1\n#SBATCH --array=5-9\necho $SLURM_ARRAY_TASK_ID\n")
    jobs = [each["env"] for each in poise("submit", "--dry-run", "--json", "--array", "3", "s.sbatch").json]
    assert [job["SLURM_ARRAY_TASK_ID"] for job in jobs] == [job["ARRAY_INDEX"] for job in jobs] == ["0", "1", "2"]
    shared = ("SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX")
    assert {tuple(job[name] for name in shared) for job in jobs} == {("3", "0", "2")}
    jobs = [each["env"] for each in poise("submit", "--dry-run", "--json", "--sweep", "LR=1,2", "s.sbatch").json]
    assert [(job["LR"], "SLURM_ARRAY_TASK_ID" in job) for job in jobs] == [("1", False), ("2", False)]
    jobs = [each["env"] for each in poise("submit", "--dry-run", "--json", "--array", "2", "--", "fit").json]
    assert not any("SLURM_ARRAY_TASK_ID" in job for job in jobs)


def test_a_script_of_slurms_without_gpus_is_told_what_it_gets_if_nobody_says_so(api: Api, tmp_path: Path) -> None:
    (tmp_path / "s.sh").write_text("#!/bin/bash\necho\n")
    assert poise("submit", "--dry-run", "s.sh").err == "note: s.sh: it asks for no GPU; it gets 1, the least there is\n"
    assert poise("submit", "--dry-run", "-g", "2", "s.sh").err == ""


def test_a_dry_run_sends_nothing_and_needs_no_server(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "from_config", None)
    found = poise("submit", "--dry-run", "--json", "-g", "2", "--", "fit").json
    assert (found["command"], found["gpus"]) == (["fit"], 2)
    sweep = poise("submit", "--dry-run", "--json", "--sweep", "X=1,2", "--", "fit").json
    assert [each["env"]["X"] for each in sweep] == ["1", "2"]
    assert len(api.engine.jobs) == 2


def test_a_dry_run_shows_people_what_would_run(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        monkeypatch.delenv(name)
    monkeypatch.setattr(Client, "from_config", None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    monkeypatch.setenv("TERM", "xterm")
    (tmp_path / "fit").touch(mode=0o755)
    said = poise("submit", "--dry-run", "-g", "1..4", "--type", "V100,a100", "--env", "LR=0 1", "--", "fit", "--lr", "${LR}")
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines() == [
        "would submit 1 job; nothing was sent",
        "  command      fit --lr '0 1'",
        f"  program      {tmp_path}/fit",
        f"  folder       {tmp_path}",
        "  virtual env  none",
        "  GPUs         1..4 of v100 or a100",
        "  replicas     one process per node",
        "  checkpoints  where the service keeps them",
        "  variables    'LR=0 1'",
        "  exported     2 variables of this shell: PATH, WANDB_API_KEY",
    ]
    said = poise(
        "submit", "--dry-run", "--export", "none", "--sweep", "LR=1,2", "--env", "A=b", "--", "./fit", "${LR}", "${A}"
    )
    assert said.out.splitlines()[0] == "would submit 2 jobs; nothing was sent"
    assert "  variables    A=b" in said.out
    assert "  exported     none" in said.out
    assert said.out.splitlines()[-2:] == [f"  LR=1: {tmp_path}/fit 1 b", f"  LR=2: {tmp_path}/fit 2 b"]
    many = poise("submit", "--dry-run", "--array", "99", "--", "absent").out
    assert len(many.splitlines()) < 40
    assert "  program      no absent in PATH on this machine" in many
    shown = poise("submit", "--dry-run", "--image", "pytorch", "--checkpoint-url", "relay", "--hold", "--", "fit").out
    for line in ("program      as found where the job runs", "image        pytorch", "checkpoints  relay", "on hold "):
        assert f"  {line}" in shown
    assert "exported     1 variable of this shell: WANDB_API_KEY" in shown
    when = ("--after", "job-0:succeeded", "--begin", "2100-01-01T00:00Z", "--finish-by", "2100-01-02T00:00Z")
    shown = poise("submit", "--dry-run", *when, "--array", "0-9%3", "--", "fit").out
    for line in (
        "after        job-0:succeeded", "begins       2100-01-01 00:00:00Z or later", "finish by    2100-01-02 00:00:00Z",
        "at once      3 of its array",
    ):  # fmt: skip
        assert f"  {line}\n" in shown


def test_the_environment_of_the_shell_comes_along_unless_one_says_otherwise(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in os.environ:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SEED", "1")
    monkeypatch.setenv("DATA", "/data")
    (tmp_path / "job.yaml").write_text("run: x\nexport: [SEED]\nenv: {LR: 1}\n")
    (tmp_path / "s.sbatch").write_text("#!/bin/bash\n#SBATCH --gpus=1 --export=NONE\nx\n")
    for words in (
        ["--", "x"],
        ["job.yaml"],
        ["--export", "none", "job.yaml"],
        ["--export", "DATA,LR=2", "job.yaml"],
        ["s.sbatch"],
    ):
        assert poise("submit", *words).code == 0
    found = [(kept(api, f"job-{number}").exported, kept(api, f"job-{number}").env.get("LR")) for number in range(2, 7)]
    assert found == [
        (sha256_of(text_of({"SEED": "1", "DATA": "/data"})), None), (sha256_of(text_of({"SEED": "1"})), "1"), (None, "1"),
        (sha256_of(text_of({"DATA": "/data"})), "2"), (None, None),
    ]  # fmt: skip
    assert (
        poise("submit", "--export", "DATUM", "--", "x").refusal
        == "export: DATUM is not set in this shell; did you mean DATA?"
    )
    monkeypatch.setenv("LONG", "x" * 70_000)
    said = poise("submit", "--", "x")
    assert said.code == 0
    assert said.err.startswith("note: not exported: LONG (70,004 characters); a job takes 500 variables with 65,536 ")
    assert "LONG (70,004" in poise("submit", "--export", "all", "--", "x").refusal
    (tmp_path / "bad.yaml").write_text("run: x\nexport: SEED=1\n")
    assert poise("submit", "bad.yaml").refusal.startswith("bad.yaml:2: export: put SEED into `env`, with its value; ")


def test_a_script_that_joins_a_process_group_alone_gets_a_hint_when_submitted_and_shown(api: Api, tmp_path: Path) -> None:
    (tmp_path / "ddp.py").write_text("import torch.distributed as dist\ndist.init_process_group()\n")
    for words in (["-g", "2"], ["--micro-batches", "4"], ["-g", "2", "--sweep", "LR=1,2"], ["-g", "2", "--dry-run"]):
        said = poise("submit", *words, "--", "python", "ddp.py", "${LR}")
        assert said.code == 0
        assert said.err.startswith("note: replicas: it calls init_process_group, and has one process per node")
        assert said.err.count("note:") == 1
    for job in ("job-2", "job-3", "job-5"):
        assert "replicas  " in poise("show", job).out
        assert "--replicas gpu starts one process per GPU" in poise("show", job).out
    for words in (["-g", "1"], ["-g", "2", "--replicas", "gpu"]):
        assert poise("submit", *words, "--", "python", "ddp.py").err == ""
    assert "WORLD_SIZE" not in poise("show", "job-7").out


def test_a_job_file_may_come_on_standard_input(api: Api) -> None:
    assert poise("submit", "-", "--json", stdin=b"run: fit\ngpus: 3\n").json == {"jobs": ["job-2"]}
    assert kept(api, "job-2").gpus == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a job file, a script, or a command: poise submit -- python train.py (see poise submit --help)"),
        (["python", "x.py"], "one FILE, or a command after --: poise submit -- python x.py (see poise submit --help)"),
        (["absent.yaml"], "absent.yaml: there is no such file"),
        (["absent"], "absent: there is no such file; a command goes after --: poise submit -- absent"),
        (["x.py"], "x.py: neither a job file (.yaml) nor a script that begins with #!; a command goes after --: "
                   "poise submit -- python x.py"),
        (["job.yaml", "--", "x"], "job.yaml says what to run; leave the command out"),
        (["--export", "", "--", "x"], "--export: expected `all`, `none`, or names of variables with commas, got ''"),
        (["--export", "A-B", "--", "x"], "--export: expected `all`, `none`, or names of variables with commas, got 'A-B'"),
        (["--export", "A,none", "--", "x"],
         "--export: `none` does not go together with names or `all`; leave one of them out"),
        (["--export", "POISE_TOKEN", "--", "x"], "export: POISE_TOKEN: names that begin with POISE_ are Poise's own"),
        (["--export", "POISE_X=1", "--", "x"], "env: names that begin with POISE_ are Poise's own"),
        (["typo.yaml"], "typo.yaml:2: unknown key 'gups'; did you mean gpus?"),
        (["-g", "9" * 5000, "--", "x"], f"--gpus: expected at most 100,000 GPUs, got '{'9' * 40}'"),
        (["-g", "1..99999999999", "--", "x"], "--gpus: expected at most 100,000 GPUs, got '1..99999999999'"),
        (["-g", "two", "--", "x"], "--gpus: expected a number of GPUs such as 4, or 1..4 for an elastic job, got 'two'"),
        (["-g", "0", "--", "x"], "gpus: expected at least 1, got 0"),
        (["--env", "A-1", "--", "x"], "--env: expected NAME=VALUE, or the NAME of a variable of this shell, got 'A-1'"),
        (["--env", "NO_SUCH", "--", "x"], "--env: NO_SUCH is not set in this shell; write --env NO_SUCH=VALUE, or export it "
                                          "first"),
        (["--env-file", "none.env", "--", "x"], "none.env: No such file or directory"),
        (["--venv", "a", "--no-venv", "--", "x"], "--venv and --no-venv do not go together; leave one of them out"),
        (["--json", "-q", "--", "x"], "--json and --id-only are two forms of one answer; leave one of them out"),
        (["--follow", "-q", "--", "x"], "--follow prints what the job prints; leave --json and --id-only out, or take "
                                        "--wait"),
        (["--follow", "--array", "2", "--", "x"], "--follow prints one log, and these are 2 jobs; take --wait, or `poise "
                                                        "logs -f` of one"),
        (["--sweep", "A=1", "--sweep", "A=2", "--", "x"], "--sweep: A is there twice; write all its values with commas"),
        (["--sweep", "A", "--", "x"], "--sweep: expected NAME=V1,V2,..., got 'A'"),
        (["--array", "0", "--", "x"], "--array: expected at least 1 job, got 0"),
        (["--array", "9-1", "--", "x"], "--array: expected indices such as 0-9, 1,3,5 or 0-15:4, got '9-1'"),
        (["--array", "-3", "--", "x"], "--array: expected indices such as 0-9, 1,3,5 or 0-15:4, got '-3'"),
        (["--array", "0-1000", "--", "x"], "--array: more than the 1,000 jobs that one submission may have; divide it"),
        (["--array", "5%", "--", "x"], "--array: after % expected how many of its jobs may hold GPUs at once, such as "
                                       "0-99%10, got '5%'"),
        (["--array", "5%x", "--", "x"], "--array: after % expected how many of its jobs may hold GPUs at once, such as "
                                        "0-99%10, got '5%x'"),
        (["--after", "nobody", "--", "x"], "after: there is no job 'nobody', and no app of this tenant is called so"),
        (["--after", "9-3", "--", "x"], "after: expected the lower id first, got '9-3'"),
        (["--after", "1:started", "--", "x"], "after: expected ids or names of jobs, and ended, succeeded or failed, such "
                                              "as 17, 17:succeeded or 17,20-29:failed, got '1:started'"),
        (["--begin", "soon", "--", "x"], "--begin: expected a moment such as 16:00, tomorrow, now+2h, 2026-11-20 or "
                                         "2026-11-20T16:00, with Z or +01:00 if it is not local time, got 'soon'"),
        (["--finish-by", "1h", "--", "x"], "--finish-by: expected a moment such as 16:00, tomorrow, now+2h, 2026-11-20 or "
                                           "2026-11-20T16:00, with Z or +01:00 if it is not local time, got '1h'"),
        (["--begin", "2033-05-18T03:33:20Z", "--finish-by", "2033-05-18Z", "--", "x"],
         "deadline: expected a moment after begin, which is 2033-05-18 03:33:20Z"),
        (["--array", "2", "--sweep", "A=1", "--", "x"], "--array and --sweep do not go together; give the index as one more "
                                                        "variable of the sweep"),
        (["--deadline", "x", "--", "x"], "--deadline: not a duration: 'x' (give seconds, or e.g. 90s, 15m, 1h30m, 7d)"),
        (["--preemption", "no", "--", "x"], "Invalid value for '--preemption': 'no' is not one of 'checkpoint', 'restart', "
                                            "'never'. (see poise submit --help)"),
        (["--", ""], "command: the program has no name"),
        (["--cwd", "~nobody-of-this-name", "--", "x"], "--cwd: there is no home folder '~nobody-of-this-name'"),
        (["--sweep", "A=", "--", "x"], "--sweep: A has no values; e.g. LR: [0.1, 0.01]"),
        (["-g", "2", "python", "x.py", "--xyzzy", "1"], "No such option '--xyzzy'. A command goes after --: poise submit -- "
                                                        "python train.py (see poise submit --help)"),
        (["--xyzzy", "1", "--", "x"], "No such option '--xyzzy'. (see poise submit --help)"),
    ],
)  # fmt: skip
def test_a_wrong_submission_gets_one_line_and_nothing_is_made(words: list[str], said: str, api: Api, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("print()\n")
    (tmp_path / "job.yaml").write_text("run: x\n")
    (tmp_path / "typo.yaml").write_text("run: x\ngups: 2\n")
    assert poise("submit", *words).refusal == said
    assert len(api.engine.jobs) == 2


def test_jobs_to_wait_for_are_named_by_id_name_or_app_and_sent_as_ids(api: Api) -> None:
    for number, app in enumerate(("prep", "prep", "other"), start=11):
        api.engine.jobs[str(number)] = Kept("admins", JobRequest(command=("x",), name=f"{app}-{number}", app=app))
    api.engine.jobs["14"] = Kept("theirs", JobRequest(command=("x",), app="prep"))  # an app is its tenant's own
    words = ("--after", "other-13", "--after", "prep:succeeded", "--after", "7,9-10:failed", "--after", "job-0")
    assert poise("submit", *words, "--", "x").code == 0
    assert [*api.engine.jobs.values()][-1].request.after == ("13", "11-12:succeeded", "7,9-10:failed", "job-0")
    shown = poise("show", [*api.engine.jobs][-1]).out
    assert "13, 11-12:succeeded, 7,9-10:failed, job-0" in shown


def test_times_and_caps_are_fields_of_the_request_and_shown(api: Api) -> None:
    words = ("--begin", "2033-05-18T03:33:20Z", "--finish-by", "2033-05-18T05:33:20+01:00", "--array", "3-9:2,20%2")
    assert poise("submit", *words, "-n", "a", "--", "x").code == 0
    requests = [kept(api, f"job-{number}") for number in range(2, 7)]
    assert {(each.begin, each.deadline, each.array_cap) for each in requests} == {(2e9, 2e9 + 3600, 2)}
    assert [each.env["ARRAY_INDEX"] for each in requests] == ["3", "5", "7", "9", "20"]
    assert [each.name for each in requests] == ["a-3", "a-5", "a-7", "a-9", "a-20"]
    assert len({each.array for each in requests}) == 1
    poise("submit", "--array", "3%2", "-n", "a", "--", "x")
    assert kept(api, "job-7").array != requests[0].array  # another array, with a cap of its own
    shown = poise("show", "job-2").out
    for fact in ("2033-05-18 03:33:20Z", "2033-05-18 04:33:20Z", "2 of its array"):
        assert fact in shown


def test_an_option_for_an_array_replaces_that_of_the_file_with_its_cap(api: Api, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "run: x\narray: 0-99%10\nafter: [job-0, job-1:succeeded]\nbegin: 2033-05-18T03:33:20Z\n"
    )
    jobs = poise("submit", "--dry-run", "--json", "job.yaml").json
    assert (len(jobs), jobs[0]["array_cap"], jobs[0]["begin"]) == (100, 10, 2e9)
    assert jobs[0]["after"] == ["job-0", "job-1:succeeded"]
    jobs = poise("submit", "--dry-run", "--json", "--array", "2", "--after", "job-1", "job.yaml").json
    assert [(each.get("array_cap"), each["after"]) for each in jobs] == [(None, ["job-1"])] * 2
    jobs = poise("submit", "--dry-run", "--json", "--sweep", "A=1,2", "job.yaml").json
    assert [each.get("array_cap") for each in jobs] == [None] * 2


def test_a_refusal_of_the_server_is_one_line(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    as_role(api, monkeypatch, "user")
    said = poise("submit", "--tenant", "theirs", "--", "x").refusal
    assert said == "tenant: token 'user' is of tenant mine, not of theirs"
    said = poise("submit", "--tenant", "theirs", "--array", "2", "--", "x").refusal
    assert said == "jobs[0].tenant: token 'user' is of tenant mine, not of theirs"
    assert "token" in poise("use", "las").refusal
    assert "theirs" in poise("logs", "job-1").refusal


def test_queue_has_its_forms(api: Api) -> None:
    table = poise("queue")
    assert (table.code, table.err) == (0, "")
    assert next(line.split() for line in table.out.splitlines() if "job-" in line)[:6] == [
        "1", "job-0", "job-0", "mine", "1", "any",
    ]  # fmt: skip
    document = poise("queue", "--json").json
    assert [(row["id"], row["submitted"], row["waited"]) for row in document["jobs"]] == [
        ("job-0", "2023-11-14T22:13:20.000Z", 0.0),
        ("job-1", "2023-11-14T22:13:20.000Z", 0.0),
    ]
    assert poise("queue", "-o", "json").json == document == yaml.safe_load(poise("queue", "-o", "yaml").out)
    rows = list(csv.DictReader(io.StringIO(poise("queue", "-o", "csv").out)))
    assert [(row["id"], row["reason"], row["reason_text"]) for row in rows] == [
        ("job-0", "capacity", "no GPU is free"),
        ("job-1", "capacity", "no GPU is free"),
    ]


def ids(*words: str) -> list[str]:
    return [row["id"] for row in poise("queue", *words, "--json").json["jobs"]]


def test_queue_chooses_by_state_tenant_and_app(api: Api) -> None:
    api.engine.jobs["job-2"] = Kept("mine", JobRequest(command=("x",), app="tuning"), JobState.FAILED)
    api.engine.jobs["job-3"] = Kept("mine", JobRequest(command=("x",), app="tuning"))
    assert ids() == ["job-0", "job-1", "job-3"]
    assert ids("--state", "ended") == ids("--state", "failed,Succeeded") == ["job-2"]
    assert ids("--state", "all") == ["job-0", "job-1", "job-2", "job-3"]
    assert ids("--tenant", "theirs") == ["job-1"]
    assert poise("queue", "--tenant", "nobody").out == "no jobs\n"
    assert ids("--app", "tuning") == ["job-3"]
    assert poise("queue", "--state", "runing").refusal.startswith("unknown state 'runing'; did you mean running")
    assert poise("queue", "--watch", "--json").refusal == "--watch draws tables; ask again and again for -o json"


def test_queue_shows_fifty_rows_unless_asked_for_more(api: Api) -> None:
    for number in range(2, 1_500):
        api.engine.jobs[f"job-{number}"] = Kept("mine", JobRequest(command=("x",)))
    said = poise("queue")
    assert sum("job-" in line for line in said.out.splitlines()) == 50
    assert said.err == "50 of 1,500 jobs are shown; --all shows all\n"
    assert len(ids("--limit", "1200")) == 1_200
    assert ids("--all") == [f"job-{number}" for number in range(1_500)]


def test_show_and_why_tell_of_one_job(api: Api) -> None:
    said = poise("show", "job-0").out
    assert said.startswith("job-0\n")
    assert "no GPU is free (capacity)" in said
    assert "python train.py" in said
    assert poise("show", "job-0", "--json").json["job"]["submitted"] == "2023-11-14T22:13:20.000Z"
    assert poise("why", "job-0").out == "job-0 PENDING: no GPU is free (capacity)\n"
    assert poise("why", "job-0", "--json").json["reason"]["code"] == "capacity"


OF_A_JOB = ["show", "why", "logs", "cancel", "hold", "release", "wait"]
"""Verbs that are given a job."""


@pytest.mark.parametrize("verb", OF_A_JOB)
def test_a_job_that_is_not_there_gets_the_nearest_that_are(verb: str, api: Api) -> None:
    assert poise(verb, "job-9").refusal == "there is no job 'job-9'; did you mean job-1 or job-0?"
    assert poise(verb, "zzz").refusal == "there is no job 'zzz'; `poise queue` lists those that there are"
    assert "is no name of a job" in poise(verb, "../x").refusal


def put(api: Api, job: str, name: str, state: JobState = JobState.PENDING, tenant: str = "mine") -> None:
    api.engine.jobs[job] = Kept(tenant, JobRequest(command=("x",), name=name), state)


@pytest.mark.parametrize("verb", OF_A_JOB)
@pytest.mark.parametrize("word", ["resnet50", "res"])
def test_a_job_may_be_given_by_its_name_or_how_that_begins_if_it_is_one_job(verb: str, word: str, api: Api) -> None:
    done = JobState.SUCCEEDED if verb == "wait" else JobState.PENDING
    put(api, "a17", "resnet50", done)
    assert poise(verb, word).out == poise(verb, "a17").out != ""
    put(api, "a17", "resnet50", done)
    put(api, "a18", "resnet50", done)
    before = dict(api.engine.jobs)
    what = "several jobs are called 'resnet50'" if word == "resnet50" else "names of 2 jobs begin with 'res'"
    advice = "give the id of one" if word == "resnet50" else "give more of the name, or the id of one"
    ids = f"a17 ({done}), a18 ({done})" if word == "resnet50" else f"a17 resnet50 ({done}), a18 resnet50 ({done})"
    assert poise(verb, word).refusal == f"{what}: {ids}; {advice}"
    assert api.engine.jobs == before, "nothing is done to any of them"


def test_whole_names_come_before_beginnings_live_jobs_before_ended_ones_and_ones_own_before_others(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(word: str) -> str:
        return str(poise("show", word, "--json").json["job"]["id"])

    put(api, "a1", "fit-long", JobState.RUNNING)
    put(api, "a2", "fit", JobState.FAILED)
    assert found("fit") == "a2"
    assert found("fi") == "a1"
    put(api, "a3", "fit", JobState.PENDING, "theirs")
    assert found("fit") == "a3"
    as_role(api, monkeypatch, "user")
    put(api, "a4", "fit", JobState.PENDING, "mine")
    assert found("fit") == "a4"
    assert found("fit-") == "a1"
    as_role(api, monkeypatch, "admin")
    assert "a3 (PENDING), a4 (PENDING)" in poise("show", "fit").refusal


def test_a_number_is_an_id_and_no_beginning_of_a_name(api: Api) -> None:
    put(api, "a1", "17-rates")
    assert poise("cancel", "17").refusal.startswith("there is no job '17'")
    assert poise("show", "17-", "--json").json["job"]["id"] == "a1"


def test_of_many_jobs_that_could_be_meant_some_are_named(api: Api) -> None:
    for number in range(30):
        put(api, f"a{number}", f"fit-{number}")
    said = poise("cancel", "fit").refusal
    assert said.startswith("names of 30 jobs begin with 'fit': a0 fit-0 (PENDING), a1 fit-1 (PENDING), ")
    assert said.endswith(", a9 fit-9 (PENDING), …; give more of the name, or the id of one")
    assert not any(kept.state.is_final for kept in api.engine.jobs.values())


def test_all_jobs_are_those_of_ones_own_tenant_or_for_operators_of_all(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    put(api, "a1", "one", JobState.RUNNING)
    put(api, "a2", "two", JobState.SUCCEEDED)
    as_role(api, monkeypatch, "user")
    assert poise("cancel", "--state", "running").out == "1 job RUNNING of tenant mine cancelled\n"
    assert poise("cancel", "--all", "--json").json == {"tenant": "mine", "jobs": 1}
    assert poise("cancel", "--all").refusal == "there are no jobs of tenant mine that have not ended"
    assert poise("cancel", "--all", "--tenant", "theirs").refusal.endswith("only operators may do that")
    as_role(api, monkeypatch, "operator")
    assert poise("cancel", "--state", "pending").refusal == (
        "an operator says whose jobs are meant: --tenant NAME, or --all for those of all tenants"
    )
    assert poise("cancel", "--all", "--state", "pending,paused").out == "1 job PENDING or PAUSED of all tenants cancelled\n"
    assert {job: kept.state.value for job, kept in api.engine.jobs.items()} == {
        "job-0": "CANCELLED", "job-1": "CANCELLED", "a1": "CANCELLED", "a2": "SUCCEEDED",
    }  # fmt: skip


def test_jobs_of_an_app_in_some_states_are_one_command(api: Api) -> None:
    assert poise("submit", "--app", "sweep", "--array", "3", "--", "x").code == 0
    api.engine.jobs["job-3"] = replace(api.engine.jobs["job-3"], state=JobState.RUNNING)
    said = poise("cancel", "--app", "sweep", "--state", "pending", "--tenant", "admins")
    assert said.out == "2 jobs PENDING of app sweep of tenant admins cancelled\n"
    assert api.engine.jobs["job-3"].state is JobState.RUNNING
    assert api.engine.jobs["job-0"].state is JobState.PENDING


@pytest.mark.parametrize(("role", "verb"), [("operator", "cancel"), ("operator", "hold"), ("user", "cancel")])
def test_whoever_sits_at_a_terminal_is_asked_before_all_jobs_are_meant(
    role: str, verb: str, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_role(api, monkeypatch, role)
    monkeypatch.setattr("poise.cli.control.can_ask", lambda: True)
    before = dict(api.engine.jobs)
    done = {"cancel": "cancelled", "hold": "held"}[verb]
    asked = "1 job of tenant mine" if role == "user" else "2 jobs of all tenants"
    said = poise(verb, "--all", stdin=b"n\n")
    assert (said.code, said.out) == (1, "")
    assert said.err.endswith(f"{verb.capitalize()} {asked}? [y/N]: poise: nothing was {done}\n")
    assert api.engine.jobs == before
    assert poise(verb, "--all", "--yes").code == 0
    assert api.engine.jobs != before


def test_hold_and_release_take_the_jobs_of_a_choice_that_they_change(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    put(api, "a1", "one", JobState.RUNNING)
    as_role(api, monkeypatch, "user")
    assert poise("hold", "--state", "running").out == "a1 PAUSED\n"
    assert poise("release", "--all").refusal == "there are no jobs of tenant mine that are held"
    assert poise("hold", "--all").out == "job-0 PAUSED\na1 PAUSED\n"


WRONG_CHOICES = {
    "17 --all": "--all chooses jobs by what they have in common; leave 17 out, or --all",
    "17 18 --state pending": "--state chooses jobs by what they have in common; leave 17 18 out, or --state",
    "--state": "Option '--state' requires an argument.",
    "--state ended": "unknown state 'ended'; ",
    "--state held": "unknown state 'held'; ",
    "--state PENDING,": "unknown state ''; ",
    "--state failed": "--state failed: nothing can be done to jobs that have ended; expected pending, starting, ",
    "--all --state running": "there are no jobs RUNNING of all tenants that",
    "--all --app nosuch": "there are no jobs of app nosuch of all tenants that",
    "--state pending --app nosuch --tenant mine": "there are no jobs PENDING of app nosuch of tenant mine that",
    "--all --tenant ../x": "tenant: ",
    "": "name a job, several, an app with --app, or take --all",
}


@pytest.mark.parametrize("verb", ["cancel", "hold", "release"])
@pytest.mark.parametrize("words", WRONG_CHOICES)
def test_choices_that_make_no_sense_are_refused_in_one_line_and_change_nothing(words: str, verb: str, api: Api) -> None:
    before = dict(api.engine.jobs)
    assert WRONG_CHOICES[words] in poise(verb, *words.split()).refusal
    assert api.engine.jobs == before


def test_what_happened_to_a_job_is_told_by_its_name_as_well(api: Api) -> None:
    assert poise("submit", "-n", "resnet50", "--", "x").code == 0
    assert poise("events", "--job", "resnet50").out == poise("events", "--job", "job-2").out != ""


def test_an_id_is_never_taken_for_a_name(api: Api) -> None:
    api.engine.jobs["a17"] = Kept("mine", JobRequest(command=("x",), name="job-0"))
    assert poise("cancel", "job-0").out == "job-0 CANCELLED\n"
    assert api.engine.jobs["a17"].state is JobState.PENDING


def test_variables_come_from_files_then_options_and_from_the_shell(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "s3")
    (tmp_path / "job.yaml").write_text("run: x ${B}\nenv: {A: file, B: file, C: file, D: file}\n")
    (tmp_path / "one.env").write_text("B=one\nC=one\nD=one\n")
    (tmp_path / "two.env").write_text("C=two\nD=two\n")
    words = ("--env-file", "one.env", "--env-file", "two.env", "--env", "D=option", "--env", "SECRET")
    assert poise("submit", "job.yaml", *words).code == 0
    got = kept(api, "job-2")
    assert got.env == {"A": "file", "B": "one", "C": "two", "D": "option", "SECRET": "s3"}
    assert got.command == ("x", "one")


def test_ids_alone_are_one_a_line(api: Api) -> None:
    said = poise("submit", "-q", "--array", "2", "--", "fit")
    assert (said.out, said.err) == ("job-2\njob-3\n", "")


def test_the_virtual_environment_of_the_shell_is_sent_and_shown(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = tmp_path / "env"
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").touch()
    (venv / "bin" / "python").touch(mode=0o755)
    monkeypatch.setenv("VIRTUAL_ENV", str(venv))
    said = poise("submit", "--", "python", "x.py").out
    assert f"\nruns in the virtual environment {venv} (--no-venv: in none)\n" in said
    assert f"virtual env  {venv}" in poise("show", "job-2").out
    assert poise("submit", "--json", "--", "x").json == {"jobs": ["job-3"], "venv": str(venv)}
    assert poise("submit", "--dry-run", "--json", "--", "x").json["venv"] == str(venv)
    (tmp_path / "s.sbatch").write_text("#!/bin/bash\n#SBATCH --gpus=1 --array=0-1\npython x.py\n")
    assert [each["venv"] for each in poise("submit", "--dry-run", "--json", "s.sbatch").json] == [str(venv)] * 2
    assert "virtual" not in poise("submit", "--no-venv", "--", "x").out
    (tmp_path / "none.yaml").write_text("run: x\nvenv: none\n")
    (tmp_path / "other.yaml").write_text("run: x\nvenv: other\n")
    assert "venv" not in poise("submit", "--dry-run", "--json", "none.yaml").json
    assert poise("submit", "--dry-run", "--json", "other.yaml").json["venv"] == str(tmp_path / "other")
    assert poise("submit", "--dry-run", "--json", "none.yaml", "--venv", "mine").json["venv"] == str(tmp_path / "mine")


def test_a_priority_is_noted_to_have_no_effect(api: Api) -> None:
    said = poise("submit", "--dry-run", "--priority", "7", "--", "x")
    assert said.err.startswith("note: priority 7 has no effect: ")
    assert poise("submit", "--priority", "7", "--", "x").err == said.err
    assert "7; no policy of the catalogue looks at priorities" in poise("show", "job-2").out


def test_waiting_ends_with_all_jobs_and_with_their_worst_exit_code(api: Api) -> None:
    for number, state in enumerate((JobState.SUCCEEDED, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)):
        api.engine.jobs[f"e{number}"] = Kept("mine", JobRequest(command=("x",)), state)
    said = poise("wait", "e0", "e1", "e0")
    assert (said.code, said.out) == (0, "e0 SUCCEEDED\ne1 SUCCEEDED\n")
    assert said.err.startswith("e0: SUCCEEDED, ")
    said = poise("wait", "-q", "e0", "e2")
    assert (said.code, said.out, said.err) == (1, "e0 SUCCEEDED\ne2 FAILED\n", "")
    said = poise("wait", "-q", "e3", "--json")
    assert (said.code, json.loads(said.out)) == (1, [{"job": "e3", "state": "CANCELLED"}])
    said = poise("wait", "-q", "e0", "job-0", "--timeout", "0.05")
    assert (said.code, said.out, said.err) == (124, "", "poise: job job-0 is PENDING after 0.05 s; it goes on\n")


def test_logs_are_printed_as_they_are(api: Api) -> None:
    assert poise("logs", "job-0").out == "epoch 1\nepoch 2\n"
    assert poise("logs", "--tail", "1", "job-0").out == "epoch 2\n"
    assert poise("logs", "--tail", "0", "job-0").out == ""
    assert poise("logs", "job-0", "--json").json == {"job": "job-0", "replica": 0, "text": "epoch 1\nepoch 2\n"}
    assert "leave one of them out" in poise("logs", "-f", "job-0", "--json").refusal


def test_wishes_are_for_one_job_several_or_an_app(api: Api) -> None:
    assert poise("hold", "job-0").out == "job-0 PAUSED\n"
    assert poise("hold", "--stop", "job-0").out == "job-0 CHECKPOINTING\n"
    assert poise("release", "job-0", "job-1").out == "job-0 PENDING\njob-1 PENDING\n"
    for number in (2, 3):
        api.engine.jobs[f"job-{number}"] = Kept("mine", JobRequest(command=("x",), app="tuning"))
    assert poise("cancel", "--app", "tuning", "--json").json == [
        {"job": "job-2", "state": "CANCELLED"},
        {"job": "job-3", "state": "CANCELLED"},
    ]
    assert poise("cancel", "--app", "tuning").refusal == "the app 'tuning' has no jobs that have not ended"
    assert poise("cancel").refusal == "name a job, several, an app with --app, or take --all"


@pytest.mark.parametrize("verb", ["cancel", "hold", "release"])
def test_an_app_that_several_tenants_have_is_that_of_the_user_or_of_the_tenant_that_an_operator_names(
    verb: str, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, tenant in enumerate(("mine", "theirs", "mine"), 2):
        api.engine.jobs[f"job-{number}"] = Kept(tenant, JobRequest(command=("x",), app="tuning"))

    def wished(*more: str) -> list[str]:
        said = poise(verb, "--app", "tuning", *more, "--json")
        assert (said.code, said.err) == (0, "")
        return [each["job"] for each in json.loads(said.out)]

    several = "the app 'tuning' is of several tenants: mine, theirs; say whose with --tenant"
    assert poise(verb, "--app", "tuning").refusal == several
    assert {each.state for each in api.engine.jobs.values()} == {JobState.PENDING}
    as_role(api, monkeypatch, "operator")
    assert poise(verb, "--app", "tuning").refusal == several
    assert wished("--tenant", "theirs") == ["job-3"]
    as_role(api, monkeypatch, "user")
    assert wished() == ["job-2", "job-4"]
    alone = {"cancel": "--tenant names all jobs of a tenant; leave the others out"}
    want = alone.get(verb, "--tenant mine says whose app is meant; name the app with --app, or add --all")
    assert poise(verb, "job-0", "--tenant", "mine").refusal == want


def test_the_app_of_another_tenant_is_not_reached_by_its_name(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.engine.jobs["job-2"] = Kept("theirs", JobRequest(command=("x",), app="tuning"))
    as_role(api, monkeypatch, "user")
    assert poise("cancel", "--app", "tuning").refusal == "the app 'tuning' of tenant mine has no jobs that have not ended"
    assert poise("cancel", "--app", "tuning", "--tenant", "theirs").code != 0
    assert api.engine.jobs["job-2"].state is JobState.PENDING


def test_of_several_wishes_those_that_can_be_met_are(api: Api) -> None:
    said = poise("cancel", "job-0", "nobody", "job-1")
    assert (said.code, said.out) == (2, "job-0 CANCELLED\njob-1 CANCELLED\n")
    assert said.err.startswith("poise: nobody: there is no job 'nobody'")
    assert poise("cancel", "job-0").out == "job-0 CANCELLED\n"
    said = poise("hold", "job-0", "job-1", "--json")
    assert [each["error"] for each in json.loads(said.out)] == ["job job-0 has ended", "job job-1 has ended"]
    said = poise("hold", "job-0", "--json")
    assert (said.code, said.err) == (2, "poise: job job-0 has ended\n")
    assert json.loads(said.out) == [{"job": "job-0", "error": "job job-0 has ended"}]


def test_nodes_are_shown_with_who_holds_them(api: Api) -> None:
    said = poise("nodes").out
    assert said.startswith("1 node, 4 GPUs, 3 free\n")
    assert "gpu-0 gpu 4 3 rack-0 up job-0" in " ".join(said.split())
    assert poise("nodes", "--json").json["nodes"][0]["jobs"] == ["job-0", None, None, None]


def test_nodes_that_are_not_up_say_since_when_and_why(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"gpu_type": "v100", "gpus": 2, "free": 2, "rack": "r", "alive": True, "jobs": (None, None), "available": 0}
    drained = {"drained": 100.0, "drained_by": "ops", "drain_reason": "new driver"}
    more: dict[str, dict[str, object]] = {
        "up": {"available": 2, "state": "up"},
        "away": {"state": "unreachable", "since": 60.0, "evidence": "no word for 30 s", "available": 2},
        "lost": {"state": "lost", "alive": False, "since": 61.0, "evidence": "silent", **drained},
        "busy": {"state": "up", "withheld": (1,), "available": 1, "evidence": "others use it", "since": 1.0},
        "draining": {"state": "draining", **drained, "jobs": ("7", None), "leaving": (None, "8"), "free": 0},
        "drained": {"state": "drained", **drained, "emptied": 120.0},
    }
    rows = tuple(NodeRow.model_validate({"name": name, **plain, **changes}) for name, changes in more.items())
    monkeypatch.setattr(api.engine, "nodes", lambda: NodeList(nodes=rows))
    heading, _, columns, _, *lines = poise("nodes").out.splitlines()
    assert heading == "6 nodes, 12 GPUs, 5 free"
    assert columns.split() == ["NODE", "TYPE", "GPUS", "FREE", "RACK", "STATE", "SINCE", "JOBS", "WHY"]
    found = [" ".join(line.split()) for line in lines]
    assert found[0] == "up v100 2 2 r up – – –"
    assert found[1] == "away v100 2 2 r unreachable 1970-01-01 00:01:00Z – no word for 30 s"
    assert found[2] == "lost v100 2 0 r lost 1970-01-01 00:01:01Z – silent; drained by ops: new driver"
    assert found[3] == "busy v100 2 1 r up, 1 withheld 1970-01-01 00:00:01Z – others use it"
    assert found[4] == "draining v100 2 0 r draining 1970-01-01 00:01:40Z 7 (8 leaves) drained by ops: new driver"
    assert found[5] == "drained v100 2 0 r drained 1970-01-01 00:01:40Z – drained by ops: new driver"
    document = poise("nodes", "--json").json["nodes"]
    assert (document[5]["drained"], document[5]["emptied"]) == ("1970-01-01T00:01:40.000Z", "1970-01-01T00:02:00.000Z")
    monkeypatch.setattr(api.engine, "nodes", lambda: NodeList(nodes=()))
    assert poise("nodes").out == "no node has joined yet\n"


def test_nodes_are_drained_and_returned(api: Api) -> None:
    said = poise("drain", "gpu-0", "--reason", "new driver", "--no-wait")
    assert (said.code, said.out, said.err) == (0, "gpu-0 is drained; 0 runs still there\n", "")
    assert "draining" in poise("nodes").out
    found = poise("drain", "gpu-0", "gpu-0", "--no-wait", "--json").json
    assert [(each["name"], each["state"], each["drained_by"]) for each in found] == [("gpu-0", "draining", "admin")]
    assert poise("return", "gpu-0").out == "gpu-0 up: takes new runs\n"
    assert [each["state"] for each in poise("return", "gpu-0", "--json").json] == ["up"]


def test_of_several_nodes_those_that_there_are_are_drained(api: Api) -> None:
    said = poise("drain", "gpu-1", "gpu-0", "--no-wait", "--json")
    assert said.code == 2
    assert "poise: gpu-1: unknown node 'gpu-1'; known: gpu-0\n" in said.err
    assert [each.get("error", each.get("state")) for each in json.loads(said.out)] == [
        "unknown node 'gpu-1'; known: gpu-0",
        "draining",
    ]
    assert poise("drain", "gpu-1").refusal == "unknown node 'gpu-1'; known: gpu-0"
    assert poise("return", "a/b").refusal.startswith("node: 'a/b' is no name of a node")
    assert "Missing argument 'NODE...'" in poise("drain").refusal
    assert "reason" in poise("drain", "gpu-0", "--reason", "").refusal


def test_waiting_for_a_node_ends_when_somebody_gives_it_back(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poise.cli.nodes.EVERY", 0.01)
    [row] = api.engine.nodes().nodes
    run = {"job": "7", "name": "fit", "tenant": "t", "epoch": 1, "slots": (0, 1), "leaving": False, "stays": "it is new"}
    there = {"state": NodeCondition.DRAINING, "drained": 1.0, "drained_by": "ops"}
    seen = iter([
        row.model_copy(update={**there, "runs": (NodeRun.model_validate(run),)}),
        row.model_copy(update={**there, "runs": (NodeRun.model_validate(run | {"leaving": True, "stays": None}),)}),
        row.model_copy(update=there),
        row,
    ])  # fmt: skip
    first = next(seen)
    monkeypatch.setattr(api.engine, "drain", lambda _by, _node, _reason: done(first))
    monkeypatch.setattr(api.engine, "nodes", lambda: NodeList(nodes=(next(seen),)))
    said = poise("drain", "gpu-0")
    assert said.code == 1
    assert said.out.splitlines() == [
        "gpu-0 is drained; 1 run still there",
        "  job 7 (fit, tenant t) on GPUs 0, 1 is still there: it is new",
        "  job 7 (fit, tenant t) on GPUs 0, 1 was asked to leave, and leaves",
        "  job 7 (fit, tenant t) on GPUs 0, 1 has left gpu-0",
        "gpu-0 was given back before it was empty",
    ]


def test_shares_of_the_service_are_shown_and_set(api: Api, tmp_path: Path) -> None:
    assert "mine 1 50% 0% 0 0 1 0 0" in " ".join(poise("shares").out.split())
    found = poise("shares", "--set", "mine=2.5", "--set", "theirs=1", "--json").json
    assert [(each["tenant"], each["weight"]) for each in found["tenants"]] == [("mine", 2.5), ("theirs", 1.0)]
    assert poise("shares", "--set", "mine").refusal == "--set: expected TENANT=WEIGHT, got 'mine'"
    assert poise("shares", "--set", "mine=x").refusal == "--set: expected mine=WEIGHT, a number, got 'mine=x'"
    assert poise("shares", "--set", "mine=7", "--set", "x=0").refusal == "weight: expected at least 0.001, got 0.0"
    assert [each["weight"] for each in poise("shares", "--json").json["tenants"]] == [2.5, 1.0]
    assert poise("shares", "--set", "a=1", tmp_path).refusal == "--set changes the running service; leave JOURNAL out"


def test_events_are_lines_of_time_actor_objects_and_a_sentence(api: Api) -> None:
    poise("hold", "job-0")
    poise("cancel", "job-1")
    want = [
        "[2023-11-14 22:13:20Z] [admin] [job-0 mine] paused by admin",
        "[2023-11-14 22:13:20Z] [admin] [job-1 theirs] cancelled by admin",
    ]
    assert poise("events").out.splitlines() == want
    assert poise("events", "--limit", "1").out.splitlines() == want[1:]
    assert poise("events", "--job", "job-0").out.splitlines() == want[:1]
    found: Any = poise("events", "--tenant", "theirs", "--json").json
    assert [(each["kind"], each["time"]) for each in found["events"]] == [("cancelled", "2023-11-14T22:13:20.000Z")]


def test_use_changes_the_policy_and_a_wrong_one_gets_the_nearest(api: Api) -> None:
    assert poise("use", "las").out == "las on gpu:4\n"
    assert api.engine.current == "las"
    assert poise("use", "max-mim").refusal == "unknown policy 'max-mim'; did you mean max-min?"


@pytest.mark.parametrize(
    "verb", ["submit", "queue", "show", "logs", "cancel", "hold", "release", "why", "nodes", "events", "shares", "use"]
)
def test_every_verb_has_help_with_an_example(verb: str, api: Api) -> None:
    said = poise(verb, "--help")
    assert said.code == 0
    assert f"  poise {verb}" in said.out.partition("Example")[2]
