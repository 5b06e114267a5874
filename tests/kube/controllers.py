"""Pretend controllers: of Jobs, and of JobSets and TrainJobs where `install_crds` has defined them.

They do what those of Kubernetes, JobSet and Kubeflow Trainer do as far as a scheduler of pods can tell: make pods, end them
when their owner is suspended or gone, make failed ones again, and say how it went. They look at everything several times a
second.
"""

import copy
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from types import TracebackType
from typing import Any, Self

import httpx
from tests.kube.server import Admin, Json, KubeError, KubeServer, now

JOBS = "/apis/batch/v1"
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2"
TRAINJOBS = "/apis/trainer.kubeflow.org/v1alpha1"
FINALIZER = "batch.kubernetes.io/job-tracking"
INDEX = "batch.kubernetes.io/job-completion-index"
_KINDS = (("jobset.x-k8s.io", "v1alpha2", "JobSet"), ("trainer.kubeflow.org", "v1alpha1", "TrainJob"))
_COPIED = ("nodeSelector", "tolerations", "schedulingGates")


def install_crds(server: KubeServer, seconds: float = 30.0) -> None:
    """Define JobSet and TrainJob, with schemas that accept everything; wait until they can be used."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for group, version, kind in _KINDS:
        plural = f"{kind.lower()}s"
        anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        schema = {"type": "object", "properties": {"spec": anything, "status": anything}}
        crd = {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{plural}.{group}", "annotations": {"api-approved.kubernetes.io": "unapproved, a test"}},
            "spec": {
                "group": group,
                "scope": "Namespaced",
                "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
                "versions": [
                    {
                        "name": version,
                        "served": True,
                        "storage": True,
                        "subresources": {"status": {}},
                        "schema": {"openAPIV3Schema": schema},
                    }
                ],
            },
        }
        if server.admin.find(f"{path}/{plural}.{group}") is None:
            server.admin.post(path, crd)
    deadline = time.monotonic() + seconds
    for group, version, kind in _KINDS:
        while server.admin.find(f"/apis/{group}/{version}/{kind.lower()}s") is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the definition of {kind} is not established")
            time.sleep(0.1)


class Controllers:
    """All of them, in one thread; a context manager.

    runtimes    the JobSet specs that TrainJobs refer to by `runtimeRef.name`; those that are not known have one container
    """

    def __init__(self, server: KubeServer, interval: float = 0.1, runtimes: Mapping[str, Json] | None = None) -> None:
        self.api = Admin(server.url, server.ca, server.token("admin"))
        self.problems: list[str] = []
        self._interval = interval
        self._runtimes = dict(runtimes or {})
        self._closing = threading.Event()
        self._succeeded: dict[str, dict[str, str]] = {}
        """Pods that have succeeded, by the uid of their Job: the uid of each and its index."""
        self._failed: dict[str, dict[str, str]] = {}
        self._suspended: set[str] = set()
        """Pods that were ended by a suspension: their end is not counted."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="controllers")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing more."""
        self._closing.set()
        self._thread.join(60)
        self.api.close()

    def _run(self) -> None:
        while not self._closing.wait(self._interval):
            try:
                self._look()
            except KubeError as error:
                if error.code not in (404, 409):
                    self.problems.append(str(error))
            except (httpx.HTTPError, OSError, HTTPException):
                self._closing.wait(0.2)

    def _look(self) -> None:
        trainjobs, jobsets = self._all(f"{TRAINJOBS}/trainjobs"), self._all(f"{JOBSETS}/jobsets")
        jobs, pods = self._all(f"{JOBS}/jobs"), self._all("/api/v1/pods")
        for each in trainjobs:
            self._one(self._train, each, _owned(each, jobsets))
        for each in jobsets:
            self._one(self._set, each, _owned(each, jobs))
        for each in jobs:
            self._one(self._job, each, _owned(each, pods))
        self._collect_garbage("JobSet", jobsets, {each["metadata"]["uid"] for each in trainjobs})
        self._collect_garbage("Job", jobs, {each["metadata"]["uid"] for each in jobsets})
        self._collect_garbage("Pod", pods, {each["metadata"]["uid"] for each in jobs})

    def _one(self, controller: Any, each: Json, owned: Sequence[Json]) -> None:
        """Let one object be looked after; what is refused for one is no matter of the others."""
        try:
            controller(each, owned)
        except KubeError as error:
            if error.code not in (404, 409):
                self.problems.append(f"{each['metadata']['name']}: {error}")

    def _all(self, path: str) -> list[Json]:
        found = self.api.find(path)
        return [] if found is None else list(found["items"])

    def _collect_garbage(self, kind: str, objects: Iterable[Json], owners: set[str]) -> None:
        path = {"JobSet": f"{JOBSETS}/{{}}/jobsets", "Job": f"{JOBS}/{{}}/jobs", "Pod": "/api/v1/{}/pods"}[kind]
        above = {"JobSet": "TrainJob", "Job": "JobSet", "Pod": "Job"}[kind]
        for each in objects:
            meta = each["metadata"]
            owner = _owner(each)
            if owner is None or owner["kind"] != above or owner["uid"] in owners:
                continue
            where = f"{path.format('namespaces/' + meta['namespace'])}/{meta['name']}"
            with suppress(KubeError):
                if FINALIZER in meta.get("finalizers", []):
                    self._track(each)
                if "deletionTimestamp" not in meta:
                    self.api.delete(where, uid=meta["uid"])

    # Jobs ---------------------------------------------------------------------------------------------------------------

    def _job(self, job: Json, pods: Sequence[Json]) -> None:
        meta, spec = job["metadata"], job["spec"]
        uid, path = meta["uid"], f"{JOBS}/namespaces/{meta['namespace']}/jobs/{meta['name']}"
        conditions = _conditions(job)
        if "Complete" in conditions or "Failed" in conditions or "deletionTimestamp" in meta:
            for pod in pods:
                self._track(pod)
                if _is_active(pod):
                    self._delete_pod(pod)
            return
        cause = self._count(job, pods)
        succeeded, failed = self._succeeded.setdefault(uid, {}), self._failed.setdefault(uid, {})
        active = [pod for pod in pods if _is_active(pod)]
        wanted = spec.get("completions")
        is_done = len(set(succeeded.values())) >= wanted if wanted is not None else bool(succeeded) and not active
        leaving = [pod for pod in pods if "deletionTimestamp" in pod["metadata"] and not _is_ended(pod)]
        status: Json = {"succeeded": len(succeeded), "failed": len(failed), "ready": 0, "terminating": len(leaving)}
        if is_done or cause or len(failed) > spec.get("backoffLimit", 6):
            kind = "Complete" if is_done else "Failed"
            reason, message = ("CompletionsReached", "") if is_done else cause or ("BackoffLimitExceeded", "")
            for pod in active:
                self._delete_pod(pod)
            if [pod for pod in pods if not _is_ended(pod)]:  # the verdict waits until all have ended
                self._tell_job(path, job, {**status, "active": len(active)}, _verdict_to_be(kind, reason, message))
                return
            self._tell_job(path, job, {**status, "active": 0}, _verdict(kind, reason, message))
        elif spec.get("suspend"):
            for pod in active:
                self._suspended.add(pod["metadata"]["uid"])
                self._delete_pod(pod)
            self._tell_job(path, job, {**status, "active": 0}, [_condition("Suspended", "True", "JobSuspended")])
        else:
            said = [_condition("Suspended", "False", "JobResumed")] if "Suspended" in _known(job) else []
            made = self._make_pods(job, pods, active)
            ready = len([pod for pod in active if "Ready" in _conditions(pod)])
            self._tell_job(path, job, {**status, "active": len(active) + made, "ready": ready}, said)

    def _count(self, job: Json, pods: Sequence[Json]) -> tuple[str, str] | None:
        """Note pods that have ended; return why the Job fails at once, if a rule says so."""
        uid, cause = job["metadata"]["uid"], None
        succeeded, failed = self._succeeded.setdefault(uid, {}), self._failed.setdefault(uid, {})
        for pod in pods:
            meta = pod["metadata"]
            phase = pod.get("status", {}).get("phase")
            if phase == "Succeeded":
                succeeded[meta["uid"]] = _index(pod) or meta["uid"]
            elif _is_ended(pod) and meta["uid"] not in self._suspended and meta["uid"] not in failed:
                action, message = _rule(job, pod)
                if action == "FailJob":
                    cause = "PodFailurePolicy", message
                if action != "Ignore":
                    failed[meta["uid"]] = _index(pod)
            if _is_ended(pod):
                self._track(pod)
        return cause

    def _make_pods(self, job: Json, pods: Sequence[Json], active: Sequence[Json]) -> int:
        """Make the pods that are missing; those that are ending count if the Job asks to wait for them."""
        spec, uid = job["spec"], job["metadata"]["uid"]
        waits = (
            spec.get("podReplacementPolicy", "Failed" if "podFailurePolicy" in spec else "TerminatingOrFailed") == "Failed"
        )
        there = [pod for pod in pods if not _is_ended(pod) and (waits or "deletionTimestamp" not in pod["metadata"])]
        succeeded = set(self._succeeded.get(uid, {}).values())
        parallelism, completions = spec.get("parallelism", 1), spec.get("completions")
        if completions is not None:
            parallelism = min(parallelism, completions - len(succeeded))
        elif succeeded:
            parallelism = len(there)  # a work queue: no new ones once one has succeeded
        missing = max(parallelism - len(there), 0)
        if spec.get("completionMode") == "Indexed":
            taken = {_index(pod) for pod in there} | succeeded
            indices = [str(each) for each in range(completions or 0) if str(each) not in taken][:missing]
        else:
            indices = [""] * missing
        for index in indices:
            self._make_pod(job, index)
        return len(indices)

    def _make_pod(self, job: Json, index: str) -> None:
        meta = job["metadata"]
        template = copy.deepcopy(job["spec"]["template"])
        made = template.setdefault("metadata", {})
        middle = f"-{index}" if index else ""
        made["name"] = f"{meta['name']}{middle}-{secrets.token_hex(3)[:5]}"
        made["ownerReferences"] = [_reference("batch/v1", "Job", meta)]
        made["finalizers"] = [FINALIZER]
        known = {"batch.kubernetes.io/job-name": meta["name"], "job-name": meta["name"]}
        made["labels"] = {**made.get("labels", {}), **known, "controller-uid": meta["uid"]}
        made["labels"]["batch.kubernetes.io/controller-uid"] = meta["uid"]
        if index:
            made["labels"][INDEX] = index
            made["annotations"] = {**made.get("annotations", {}), INDEX: index}
            template["spec"].setdefault("hostname", f"{meta['name']}-{index}"[:63])
            source = {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX}']"}}
            for each in [*template["spec"]["containers"], *template["spec"].get("initContainers", [])]:
                each["env"] = [*each.get("env", []), {"name": "JOB_COMPLETION_INDEX", "valueFrom": source}]
        self.api.post(f"/api/v1/namespaces/{meta['namespace']}/pods", template)

    def _delete_pod(self, pod: Json) -> None:
        meta = pod["metadata"]
        if "deletionTimestamp" not in meta:
            self.api.delete(f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}", uid=meta["uid"])

    def _track(self, pod: Json) -> None:
        """Let go of a pod that was counted."""
        meta = pod["metadata"]
        if FINALIZER in meta.get("finalizers", []):
            left = [each for each in meta["finalizers"] if each != FINALIZER]
            path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
            with suppress(KubeError):
                self.api.patch(path, {"metadata": {"uid": meta["uid"], "finalizers": left or None}})

    def _tell_job(self, path: str, job: Json, status: Json, conditions: Sequence[Json]) -> None:
        old = job.get("status", {})
        said = {**status, "conditions": _merged(old.get("conditions", []), conditions)}
        is_suspended = any(each["type"] == "Suspended" and each["status"] == "True" for each in said["conditions"])
        is_judged = bool({each["type"] for each in conditions} & {"SuccessCriteriaMet", "FailureTarget"})
        # What is suspended has not started; but what has come to its end, even on its way out, must have.
        said["startTime"] = None if is_suspended and not is_judged else old.get("startTime") or now()
        if any(each["type"] == "Complete" for each in conditions):
            said["completionTime"] = now()
        if any(old.get(key, 0 if isinstance(value, int) else None) != value for key, value in said.items()):
            self.api.patch(f"{path}/status", {"metadata": _same(job), "status": said})

    # JobSets ------------------------------------------------------------------------------------------------------------

    def _set(self, jobset: Json, jobs: Sequence[Json]) -> None:
        meta, spec = jobset["metadata"], jobset["spec"]
        path = f"{JOBSETS}/namespaces/{meta['namespace']}/jobsets/{meta['name']}"
        if "Completed" in _conditions(jobset) or "Failed" in _conditions(jobset) or "deletionTimestamp" in meta:
            return
        restarts = int(jobset.get("status", {}).get("restarts", 0))
        old = [job for job in jobs if _attempt(job) < restarts]
        for job in old:
            self.api.delete(f"{JOBS}/namespaces/{meta['namespace']}/jobs/{job['metadata']['name']}")
        current = [job for job in jobs if _attempt(job) >= restarts]
        suspend = bool(spec.get("suspend"))
        if not old:
            self._make_jobs(jobset, {job["metadata"]["name"] for job in current}, restarts)
        for job in current:
            if bool(job["spec"].get("suspend")) != suspend:
                self._switch_job(job, jobset, suspend=suspend)
        wanted = sum(int(each.get("replicas", 1)) for each in spec["replicatedJobs"])
        status: Json = {
            "restarts": restarts,
            "replicatedJobsStatus": [_counts(each, current) for each in spec["replicatedJobs"]],
        }
        conditions = []
        if any("Failed" in _conditions(job) for job in current):
            if restarts < int(spec.get("failurePolicy", {}).get("maxRestarts", 0)):
                status["restarts"] = restarts + 1
            else:
                conditions, status["terminalState"] = [_condition("Failed", "True", "FailedJobs")], "Failed"
        elif len([job for job in current if "Complete" in _conditions(job)]) == wanted:
            conditions, status["terminalState"] = [_condition("Completed", "True", "AllJobsCompleted")], "Completed"
        elif suspend or "Suspended" in _known(jobset):
            conditions = [_condition("Suspended", str(suspend), "SuspendedJobs" if suspend else "ResumeJobs")]
        self._tell(path, jobset, status, conditions)

    def _make_jobs(self, jobset: Json, there: set[str], restarts: int) -> None:
        meta, spec = jobset["metadata"], jobset["spec"]
        self._make_service(jobset)
        for replicated in spec["replicatedJobs"]:
            count = int(replicated.get("replicas", 1))
            for index in range(count):
                name = f"{meta['name']}-{replicated['name']}-{index}"
                if name in there:
                    continue
                known = {
                    "jobset.sigs.k8s.io/jobset-name": meta["name"],
                    "jobset.sigs.k8s.io/jobset-uid": meta["uid"],
                    "jobset.sigs.k8s.io/replicatedjob-name": replicated["name"],
                    "jobset.sigs.k8s.io/replicatedjob-replicas": str(count),
                    "jobset.sigs.k8s.io/job-index": str(index),
                    "jobset.sigs.k8s.io/restart-attempt": str(restarts),
                }
                job = copy.deepcopy(replicated["template"])
                job["metadata"] = {**job.get("metadata", {}), "name": name}
                job["metadata"]["ownerReferences"] = [_reference("jobset.x-k8s.io/v1alpha2", "JobSet", meta)]
                template = job["spec"].setdefault("template", {})
                for each in (job["metadata"], template.setdefault("metadata", {})):
                    each["labels"] = {**each.get("labels", {}), **known}
                    each["annotations"] = {**each.get("annotations", {}), **known}
                job["spec"].setdefault("completionMode", "Indexed")
                job["spec"].setdefault("completions", job["spec"].get("parallelism", 1))
                job["spec"]["suspend"] = bool(spec.get("suspend"))
                if spec.get("network", {}).get("enableDNSHostnames", True):
                    template["spec"].setdefault("subdomain", _subdomain(jobset))
                self.api.post(f"{JOBS}/namespaces/{meta['namespace']}/jobs", job)

    def _make_service(self, jobset: Json) -> None:
        meta, network = jobset["metadata"], jobset["spec"].get("network", {})
        path = f"/api/v1/namespaces/{meta['namespace']}/services"
        if not network.get("enableDNSHostnames", True) or self.api.find(f"{path}/{_subdomain(jobset)}") is not None:
            return
        service = {
            "metadata": {"name": _subdomain(jobset), "ownerReferences": [_reference(JOBSETS[6:], "JobSet", meta)]},
            "spec": {
                "clusterIP": "None",
                "selector": {"jobset.sigs.k8s.io/jobset-name": meta["name"]},
                "publishNotReadyAddresses": network.get("publishNotReadyAddresses", True),
            },
        }
        self.api.post(path, service)

    def _switch_job(self, job: Json, jobset: Json, *, suspend: bool) -> None:
        """Suspend or resume a Job; what may change of its pods is taken over from the JobSet when it is resumed."""
        meta = job["metadata"]
        path = f"{JOBS}/namespaces/{meta['namespace']}/jobs/{meta['name']}"
        name = meta["labels"]["jobset.sigs.k8s.io/replicatedjob-name"]
        template = next(each["template"] for each in jobset["spec"]["replicatedJobs"] if each["name"] == name)
        wanted = template["spec"]["template"].get("spec", {})
        changed = {key: wanted[key] for key in _COPIED if key in wanted}
        if not suspend and changed and "startTime" not in job.get("status", {}):
            self.api.patch(path, {"spec": {"template": {"spec": changed}}})
        self.api.patch(path, {"spec": {"suspend": suspend}})

    # TrainJobs ----------------------------------------------------------------------------------------------------------

    def _train(self, train: Json, jobsets: Sequence[Json]) -> None:
        meta, spec = train["metadata"], train["spec"]
        path = f"{TRAINJOBS}/namespaces/{meta['namespace']}/trainjobs/{meta['name']}"
        if "Complete" in _conditions(train) or "Failed" in _conditions(train) or "deletionTimestamp" in meta:
            return
        suspend = bool(spec.get("suspend"))
        where = f"{JOBSETS}/namespaces/{meta['namespace']}/jobsets"
        if not jobsets:
            self.api.post(where, self._jobset_of(train))
            return
        jobset = jobsets[0]
        if bool(jobset["spec"].get("suspend")) != suspend:
            self.api.patch(f"{where}/{meta['name']}", {"spec": {"suspend": suspend}})
        conditions = []
        if "Completed" in _conditions(jobset):
            conditions = [_condition("Complete", "True", "AllJobsCompleted")]
        elif "Failed" in _conditions(jobset):
            conditions = [_condition("Failed", "True", "FailedJobs")]
        elif suspend or "Suspended" in _known(train):
            conditions = [_condition("Suspended", str(suspend), "Suspended" if suspend else "Resumed")]
        self._tell(path, train, {}, conditions)

    def _jobset_of(self, train: Json) -> Json:
        meta, spec = train["metadata"], train["spec"]
        plain = {"name": "node", "template": {"spec": {"template": {"spec": {"restartPolicy": "Never"}}}}}
        runtime = self._runtimes.get(spec.get("runtimeRef", {}).get("name", ""), {"replicatedJobs": [plain]})
        made = copy.deepcopy(runtime)
        trainer = spec.get("trainer", {})
        for replicated in made["replicatedJobs"]:
            job = replicated["template"]["spec"]
            if "numNodes" in trainer:
                job["parallelism"] = job["completions"] = trainer["numNodes"]
            template = job["template"]
            labels = template.setdefault("metadata", {}).setdefault("labels", {})
            labels["trainer.kubeflow.org/trainjob-ancestor-step"] = "trainer"
            container = template["spec"].setdefault("containers", [{"name": "node"}])[0]
            container |= {key: trainer[key] for key in ("image", "command", "args", "env") if key in trainer}
            if "resourcesPerNode" in trainer:
                container["resources"] = trainer["resourcesPerNode"]
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {
                "name": meta["name"],
                "labels": spec.get("labels", {}),
                "annotations": spec.get("annotations", {}),
                "ownerReferences": [_reference("trainer.kubeflow.org/v1alpha1", "TrainJob", meta)],
            },
            "spec": {**made, "suspend": bool(spec.get("suspend"))},
        }

    def _tell(self, path: str, each: Json, status: Json, conditions: Sequence[Json]) -> None:
        old = each.get("status", {})
        said = {**status, "conditions": _merged(old.get("conditions", []), conditions)}
        if any(old.get(key) != value for key, value in said.items()):
            self.api.patch(f"{path}/status", {"metadata": _same(each), "status": said})


