"""`kubectl poise`: names of Kubernetes become jobs of Poise, and everything else is as with `poise`."""

import json
import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import httpx
import pytest
from tests.fake_desk import DETAIL, ROW, Desk, problem

from poise.cli import kubectl
from poise.cli.app import VERBS, poise
from poise.scheduler.model.errors import PoiseError, RequestError
from poise.service.backends.kubernetes import names
from poise.service.client import Client
from poise.service.server.naming import Candidate, meant
from poise.service.wire.views import JobState

FAKE = """#!{python}
import json, pathlib, sys
home = pathlib.Path({home!r})
with (home / "asked").open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
words = sys.argv[1:]
if words[:2] == ["config", "view"]:
    if "--context=none" in words:
        sys.exit("error: cannot locate context none")
    if (home / "bare").exists() and words[-1] != "--context=dev":
        sys.exit("error: current-context must exist in order to minify")
    print("current", end="")
    sys.exit(0)
if "--context=none" in words:
    sys.exit('error: context "none" does not exist')
space = next((each.partition("=")[2] for each in words if each.startswith("--namespace=")), "current")
answers = json.loads((home / "answers").read_text())
key = words[1] + "/" + words[2] if words[1] == "namespace" else space + "/" + words[2]
found = answers.get(key)
if found is None:
    sys.exit('Error from server (NotFound): %s "%s" not found' % (words[1], words[2]))
if isinstance(found, str):
    sys.exit(found)
print(json.dumps(found))
"""


class Cluster:
    """A kubectl that answers what it was told to, and notes what it was asked."""

    def __init__(self, home: Path) -> None:
        self._home = home
        program = home / "kubectl"
        program.write_text(FAKE.format(python=sys.executable, home=str(home)))
        program.chmod(0o755)
        self.has({})

    def has(self, answers: Mapping[str, Any]) -> None:
        (self._home / "answers").write_text(json.dumps(answers))

    @property
    def asked(self) -> list[list[str]]:
        noted = self._home / "asked"
        return [json.loads(line) for line in noted.read_text().splitlines()] if noted.exists() else []


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("POISE_URL", "http://server:1")
    monkeypatch.setenv("POISE_TOKEN", "secret-token")
    return Cluster(tmp_path)


def job(
    id: str, name: str, tenant: str = "vision", space: str | None = "vision", kind: str = "Job", **row: Any
) -> dict[str, Any]:
    """A job as the service shows it; space: None for one of `poise submit`."""
    pods = {"key": "key-of-a-gang", "kind": kind, "namespace": space, "name": name, "size": 1, "gpus": 1}
    request = {"command": ["x"], "pods": None if space is None else pods}
    return {**DETAIL, "job": {**ROW, "id": id, "name": name, "tenant": tenant, **row}, "request": request}


class Service:
    """A server that has these jobs."""

    def __init__(self, *jobs: dict[str, Any]) -> None:
        self._jobs = {each["job"]["id"]: each for each in jobs}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        query = request.url.params
        if request.url.path == "/v1/jobs":
            rows = [
                each["job"]
                for each in self._jobs.values()
                if each["job"]["name"] == query["name"]
                and each["job"]["tenant"] == query.get("tenant", each["job"]["tenant"])
            ]
            return httpx.Response(200, json={"jobs": rows, "total": len(rows), "counts": {}})
        if request.url.path.startswith("/v1/names/"):
            rows = [each["job"] for each in self._jobs.values()]
            named = [Candidate(row["id"], row["name"], row["tenant"], JobState(row["state"])) for row in rows]
            answer = meant(named, request.url.path.rpartition("/")[2], "vision")
            return httpx.Response(200, content=answer.model_dump_json())
        found = self._jobs.get(request.url.path.rpartition("/")[2])
        return problem(404, "not-found", "there is no such job") if found is None else httpx.Response(200, json=found)


def said(words: str, *jobs: dict[str, Any]) -> str:
    """The words of `poise`, with a service that has these jobs."""
    client = Client("http://server:1", "secret-token", transport=httpx.MockTransport(Desk([Service(*jobs)])), patience=0.0)
    with patch.object(kubectl, "connected", lambda: client):
        return " ".join(kubectl.words_of(words.split()))


