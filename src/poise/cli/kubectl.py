"""`kubectl poise`: the commands of Poise under the name of a plug-in of kubectl, with jobs by the names that Kubernetes has.

    kubectl poise why pod/train-0 -n vision          poise why 17
    kubectl poise logs -f job/train                  poise logs -f 17
    kubectl poise queue -n vision                    poise queue --tenant vision

kubectl's own options may stand before or behind the verb; where they choose nothing they are noted or refused. `words_of`
turns the words of the one into those of the other; everything else is `poise`. A pod says on itself which job it belongs
to, once it is bound, so it is read by `kubectl get`. A Job, JobSet or TrainJob is a job of the same name, whose tenant is
that of its namespace. Other words are ids and names of Poise's own jobs, and then names of pods.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import click

from poise.cli import INTERRUPTED
from poise.cli.app import VERBS, Verbs, poise
from poise.cli.app import main as poise_main
from poise.cli.live import connected
from poise.cli.output import show_notes
from poise.scheduler.model.errors import PoiseError, RequestError, plain
from poise.service.backends.kubernetes import names
from poise.service.backends.kubernetes.gangs import GROUP_NAMES
from poise.service.client import Client, ServerRefusedError
from poise.service.client.config import NOTHING, find_server
from poise.service.client.connection import NOT_FOUND
from poise.service.wire.draft import clean_name
from poise.service.wire.request import DNS_NAME
from poise.service.wire.views import JobRow, JobState

JOB_VERBS = frozenset({"why", "show", "logs", "events", "cancel", "hold", "release", "wait"})
"""Verbs that take jobs, and so the names of Kubernetes."""
TENANT_VERBS = frozenset({"queue", "events"})
"""Verbs that a namespace narrows down to its tenant."""
WHOLE_VERBS = frozenset({"shares", "nodes", "top"})
"""Verbs that show all that the service has: options of kubectl change nothing."""
SERVICE_VERBS = frozenset({"submit", "run", "drain", "return", "use", "tokens"})
"""Verbs that change something in the service, which options of kubectl do not choose."""
LIVE_VERBS = JOB_VERBS | TENANT_VERBS | WHOLE_VERBS | SERVICE_VERBS
CHOOSING_VERBS = frozenset({"cancel", "hold", "release"})
"""Verbs that take jobs by what they have in common instead of names, of which a namespace means those of its tenant."""
_CHOICES = frozenset({"--app", "--all", "--state"})
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
_OF_ITS_OWN = "For a Job that a JobSet or TrainJob made, ask for jobset/NAME or trainjob/NAME"
_TAKES = {
    kind: f"Poise takes a {kind} only if its pods ask for GPUs and say schedulerName: poise"
    for kind in ("Job", "JobSet", "TrainJob")
}
_TAKES["Job"] += f". {_OF_ITS_OWN}"
"""Why Poise may not know what there is of a kind."""
_KUBECTL_OPTIONS = {"-n": "namespace", "--namespace": "namespace", "--context": "context", "--kubeconfig": "kubeconfig"}
_EVERYWHERE = ("-A", "--all-namespaces")
_HELP = {"-h", "--help"}
_NAME = re.compile(DNS_NAME)

PROGRAM = "kubectl poise"
EPILOG = """\b
Names of Kubernetes, for verbs that take jobs:
  pod/NAME                              the job of a pod
  job/NAME, jobset/NAME, trainjob/NAME  the job that was created under this name
  17, NAME                              a job of Poise by its id or name, or else that of a pod

\b
Options of kubectl, before or behind the verb:
  -n, --namespace NAME                  where these names are; with queue and events, whose jobs are listed
  --context NAME, --kubeconfig FILE     with which kubectl looks up pods and namespaces; POISE_URL names the service
"""


class PluginVerbs(Verbs):
    """The verbs of `poise`, whose help says also which names and options of Kubernetes they take."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name."""
        command = super().get_command(ctx, cmd_name)
        if command is None or cmd_name not in JOB_VERBS | TENANT_VERBS:
            return command
        command = copy(command)
        command.epilog = f"{(command.epilog or '').rstrip()}\n\n{EPILOG}"
        return command


plugin = PluginVerbs(
    params=poise.params, callback=poise.callback, help=poise.help, epilog=EPILOG, context_settings=poise.context_settings
)


def main() -> NoReturn:
    """Run a command and exit with its code."""
    try:
        sys.argv = [PROGRAM, *words_of(sys.argv[1:])]
    except PoiseError as error:
        click.echo(f"poise: {plain(str(error))}", err=True)
        sys.exit(2 if isinstance(error, RequestError) else 1)
    except KeyboardInterrupt:
        click.echo("\npoise: interrupted before anything was finished", err=True)
        sys.exit(INTERRUPTED)
    poise_main(plugin, PROGRAM)
    sys.exit(0)


def words_of(words: Sequence[str]) -> list[str]:
    """Return the words of `poise` that do what these of `kubectl poise` ask for."""
    before, verb, rest = _divided(words)
    if before and verb not in LIVE_VERBS and verb in VERBS:
        raise RequestError(f"{before[0]}: `{verb}` asks no cluster; leave it out")
    if verb in LIVE_VERBS and _HELP & {*rest[: rest.index("--") if "--" in rest else None]}:
        return [verb, "--help"]
    if verb not in LIVE_VERBS:
        return [*([verb] if verb else []), *rest]
    cluster, left = Kubectl.parse([*before, *rest])
    if verb in SERVICE_VERBS:
        _refuse_options(verb, cluster)
    _check_server()
    if verb in SERVICE_VERBS:
        return [verb, *rest]
    if verb in WHOLE_VERBS:
        show_notes([f"{option} changes nothing: `{verb}` shows what the service has" for option in cluster.given])
        return [verb, *left]
    kept, named = _told_apart(verb, left)
    if verb == "events" and len(named) > 1:
        raise RequestError("events: expected one job, or none")
    found = _ids(cluster, named) if verb in JOB_VERBS else named
    if verb == "events":
        kept += [word for each in found for word in ("--job", each)]
        found = []
    is_choice = verb in CHOOSING_VERBS and not _CHOICES.isdisjoint(each.partition("=")[0] for each in kept)
    is_narrowed = verb in TENANT_VERBS or is_choice
    if is_narrowed and cluster.namespace is not None and not named:
        kept += ["--tenant", cluster.tenant()]
    return [verb, *kept, *(["--"] if found else []), *found]