def _same(each: Json) -> Json:
    """Return what has a change refused if the object is not as it was seen."""
    return {key: each["metadata"][key] for key in ("uid", "resourceVersion")}


def _owner(each: Json) -> Json | None:
    return next((one for one in each["metadata"].get("ownerReferences", []) if one.get("controller")), None)


def _owned(owner: Json, objects: Iterable[Json]) -> list[Json]:
    return [each for each in objects if (_owner(each) or {}).get("uid") == owner["metadata"]["uid"]]


def _reference(version: str, kind: str, meta: Json) -> Json:
    known = {"apiVersion": version, "kind": kind, "name": meta["name"], "uid": meta["uid"]}
    return {**known, "controller": True, "blockOwnerDeletion": True}


def _known(each: Json) -> set[str]:
    return {one["type"] for one in each.get("status", {}).get("conditions", [])}


def _conditions(each: Json) -> set[str]:
    """Return the conditions that hold."""
    return {one["type"] for one in each.get("status", {}).get("conditions", []) if one["status"] == "True"}


def _condition(kind: str, status: str, reason: str, message: str = "") -> Json:
    said = {"type": kind, "status": status, "reason": reason, "message": message or reason}
    return {**said, "lastTransitionTime": now(), "lastProbeTime": now()}


def _verdict_to_be(kind: str, reason: str, message: str) -> list[Json]:
    return [_condition("SuccessCriteriaMet" if kind == "Complete" else "FailureTarget", "True", reason, message)]


