"""Exports of Kubernetes as a trace: what pods, Jobs, Workloads and Volcano's Jobs become, alone and together.

Jobs and pods of a real API server are in tests/data/kubernetes. The other objects are written by hand, in the fields of
k8s.io/api v0.36, sigs.k8s.io/kueue v0.9 and volcano.sh/apis v1.10.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from poise.lab.traces.reader import read_trace
from poise.lab.traces.schema import FailedAttempt, JobOutcome, RunAttempt, Trace, TraceJob
from poise.scheduler.model.errors import TraceError

Json = dict[str, Any]
OBJECTS = Path(__file__).parents[1] / "data" / "kubernetes" / "objects.json"
DAY = 1767312000.0
"""2026-01-02T00:00:00Z."""


def clock(seconds: float) -> str:
    return f"2026-01-02T00:{int(seconds) // 60:02}:{int(seconds) % 60:02}Z"


def template(gpus: int, **spec: Any) -> Json:
    resources = {"limits": {"nvidia.com/gpu": str(gpus), "cpu": "4"}} if gpus else {}
    return {"containers": [{"name": "main", "resources": resources}], **spec}


def meta(name: str, created: float, owner: Json | None = None, uid: str | None = None) -> Json:
    found: Json = {"name": name, "namespace": "vision", "uid": uid or f"uid-{name}", "creationTimestamp": clock(created)}
    return found | ({"ownerReferences": [owner]} if owner else {})


def owned_by(name: str, kind: str = "Job") -> Json:
    return {"kind": kind, "name": name, "uid": f"uid-{name}", "controller": True}


def pod(
    name: str, created: float, start: float, end: float, gpus: int = 1, owner: Json | None = None, *,
    phase: str = "Succeeded", node: str = "n1", **spec: Any,
) -> Json:  # fmt: skip
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": meta(name, created, owner),
        "spec": template(gpus, nodeName=node, **spec),
        "status": {
            "phase": phase,
            "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": clock(start)}],
            "containerStatuses": [{"name": "main", "state": {"terminated": {"finishedAt": clock(end), "exitCode": 0}}}],
        },
    }


def batch_job(
    name: str, created: float, start: float, end: float, gpus: int = 1, pods: int = 1, how: str = "Complete"
) -> Json:
    status = {"startTime": clock(start), "conditions": [{"type": how, "status": "True", "lastTransitionTime": clock(end)}]}
    spec = {"parallelism": pods, "template": {"spec": template(gpus)}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta(name, created), "spec": spec, "status": status}


def workload(name: str, created: float, start: float, end: float, gpus: int, pods: int, owner: Json | None = None) -> Json:
    conditions = [
        {"type": "QuotaReserved", "status": "True", "lastTransitionTime": clock(start - 1)},
        {"type": "Admitted", "status": "True", "lastTransitionTime": clock(start)},
        {"type": "Finished", "status": "True", "reason": "Succeeded", "lastTransitionTime": clock(end)},
    ]
    spec = {"podSets": [{"name": "main", "count": pods, "template": {"spec": template(gpus)}}], "priority": 7}
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "Workload", "metadata": meta(name, created, owner),
        "spec": spec, "status": {"conditions": conditions},
    }  # fmt: skip


def volcano_job(name: str, created: float, *changes: tuple[str, float], gpus: int = 1, pods: int = 1) -> Json:
    conditions = [{"status": status, "lastTransitionTime": clock(at)} for status, at in changes]
    last, end = changes[-1]
    return {
        "apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "metadata": meta(name, created),
        "spec": {"tasks": [{"name": "main", "replicas": pods, "template": {"spec": template(gpus)}}]},
        "status": {"state": {"phase": last, "lastTransitionTime": clock(end)}, "conditions": conditions},
    }  # fmt: skip


def read(folder: Path, *objects: Json, format: str = "auto") -> Trace:
    path = folder / "log"
    path.write_text(json.dumps({"apiVersion": "v1", "items": objects, "kind": "List"}, indent=1))
    return read_trace(str(path), format=format)


def only(folder: Path, *objects: Json) -> TraceJob:
    (found,) = read(folder, *objects).jobs
    return found


def told(found: TraceJob) -> tuple[str, float, int, float | None, JobOutcome]:
    return found.job.id, found.job.submitted - DAY, found.job.gpus, found.job.duration, found.outcome


def test_jobs_of_a_real_api_server_are_what_was_submitted() -> None:
    found = {each.job.id: each for each in read_trace(str(OBJECTS)).jobs}
    assert {name: (each.job.gpus, each.job.unit) for name, each in found.items()} == {
        "vision/resnet": (4, 4),
        "vision/gang": (8, 4),
        "vision/short": (1, 1),
        "speech/asr": (2, 1),
        "speech/broken": (2, 2),
    }
    assert all(each.job.gpu_types == ("a100",) for each in found.values())
    assert [name for name, each in found.items() if each.outcome is JobOutcome.FAILED] == ["speech/broken"]
    assert len(found["speech/broken"].observed) == 2
    assert found["vision/gang"].observed[0].nodes == (4, 4)


def test_times_of_a_real_log_are_those_of_its_pods() -> None:
    """Pods that overlap are one attempt; none of these jobs has pods that begin and end at other times and do not."""
    pods: dict[str, list[tuple[float, float]]] = {}
    submitted: dict[str, float] = {}
    for each in json.loads(OBJECTS.read_text())["items"]:
        meta, status = each["metadata"], each["status"]
        if each["kind"] == "Job":
            submitted[f"{meta['namespace']}/{meta['name']}"] = of(meta["creationTimestamp"])
            continue
        (start,) = (each["lastTransitionTime"] for each in status["conditions"] if each["type"] == "PodScheduled")
        end = status["containerStatuses"][0]["state"]["terminated"]["finishedAt"]
        job = f"{meta['namespace']}/{meta['ownerReferences'][0]['name']}"
        pods.setdefault(job, []).append((of(start), of(end)))
    for found in read_trace(str(OBJECTS)).jobs:
        spans = sorted(pods[found.job.id])
        if found.job.id == "speech/broken":
            want = sum(end - start for start, end in spans)
        else:
            want = max(end for _, end in spans) - spans[0][0]
        assert (found.job.submitted, found.job.duration) == (submitted[found.job.id], want)


def of(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def test_pod_of_its_own_is_a_job(tmp_path: Path) -> None:
    found = only(tmp_path, pod("a", 10, 30, 90, gpus=2))
    assert told(found) == ("vision/a", 10, 2, 60, JobOutcome.PASSED)
    assert (found.job.tenant, found.job.name, found.job.unit) == ("vision", "a", 2)
    assert found.observed == (RunAttempt(DAY + 30, DAY + 90, (2,)),)


def test_pods_of_one_owner_are_a_gang(tmp_path: Path) -> None:
    pods = [pod(f"a-{rank}", 10, 30, 90 + rank, 4, owned_by("a", "PyTorchJob"), node=f"n{rank}") for rank in range(2)]
    found = only(tmp_path, *pods)
    assert told(found) == ("vision/a", 10, 8, 61, JobOutcome.PASSED)
    assert found.job.unit == 4
    assert found.observed[0].nodes == (4, 4)


def test_pod_that_takes_the_place_of_another_is_another_attempt(tmp_path: Path) -> None:
    owner = owned_by("a")
    found = only(tmp_path, pod("a-1", 10, 30, 50, 2, owner, phase="Failed"), pod("a-2", 51, 51, 90, 2, owner))
    assert told(found) == ("vision/a", 10, 2, 59, JobOutcome.PASSED)
    assert found.failures == (FailedAttempt(20.0, "unknown"),)
    assert [attempt.start - DAY for attempt in found.observed] == [30, 51]


def test_gang_is_the_most_gpus_that_pods_have_at_once(tmp_path: Path) -> None:
    """Four pods, two at a time, the last of which starts when another ends."""
    spans = [(0, 20), (0, 30), (20, 40), (30, 50)]
    found = only(tmp_path, *(pod(f"a-{place}", 0, *span, owner=owned_by("a")) for place, span in enumerate(spans)))
    assert told(found) == ("vision/a", 0, 2, 50, JobOutcome.PASSED)
    assert found.observed[0].nodes == ()


def test_job_with_its_pods_is_one_job_that_was_submitted_with_the_first_of_them(tmp_path: Path) -> None:
    objects = (batch_job("a", 5, 6, 95, 2), pod("a-x", 10, 30, 90, 2, owned_by("a")))
    for order in (objects, objects[::-1]):
        assert told(only(tmp_path, *order)) == ("vision/a", 5, 2, 60, JobOutcome.PASSED)


def test_job_says_how_it_ended_whatever_its_last_pod_did(tmp_path: Path) -> None:
    failed = batch_job("a", 5, 6, 95, how="Failed")
    assert only(tmp_path, failed, pod("a-x", 10, 30, 90, owner=owned_by("a"))).outcome is JobOutcome.FAILED


def test_job_without_pods_runs_from_its_start_time_which_is_counted(tmp_path: Path) -> None:
    trace = read(tmp_path, batch_job("a", 5, 6, 96, gpus=2, pods=3))
    assert told(trace.jobs[0]) == ("vision/a", 5, 6, 90, JobOutcome.PASSED)
    assert "jobs whose run time includes the wait of their pods, which the log does not have: 1" in trace.notes


def test_workload_runs_from_its_admission(tmp_path: Path) -> None:
    found = only(tmp_path, workload("a", 5, 30, 90, gpus=4, pods=2))
    assert told(found) == ("vision/a", 5, 8, 60, JobOutcome.PASSED)
    assert (found.job.unit, found.job.priority) == (4, 7)


def test_workload_of_a_job_tells_when_it_ran(tmp_path: Path) -> None:
    found = only(tmp_path, workload("job-a-1f", 6, 30, 90, 1, 2, owned_by("a")), batch_job("a", 5, 6, 95, 1, 2))
    assert told(found) == ("vision/a", 5, 2, 60, JobOutcome.PASSED)


def test_workload_that_was_evicted_is_counted(tmp_path: Path) -> None:
    evicted = workload("a", 5, 30, 90, gpus=4, pods=2)
    evicted["status"]["conditions"].append({"type": "Evicted", "status": "False", "lastTransitionTime": clock(20)})
    notes = read(tmp_path, evicted).notes
    assert "jobs of which only the last run is known, as they were evicted before: 1" in notes


@pytest.mark.parametrize(
    ("phase", "outcome"),
    [
        ("Completed", JobOutcome.PASSED),
        ("Failed", JobOutcome.FAILED),
        ("Aborted", JobOutcome.KILLED),
        ("Terminated", JobOutcome.KILLED),
    ],
)
def test_job_of_volcano_runs_from_running_to_its_end(phase: str, outcome: JobOutcome, tmp_path: Path) -> None:
    found = only(tmp_path, volcano_job("a", 5, ("Pending", 6), ("Running", 30), (phase, 90), gpus=2, pods=2))
    assert told(found) == ("vision/a", 5, 4, 60, outcome)


def test_job_of_volcano_that_restarted_has_attempts(tmp_path: Path) -> None:
    changes = (("Pending", 6), ("Running", 10), ("Restarting", 25), ("Pending", 26), ("Running", 30), ("Completed", 90))
    found = only(tmp_path, volcano_job("a", 5, *changes))
    assert told(found) == ("vision/a", 5, 1, 75, JobOutcome.PASSED)
    assert found.failures == (FailedAttempt(15.0, "unknown"),)


def test_jobs_of_a_cron_job_are_jobs_of_their_own(tmp_path: Path) -> None:
    jobs = [batch_job(f"nightly-{night}", night, night, night + 50) for night in (1, 2)]
    for each in jobs:
        each["metadata"]["ownerReferences"] = [owned_by("nightly", "CronJob")]
    assert [each.job.id for each in read(tmp_path, *jobs).jobs] == ["vision/nightly-1", "vision/nightly-2"]


def test_pods_of_a_group_without_an_owner_are_a_gang(tmp_path: Path) -> None:
    """Kueue's Workload of such a group is owned by its pods."""
    pods = [pod(f"a-{rank}", 10, 30, 90) for rank in range(2)]
    for each in pods:
        each["metadata"]["labels"] = {"kueue.x-k8s.io/pod-group-name": "a", "app": "train"}
    found = only(tmp_path, *pods, workload("a", 8, 30, 90, 1, 2, {"kind": "Pod", "name": "a-0", "uid": "uid-a-0"}))
    assert told(found) == ("vision/a", 8, 2, 60, JobOutcome.PASSED)