def _divided(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Return the options of kubectl before the verb, the verb, and the rest; "" if there is no verb."""
    at = 0
    while at < len(words) and (length := _option_length(words[at])):
        at += length
    return [*words[:at]], *(("", [*words[at:]]) if at >= len(words) else (words[at], [*words[at + 1 :]]))


def _option_length(word: str) -> int:
    """Say how many words an option of kubectl takes, its value included; 0: it is none."""
    name, equals, _ = word.partition("=")
    if name in _KUBECTL_OPTIONS:
        return 1 if equals else 2
    return 1 if word in _EVERYWHERE or (word.startswith("-n") and len(word) > 2) else 0


def _refuse_options(verb: str, cluster: "Kubectl") -> None:
    """Refuse options of kubectl that would seem to choose where something happens."""
    if not cluster.given:
        return
    if verb in ("submit", "run") and cluster.namespace is not None:
        raise RequestError(
            f"{verb} -n {cluster.namespace}: Poise creates pods in the namespace of the service; leave -n out, or name the"
            f" job with --name {cluster.namespace}"
        )
    raise RequestError(f"{verb}: {cluster.given[0]} does not choose the service, POISE_URL does; leave it out")


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
            elif word not in _EVERYWHERE:
                rest.append(word)
        found = cls(**given)
        if found.namespace is not None and not _NAME.fullmatch(found.namespace):
            raise RequestError(f"-n {found.namespace[:64]!r}: expected the name of a namespace")
        return found, rest

    @property
    def given(self) -> list[str]:
        """The options that were given, as kubectl calls them."""
        values = {"-n": self.namespace, "--context": self.context, "--kubeconfig": self.kubeconfig}
        return [option for option, value in values.items() if value is not None]

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return an object of the cluster; None: it does not exist. Raise PoiseError if kubectl does not say."""
        _check_name(kind, name)
        done = self._run("get", kind, name, "--output", "json")
        if done.returncode:
            if "(NotFound)" in done.stderr:
                return None
            raise PoiseError(f"kubectl get {kind} {name}: {_last_words(done)}")
        try:
            document = json.loads(done.stdout)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise PoiseError(f"kubectl get {kind} {name}: what it has printed is no JSON")
        return document

    def home(self) -> str:
        """Return the namespace that is meant where none is named. Raise PoiseError if kubectl does not know."""
        if self.namespace is not None:
            return self.namespace
        done = self._run("config", "view", "--minify", "--output", "jsonpath={..namespace}")
        # Without any configuration there is no context, and kubectl itself goes on with `default`.
        if done.returncode and (self.context is not None or "current-context must exist" not in done.stderr):
            raise PoiseError(f"kubectl config view: {_last_words(done)}")
        return (done.stdout.strip() if done.returncode == 0 else "") or "default"

    def tenant(self) -> str:
        """Return whose the jobs of the namespace are: as its label says, or its name."""
        space = self.home()
        try:
            found = replace(self, namespace=None).get("namespace", space)
        except PoiseError as error:
            if (self.context is not None or self.kubeconfig is not None) and "(Forbidden)" not in str(error):
                raise
            found = None  # looking at the queue needs neither a cluster nor the right to read namespaces
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


def _last_words(done: "subprocess.CompletedProcess[str]") -> str:
    said = done.stderr.strip().splitlines()
    return said[-1] if said else f"exit code {done.returncode}"


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
        raise RequestError(f"Poise knows no {kind} {name} of namespace {space} (tenant {tenant}). {_TAKES[kind]}")
    return found


def _of_plain_name(client: Client, cluster: Kubectl, word: str) -> str:
    """A job of Poise by its id or name; with a namespace, first one that was created there; else a pod of that name.

    Without a namespace, and if there is no such pod either, a job whose name begins so will do.
    """
    is_beginning = False
    if cluster.namespace is not None:
        found = _find(client, [word], cluster.namespace, cluster.tenant(), None)
        if found is not None:
            return found
    elif not (is_beginning := _is_beginning(client, word)):
        try:
            return client.find(word)
        except ServerRefusedError as error:
            if error.code != NOT_FOUND:
                raise
    where = "" if cluster.namespace is None else f" in namespace {cluster.namespace}"
    try:
        pod = cluster.get("pod", word) if _NAME.fullmatch(word) else None
        space = cluster.home()
    except PoiseError as error:
        if is_beginning:
            return client.find(word)
        raise RequestError(f"there is no job {word[:64]!r}{where}; pods cannot be looked up: {error}") from None
    if pod is not None:
        return _of_pod(client, cluster, pod)
    if is_beginning:
        return client.find(word)
    raise RequestError(f"there is no job {word[:64]!r}, and no pod of that name in namespace {space}")


def _is_beginning(client: Client, word: str) -> bool:
    """Whether a word is neither id nor name of a job, but how names of jobs begin."""
    if word.isdecimal():
        return False
    try:
        found = client.called(word)
    except ServerRefusedError:  # the server is too old to say
        return False
    return bool(found.jobs) and not found.exact


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
