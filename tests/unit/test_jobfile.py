"""Job files: what they mean, and the one line that a wrong one gets."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.scheduler.model.errors import RequestError
from poise.service.wire.jobfile import KEYS, MOST_BYTES, MOST_VALUES, read_job_file
from poise.service.wire.request import MOST_JOBS, JobRequest, PreemptionMode, Replicas

WHOLE = """\
name: resnet50
gpus: {count: 4, any_of: [A100, V100]}
setup: pip install -r requirements.txt
run: python train.py --lr ${LR}
env: {LR: "0.1"}
checkpoint: {every: 10m, deadline: 60s}
retry: {on_errors: 3, exit_codes: [137]}
max_duration: 12h
"""


def one(text: str) -> JobRequest:
    (request,) = read_job_file(text)
    return request


def refusal(text: str) -> str:
    with pytest.raises(RequestError) as caught:
        read_job_file(text)
    said = str(caught.value)
    assert "\n" not in said
    return said


def test_a_job_file_says_what_a_request_says() -> None:
    assert one(WHOLE) == JobRequest.model_validate(
        {
            "name": "resnet50",
            "command": ("python", "train.py", "--lr", "0.1"),
            "setup": ("pip", "install", "-r", "requirements.txt"),
            "gpus": 4,
            "gpu_types": ("a100", "v100"),
            "env": {"LR": "0.1"},
            "checkpoint": {"every": 600.0, "deadline": 60.0},
            "retry": {"on_errors": 3, "exit_codes": (137,)},
            "max_duration": 43_200.0,
        }
    )


def test_every_other_key_is_understood_too() -> None:
    got = one(
        "run: [./train]\ntenant: vision\napp: tuning\nmodel: ResNet-50\nbatch_size: 64\nmicro_batches: 8\nsteps: 1e4\n"
        "duration: 3h12m\nweight: 2\npriority: -3\npreemption: restart\nreplicas: gpu\ncwd: /data\nhold: yes\n"
        "limits: {memory: 8GB, cpu_seconds: 2h, open_files: 1024, processes: 64}\n"
    )
    assert (got.tenant, got.app, got.model, got.batch_size, got.micro_batches) == ("vision", "tuning", "ResNet-50", 64, 8)
    assert (got.steps, got.duration, got.weight, got.priority, got.hold) == (10_000.0, 11_520.0, 2.0, -3, True)
    assert (got.preemption, got.replicas, got.cwd) == (PreemptionMode.RESTART, Replicas.GPU, "/data")
    assert got.limits.model_dump() == {"memory": 8 * 10**9, "cpu_seconds": 7_200, "open_files": 1_024, "processes": 64}


@pytest.mark.parametrize(
    ("gpus", "want"),
    [
        ("4", (4, None, None, ())),
        ("1..4", (4, 1, 4, ())),
        ("{count: 2..2}", (2, 2, 2, ())),
        ("{any_of: V100}", (1, None, None, ("v100",))),
        ("{count: 3, any_of: [K80, k80]}", (3, None, None, ("k80",))),
    ],
)
def test_gpus_are_a_number_a_range_or_keys(gpus: str, want: tuple[object, ...]) -> None:
    got = one(f"run: x\ngpus: {gpus}")
    assert (got.gpus, got.min_gpus, got.max_gpus, got.gpu_types) == want


def test_values_of_env_are_the_text_that_was_written() -> None:
    got = one("run: x\nenv: {A: 0.10, B: yes, C: 1_000, D: 2026-01-01, E: '', F: 0x1F, G: 12:30:00, H: .5e3}")
    want = {"A": "0.10", "B": "yes", "C": "1_000", "D": "2026-01-01", "E": "", "F": "0x1F", "G": "12:30:00", "H": ".5e3"}
    assert got.env == want


def test_a_relative_folder_begins_at_the_file(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("run: x\ncwd: runs\n")
    assert read_job_file(tmp_path / "job.yaml")[0].cwd == str(tmp_path / "runs")


def test_an_array_is_so_many_jobs_that_know_their_index() -> None:
    jobs = read_job_file("name: seed\nrun: train --seed ${ARRAY_INDEX}\narray: 3")
    assert [job.name for job in jobs] == ["seed-0", "seed-1", "seed-2"]
    assert {job.app for job in jobs} == {"seed"}
    assert [job.command[-1] for job in jobs] == ["0", "1", "2"]
    assert {job.env["ARRAY_COUNT"] for job in jobs} == {"3"}


def test_a_sweep_is_every_combination_and_the_last_variable_changes_fastest() -> None:
    jobs = read_job_file(
        "run: [python, src/fit.py, '${LR}', '${OTHER}']\nenv: {X: 1}\nsweep: {LR: [0.1, 1e-2], SEED: [1, 2]}"
    )
    assert [(job.env["LR"], job.env["SEED"], job.env["X"]) for job in jobs] == [
        ("0.1", "1", "1"),
        ("0.1", "2", "1"),
        ("1e-2", "1", "1"),
        ("1e-2", "2", "1"),
    ]
    assert {job.app for job in jobs} == {"fit"}
    assert jobs[2].command == ("python", "src/fit.py", "1e-2", "${OTHER}")  # nobody sets that one: it stands as it is


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run: x\n\ngpu: 4", "job:3: unknown key 'gpu'; did you mean gpus?"),
        ("run: x\ncheckpoint:\n  evry: 1m", "job:3: checkpoint: unknown key 'evry'; did you mean every?"),
        ("run: x\ngpus: {cont: 1}", "job:2: gpus: unknown key 'cont'; did you mean count?"),
        ("run: x\ngpus: 1\nrun: y", "job:3: the key 'run' stands in line 1 already"),
        ("run: x\nenv:\n  A: 1\n  A: 2", "job:4: the key 'A' stands in line 3 already"),
        ("run: x\ngpus: 0", "job:2: gpus: expected at least 1, got 0"),
        ("run: x\ngpus: 4..1", "job:2: gpus: expected the lower number first and at least 1, got '4..1'"),
        ("run: x\ngpus: four", "job:2: gpus: expected a number of GPUs such as 4, or 1..4 for an elastic job, got 'four'"),
        ("run: x\ngpus:\n  in_order: [a]", "job:3: gpus.in_order: is not supported yet; name the types with any_of"),
        ("run: x\ngpus: {memory: 24GB}", "job:2: gpus.memory: is not supported yet; name the types with any_of"),
        ("run: x\ngpus: {any_of: []}", "job:2: gpus.any_of: expected at least one GPU type; leave it out for any"),
        ("gpus: 1", "job: run: is missing; it says what to run, e.g. `run: python train.py`"),
        ("run: x ${Y}", "job:1: run: ${Y} is not set; give it in `env`"),
        ("run: x ${LR}\nenv: {LRR: 1}", "job:1: run: unknown variable 'LR'; known: LRR"),
        ("run: x\nenv: {POISE_JOB: 1}", "job:2: env: names that begin with POISE_ are Poise's own"),
        ("run: x\nenv: {a b: 1}", "job:2: env: expected names of letters, digits and `_`, got 'a b'"),
        ("run: x\nenv: {A: }", "job:2: env.A: has no value; give one, or leave the key out"),
        ("run: x\nenv: [A]", "job:2: env: expected keys with values, got a list"),
        ("run: x\nenv: A=1", "job:2: env: expected keys with values, got a single value, 'A=1'"),
        ("run: x\nenv:", "job:2: env: has no value; give one, or leave the key out"),
        ("run: x\nsweep:", "job:2: sweep: has no value; give one, or leave the key out"),
        ("run: x\ngpus: 1..4\nmicro_batches: 8", "job:3: micro_batches: a job that divides takes any number of GPUs; "
         "ask for one number, not a range"),
        ("run: x\nenv: {A: 1}\nsweep: {A: [1]}", "job:2: env: A is set for each job of the array or sweep; leave it out "
         "here"),
        ("run: x\nsweep: {A: []}", "job:2: sweep: A has no values; e.g. LR: [0.1, 0.01]"),
        ("run: x\narray: 0", "job:2: array: expected at least 1 job, got 0"),
        ("run: x\narray: 2\nsweep: {A: [1]}", "job:2: array: a job is an array or a sweep, not both; give the index as "
         "one more variable of the sweep"),
        ("run: x\npreemption: maybe", "job:2: preemption: expected 'checkpoint', 'restart' or 'never', got 'maybe'"),
        ("run: x\ncheckpoint:\n  deadline: 0", "job:3: checkpoint.deadline: expected more than 0, got 0.0"),
        ("run: x\nmax_duration: soon", "job:2: max_duration: not a duration: 'soon' (give seconds, or e.g. 90s, 15m, "
         "1h30m, 7d)"),
        ("run: x\nlimits: {memory: 8G}", "job:2: limits.memory: expected a size such as 8GB or 512MiB, got '8G'"),
        ("run: x\nretry: {exit_codes: [0]}", "job:2: retry.exit_codes: expected at least 1, got 0"),
        ("run: x\npriority: 1.5", "job:2: priority: expected a whole number, got '1.5'"),
        ("run: x\nhold: maybe", "job:2: hold: expected true or false, got 'maybe'"),
        ("run: x\nname: [a]", "job:2: name: expected a single value, got a list"),
        ("run: x\ncwd: ~nobody-of-this-name", "job:2: cwd: there is no home folder '~nobody-of-this-name'"),
        ("- run: x", "job:1: expected keys such as `run` and `gpus`; that is no job file"),
        ("", "job: is empty; expected keys such as `run` and `gpus`"),
        ("run: [x", "job:1: not YAML: expected ',' or ']', but got '<stream end>'"),
        ("run: x\x1a", "job: not YAML: it holds the control character U+001A; take it out"),
        ("run: \udcff", "job: not UTF-8 text"),
        ("run: x\n---\nrun: y", "job:2: not YAML: expected a single document in the stream but found another document"),
        ('run: !!python/object/apply:os.system ["id"]', "job:1: the tag 'tag:yaml.org,2002:python/object/apply:os.system' "
         "has no meaning here"),
        ("run: x\nenv: !mine {A: 1}", "job:2: the tag '!mine' has no meaning here"),
        ("!mine {run: x}", "job:1: the tag '!mine' has no meaning here"),
        ("run: !!python/name:os.system x", "job:1: the tag 'tag:yaml.org,2002:python/name:os.system' has no meaning here"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line_with_its_place(text: str, said: str) -> None:
    assert refusal(text) == said


def test_a_name_that_needs_quoting_is_refused() -> None:
    assert refusal("run: x\nname: a b").startswith("job:2: name: expected letters, digits, `.`, `_` and `-`")


def test_more_jobs_than_a_submission_may_have_are_refused_before_any_is_made() -> None:
    assert f"more than the {MOST_JOBS:,}" in refusal(f"run: x\narray: {MOST_JOBS + 1}")
    sweep = ", ".join(f"V{place}: [1, 2, 3, 4, 5, 6, 7, 8, 9]" for place in range(30))
    assert f"more than the {MOST_JOBS:,}" in refusal(f"run: x\nsweep: {{{sweep}}}")


@pytest.mark.slow
def test_aliases_cannot_blow_a_file_up() -> None:
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{this}: &{this} [{', '.join([f'*{last}'] * 10)}]\n" for last, this in zip("abcdef", "bcdefg", strict=True)
    )
    assert f"more than {MOST_VALUES:,} values" in refusal(bomb)
    assert "nested too deeply" in refusal("run: &a [*a]")
    assert "nested too deeply" in refusal("run: " + "[" * 5_000)


def test_an_alias_is_as_good_as_what_it_stands_for() -> None:
    assert one("run: x\nenv: {A: &v 0.10, B: *v}").env == {"A": "0.10", "B": "0.10"}


def test_a_file_that_is_too_large_absent_or_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    for content, said in ((b"#" * (MOST_BYTES + 1), "larger than 256 KiB"), (b"run: \xff", "not UTF-8 text")):
        path.write_bytes(content)
        with pytest.raises(RequestError, match=said):
            read_job_file(path)
    with pytest.raises(RequestError, match="No such file"):
        read_job_file(tmp_path / "absent.yaml")


def test_a_file_with_windows_line_ends_and_a_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbfrun: x\r\ngpus: 2\r\n")
    assert read_job_file(path)[0].gpus == 2


@given(st.dictionaries(st.sampled_from(KEYS), st.text(max_size=20), max_size=4), st.text(max_size=60))
def test_whatever_stands_in_a_file_it_is_read_or_refused_in_one_line(keys: dict[str, str], more: str) -> None:
    said = ""
    try:
        read_job_file("".join(f"{key}: {value}\n" for key, value in keys.items()) + more)
    except RequestError as error:
        said = str(error)
    assert "\n" not in said