def test_owners_are_followed_to_the_first_that_is_known(tmp_path: Path) -> None:
    inner = batch_job("a-0", 5, 6, 95)
    inner["metadata"]["ownerReferences"] = [owned_by("a", "JobSet")]
    found = only(tmp_path, inner, pod("a-0-x", 10, 30, 90, owner=owned_by("a-0")))
    assert told(found) == ("vision/a", 5, 1, 60, JobOutcome.PASSED)


def test_owners_in_a_circle_are_followed_once(tmp_path: Path) -> None:
    first, second = (pod(name, 10, 30, 90, owner=owned_by(other, "Pod")) for name, other in (("a", "b"), ("b", "a")))
    assert sum(each.job.gpus for each in read(tmp_path, first, second).jobs) == 2


def test_name_that_is_used_again_is_another_job(tmp_path: Path) -> None:
    first, second = pod("a", 10, 30, 90), pod("a", 100, 130, 190)
    second["metadata"]["uid"] = "another"
    assert [each.job.id for each in read(tmp_path, first, second).jobs] == ["vision/a", "vision/a~2"]


def test_exports_may_stand_one_after_another_and_the_last_counts(tmp_path: Path) -> None:
    early, late = pod("a", 10, 30, 40, phase="Running"), pod("a", 10, 30, 90)
    path = tmp_path / "log"
    path.write_text("\n".join(json.dumps({"apiVersion": "v1", "kind": "List", "items": [each]}) for each in (early, late)))
    (found,) = read_trace(str(path)).jobs
    assert told(found) == ("vision/a", 10, 1, 60, JobOutcome.PASSED)