def pod(name: str = "train-0", space: str = "vision", scheduler: str = "poise", **meta: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": space, **meta}, "spec": {"schedulerName": scheduler}}


def owned(by: str) -> list[dict[str, Any]]:
    return [{"kind": "Job", "name": by, "controller": True}]


def test_a_pod_that_is_bound_says_which_job_it_is(cluster: Cluster) -> None:
    cluster.has({"vision/train-0": pod(annotations={names.JOB: "17"})})
    assert said("why pod/train-0 -n vision") == "why -- 17"
    assert cluster.asked == [["get", "pod", "train-0", "--output", "json", "--namespace=vision"]]


def test_a_pod_that_poise_has_created_says_so_by_its_label(cluster: Cluster) -> None:
    cluster.has({"current/poise-17-2-0": pod("poise-17-2-0", labels={names.SERVICE: "s", names.JOB: "17"})})
    assert said("logs -f --tail 20 po/poise-17-2-0") == "logs -f --tail 20 -- 17"


@pytest.mark.parametrize(
    "meta",
    [
        {"ownerReferences": owned("train")},
        {"labels": {"jobset.sigs.k8s.io/jobset-name": "train"}, "ownerReferences": owned("train-workers-0")},
        {"annotations": {names.GANG: "train"}},
        {"labels": {"scheduling.x-k8s.io/pod-group": "train"}},
    ],
)
def test_a_pod_that_waits_is_found_by_what_it_belongs_to(cluster: Cluster, meta: dict[str, Any]) -> None:
    cluster.has({"vision/train-0": pod(**meta)})
    assert said("why pod/train-0 -n vision", job("17", "train", kind="JobSet")) == "why -- 17"


def test_a_pod_alone_is_found_by_its_own_name(cluster: Cluster) -> None:
    cluster.has({"vision/train-0": pod()})
    assert said("why train-0 -n vision", job("17", "train-0", kind="Pod")) == "why -- 17"


def test_kind_and_name_may_be_two_words_and_several_jobs_one_command(cluster: Cluster) -> None:
    jobs = job("17", "a"), job("18", "b")
    assert said("cancel job a b -n vision", *jobs) == "cancel -- 17 18"
    assert said("hold --stop jobs.batch/a -nvision", *jobs) == "hold --stop -- 17"


def test_a_job_is_looked_for_in_the_current_namespace_if_none_is_named(cluster: Cluster) -> None:
    assert said("why job/a", job("17", "a", "current", "current"), job("18", "a")) == "why -- 17"


def test_the_tenant_of_a_namespace_is_what_its_label_says(cluster: Cluster) -> None:
    cluster.has({"namespace/vision": {"metadata": {"name": "vision", "labels": {names.TENANT: "research"}}}})
    assert said("why job/a -n vision", job("16", "a", "vision"), job("17", "a", "research")) == "why -- 17"
    assert said("queue -n vision -o wide") == "queue -o wide --tenant research"
    assert said("events -n vision --limit 5") == "events --limit 5 --tenant research"


def test_whoever_may_not_read_namespaces_gets_the_name_of_it_as_tenant(cluster: Cluster) -> None:
    cluster.has({"namespace/vision": "Error from server (Forbidden): namespaces is forbidden"})
    assert said("queue --namespace=vision") == "queue --tenant vision"


def test_jobs_of_two_namespaces_of_one_tenant_are_told_apart(cluster: Cluster) -> None:
    label = {"labels": {names.TENANT: "research"}}
    cluster.has({"namespace/one": {"metadata": label}, "namespace/two": {"metadata": label}})
    jobs = job("16", "a", "research", "one"), job("17", "a", "research", "two")
    assert said("why job/a -n two", *jobs) == "why -- 17"
    assert said("why job/a -n one", *jobs) == "why -- 16"


def test_of_jobs_of_one_name_the_one_is_meant_that_has_not_ended_or_else_the_last(cluster: Cluster) -> None:
    ended = {"state": "SUCCEEDED"}
    old = job("15", "a", submitted=1.0, **ended), job("16", "a", submitted=2.0, **ended)
    assert said("why job/a -n vision", *old) == "why -- 16"
    assert said("why job/a -n vision", *old, job("14", "a", submitted=0.5)) == "why -- 14"


def test_a_job_of_another_kind_or_of_poise_submit_is_not_meant(cluster: Cluster) -> None:
    with pytest.raises(RequestError, match=r"Poise knows no Job a of namespace vision \(tenant vision\)"):
        said("why job/a -n vision", job("16", "a", kind="JobSet"), job("17", "a", space=None))
    assert said("why jobset/a -n vision", job("16", "a", kind="JobSet")) == "why -- 16"


def test_a_name_that_is_too_long_for_poise_is_found_by_what_is_left_of_it(cluster: Cluster) -> None:
    long = "a" * 70
    found = job("17", long)
    found["job"]["name"] = long[:64]
    assert said(f"why job/{long} -n vision", found) == "why -- 17"


def test_ids_and_names_of_poise_need_no_kubectl(cluster: Cluster) -> None:
    assert said("why 17", job("17", "a", space=None)) == "why -- 17"
    assert said("wait --timeout 1h a", job("17", "a", space=None)) == "wait --timeout 1h -- 17"
    assert cluster.asked == []


def test_how_a_name_begins_will_do_if_there_is_no_pod_of_that_name(cluster: Cluster) -> None:
    assert said("why re", job("17", "resnet", space=None)) == "why -- 17"
    cluster.has({"current/re": pod("re", annotations={names.JOB: "18"})})
    assert said("why re", job("17", "resnet", space=None)) == "why -- 18"


def test_a_plain_name_that_poise_does_not_know_is_that_of_a_pod(cluster: Cluster) -> None:
    cluster.has({"current/train-0": pod(annotations={names.JOB: "17"})})
    assert said("why train-0") == "why -- 17"
    with pytest.raises(RequestError, match="there is no job 'other', and no pod of that name in namespace current"):
        said("why other")


def test_events_take_a_job_as_an_option_or_as_a_word(cluster: Cluster) -> None:
    found = job("17", "a")
    assert said("events --job job/a -n vision", found) == "events --job 17"
    assert said("events --job=job/a -f -n vision", found) == "events -f --job 17"
    assert said("events job/a -n vision", found) == "events --job 17"
    assert said("events") == "events"


def test_other_verbs_are_passed_on_word_by_word(cluster: Cluster) -> None:
    for words in (
        "submit --name name --image pytorch -- python train.py -n 3 --help",
        "nodes",
        "shares --set vision=2",
        "policies",
        "--help",
    ):
        assert said(words) == words
    assert said("queue -A --limit 3") == "queue --limit 3"
    assert kubectl.words_of([]) == []


def test_options_of_kubectl_are_passed_on_to_it(cluster: Cluster) -> None:
    cluster.has({"vision/train-0": pod(annotations={names.JOB: "17"})})
    assert said("show pod/train-0 -n vision --context dev --kubeconfig=/k --json") == "show --json -- 17"
    assert cluster.asked[0][3:] == ["--output", "json", "--namespace=vision", "--context=dev", "--kubeconfig=/k"]


@pytest.mark.parametrize("option", ["-n vision", "-nvision", "--namespace vision", "--namespace=vision"])
def test_options_of_kubectl_may_stand_before_the_verb(cluster: Cluster, option: str) -> None:
    cluster.has({"vision/train-0": pod(annotations={names.JOB: "17"})})
    assert said(f"{option} queue -o wide") == "queue -o wide --tenant vision"
    assert said(f"--context dev {option} why pod/train-0") == "why -- 17"
    assert cluster.asked[-1][-2:] == ["--namespace=vision", "--context=dev"]
    assert said(f"{option} why pod/train-0 --help") == "why --help"


def test_options_of_kubectl_that_change_nothing_are_noted(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert said("nodes --context x --json") == "nodes --json"
    assert said("-n vision shares --set vision=2 -A") == "shares --set vision=2"
    assert capsys.readouterr().err.splitlines() == [
        "note: --context changes nothing: `nodes` shows what the service has",
        "note: -n changes nothing: `shares` shows what the service has",
    ]
    assert cluster.asked == []


def test_a_namespace_narrows_the_jobs_of_an_app_to_those_of_its_tenant(cluster: Cluster) -> None:
    for verb in ("cancel", "hold", "release"):
        assert said(f"{verb} --app tuning -n vision") == f"{verb} --app tuning --tenant vision"
        assert said(f"{verb} --app=tuning") == f"{verb} --app=tuning"
        assert said(f"{verb} -n vision") == verb


def test_help_says_which_names_and_options_of_kubernetes_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, usage in (
        (["--help"], "Usage: kubectl poise [OPTIONS]"),
        (["why", "--help"], "Usage: kubectl poise why [OPTIONS]"),
        (["-n", "vision", "why", "pod/x", "-h"], "Usage: kubectl poise why [OPTIONS]"),
    ):
        monkeypatch.setattr(sys, "argv", ["kubectl-poise", *words])
        with pytest.raises(SystemExit) as caught:
            kubectl.main()
        shown = capsys.readouterr().out
        assert caught.value.code == 0
        assert shown.startswith(usage)
        assert "pod/NAME  " in shown
        assert "-n, --namespace NAME" in shown
    why = poise.get_command(click.Context(poise), "why")
    assert why is not None
    assert "pod/NAME" not in (why.epilog or "")


def test_a_context_that_is_missing_is_reported(cluster: Cluster) -> None:
    with pytest.raises(PoiseError, match=r"^kubectl config view: error: cannot locate context none$"):
        said("why job/x --context none", job("17", "x", "default", "default"))
    with pytest.raises(PoiseError, match=r'^kubectl get namespace vision: error: context "none" does not exist$'):
        said("why job/x -n vision --context none", job("17", "x"))


def test_without_any_context_the_namespace_is_that_of_kubectl_itself(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "bare").touch()
    assert said("why job/x", job("17", "x", "default", "default")) == "why -- 17"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("submit -n vision -- x", "submit -n vision: Poise creates pods in the namespace of the service; leave -n out, or"
         " name the job with --name vision"),
        ("submit --context x -- x", "submit: --context does not choose the service, POISE_URL does; leave it out"),
        ("-n vision drain n1", "drain: -n does not choose the service, POISE_URL does; leave it out"),
        ("-n vision policies", "-n: `policies` asks no cluster; leave it out"),
        ("why job/a -n vision", "Poise knows no Job a of namespace vision (tenant vision). Poise takes a Job only if its"
         " pods ask for GPUs and say schedulerName: poise. For a Job that a JobSet or TrainJob made, ask for jobset/NAME"
         " or trainjob/NAME"),
        ("why jobset/a -n vision", "Poise knows no JobSet a of namespace vision (tenant vision). Poise takes a JobSet only"
         " if its pods ask for GPUs and say schedulerName: poise"),
        ("why 99", "there is no job '99'; pods cannot be looked up: kubectl get pod 99: The connection to the server"
         " localhost:8080 was refused"),
        ("why dup -n vision", "there is no job 'dup' in namespace vision; pods cannot be looked up: kubectl get pod dup:"
         " The connection to the server localhost:8080 was refused"),
        ("why pod/--all", "'--all' is no name of a Pod; expected small letters, digits, `-` and `.`"),
        ("why pod/", "'' is no name of a Pod; expected small letters, digits, `-` and `.`"),
        ("why secret/x", "'secret/x': expected pod/NAME, job/NAME, jobset/NAME, trainjob/NAME, or a job of Poise"),
        ("why pod/none -n vision", "there is no pod none in namespace vision; -n names another one"),
        ("why pod/other -n vision", "Poise has no job for pod vision/other: its schedulerName is 'default-scheduler'"),
        ("why pod/partial -n vision", "Poise has no job for pod vision/partial: 1 of 4 pods exist"),
        ("why po/new -n vision", "Poise has no job for pod vision/new: not all pods of its gang exist yet, or it is new"),
        ("queue -n --all", "-n '--all': expected the name of a namespace"),
        ("events a b", "events: expected one job, or none"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_sentence(cluster: Cluster, words: str, text: str) -> None:
    partial = pod("partial")
    partial["status"] = {"conditions": [{"type": "PodScheduled", "status": "False", "message": "1 of 4 pods exist"}]}
    away = "The connection to the server localhost:8080 was refused"
    cluster.has(
        {
            "vision/other": pod("other", scheduler="default-scheduler"), "vision/partial": partial, "vision/new": pod("new"),
            "current/99": away, "vision/dup": away,
        }
    )  # fmt: skip
    with pytest.raises(RequestError) as caught:
        said(words)
    assert str(caught.value) == text


def test_what_kubectl_complains_of_is_passed_on(cluster: Cluster) -> None:
    cluster.has({"vision/x": "error: You must be logged in to the server (Unauthorized)"})
    with pytest.raises(
        PoiseError, match=r"^kubectl get pod x: error: You must be logged in to the server \(Unauthorized\)$"
    ):
        said("why pod/x -n vision")


def test_without_kubectl_the_jobs_of_poise_are_there_still(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert said("why 17", job("17", "a")) == "why -- 17"
    with pytest.raises(RequestError, match="kubectl is not installed, or not in PATH"):
        said("why pod/x")


def test_where_no_server_is_known_it_says_how_to_reach_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [each for each in os.environ if each.startswith("POISE_")]:
        monkeypatch.delenv(name)
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["kubectl-poise", "queue"])
    with pytest.raises(SystemExit) as caught:
        kubectl.main()
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said == f"poise: {kubectl.NO_SERVER}\n"
    assert "kubectl -n poise-system port-forward svc/poise 8642" in said


def test_it_ends_as_poise_does(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["kubectl-poise", "--version"])
    with pytest.raises(SystemExit) as caught:
        kubectl.main()
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("poise, version ")


def test_its_verbs_are_verbs_of_poise() -> None:
    assert VERBS.keys() >= kubectl.LIVE_VERBS


def test_it_is_installed_under_the_name_that_kubectl_looks_for() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["kubectl-poise"] == "poise.cli.kubectl:main"
