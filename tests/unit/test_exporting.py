"""The environment that comes along with jobs: what of it, where to, and what is said of what cannot."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fake_desk import talking

from poise.scheduler.model.errors import RequestError
from poise.service.client.config import ServerAddress
from poise.service.client.exporting import Exported, exported
from poise.service.client.submission import validated
from poise.service.wire.environments import joined, parse_export, sha256_of, text_of
from poise.service.wire.request import (
    MOST_ENVIRONMENT,
    MOST_ENVIRONMENTS,
    MOST_VARIABLES,
    JobRequest,
    Submission,
    environment_problem,
)

SETTINGS = {
    "HF_TOKEN": "secret", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO", "http_proxy": "http://p",
    "DATA_PATH": "/data", "RANKING": "x", "GROUP_NAME": "x", "HISTORY": "9", "TERMS": "3", "PATHS": "x", "MODULE": "m",
}  # fmt: skip
"""What a job can use wherever it runs."""
PLACES = {
    "PATH": "/opt/cuda/bin:/usr/bin", "LD_LIBRARY_PATH": "/opt/cuda/lib", "LD_PRELOAD": "/lib/x.so", "PYTHONPATH": "/me/lib",
    "CUDA_HOME": "/opt/cuda", "LOADEDMODULES": "cuda/12", "XDG_CACHE_HOME": "/me/cache",
}  # fmt: skip
"""What means something on this machine alone."""
NEVER = {
    "POISE_TOKEN": "t", "POISE_STATE": "/s", "CUDA_VISIBLE_DEVICES": "7", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "9",
    "MASTER_ADDR": "a", "SLURM_JOB_ID": "1", "HOME": "/me", "USER": "me", "SHELL": "/bin/zsh", "TMPDIR": "/me/tmp",
    "TERM": "xterm", "DISPLAY": ":0", "SSH_AUTH_SOCK": "/s", "TMUX": "t", "STY": "s", "DBUS_SESSION_BUS_ADDRESS": "d",
    "XDG_RUNTIME_DIR": "/run/me", "XDG_SESSION_ID": "1", "PWD": "/p", "OLDPWD": "/o", "SHLVL": "1", "_": "/bin/poise",
    "LS_COLORS": "x", "VIRTUAL_ENV": "/v", "VIRTUAL_ENV_PROMPT": "v", "CONDA_PREFIX": "/c", "CONDA_SHLVL": "1",
    "BASH_FUNC_ml%%": "() { :; }", "ARRAY_INDEX": "1", "RAY_ADDRESS": "head:6379",
    "HIP_VISIBLE_DEVICES": "1", "MPLBACKEND": "module://matplotlib_inline.backend_inline", "JPY_PARENT_PID": "1",
}  # fmt: skip
SHELL = {**SETTINGS, **PLACES, **NEVER}
JOB = JobRequest(command=("x",))


def taken(request: JobRequest, environ: dict[str, str] = SHELL, *, is_here: bool = True) -> dict[str, str]:
    """The variables that come along with one job; its request names just them."""
    sent = exported([request], environ, is_here=is_here)
    [named] = {each.exported for each in sent.requests}
    [found] = sent.environments or [{}]
    assert named == (sha256_of(text_of(found)) if found else None)
    return found


def of(export: str, **more: object) -> JobRequest:
    return JobRequest.model_validate({"command": ("x",), "export": export, **more})


@pytest.mark.usefixtures("no_venv")
def test_all_is_what_makes_sense_in_a_job_on_this_machine() -> None:
    assert taken(JOB) == taken(of("all")) == SETTINGS | PLACES


@pytest.mark.usefixtures("no_venv")
def test_paths_of_this_machine_stay_here_if_the_service_or_the_container_is_elsewhere() -> None:
    assert taken(JOB, is_here=False) == SETTINGS
    assert taken(JobRequest(command=("x",), image="pytorch")) == SETTINGS
    assert taken(of("PATH,LANG"), is_here=False) == {"PATH": PLACES["PATH"], "LANG": "C.UTF-8"}


def test_none_is_nothing_and_names_are_just_these_whatever_they_are() -> None:
    assert taken(of("none")) == {}
    assert taken(of("HOME,RANK")) == {"HOME": "/me", "RANK": "3"}
    with pytest.raises(RequestError, match=r"^export: HF_TOKN is not set in this shell; did you mean HF_TOKEN\?$"):
        taken(of("HF_TOKN"))
    with pytest.raises(RequestError, match=r"^export: al is not set in this shell; did you mean all\?$"):
        taken(of("al"))
    with pytest.raises(RequestError, match=r"^export: POISE_TOKEN: names that begin with POISE_ are Poise's own$"):
        taken(of("POISE_TOKEN"))


def test_the_path_comes_without_the_programs_of_the_active_virtual_environment(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "pyvenv.cfg").touch()
    (tmp_path / "bin" / "python").touch(mode=0o755)
    environ = {"VIRTUAL_ENV": str(tmp_path), "PATH": f"{tmp_path}/bin:/usr/bin"}
    assert taken(JOB, environ) == {"PATH": "/usr/bin"}
    assert taken(of("PATH"), environ) == {"PATH": environ["PATH"]}


def test_what_cannot_come_along_is_noted_and_an_error_only_if_it_was_asked_for() -> None:
    environ = {"A": "1", "RAW": os.fsdecode(b"\xff"), "VAST": "x" * (128 << 10)}
    sent = exported([JOB], environ, is_here=True)
    assert sent.environments == ({"A": "1"},)
    assert sent.notes == (
        "not exported: RAW (not UTF-8), VAST (131,077 bytes); a job takes 500 variables with 65,536 characters of UTF-8 in "
        "all: name what it needs (--export NAME,NAME), or take nothing along (--export none)",
    )
    for export in ("all", "A,RAW"):
        with pytest.raises(
            RequestError, match=r"^export: RAW \(not UTF-8\).* cannot come along; a job takes .*--export none\)$"
        ):
            exported([of(export)], environ, is_here=True)


def test_of_too_much_the_largest_stay_here_so_that_the_rest_and_what_the_job_is_given_fit() -> None:
    environ = {"SMALL": "1", "LARGE": "x" * 60_000, "MIDDLE": "y" * 6_000}
    sent = exported([JOB, JobRequest(command=("x",), env={"OWN": "z" * 10_000})], environ, is_here=True)
    assert sent.environments == ({"SMALL": "1", "MIDDLE": environ["MIDDLE"]},)
    assert sent.notes[0].startswith("not exported: LARGE (60,005 characters); a job takes 500 variables with 65,536 ")
    assert len({each.exported for each in sent.requests}) == 1
    many = {f"V{number:03}": "" for number in range(600)} | {"PATH": "/long/way:/bin"}
    [kept] = exported([JobRequest(command=("x",), env={"OWN": ""})], many, is_here=True).environments
    assert len(kept) == MOST_VARIABLES - 1
    assert kept["PATH"] == "/long/way:/bin"  # nothing would be found without it


def test_jobs_of_one_submission_share_what_they_get_alike() -> None:
    sent = exported([JOB, of("none"), JOB, of("A"), of("A,B")], {"A": "1", "B": "2", "C": "3"}, is_here=True)
    assert sent.environments == ({"A": "1", "B": "2", "C": "3"}, {"A": "1"}, {"A": "1", "B": "2"})
    assert [each.exported is None for each in sent.requests] == [False, True, False, False, False]
    assert sent.requests[0].exported == sent.requests[2].exported


TEXT = st.text(st.characters(exclude_characters="\0"), max_size=50)


@given(
    st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True) | TEXT.filter(bool), TEXT, max_size=30),
    st.integers(0, 3),
    st.booleans(),
)
@settings(max_examples=settings().max_examples * 2)
def test_whatever_the_shell_has_the_submission_is_one_that_the_service_takes(
    environ: dict[str, str], large: int, is_here: bool
) -> None:
    environ = environ | {f"L{number}": "ü" * 40_000 for number in range(large)}
    sent: Exported = exported([JOB], environ, is_here=is_here)
    submission = Submission(jobs=sent.requests, environments=sent.environments)
    assert Submission.model_validate_json(submission.model_dump_json(exclude_defaults=True)) == submission
    for each in submission.environments:
        whole = joined(submission.jobs[0], each)
        assert JobRequest.model_validate_json(whole.model_dump_json()) == whole
        assert environment_problem(each) is None


@pytest.mark.parametrize(
    ("text", "export", "env"),
    [
        ("all", "all", {}), ("ALL", "all", {}), ("none", "none", {}), ("NIL", "none", {}), ("A,B", "A,B", {}),
        ("A, A", "A", {}), ("A,B=1,C=x=y", "A", {"B": "1", "C": "x=y"}), ("B=1", "none", {"B": "1"}),
        ("ALL,B=", "all", {"B": ""}), ("all,A", "all", {}), ("none,A=1", "none", {"A": "1"}),
    ],
)  # fmt: skip
def test_an_export_is_written_as_for_sbatch(text: str, export: str, env: dict[str, str]) -> None:
    assert parse_export(text) == (export, env)


@pytest.mark.parametrize("text", ["", ",", "A B", "1A", "A-B=1", "all=1", "A,,B", "ü"])
def test_what_is_no_export_is_said(text: str) -> None:
    with pytest.raises(ValueError, match=r"^expected `all`, `none`, or names of variables with commas, got "):
        parse_export(text)


def test_none_excludes_the_others() -> None:
    for text in ("none,all", "A,none"):
        with pytest.raises(ValueError, match=r"^`none` does not go together with names or `all`"):
            parse_export(text)


def test_what_one_job_is_given_wins_and_more_than_fits_is_refused() -> None:
    request = JobRequest(command=("x",), env={"A": "own"}, exported="0" * 64)
    whole = joined(request, {"A": "shell", "B": "shell"})
    assert (whole.env, whole.exported) == ({"A": "own", "B": "shell"}, None)
    with pytest.raises(RequestError, match=r"^env: more than 500 variables and 65,536 characters, with what is exported; "):
        joined(request, {"C": "x" * MOST_ENVIRONMENT})


@pytest.mark.parametrize(
    ("environments", "said"),
    [
        ([{}] * (MOST_ENVIRONMENTS + 1), "environments: expected at most 8 of them"),
        ([{f"V{number}": "" for number in range(MOST_VARIABLES + 1)}], "environments: expected at most 500 of them"),
        ([{"A": "x" * MOST_ENVIRONMENT}], "environments: more than 65,536 characters"),
        ([{"POISE_JOB": "1"}], "environments: names that begin with POISE_ are Poise's own"),
        ([{"A B": "1"}], "environments: expected names of letters, digits and `_`, got 'A B'"),
        ([{"A": "1\0"}], "environments: a character in it cannot be passed on"),
        ([{"A": 1}], "environments: expected text, got 1"),
        ("A=1", "environments: expected a list, got 'A=1'"),
    ],
)
def test_environments_of_a_submission_are_bounded_and_checked(environments: object, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        validated(Submission, jobs=(JOB,), environments=environments)
    assert str(refused.value) == said


def test_a_service_is_here_if_it_left_its_address_here_or_listens_on_the_loopback(tmp_path: Path) -> None:
    assert ServerAddress("http://10.0.0.1:1", "t", home=tmp_path).is_here
    assert all(ServerAddress(f"http://{host}:1", "t").is_here for host in ("127.0.0.1", "localhost", "[::1]"))
    assert not ServerAddress("https://poise.example.org", "t").is_here


@pytest.mark.usefixtures("no_venv")
def test_the_client_sends_the_environment_once_and_tells_what_stayed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SEED", "1")
    monkeypatch.setenv("BIG", "x" * (128 << 10))
    client, desk = talking({"jobs": ["j1", "j2"], "notes": ["of the server"]})
    jobs = client.submit_all([JobRequest(command=("x",), venv=None)] * 2)
    [body] = desk.bodies
    assert body["environments"] == [{"SEED": "1"}]
    assert [each["exported"] for each in body["jobs"]] == [sha256_of(text_of({"SEED": "1"}))] * 2
    assert jobs[0].notes[0].startswith("not exported: BIG (131,076 bytes); ")
    assert jobs[0].notes[1] == "of the server"
    with pytest.raises(RequestError, match=r"^export: expected `all`, `none`, or names of variables with commas, got 'A;B'"):
        client.submit(command=["x"], export="A;B")