def test_single_objects_are_read_as_well(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(json.dumps(pod(name, 10, 30, 90)) + "\n" for name in "ab"))
    assert [each.job.id for each in read_trace(str(path)).jobs] == ["vision/a", "vision/b"]


TYPES = [
    ("product", {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}}, ("a100",)),
    ("accelerator", {"nodeSelector": {"cloud.google.com/gke-accelerator": "nvidia-tesla-v100"}}, ("v100",)),
    ("something else", {"nodeSelector": {"zone": "a100"}}, ()),
]


@pytest.mark.parametrize(("spec", "types"), [case[1:] for case in TYPES], ids=[case[0] for case in TYPES])
def test_types_are_those_that_a_pod_selects(spec: Json, types: tuple[str, ...], tmp_path: Path) -> None:
    assert only(tmp_path, pod("a", 10, 30, 90, **spec)).job.gpu_types == types


@pytest.mark.parametrize(
    ("resource", "gpus"), [("amd.com/gpu", 2), ("nvidia.com/gpu", 2), ("nvidia.com/mig-1g.5gb", 2), ("cpu", 0)]
)
def test_gpus_are_resources_of_any_vendor(resource: str, gpus: int, tmp_path: Path) -> None:
    asking, other = pod("a", 10, 30, 90), pod("b", 10, 30, 90)
    asking["spec"]["containers"][0]["resources"] = {"requests": {resource: 2}}
    jobs = {each.job.id: each.job.gpus for each in read(tmp_path, asking, other).jobs}
    assert jobs == {"vision/b": 1} | ({"vision/a": gpus} if gpus else {})


