"""Gangs of pods that others create: who belongs together, what is wrong with them, where they can go."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from tests.fake_kubernetes import a_node, a_pod

from poise.service.backends.kubernetes import names, objects, owners, places
from poise.service.backends.kubernetes.gang_runs import request_of
from poise.service.backends.kubernetes.gangs import Gang, GangIndex, Preempts
from poise.service.backends.kubernetes.objects import Json, NodeInfo, PodInfo
from poise.service.backends.kubernetes.owners import OwnerPhase
from poise.service.backends.kubernetes.places import placement_of

GPU = names.GPU_RESOURCE
read_owner = partial(owners.read_owner, resource=GPU)
read_pod, read_node = partial(objects.read_pod, resource=GPU), partial(objects.read_node, resource=GPU)
NodeTypes = partial(places.NodeTypes, resource=GPU)
GROUP = "scheduling.x-k8s.io/pod-group"
QUEUE = "kueue.x-k8s.io/queue-name"
IGNORES = {"rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]}
VERSIONS = {
    "Job": "batch/v1", "JobSet": "jobset.x-k8s.io/v1alpha2", "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "CronJob": "batch/v1", "ReplicaSet": "apps/v1", "StatefulSet": "apps/v1", "Workflow": "argoproj.io/v1alpha1",
}  # fmt: skip


def pod(name: str, *, uid: str = "", created: int = 0, ending: bool = False, **more: Any) -> PodInfo:
    found = a_pod(name, **more)
    found["metadata"] |= {
        "uid": uid or f"uid-{name}",
        "creationTimestamp": f"2025-01-01T00:{created // 60:02}:{created % 60:02}Z",
    }
    if ending:
        found["metadata"]["deletionTimestamp"] = "2025-01-01T01:00:00Z"
    return read_pod(found)


def thing(kind: str, name: str, *, owner: Json | None = None, version: str = "", **meta: Any) -> Json:
    """An object by which others can be owned."""
    version = version or VERSIONS[kind]
    head: Json = {"name": name, "namespace": "default", "uid": f"uid-{kind.lower()}-{name}", **meta}
    if owner is not None:
        about = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "controller": True}
        head["ownerReferences"] = [{**about, "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}]
    return {"apiVersion": version, "kind": kind, "metadata": head}


def template(gpus: int = 1, scheduler: str = "poise", annotations: Mapping[str, str] | None = None) -> Json:
    spec = a_pod("x", gpus, scheduler)["spec"]
    return {"metadata": {"annotations": dict(annotations or {})}, "spec": spec}


def job(
    name: str = "train", size: int = 2, *, gpus: int = 1, scheduler: str = "poise", status: Json | None = None, **more: Any
) -> Json:
    """A Job. `owner`, `labels` and `annotations` are its metadata; other keywords go into its spec."""
    meta = {key: more.pop(key) for key in ("owner", "labels", "annotations", "namespace") if key in more}
    spec: Json = {"parallelism": size, "completions": size, "template": template(gpus, scheduler), **more}
    return {**thing("Job", name, **meta), "spec": spec, "status": status or {}}


def replicated(name: str, pods: int = 1, replicas: int = 1, *, after: Sequence[str] = (), **more: Any) -> Json:
    inner = {"parallelism": pods, "completions": pods, "template": template(**more)}
    depends = {"dependsOn": [{"name": each, "status": "Complete"} for each in after]} if after else {}
    return {"name": name, "replicas": replicas, "template": {"spec": inner}, **depends}


def jobset(name: str, *parts: Json, owner: Json | None = None, labels: Mapping[str, str] | None = None, **spec: Any) -> Json:
    return {**thing("JobSet", name, owner=owner, labels=dict(labels or {})), "spec": {"replicatedJobs": [*parts], **spec}}


def trainjob(name: str, **spec: Any) -> Json:
    return {**thing("TrainJob", name), "spec": spec}


def indexed(*things: PodInfo | Json) -> GangIndex:
    index = GangIndex()
    for each in things:
        if isinstance(each, PodInfo):
            index.put_pod(each)
        else:
            index.put_owner(read_owner(each))
    return index


def only(*things: PodInfo | Json) -> Gang:
    (gang,) = indexed(*things)
    return gang


def group(size: str | None = None, count: int = 2, **more: Any) -> list[PodInfo]:
    annotations = {names.GANG: "g", **({} if size is None else {names.GANG_SIZE: size}), **more.pop("annotations", {})}
    return [pod(f"p{number}", created=number, annotations=annotations, **more) for number in range(count)]


def problem_of(*things: PodInfo | Json) -> str:
    problem = only(*things).problem
    assert problem is not None
    return problem


# Owners


def test_an_owner_is_read_with_its_path_its_size_and_its_state() -> None:
    failed = {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]}
    got = read_owner(
        job("train", 4, gpus=8, suspend=True, status=failed, annotations={names.SUSPENDED_BY: "3", "other": "x"})
    )
    assert (got.path, got.size, got.gpus) == ("/apis/batch/v1/namespaces/default/jobs/train", 4, 8)
    assert (got.scheduler, got.suspended, got.is_held) == ("poise", True, False)
    assert (got.state, got.annotations) == (OwnerPhase.FAILED, {names.SUSPENDED_BY: "3"})


@pytest.mark.parametrize(
    ("kind", "condition", "want"),
    [
        ("Job", "Complete", OwnerPhase.COMPLETE),
        ("JobSet", "Completed", OwnerPhase.COMPLETE),
        ("TrainJob", "Complete", OwnerPhase.COMPLETE),
        ("JobSet", "Failed", OwnerPhase.FAILED),
        ("Job", "FailureTarget", OwnerPhase.ACTIVE),
    ],
)
def test_the_state_of_an_owner_is_that_of_its_conditions(kind: str, condition: str, want: OwnerPhase) -> None:
    made = job() if kind == "Job" else thing(kind, "x")
    assert read_owner(made | {"status": {"conditions": [{"type": condition, "status": "True"}]}}).state is want


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        ({"parallelism": 4, "completions": 2}, 2),
        ({"parallelism": 2, "completions": 9}, 2),
        ({"parallelism": 3, "completions": None}, 3),
        ({"parallelism": None, "completions": None}, 1),
    ],
)
def test_the_size_of_a_job_is_the_number_of_its_pods_at_once(spec: Json, want: int) -> None:
    assert read_owner(job(**spec)).size == want


def test_the_size_of_a_jobset_adds_up_its_replicated_jobs() -> None:
    assert read_owner(jobset("x", replicated("a", 2, 3), replicated("b"))).size == 7
    assert read_owner(trainjob("x")).size is None


def test_an_object_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of Job, JobSet, TrainJob, got 'CronJob'"):
        read_owner(thing("CronJob", "x"))


def rule(action: str, *codes: int, operator: str = "In", disruption: bool = False) -> Json:
    found: Json = {"action": action}
    if codes:
        found["onExitCodes"] = {"operator": operator, "values": [*codes]}
    if disruption:
        found["onPodConditions"] = [{"type": "DisruptionTarget", "status": "True"}]
    return found


@pytest.mark.parametrize(
    ("rules", "want"),
    [
        ([], False),
        ([rule("Ignore", disruption=True)], True),
        ([rule("Ignore", 75)], True),
        ([rule("Ignore", 1, operator="NotIn")], True),
        ([rule("Ignore", 1)], False),
        ([rule("Count", disruption=True)], False),
        ([rule("FailJob", 42), rule("Ignore", disruption=True)], True),
        ([rule("FailJob", 143), rule("Ignore", disruption=True)], False),
        ([rule("FailJob", 0, operator="NotIn"), rule("Ignore", disruption=True)], False),
    ],
)
def test_the_first_rule_for_an_evicted_pod_decides_whether_it_counts_as_failed(rules: list[Json], want: bool) -> None:
    assert read_owner(job(podFailurePolicy={"rules": rules})).ignores_disruption is want


# Membership


def test_pods_of_a_job_are_a_gang_that_is_whole_once_all_exist() -> None:
    made = job(size=2, gpus=4)
    index = indexed(made, pod("a", gpus=4, owner=made))
    (gang,) = index
    assert (gang.kind, gang.name, gang.size, gang.gpus, gang.is_whole) == ("Job", "train", 2, 4, False)
    index.put_pod(pod("b", gpus=4, owner=made, created=1))
    (gang,) = index
    assert gang.is_whole
    assert [each.name for each in gang.pods] == ["a", "b"]
    assert gang.problem is None


def test_a_pod_waits_for_its_owner_to_be_known() -> None:
    made = job(size=1)
    index = indexed(pod("a", owner=made))
    (gang,) = index
    assert (gang.kind, gang.name, gang.size, gang.owner, gang.is_whole) == ("Job", "train", None, None, False)
    assert gang.preempts is Preempts.NEVER
    index.put_owner(read_owner(made))
    (known,) = index
    assert known.is_whole
    assert known.key == gang.key


def test_the_topmost_owner_makes_the_gang_in_whatever_order_owners_become_known() -> None:
    top = trainjob("llm")
    middle = jobset("llm", replicated("node", 1, 2), owner=top)
    jobs = [job(f"llm-node-{number}", 1, owner=middle) for number in range(2)]
    index = indexed(*(pod(f"p{number}", owner=each) for number, each in enumerate(jobs)))
    assert len(index) == 2
    index.put_owner(read_owner(top))
    for each in (jobs[0], middle, jobs[1]):
        index.put_owner(read_owner(each))
    (gang,) = index
    assert (gang.kind, gang.size, gang.is_whole, gang.preempts) == ("TrainJob", 2, True, Preempts.SUSPEND)
    assert gang.owner is not None
    assert gang.owner.path == "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs/llm"


def test_a_job_of_another_group_is_not_kubernetes_job() -> None:
    owner = thing("Job", "vc", version="batch.volcano.sh/v1alpha1")
    gang = only(pod("a", owner=owner))
    assert (gang.kind, gang.size, gang.preempts) == ("Pod", 1, Preempts.NEVER)


def test_an_owner_of_another_namespace_is_none() -> None:
    made = job("theirs", 1, namespace="others")
    index = indexed(made, pod("thief", owner=made), pod("own", owner=made, namespace="others"))
    theirs, thief = index.gang_of_pod(("others", "own")), index.gang_of_pod(("default", "thief"))
    assert theirs is not None
    assert thief is not None
    assert theirs != thief
    assert [(gang.key, gang.is_whole, len(gang.pods)) for gang in index if gang.is_whole] == [(theirs, True, 1)]


@pytest.mark.parametrize(
    "where",
    [
        {"labels": {GROUP: "g"}},
        {"labels": {"pod-group.scheduling.sigs.k8s.io": "g"}},
        {"labels": {"scheduling.k8s.io/group-name": "g"}},
        {"annotations": {"scheduling.k8s.io/group-name": "g"}},
    ],
)
def test_pods_of_a_known_pod_group_are_a_gang(where: Json) -> None:
    said = {**where, "annotations": {names.GANG_SIZE: "2", **where.get("annotations", {})}}
    gang = only(pod("a", **said), pod("b", **said))
    assert (gang.kind, gang.name, gang.size, gang.is_whole, gang.problem) == ("PodGroup", "g", 2, True, None)


def test_a_pod_group_may_say_its_size_as_coscheduling_has_it() -> None:
    labels = {"pod-group.scheduling.sigs.k8s.io": "g", "pod-group.scheduling.sigs.k8s.io/min-available": "1"}
    assert only(pod("a", labels=labels)).size == 1


def test_a_pod_group_comes_before_the_owner_and_the_owner_before_the_annotation() -> None:
    made = job(size=1)
    annotations = {names.GANG: "g", names.GANG_SIZE: "1"}
    assert only(made, pod("a", owner=made, annotations=annotations)).kind == "Job"
    kinds = {
        gang.kind for gang in indexed(made, pod("a", owner=made, annotations=annotations, labels={GROUP: "g"})) if gang.pods
    }
    assert kinds == {"PodGroup"}


@pytest.mark.parametrize("name", ["llm", "podgroup-uid-jobset-llm"])
def test_a_pod_group_that_is_the_owner_by_another_name_is_the_owner(name: str) -> None:
    top = jobset("llm", replicated("node"))
    made = job("llm-node-0", 1, owner=top)
    gang = only(pod("a", owner=made, labels={GROUP: name}), made, top)
    assert (gang.kind, gang.is_whole, gang.preempts) == ("JobSet", True, Preempts.SUSPEND)


def test_annotated_pods_are_a_gang() -> None:
    gang = only(*group("2"))
    assert (gang.kind, gang.name, gang.size, gang.is_whole, gang.preempts) == ("PodGroup", "g", 2, True, Preempts.NEVER)


def test_a_pod_by_itself_is_a_gang_of_one() -> None:
    gang = only(pod("a", gpus=2))
    assert (gang.kind, gang.size, gang.gpus, gang.is_whole, gang.workers) == ("Pod", 1, 2, True, 1)


def test_pods_of_other_schedulers_are_of_no_concern() -> None:
    made = job(scheduler="default-scheduler")
    assert [
        *indexed(pod("a", scheduler="default-scheduler"), made, pod("b", scheduler="default-scheduler", owner=made))
    ] == []


def test_a_gated_pod_keeps_its_gang_from_being_whole() -> None:
    assert not only(pod("a", schedulingGates=[{"name": "x"}])).is_whole


def test_pods_that_are_over_or_leaving_are_none_of_the_gangs() -> None:
    made = job(size=2)
    gang = only(made, pod("a", owner=made, phase="Failed"), pod("b", owner=made, ending=True), pod("c", owner=made))
    assert [each.name for each in gang.pods] == ["c"]
    assert not gang.is_whole


# Helpers, and pods that come later or not at all


def test_helpers_belong_to_the_gang_and_do_not_count_as_workers() -> None:
    made = jobset("mpi", replicated("launcher", gpus=0), replicated("node", 2, gpus=8))
    launcher, node = job("mpi-launcher-0", 1, gpus=0, owner=made), job("mpi-node-0", 2, gpus=8, owner=made)
    pods = [pod("l", gpus=0, owner=launcher), pod("w0", gpus=8, owner=node), pod("w1", gpus=8, owner=node)]
    gang = only(made, launcher, node, *pods)
    assert (gang.size, gang.workers, gang.gpus, gang.is_whole, gang.problem) == (3, 2, 8, True, None)
    assert not only(made, launcher, node, *pods[1:]).is_whole
    assert not only(made, launcher, node, *pods[:2]).is_whole


def test_helpers_that_are_made_after_the_others_are_not_waited_for() -> None:
    made = jobset("mpi", replicated("node", 2), replicated("launcher", gpus=0, after=["node"]))
    node = job("mpi-node-0", 2, owner=made)
    gang = only(made, node, pod("w0", owner=node), pod("w1", owner=node))
    assert (gang.size, gang.is_whole, gang.problem) == (2, True, None)


def test_initializers_of_another_scheduler_are_not_waited_for() -> None:
    made = jobset(
        "llm", replicated("data", gpus=0, scheduler="default-scheduler"), replicated("node", 1, gpus=2, after=["data"])
    )
    node = job("llm-node-0", 1, gpus=2, owner=made)
    gang = only(made, node, pod("w", gpus=2, owner=node))
    assert (gang.size, gang.is_whole, gang.problem) == (1, True, None)


@pytest.mark.parametrize("in_order", [False, True])
def test_pods_with_gpus_that_are_made_one_after_another_cannot_start_as_one(in_order: bool) -> None:
    policy = {"startupPolicy": {"startupPolicyOrder": "InOrder"}} if in_order else {}
    made = jobset("x", replicated("a"), replicated("b", after=[] if in_order else ["a"]), **policy)
    assert problem_of(made) == (
        "JobSet x: the pods of b are made after those of a have started, but a gang starts as one; start them together"
    )
    made = jobset("x", replicated("data", gpus=0), replicated("b", after=["data"]))
    assert "set schedulerName: default-scheduler for data" in problem_of(made)


def test_pods_that_have_succeeded_and_are_not_made_again_are_not_waited_for() -> None:
    made = job(size=3, status={"succeeded": 1})
    gang = only(made, pod("a", owner=made, phase="Succeeded"), pod("b", owner=made), pod("c", owner=made))
    assert (gang.size, gang.finished, gang.is_whole) == (3, 1, True)


def test_a_job_with_more_work_than_pods_makes_them_again() -> None:
    assert read_owner(job(parallelism=2, completions=9, status={"succeeded": 7})).finished == 0
    assert read_owner(job(parallelism=2, completions=9, status={"succeeded": 8})).finished == 1
    assert read_owner(job(parallelism=3, completions=None, status={"succeeded": 1})).finished == 1


def test_jobs_of_a_jobset_that_are_complete_are_not_waited_for() -> None:
    made = jobset("x", replicated("node", 1, 2))
    done = job("x-node-0", 1, owner=made, status={"conditions": [{"type": "Complete", "status": "True"}]})
    rest = job("x-node-1", 1, owner=made)
    gang = only(made, done, rest, pod("b", owner=rest))
    assert (gang.size, gang.finished, gang.is_whole) == (2, 1, True)


def test_a_bound_gang_stays_whole_when_one_of_its_pods_has_succeeded() -> None:
    said = {names.GANG: "g", names.GANG_SIZE: "2", names.JOB: "7"}
    done = pod("a", node="n", annotations=said, phase="Succeeded")
    gang = only(done, pod("b", node="n", annotations=said))
    assert (gang.is_whole, gang.finished, gang.workers) == (True, 1, 2)


def test_a_gang_with_a_run_stays_the_same_when_all_of_it_that_was_bound_has_succeeded() -> None:
    """A crash in the middle of binding, and what was bound by then is done before the rest is looked at again."""
    said = {names.GANG: "g", names.GANG_SIZE: "2"}
    waiting = pod("b", annotations=said, created=2)
    index = indexed(pod("a", annotations=said, created=1), waiting)
    (key,) = (gang.key for gang in index)
    marks = {**said, names.JOB: "7", names.GANG_KEY: key}
    index = indexed(pod("a", annotations=marks, created=1, node="n", phase="Succeeded"), waiting)
    index.open(key)
    (gang,) = index
    assert (gang.key, gang.is_whole, gang.finished) == (key, True, 1)
    assert placement_of(gang, [("n", 2)]) == {waiting.key: "n"}
    index.close(key)
    (gang,) = index
    assert (gang.key == key, gang.is_whole, gang.finished) == (False, False, 0)


# How gangs come and go


def test_a_suspended_owner_without_pods_is_a_gang() -> None:
    made = job(suspend=True, gpus=4)
    gang = only(made)
    assert (gang.pods, gang.size, gang.gpus, gang.is_whole) == ((), 2, 4, False)
    assert gang.owner is not None
    assert gang.owner.is_held


def test_a_suspended_owner_is_known_as_ours_by_its_templates() -> None:
    assert len(indexed(job(suspend=True, scheduler="default-scheduler"))) == 0
    top = trainjob("llm", suspend=True)
    assert len(indexed(top)) == 0
    assert only(top, jobset("llm", replicated("node", gpus=2), owner=top)).gpus == 2


def test_what_has_changed_is_told_once() -> None:
    index = indexed(pod("a"))
    (gang,) = index.changed()
    assert isinstance(gang, Gang)
    assert index.changed() == []
    index.put_pod(pod("a"))
    assert index.changed() == []
    index.put_pod(pod("a", node="n"))
    (bound,) = index.changed()
    assert isinstance(bound, Gang)
    assert bound.pods[0].node == "n"
    index.remove_pod(("default", "a"))
    assert index.changed() == [gang.key]
    assert index.get(gang.key) is None


def test_a_gang_that_came_and_went_between_two_looks_is_not_told() -> None:
    index = indexed(pod("a"))
    index.remove_pod(("default", "a"))
    assert index.changed() == []


def test_a_gang_keeps_its_key_while_its_owners_are_deleted_before_its_pods() -> None:
    top = jobset("x", replicated("node"))
    made = job("x-node-0", 1, owner=top)
    index = indexed(top, made, pod("a", owner=made, node="n"))
    (gang,) = index
    for uid in (top["metadata"]["uid"], made["metadata"]["uid"]):
        index.remove_owner(uid)
        (left,) = index
        assert left.key == gang.key
        assert left.owner is not None
        assert (left.owner.state, left.preempts) == (OwnerPhase.GONE, Preempts.NEVER)
    index.remove_pod(("default", "a"))
    assert [*index] == []


def test_a_job_that_a_jobset_has_replaced_does_not_count() -> None:
    top = jobset("x", replicated("node"))
    old = job("x-node-0", 1, owner=top, status={"succeeded": 1})
    new = job("x-node-0b", 1, owner=top)
    index = indexed(top, old, pod("a", owner=old, ending=True), new)
    index.remove_owner(old["metadata"]["uid"])
    (gang,) = index
    assert (gang.finished, gang.is_whole) == (0, False)


def test_a_plain_pod_that_is_over_is_no_gang_any_more() -> None:
    index = indexed(pod("a", node="n"))
    (gang,) = index.changed()
    assert isinstance(gang, Gang)
    index.put_pod(pod("a", node="n", phase="Succeeded"))
    assert index.changed() == [gang.key]


def test_an_owner_that_is_over_is_a_gang_until_it_is_deleted() -> None:
    made = job(size=1, status={"conditions": [{"type": "Complete", "status": "True"}]})
    index = indexed(made, pod("a", owner=made, node="n", phase="Succeeded"))
    (gang,) = index
    assert gang.owner is not None
    assert gang.owner.state is OwnerPhase.COMPLETE
    index.remove_owner(made["metadata"]["uid"])
    assert [*index] == []


def test_another_pod_of_the_same_name_is_another_gang() -> None:
    index = indexed(pod("a", uid="one"))
    (first,) = index
    index.put_pod(pod("a", uid="two"))
    (second,) = index
    assert first.key != second.key


def test_a_group_keeps_its_key_when_its_oldest_pod_goes_and_loses_it_when_all_have() -> None:
    pods = group("2")
    index = indexed(*pods)
    (gang,) = index
    index.remove_pod(pods[0].key)
    assert [each.key for each in index] == [gang.key]
    index.remove_pod(pods[1].key)
    index.put_pod(pods[1])
    assert [each.key for each in index] != [gang.key]


def test_new_pods_under_the_name_of_a_gang_that_is_over_are_another_gang() -> None:
    old = [pod(f"p{number}", annotations={names.GANG: "g", names.GANG_SIZE: "2"}, phase="Succeeded") for number in range(2)]
    new = [pod(f"q{number}", annotations={names.GANG: "g", names.GANG_SIZE: "2"}, created=9) for number in range(2)]
    gang = only(*old, *new)
    assert (gang.is_whole, gang.finished, len(gang.pods), gang.problem) == (True, 0, 2, None)
    assert gang.key.startswith("uid-q0-")


def test_the_key_that_poise_wrote_on_bound_pods_is_found_again_after_a_restart() -> None:
    first, second = group("2")
    key = only(first, second).key
    bound = group("2", node="n", annotations={names.GANG_KEY: key})[1]
    assert only(bound).key == key
    unbound = group("2", annotations={names.GANG_KEY: key})[1]
    assert only(unbound).key != key
    forged = group("2", node="n", annotations={names.GANG_KEY: only(pod("other")).key})[1]
    assert only(forged).key != only(pod("other")).key


def test_keys_are_fit_for_submissions() -> None:
    made = job(size=1)
    odd = pod("odd", uid="ü/" * 60)
    for gang in indexed(made, odd, *group("2"), pod("x", owner=made)):
        assert re.fullmatch(r"[A-Za-z0-9_-]{8,64}", gang.key)


def test_owners_that_own_each_other_do_no_harm() -> None:
    first, second = thing("JobSet", "a"), thing("JobSet", "b")
    circle = [jobset("a", replicated("x"), owner=second), jobset("b", replicated("x"), owner=first)]
    index = indexed(*circle, pod("p", owner=circle[0]))
    assert index.gang_of_pod(("default", "p")) is not None
    for each in circle:
        index.remove_owner(each["metadata"]["uid"])
    index.remove_pod(("default", "p"))
    assert [*index] == []


# Preemption


RESTART, NEVER = {names.PREEMPTION: "restart"}, {names.PREEMPTION: "never"}


def owned(kind: str, annotations: Mapping[str, str] | None = None) -> list[PodInfo | Json]:
    return [pod("a", owner=thing(kind, "x"), annotations=dict(annotations or {}))]


def in_job(annotations: Mapping[str, str] | None = None, *, owner: str | None = None, **more: Any) -> list[PodInfo | Json]:
    meta: Json = {} if owner is None else {"owner": thing(owner, "boss")}
    made = job(size=1, **meta, **more)
    return [made, pod("a", owner=made, annotations=dict(annotations or {}))]


@pytest.mark.parametrize(
    ("things", "want"),
    [
        (in_job(), Preempts.SUSPEND),
        (in_job(RESTART), Preempts.SUSPEND),
        (in_job(NEVER), Preempts.NEVER),
        (in_job(owner="CronJob"), Preempts.SUSPEND),
        (in_job(owner="Workflow"), Preempts.NEVER),
        (in_job(owner="Workflow", podFailurePolicy=IGNORES), Preempts.EVICT),
        (in_job(NEVER, owner="Workflow", podFailurePolicy=IGNORES), Preempts.NEVER),
        (in_job(annotations={}, labels={}), Preempts.SUSPEND),
        (owned("ReplicaSet"), Preempts.NEVER),
        (owned("ReplicaSet", RESTART), Preempts.EVICT),
        (owned("StatefulSet", RESTART), Preempts.EVICT),
        (owned("StatefulSet", NEVER), Preempts.NEVER),
        (owned("Workflow", RESTART), Preempts.NEVER),
        ([pod("a")], Preempts.NEVER),
        ([pod("a", annotations=RESTART)], Preempts.NEVER),
        (group("2", annotations=RESTART, owner=thing("StatefulSet", "x")), Preempts.EVICT),
    ],
)  # fmt: skip
def test_a_gang_leaves_only_as_politely_as_its_owner_allows(things: list[PodInfo | Json], want: Preempts) -> None:
    gang = only(*things)
    assert gang.problem is None
    assert gang.preempts is want


def test_a_gang_of_which_one_pod_would_not_come_back_is_never_preempted() -> None:
    first, second = group("2", annotations=RESTART, owner=thing("StatefulSet", "x"))
    plain = group("2", annotations=RESTART)[1]
    assert only(first, second).preempts is Preempts.EVICT
    assert only(first, plain).preempts is Preempts.NEVER


def test_what_an_owner_says_of_preemption_counts_while_it_has_no_pods() -> None:
    assert only(job(annotations=NEVER)).preempts is Preempts.NEVER
    assert only(job(template=template(annotations=NEVER))).preempts is Preempts.NEVER


# Problems


def test_a_wrong_word_for_preemption_is_a_problem() -> None:
    gang = only(pod("a", annotations={names.PREEMPTION: "maybe"}))
    assert gang.problem == "Pod a: poise.run/preemption is 'maybe'; expected restart or never"
    assert gang.preempts is Preempts.NEVER


@pytest.mark.parametrize(
    ("things", "want"),
    [
        (
            group(None),
            "PodGroup g: it does not say how many pods it has; set the annotation poise.run/gang-size on its pods",
        ),
        (group("two"), "PodGroup g: poise.run/gang-size is 'two'; expected a number of pods, such as 4"),
        (group("0"), "PodGroup g: poise.run/gang-size is '0'; expected a number of pods, such as 4"),
        (
            group("1"),
            "PodGroup g: it has 2 pods, but poise.run/gang-size says 1; correct the size, or give other gangs other names",
        ),
        (
            [group("2")[0], group("3")[1]],
            "PodGroup g: its pods differ in poise.run/gang-size ('2', '3'); give all of them the same number",
        ),
        (
            [pod("a", annotations={names.GANG_SIZE: "4"})],
            "Pod a: it has poise.run/gang-size '4', but no name of a gang; set poise.run/gang as well",
        ),
        (
            in_job({names.GANG_SIZE: "4"}),
            "Job train: poise.run/gang-size is '4', but it makes 1 pods at once; remove the annotation",
        ),
        (
            [group("2", gpus=1)[0], group("2", gpus=2)[1]],
            "PodGroup g: its pods ask for different numbers of GPUs (1, 2); give all of them the same number, or none",
        ),
        (
            [jobset("x", replicated("a", gpus=8), replicated("b", gpus=4))],
            "JobSet x: its pods ask for different numbers of GPUs (4, 8); give all of them the same number, or none",
        ),
        (
            [pod("a", gpus=0)],
            "Pod a: none of its pods asks for GPUs; Poise places pods with GPUs only,"
            " so set spec.schedulerName: default-scheduler",
        ),
        (
            [group("2")[0], group("2", scheduler="volcano")[1]],
            "PodGroup g: its pod p1 has schedulerName 'volcano', others 'poise'; give all its pods the same",
        ),
        (
            [jobset("x", replicated("a"), replicated("b", scheduler="volcano"))],
            "JobSet x: the pods of its replicated job b have schedulerName 'volcano', others 'poise';"
            " give all its pods the same",
        ),
    ],
)
def test_a_problem_names_the_thing_the_value_and_the_remedy(things: list[PodInfo | Json], want: str) -> None:
    assert problem_of(*things) == want


@pytest.mark.parametrize(
    "things",
    [
        [pod("a", labels={QUEUE: "q"})],
        [pod("a", labels={"kueue.x-k8s.io/pod-group-name": "g"}, annotations={names.GANG_SIZE: "1"})],
        [job(labels={QUEUE: "q"})],
        [job(managedBy="kueue.x-k8s.io/multikueue")],
        [jobset("x", replicated("a"), labels={QUEUE: "q"})],
        [
            job(labels={QUEUE: "q"}),
            pod("a", owner=job(), labels={GROUP: "g"}, annotations={names.GANG_SIZE: "1"}),
        ],
    ],
)
def test_what_kueue_owns_is_refused(things: list[PodInfo | Json]) -> None:
    problems = {gang.problem for gang in indexed(*things)}
    assert all(problem is not None and "Kueue decides when it runs" in problem for problem in problems)


def test_a_group_without_gpus_may_still_get_pods_that_have_some() -> None:
    first, second = group("2", gpus=0)
    assert only(first).problem is None
    assert only(first, second).problem is not None


# Placement


def placed(parts: list[tuple[str, int]], *pods: PodInfo, gpus: int = 1, finished: int = 0) -> dict[str, str] | None:
    gang = Gang(
        "k" * 8, "default", "g", "PodGroup", None, len(pods), pods, gpus, Preempts.NEVER, None, True, finished=finished
    )
    found = placement_of(gang, parts)
    return None if found is None else {name: node for (_, name), node in found.items()}


def test_every_node_gets_the_pods_that_its_gpus_are_for_neighbours_together() -> None:
    pods = [pod(f"w-{number}", gpus=2) for number in (10, 2, 0, 1)]
    want = {"w-0": "n2", "w-1": "n1", "w-2": "n1", "w-10": "n1"}
    assert placed([("n2", 2), ("n1", 6)], *pods, gpus=2) == want


def test_ranks_decide_which_pods_are_neighbours() -> None:
    index = "batch.kubernetes.io/job-completion-index"
    pods = [pod("z", labels={index: "0"}), pod("y", labels={index: "1"}), pod("x", labels={index: "2"})]
    assert placed([("a", 2), ("b", 1)], *pods) == {"z": "a", "y": "a", "x": "b"}


def test_bound_pods_stay_and_count_and_helpers_go_to_the_first_node() -> None:
    pods = [pod("a", node="n2"), pod("b"), pod("c"), pod("launcher", gpus=0)]
    assert placed([("n1", 1), ("n2", 2)], *pods) == {"b": "n1", "c": "n2", "launcher": "n1"}


@pytest.mark.parametrize(
    ("parts", "pods"),
    [
        ([("n", 3)], [pod("a", gpus=2)]),
        ([("n", 4)], [pod("a", gpus=2)]),
        ([("n", 2)], [pod("a", gpus=2), pod("b", gpus=2)]),
        ([("n", 2)], [pod("a", gpus=2, node="elsewhere")]),
        ([("n", 2)], [pod("a", gpus=2, schedulingGates=[{"name": "x"}])]),
        ([], [pod("a", gpus=2)]),
        ([("n", 0)], []),
    ],
)
def test_what_does_not_come_out_even_is_not_placed(parts: list[tuple[str, int]], pods: list[PodInfo]) -> None:
    assert placed(parts, *pods, gpus=2) is None


def test_pods_that_have_finished_leave_places_empty() -> None:
    assert placed([("n1", 1), ("n2", 1)], pod("b"), finished=1) == {"b": "n1"}
    assert placed([("n1", 1), ("n2", 2)], pod("b"), finished=1) is None


# Nodes


def node(name: str, gpus: int = 8, **more: Any) -> NodeInfo:
    found = a_node(name, gpus, **more)
    found["metadata"]["uid"] = name
    return read_node(found)


def tainted(key: str, value: str = "", effect: str = "NoSchedule") -> Json:
    return {"taints": [{"key": key, "value": value, "effect": effect}]}


A, B = node("a1", labels={"pool": "blue", "gen": "8"}), node("b1", labels={"gen": "9"})
MIXED = [(A, "a100"), (B, "h100")]


def requiring(*terms: list[Json], field: str = "matchExpressions") -> Json:
    selector = {"nodeSelectorTerms": [{field: each} for each in terms]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": selector}}}


def expression(key: str, operator: str, *values: str) -> Json:
    return {"key": key, "operator": operator, "values": [*values]}


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        ({}, ()),
        ({"nodeSelector": {"pool": "blue"}}, ("a100",)),
        (requiring([expression("pool", "In", "blue", "red")]), ("a100",)),
        (requiring([expression("pool", "NotIn", "blue")]), ("h100",)),
        (requiring([expression("pool", "Exists")]), ("a100",)),
        (requiring([expression("pool", "DoesNotExist")]), ("h100",)),
        (requiring([expression("gen", "Gt", "8")]), ("h100",)),
        (requiring([expression("gen", "Lt", "9")]), ("a100",)),
        (requiring([expression("gen", "Gt", "7"), expression("pool", "Exists")]), ("a100",)),
        (requiring([expression("pool", "Exists")], [expression("gen", "In", "9")]), ()),
        (requiring([expression("metadata.name", "In", "b1")], field="matchFields"), ("h100",)),
    ],
)
def test_selectors_and_affinity_leave_gpu_types(spec: Json, want: tuple[str, ...]) -> None:
    assert NodeTypes(MIXED).of(only(pod("p", **spec))) == (want, None)


@pytest.mark.parametrize(
    "spec",
    [
        {"nodeSelector": {"pool": "green"}},
        requiring([]),
        requiring([expression("pool", "Gt", "1")]),
        requiring([expression("gen", "Near", "8")]),
        requiring([expression("metadata.uid", "In", "a1")], field="matchFields"),
    ],
)
def test_what_no_node_matches_is_a_problem(spec: Json) -> None:
    types, problem = NodeTypes(MIXED).of(only(pod("p", **spec)))
    assert types == ()
    assert problem is not None
    assert problem.text.startswith("Pod p: no node with GPUs matches what its pods demand (")
    assert problem.code == "rejected", "another node would mend it"


@pytest.mark.parametrize(
    ("taint", "tolerations", "want"),
    [
        (tainted("team", "x"), [], False),
        (tainted("team", "x", "NoExecute"), [], False),
        (tainted("team", "x", "PreferNoSchedule"), [], True),
        (tainted("team", "x"), [{"key": "team", "operator": "Equal", "value": "x", "effect": "NoSchedule"}], True),
        (tainted("team", "x"), [{"key": "team", "operator": "Equal", "value": "y"}], False),
        (tainted("team", "x"), [{"key": "team", "operator": "Exists", "effect": "NoExecute"}], False),
        (tainted("team", "x"), [{"key": "team", "operator": "Exists"}], True),
        (tainted("team", "x"), [{"operator": "Exists"}], True),
        (tainted("nvidia.com/gpu"), [], True),
        (tainted("node.kubernetes.io/unschedulable"), [], True),
    ],
)
def test_taints_have_to_be_tolerated(taint: Json, tolerations: list[Json], want: bool) -> None:
    nodes = [(node("a1", **taint), "a100"), (B, "h100")]
    types, problem = NodeTypes(nodes).of(only(pod("p", tolerations=tolerations)))
    assert problem is None
    assert types == (() if want else ("h100",))


def test_a_gang_that_can_be_on_some_nodes_of_a_type_only_is_refused() -> None:
    nodes = [(A, "a100"), (node("a2"), "a100")]
    _, problem = NodeTypes(nodes).of(only(pod("p", nodeSelector={"pool": "blue"})))
    assert problem == (
        "cannot-run",
        "Pod p: its pods can be on a1, but not on a2 (pool=blue), both of type a100, and Poise chooses among all nodes of"
        " a type; label nodes that differ with poise.run/gpu-type",
    )


@pytest.mark.parametrize(
    ("asked", "want"),
    [
        ({"gpus": 16}, "a pod asks for 16 GPUs, the largest node (n3) has 8; ask for less per pod"),
        ({"cpu": "65"}, "a pod asks for 65 cores, the largest node (n2) has 64; ask for less per pod"),
        ({"memory": "600Gi"}, "a pod asks for 600 GiB of memory, the largest node (n2) has 512; ask for less per pod"),
        (
            {"gpus": 8, "cpu": "64"},
            "no node has the GPUs, cores and memory together that a pod asks for; ask for less per pod",
        ),
    ],
)
def test_a_pod_that_is_larger_than_every_node_is_a_problem(asked: Json, want: str) -> None:
    nodes = [(node("n2", 4), "a100"), (node("n3", 8, cpu="32", memory="256Gi"), "a100")]
    found = a_pod("p", asked.get("gpus", 1))
    limits = found["spec"]["containers"][0]["resources"]["requests"]
    limits |= {key: asked[key] for key in ("cpu", "memory") if key in asked}
    found["metadata"]["uid"] = "p"
    assert NodeTypes(nodes).of(only(read_pod(found))) == ((), ("rejected", f"Pod p: {want}"))


def test_types_whose_nodes_are_all_too_small_are_left_out() -> None:
    assert NodeTypes([(node("s", 4), "t4"), (A, "a100")]).of(only(pod("p", gpus=8))) == (("a100",), None)


def test_a_gang_without_pods_may_be_anywhere() -> None:
    assert NodeTypes(MIXED).of(only(job(suspend=True))) == ((), None)


def test_a_cluster_without_gpus_is_a_problem() -> None:
    want = "rejected", "Pod p: the cluster has no node with GPUs that Poise may use"
    assert NodeTypes([]).of(only(pod("p")))[1] == want


def test_a_suspended_gang_asks_for_the_gpus_of_its_workers_alone() -> None:
    """It has no pods that could be counted; its launcher has no GPUs."""
    made = jobset("x", replicated("launcher", gpus=0), replicated("workers", 4, gpus=8), suspend=True)
    assert request_of(only(made), ()).gpus == 32


def test_what_pods_or_else_the_owner_say_is_found() -> None:
    made = job(size=1, annotations={names.DURATION: "60", names.PREEMPTION: "restart"})
    gang = only(made, pod("a", owner=made, annotations={names.DURATION: "90"}))
    assert (gang.annotation(names.DURATION), gang.annotation(names.PREEMPTION)) == ("90", "restart")
    assert only(pod("b")).annotation(names.DURATION) is None
