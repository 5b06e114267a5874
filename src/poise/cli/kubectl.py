"""`kubectl poise`: the commands of Poise under the name of a plug-in of kubectl, with jobs by the names that Kubernetes has.

    kubectl poise why pod/train-0 -n vision          poise why 17
    kubectl poise logs -f job/train                  poise logs -f 17
    kubectl poise queue -n vision                    poise queue --tenant vision

`words_of` turns the words of the one into those of the other; everything else is `poise`. A pod says on itself which job it
belongs to, once it is bound, so it is read by `kubectl get`. A Job, JobSet or TrainJob is a job of the same name, whose
tenant is that of its namespace. Other words are ids and names of Poise's own jobs, and then names of pods.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import click

from poise.cli import INTERRUPTED
from poise.cli import main as poise_main
from poise.cli.app import poise
from poise.cli.live import connected
from poise.scheduler.model.errors import PoiseError, RequestError
from poise.service.backends.kubernetes import names
from poise.service.backends.kubernetes.gangs import GROUP_NAMES
from poise.service.client import Client, ServerRefusedError
from poise.service.client.config import NOTHING, find_server
from poise.service.client.connection import NOT_FOUND
from poise.service.wire.draft import clean_name
from poise.service.wire.request import DNS_NAME, plain
from poise.service.wire.views import JobRow, JobState

JOB_VERBS = frozenset({"why", "show", "logs", "events", "cancel", "hold", "release", "wait"})
"""Verbs that take jobs, and so the names of Kubernetes."""
TENANT_VERBS = frozenset({"queue", "events"})
"""Verbs that a namespace narrows down to its tenant."""
LIVE_VERBS = JOB_VERBS | TENANT_VERBS | {"submit", "shares", "nodes", "drain", "return", "use", "tokens"}
NO_SERVER = (
    "no Poise server is known; forward its port in another terminal (kubectl -n poise-system port-forward svc/poise 8642),"
    " then set POISE_URL=https://localhost:8642, POISE_TOKEN, and POISE_CA to the server's certificate"
)
KUBECTL_SECONDS = 30.0
MOST_LIKE = 20  # jobs of one name that are looked at
JOBSET = "jobset.sigs.k8s.io/jobset-name"  # label of pods; the JobSet of a TrainJob has its name
KINDS = {
    "pod": "Pod", "pods": "Pod", "po": "Pod",
    "job": "Job", "jobs": "Job",
    "jobset": "JobSet", "jobsets": "JobSet",
    "trainjob": "TrainJob", "trainjobs": "TrainJob",
}  # fmt: skip
"""Kinds as kubectl's users write them."""
_KUBECTL_OPTIONS = {"-n": "namespace", "--namespace": "namespace", "--context": "context", "--kubeconfig": "kubeconfig"}
_NAME = re.compile(DNS_NAME)


def main() -> NoReturn:
    """Run a command and exit with its code."""
    try:
        sys.argv = ["poise", *words_of(sys.argv[1:])]
    except PoiseError as error:
        click.echo(f"poise: {plain(str(error))}", err=True)
        sys.exit(2 if isinstance(error, RequestError) else 1)
    except KeyboardInterrupt:
        click.echo("\npoise: interrupted before anything was finished", err=True)
        sys.exit(INTERRUPTED)
    poise_main()
    sys.exit(0)


def words_of(words: Sequence[str]) -> list[str]:
    """Return the words of `poise` that do what these of `kubectl poise` ask for."""
    verb, rest = (words[0], list(words[1:])) if words else ("", [])
    if verb in LIVE_VERBS and not {"-h", "--help"} & {*rest}:
        _check_server()
    if verb not in JOB_VERBS | TENANT_VERBS:
        return list(words)
    cluster, rest = Kubectl.parse(rest)
    kept, named = _told_apart(verb, rest)
    if verb == "events" and len(named) > 1:
        raise RequestError("events: expected one job, or none")
    found = _ids(cluster, named) if verb in JOB_VERBS else named
    if verb == "events":
        kept += [word for each in found for word in ("--job", each)]
        found = []
    if verb in TENANT_VERBS and cluster.namespace is not None and not named:
        kept += ["--tenant", cluster.tenant()]
    return [verb, *kept, *(["--"] if found else []), *found]


def _check_server() -> None:
    try:
        find_server(os.environ)
    except RequestError as error:
        if str(error) == NOTHING:
            raise RequestError(NO_SERVER) from None