def test_sidecars_hold_their_gpus_beside_the_others_and_what_runs_before_does_not(tmp_path: Path) -> None:
    asking = pod("a", 10, 30, 90, gpus=2)
    one = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    asking["spec"]["initContainers"] = [one | {"restartPolicy": "Always"}, one]
    assert only(tmp_path, asking).job.gpus == 3


def test_slice_of_a_gpu_counts_as_a_whole_one(tmp_path: Path) -> None:
    asking = pod("a", 10, 30, 90)
    asking["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/mig-1g.5gb": "1"}}
    assert "jobs on slices of GPUs that get whole ones: 1" in read(tmp_path, asking).notes


def without(name: str, key: str) -> Json:
    found = pod(name, 10, 30, 90)
    del found["status"][key]
    return found


OUT = [
    ("runs", pod("b", 10, 30, 40, phase="Running"), "jobs left out because they had not ended when the log was taken: 1"),
    ("has no GPU", pod("b", 10, 30, 40, gpus=0), "jobs left out because they have no GPU: 1"),
    ("never started", without("b", "conditions"), "jobs left out because they never started: 1"),
    ("does not say when it ended", without("b", "containerStatuses") | {}, "jobs left out because they never started: 1"),
    ("is a node", {"apiVersion": "v1", "kind": "Node"}, "objects left out because they are of another kind: 1"),
]