def _verdict(kind: str, reason: str, message: str) -> list[Json]:
    return [*_verdict_to_be(kind, reason, message), _condition(kind, "True", reason, message)]


def _merged(old: Sequence[Json], new: Sequence[Json]) -> list[Json]:
    """Return conditions with those that are new or have changed."""
    made = {each["type"]: each for each in old}
    for each in new:
        if made.get(each["type"], {}).get("status") != each["status"]:
            made[each["type"]] = each
    return list(made.values())


def _index(pod: Json) -> str:
    return str(pod["metadata"].get("annotations", {}).get(INDEX, ""))


def _is_active(pod: Json) -> bool:
    """Whether a pod neither has ended nor is to."""
    return not _is_ended(pod) and "deletionTimestamp" not in pod["metadata"]


def _is_ended(pod: Json) -> bool:
    """Whether it is terminal; one that is only held by our finalizer was deleted for good."""
    meta = pod["metadata"]
    is_removed = "deletionTimestamp" in meta and meta.get("deletionGracePeriodSeconds") == 0
    return is_removed or pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def _rule(job: Json, pod: Json) -> tuple[str, str]:
    """Return what the failure policy of a Job says to a pod that has failed: an action, and why."""
    statuses = pod.get("status", {})
    ended = [*statuses.get("containerStatuses", []), *statuses.get("initContainerStatuses", [])]
    codes = {
        each["name"]: each["state"]["terminated"]["exitCode"] for each in ended if "terminated" in each.get("state", {})
    }
    for number, rule in enumerate(job["spec"].get("podFailurePolicy", {}).get("rules", [])):
        message = f"Pod {pod['metadata']['name']} matching {rule['action']} rule at index {number}"
        if "onExitCodes" in rule:
            wanted = rule["onExitCodes"]
            names = [wanted["containerName"]] if wanted.get("containerName") else list(codes)
            found = [codes[name] for name in names if codes.get(name, 0) != 0]
            is_in = wanted["operator"] == "In"
            if any((code in wanted["values"]) == is_in for code in found):
                return rule["action"], message
        for condition in rule.get("onPodConditions", []):
            for each in statuses.get("conditions", []):
                if (each["type"], each["status"]) == (condition["type"], condition.get("status", "True")):
                    return rule["action"], message
    return "Count", ""


def _attempt(job: Json) -> int:
    return int(job["metadata"].get("labels", {}).get("jobset.sigs.k8s.io/restart-attempt", 0))


def _subdomain(jobset: Json) -> str:
    return str(jobset["spec"].get("network", {}).get("subdomain") or jobset["metadata"]["name"])


def _counts(replicated: Json, jobs: Iterable[Json]) -> Json:
    """Return how the Jobs of one kind in a JobSet are."""
    key = "jobset.sigs.k8s.io/replicatedjob-name"
    chosen = [job for job in jobs if job["metadata"]["labels"].get(key) == replicated["name"]]
    status = [job.get("status", {}) for job in chosen]
    return {
        "name": replicated["name"],
        "ready": len([each for each in status if each.get("ready")]),
        "active": len([each for each in status if each.get("active")]),
        "succeeded": len([job for job in chosen if "Complete" in _conditions(job)]),
        "failed": len([job for job in chosen if "Failed" in _conditions(job)]),
        "suspended": len([job for job in chosen if "Suspended" in _conditions(job)]),
    }