def _told_apart(verb: str, words: list[str]) -> tuple[list[str], list[str]]:
    """Return the options of a verb with their values, and the names among its words."""
    command = poise.get_command(click.Context(poise), verb)
    assert command is not None
    valued = {name for each in command.params if isinstance(each, click.Option) and not each.is_flag for name in each.opts}
    options: list[str] = []
    found: list[str] = []
    left = iter(words)
    for word in left:
        if word == "--":
            found += left
        elif verb == "events" and word == "--job":
            found += [next(left, "")]
        elif verb == "events" and word.startswith("--job="):
            found.append(word.partition("=")[2])
        elif word.startswith("-") and word != "-":
            options.append(word)
            if word in valued:
                options += [value] if (value := next(left, None)) is not None else []
        else:
            found.append(word)
    if len(found) > 1 and (kind := _kind_of(found[0])) is not None:  # pod NAME, as for `kubectl get`
        found = [f"{kind}/{each}" for each in found[1:]]
    return options, found


def _kind_of(word: str) -> str | None:
    """Return the kind that a word names, with or without its group; None: none that Poise knows."""
    return KINDS.get(word.lower().partition(".")[0])


@dataclass(frozen=True, slots=True)
class Kubectl:
    """The kubectl of which this is a plug-in, with the options that it was given. None: as it has them by itself."""

    namespace: str | None = None
    context: str | None = None
    kubeconfig: str | None = None

    @classmethod
    def parse(cls, words: Sequence[str]) -> tuple["Kubectl", list[str]]:
        """Take the options of kubectl from among the words; the rest is the verb's."""
        given: dict[str, str] = {}
        rest: list[str] = []
        left = iter(words)
        for word in left:
            name, equals, value = word.partition("=")
            if word == "--":
                rest += [word, *left]
            elif name in _KUBECTL_OPTIONS:
                given[_KUBECTL_OPTIONS[name]] = value if equals else next(left, "")
            elif word.startswith("-n") and len(word) > 2:  # -nvision
                given["namespace"] = word[2:]
            elif word not in ("-A", "--all-namespaces"):
                rest.append(word)
        found = cls(**given)
        if found.namespace is not None and not _NAME.fullmatch(found.namespace):
            raise RequestError(f"-n {found.namespace[:64]!r}: expected the name of a namespace")
        return found, rest

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return an object of the cluster; None: it does not exist. Raise PoiseError if kubectl does not say."""
        _check_name(kind, name)
        done = self._run("get", kind, name, "--output", "json")
        if done.returncode:
            if "(NotFound)" in done.stderr:
                return None
            said = done.stderr.strip().splitlines()
            raise PoiseError(f"kubectl get {kind} {name}: {said[-1] if said else f'exit code {done.returncode}'}")
        try:
            document = json.loads(done.stdout)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise PoiseError(f"kubectl get {kind} {name}: what it has printed is no JSON")
        return document

    def home(self) -> str:
        """Return the namespace that is meant where none is named."""
        if self.namespace is not None:
            return self.namespace
        done = self._run("config", "view", "--minify", "--output", "jsonpath={..namespace}")
        return (done.stdout.strip() if done.returncode == 0 else "") or "default"

    def tenant(self) -> str:
        """Return whose the jobs of the namespace are: as its label says, or its name."""
        space = self.home()
        try:
            found = replace(self, namespace=None).get("namespace", space)
        except PoiseError:
            found = None  # not everybody may look at namespaces
        labels = _metadata(found or {}).get("labels") or {}
        return str(labels.get(names.TENANT) or space)

    def _run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        program = shutil.which("kubectl")
        if program is None:
            raise RequestError("kubectl is not installed, or not in PATH; name the job by its id in `poise queue`")
        said = {"--namespace": self.namespace, "--context": self.context, "--kubeconfig": self.kubeconfig}
        options = [f"{name}={value}" for name, value in said.items() if value is not None]
        try:
            return subprocess.run(
                [program, *words, *options], capture_output=True, text=True, timeout=KUBECTL_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise PoiseError(f"kubectl {' '.join(words[:3])}: no answer in {KUBECTL_SECONDS:g} s") from None


def _metadata(found: Mapping[str, Any]) -> Mapping[str, Any]:
    return found.get("metadata") or {}


def _check_name(kind: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise RequestError(f"{name[:64]!r} is no name of a {kind}; expected small letters, digits, `-` and `.`")


# From names of Kubernetes to jobs


def _ids(cluster: Kubectl, given: Sequence[str]) -> list[str]:
    """Return the jobs of Poise that these words name."""
    if not given:
        return []
    with connected() as client:
        return [_id(client, cluster, word) for word in given]


def _id(client: Client, cluster: Kubectl, word: str) -> str:
    kind_word, slash, name = word.partition("/")
    if not slash:
        return _of_plain_name(client, cluster, word)
    kind = _kind_of(kind_word)
    if kind is None:
        raise RequestError(f"{word[:80]!r}: expected pod/NAME, job/NAME, jobset/NAME, trainjob/NAME, or a job of Poise")
    _check_name(kind, name)
    if kind == "Pod":
        pod = cluster.get("pod", name)
        if pod is None:
            raise RequestError(f"there is no pod {name} in namespace {cluster.home()}; -n names another one")
        return _of_pod(client, cluster, pod)
    space, tenant = cluster.home(), cluster.tenant()
    found = _find(client, [name], space, tenant, kind)
    if found is None:
        raise RequestError(
            f"Poise knows no {kind} {name} of namespace {space} (tenant {tenant}); its pods need GPUs and"
            " schedulerName: poise, and what belongs to a JobSet or TrainJob is known by that"
        )
    return found


def _of_plain_name(client: Client, cluster: Kubectl, word: str) -> str:
    """A job of Poise by its id or name; with a namespace, first one that was created there; else a pod of that name."""
    if cluster.namespace is not None:
        found = _find(client, [word], cluster.namespace, cluster.tenant(), None)
        if found is not None:
            return found
    else:
        try:
            return client.find(word)
        except ServerRefusedError as error:
            if error.code != NOT_FOUND:
                raise
    pod = cluster.get("pod", word) if _NAME.fullmatch(word) else None
    if pod is not None:
        return _of_pod(client, cluster, pod)
    raise RequestError(f"there is no job {word[:64]!r}, and no pod of that name in namespace {cluster.home()}")


def _of_pod(client: Client, cluster: Kubectl, pod: Mapping[str, Any]) -> str:
    """The job of a pod: as it says itself, or, while it is not bound, the job of what it belongs to."""
    meta = _metadata(pod)
    space, name = str(meta.get("namespace", "default")), str(meta.get("name", ""))
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    said = annotations.get(names.JOB) or (labels.get(names.JOB) if names.SERVICE in labels else None)
    if said:
        return str(said)
    tenant = replace(cluster, namespace=space).tenant()
    found = _find(client, list(dict.fromkeys(_groups_of(meta, labels, annotations))), space, tenant, None)
    if found is not None:
        return found
    scheduler = (pod.get("spec") or {}).get("schedulerName", "default-scheduler")
    hint = f"its schedulerName is {scheduler!r}" if scheduler != names.SCHEDULER else _waits_for(pod)
    raise RequestError(f"Poise has no job for pod {space}/{name}: {hint}")


def _groups_of(meta: Mapping[str, Any], labels: Mapping[str, str], annotations: Mapping[str, str]) -> Iterator[str]:
    """Names that the job of a pod may have: those of its group, its owner, itself."""
    for each in GROUP_NAMES:
        yield from (text for text in (labels.get(each), annotations.get(each)) if text)
    yield from (text for text in (labels.get(JOBSET), annotations.get(names.GANG)) if text)
    yield from (each["name"] for each in meta.get("ownerReferences") or () if each.get("controller"))
    yield str(meta.get("name", ""))


def _waits_for(pod: Mapping[str, Any]) -> str:
    """Say why a pod that is meant for Poise is no job of it, in the words that it was told."""
    for each in (pod.get("status") or {}).get("conditions") or ():
        if each.get("type") == "PodScheduled" and each.get("status") == "False" and each.get("message"):
            return str(each["message"])
    return "not all pods of its gang exist yet, or it is new"


def _find(client: Client, candidates: Sequence[str], space: str, tenant: str, kind: str | None) -> str | None:
    """The job of a tenant that was created in a namespace under one of these names: one that has not ended, or the last."""
    for name in candidates:
        asked = clean_name(name)
        rows = client.queue(states=list(JobState), name=asked, tenant=tenant, limit=MOST_LIKE).jobs
        for row in sorted(rows, key=lambda row: (row.state.is_final, -row.submitted)):
            if _is_of(client, row, name, space, kind):
                return row.id
    return None


def _is_of(client: Client, row: JobRow, name: str, space: str, kind: str | None) -> bool:
    """Whether a job is the one of this name in Kubernetes. Of other tenants' jobs only the name is shown, and has to do."""
    request = client.show(row.id).request
    if request is None:
        return True
    if request.pods is None:
        return kind is None and row.name == name  # a job of `poise submit`
    return (request.pods.namespace, request.pods.name) == (space, name) and kind in (None, request.pods.kind)