@pytest.mark.parametrize(("other", "note"), [case[1:] for case in OUT], ids=[case[0] for case in OUT])
def test_object_that_says_nothing_of_work_is_left_out_and_counted(other: Json, note: str, tmp_path: Path) -> None:
    trace = read(tmp_path, pod("a", 10, 30, 90), other)
    assert [each.job.id for each in trace.jobs] == ["vision/a"]
    assert note in trace.notes


def test_pod_without_an_end_is_counted(tmp_path: Path) -> None:
    owner = owned_by("a")
    lost = pod("a-1", 10, 30, 40, owner=owner, phase="Failed")
    del lost["status"]["containerStatuses"]
    trace = read(tmp_path, lost, pod("a-2", 50, 50, 90, owner=owner))
    assert trace.jobs[0].job.duration == 40
    assert "pods left out because they do not say when they ended: 1" in trace.notes


def wrong(path: str, value: object) -> Json:
    found = pod("a", 10, 30, 90)
    *outer, key = path.split(".")
    place: Any = found
    for name in outer:
        place = place[int(name)] if name.isdigit() else place[name]
    place[int(key) if key.isdigit() else key] = value
    return found


WRONG: list[tuple[str, object, str]] = [
    ("metadata.creationTimestamp", "soon", "creationTimestamp: expected a time such as 2017-10-09 07:01:55, got 'soon'"),
    (
        "metadata.creationTimestamp",
        None,
        "metadata.creationTimestamp: expected a time such as 2026-01-02T03:04:05Z, got nothing",
    ),
    ("metadata.uid", "", "metadata.uid: expected a name of printable characters, got nothing"),
    ("metadata.name", "a\x1b", "metadata.name: expected a name of printable characters, got 'a\\x1b'"),
    ("metadata", [], "metadata: expected an object, got a list"),
    ("spec.containers", {}, "containers: expected a list, got an object"),
    ("spec.containers.0", 5, "containers: expected a list of objects, got 5"),
    (
        "spec.containers.0.resources",
        {"limits": {"nvidia.com/gpu": "half"}},
        "nvidia.com/gpu: expected a whole number from 0 to 1,000,000, got 'half'",
    ),
    ("status.phase", 5, "phase: expected text, got 5"),
    ("status.conditions", "none", "conditions: expected a list, got 'none'"),
    ("kind", 5, "kind: expected text, got 5"),
]


@pytest.mark.parametrize(("place", "value", "want"), WRONG, ids=[f"{case[0]} {case[1]}" for case in WRONG])
def test_wrong_value_is_refused_with_line_field_and_value(place: str, value: object, want: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught:
        read(tmp_path, wrong(place, value))
    assert str(caught.value) == f"{tmp_path / 'log'}:4: {want}"


def test_number_of_pods_that_is_none_is_refused(tmp_path: Path) -> None:
    job = batch_job("a", 5, 6, 96)
    job["spec"]["parallelism"] = "two"
    with pytest.raises(TraceError) as caught:
        read(tmp_path, job)
    assert str(caught.value).endswith(":4: parallelism: expected a whole number from 0 to 1,000,000, got 'two'")
