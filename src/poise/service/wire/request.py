"""A job as it is submitted to a live Poise: what to run, on how many GPUs, and what may be done to it.

From the words that a user types to the core's `Job` there are three types:

    JobDraft     (draft.py)  a job file, an `#SBATCH` script or options, as far as they were given; may stand for many jobs
    JobRequest   (here)      one job, complete and checked: what is sent, stored and shown again
    Submission   (here)      requests that are accepted together, with the key that makes sending them twice harmless

The server's admission turns each request into a `Job` (`scheduler/model/job.py`): what the core needs of it to decide.

Every field of a request is bounded, so one that passes here can be stored, shown and run without further checks of its
form. What depends on the cluster or on the machine (a GPU type that is absent, a program that does not exist) is checked by
the server at submission.
"""

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, StringConstraints, ValidationError
from pydantic_core import PydanticKnownError

from poise.scheduler.model.errors import UnknownNameError
from poise.service.wire.after import AfterEnd
from poise.service.wire.moments import LATEST, format_moment

MOST_ARGUMENTS = 1_000
MOST_COMMAND = 64 << 10  # characters of a command, all arguments together
MOST_VARIABLES = 500
MOST_ENVIRONMENT = 64 << 10  # characters of a job's environment, names and values together
MOST_PATH = 4_000
MOST_PLACE = 2_000  # characters of a path or URL where checkpoints are kept
MOST_GPUS = 100_000
MOST_SECONDS = 10 * 365 * 86_400.0
MOST_STEPS = 1e15
MOST_JOBS = 1_000  # jobs of one submission
MOST_VOLUMES = 64
MOST_AFTER = 64  # terms of `after`, each of which may name many jobs
MOST_AFTER_TERM = 4_000  # characters of one term
MOST_ENVIRONMENTS = 8  # of submitters, that one submission brings along

FAST = FailFast()  # stop validating a list at its first wrong item: describing a megabyte of wrong items would take seconds

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]{0,199}"
OWN_PREFIX = "POISE_"  # of variables that are Poise's own

Name = Annotated[str, StringConstraints(pattern=f"^{NAME}$", max_length=64)]
"""The name of a job, app, tenant, GPU type, model or token; it needs quoting nowhere."""
Argument = Annotated[str, StringConstraints(max_length=MOST_COMMAND, pattern=r"^[^\x00]*$")]
Variable = Annotated[str, StringConstraints(pattern=f"^{VARIABLE}$")]
Path = Annotated[str, StringConstraints(max_length=MOST_PATH, pattern=r"^/[^\x00]*$")]
Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS)]
RELAY = "relay"
_PLACE = rf"^({RELAY}|/[^\x00-\x1f]*|[a-z][a-z0-9+.-]*:///*[^/\x00-\x20][^\x00-\x20]*)$"  # a URL names more than a root
KeptAt = Annotated[str, StringConstraints(max_length=MOST_PLACE, pattern=_PLACE)]
"""Where checkpoints are kept: `relay`, through the server; a directory that all nodes share; or a URL of fsspec."""
JobPlace = Annotated[str, StringConstraints(max_length=MOST_PLACE + 250, pattern=_PLACE)]
"""Where those of one job are: `relay`, or a directory below the place."""
EXPORT_ALL, EXPORT_NONE = "all", "none"
Export = Annotated[str, StringConstraints(max_length=MOST_ENVIRONMENT, pattern=rf"^{VARIABLE}(,{VARIABLE})*$")]
"""Which variables of the submitter's environment a job gets: `all`, `none`, or names with commas."""
EXPECTED_EXPORT = "`all`, `none`, or names of variables with commas"
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


_AFTER = rf"^{NAME}(,{NAME})*(:({'|'.join(AfterEnd)}))?$"
After = Annotated[str, StringConstraints(max_length=MOST_AFTER_TERM, pattern=_AFTER)]
"""Jobs to wait for, and how they have to end: `17`, `prep:succeeded`, `17,20-29:failed` (after.py)."""
Moment = Annotated[float, Field(ge=0, le=LATEST)]
"""A timestamp: seconds since 1970."""


class PreemptionMode(StrEnum):
    """How a run may be stopped before its job has ended.

    CHECKPOINT   ask for a checkpoint at the end of its lease, and resume from it (scripts that use poise.worker); a run that
                 has not said that it can save, as any other script, keeps its GPUs until it does
    RESTART      send TERM at the end of its lease, and start it again; it finds its own checkpoints, or starts over
    NEVER        it keeps its GPUs until it ends
    """

    CHECKPOINT = "checkpoint"
    RESTART = "restart"
    NEVER = "never"


class Replicas(StrEnum):
    """Processes of a run: one per node, which sees all GPUs of the run there, or one per GPU (as torchrun does)."""

    NODE = "node"
    GPU = "gpu"


class Wire(BaseModel):
    """Base of all types that cross a process boundary as JSON: frozen; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Checkpoint(Wire):
    """When a run saves its state, in seconds, and where that is kept.

    every      time between periodic checkpoints; None: only when asked to
    deadline   time allowed for writing one
    url        where they are kept if runs are on other machines; None: where the service keeps those of all jobs
    """

    every: Seconds | None = None
    deadline: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    url: KeptAt | None = None


class RetrySpec(Wire):
    """Which failed runs are tried again.

    on_errors    how many; None: as the service is configured
    exit_codes   runs that end with one of these are always tried again
    """

    on_errors: Annotated[int, Field(ge=0, le=1_000)] | None = None
    exit_codes: Annotated[tuple[Annotated[int, Field(ge=1, le=255)], ...], FAST, Field(max_length=64)] = ()


class Limits(Wire):
    """Limits of each replica: bytes of address space, seconds of CPU time, open files, processes of its user. None: none."""

    memory: Annotated[int, Field(ge=1 << 20, le=1 << 50)] | None = None
    cpu_seconds: Annotated[int, Field(ge=1, le=1 << 40)] | None = None
    open_files: Annotated[int, Field(ge=16, le=1 << 20)] | None = None
    processes: Annotated[int, Field(ge=1, le=1 << 20)] | None = None


DNS_NAME = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
DNS_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
KubeName = Annotated[str, StringConstraints(pattern=f"^{DNS_NAME}$")]
"""The name of an object of Kubernetes."""
IMAGE = r"[A-Za-z0-9][A-Za-z0-9._:/@+-]*"
EXPECTED_IMAGE = "the name of a container image, such as pytorch/pytorch:2.9.0"
MILLICORE = 0.001  # the least of a processor that Kubernetes knows
LEAST_MEMORY = 1 << 20
OWN_FOLDERS = ("/poise", "/dev/shm")
"""Where Poise itself mounts something in the container of a job."""


def image_problem(name: str) -> str | None:
    """Say what is wrong with the name of a container image; None: nothing that can be seen without a registry."""
    if not re.fullmatch(IMAGE, name):
        return f"expected {EXPECTED_IMAGE}, got {name[:60]!r}"
    scheme, separator, _ = name.partition("://")
    if separator:
        return f"{name[:60]!r}: a scheme is no part of the name of an image; leave {scheme}:// out"
    first, slash, rest = name.partition("@")[0].partition("/")
    is_host = slash and (first == "localhost" or "." in first or ":" in first)
    *folders, last = (rest if is_host else first + slash + rest).split("/")
    is_lower = all(part == part.lower() for part in (*folders, last.partition(":")[0]))
    return None if is_lower else f"{name[:60]!r}: the names of repositories are in lower case; only a tag may have capitals"


def _check_image(name: str) -> str:
    problem = image_problem(name)
    if problem is not None:
        raise ValueError(f"image: {problem}")
    return name


Image = Annotated[
    str, StringConstraints(min_length=1, max_length=500, pattern=f"^{IMAGE}$"), pydantic.AfterValidator(_check_image)
]


class Volume(Wire):
    """Something that a container sees below `path`: a claim, a secret or a config map of the namespace of its pod."""

    name: KubeName
    path: Path
    kind: Literal["claim", "secret", "config"] = "claim"
    read_only: bool = False

    @property
    def folder(self) -> str:
        """The path in its shortest form."""
        return "/" + "/".join(_parts(self.path))


class PodOptions(Wire):
    """What a job's pods ask for besides GPUs, for each of them, if the service runs jobs on Kubernetes.

    cpu              cores;  memory: bytes. None: as the namespace has it
    service_account  that they run as; None: one without rights
    user             number of the user that their processes run as; None: 0, which is root, whatever the image says
    pull_secrets     with which the image is fetched
    """

    cpu: Annotated[float, Field(ge=MILLICORE, le=10_000)] | None = None
    memory: Annotated[int, Field(ge=LEAST_MEMORY, le=1 << 50)] | None = None
    volumes: Annotated[tuple[Volume, ...], FAST, Field(max_length=MOST_VOLUMES)] = ()
    service_account: KubeName | None = None
    user: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    pull_secrets: Annotated[tuple[KubeName, ...], FAST, Field(max_length=16)] = ()

    @pydantic.field_validator("volumes")
    @classmethod
    def _mountable(cls, volumes: tuple[Volume, ...]) -> tuple[Volume, ...]:
        taken: set[str] = set()
        for each in volumes:
            parts, folder = _parts(each.path), each.folder
            if (problem := _mount_problem(folder, parts, taken)) is not None:
                shown = each.path if len(each.path) <= _SHOWN else each.path[: _SHOWN - 1] + "…"
                raise ValueError(f"pod.volumes: {shown!r}: {problem}")
            taken.add(folder)
        return volumes

    def claim_at(self, path: str) -> Volume | None:
        """Return the claim that a path is on, if it can be written there; None: it is on none."""
        wanted = "/" + "/".join(_parts(path)) + "/"
        above = (each for each in self.volumes if wanted.startswith(f"{each.folder}/"))
        found = max(above, key=lambda each: len(each.folder), default=None)
        return found if found is not None and found.kind == "claim" and not found.read_only else None


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _mount_problem(folder: str, parts: Sequence[str], taken: Container[str]) -> str | None:
    """Say why a volume cannot be mounted at a folder of a container, or is not to be; None: it can."""
    own = next((each for each in OWN_FOLDERS if folder == each or folder.startswith(f"{each}/")), None)
    if not parts:
        return "a volume would hide the whole image there; name a folder below"
    if own is not None:
        return f"{own} and what is below it is Poise's own; name another folder"
    if ".." in parts:
        return "`..` cannot be part of the path of a volume"
    if ":" in folder:
        return "`:` cannot be part of the path of a volume"
    if folder in taken:
        return "two volumes cannot be mounted at one path"
    return None


class PodGang(Wire):
    """Pods that others have created and that Poise places: those of one Job, JobSet or TrainJob, or of one group.

    key    that it is known by for ever
    size   number of its pods that have GPUs;  gpus: of each
    """

    key: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{8,64}$")]
    kind: Annotated[str, StringConstraints(max_length=100)]
    namespace: KubeName
    name: KubeName
    size: Annotated[int, Field(ge=1, le=MOST_GPUS)]
    gpus: Annotated[int, Field(ge=1, le=MOST_GPUS)]


def _check_count(given: Any) -> Any:  # noqa: ANN401 - whatever was sent
    """Count the variables before validating any: describing a megabyte of mistakes would take seconds."""
    if isinstance(given, dict) and len(given) > MOST_VARIABLES:
        counts = {"field_type": "Dictionary", "max_length": MOST_VARIABLES, "actual_length": len(given)}
        raise PydanticKnownError("too_long", counts)
    return given


Environment = Annotated[dict[Variable, Argument], Field(max_length=MOST_VARIABLES), BeforeValidator(_check_count)]


def environment_problem(variables: Mapping[str, str]) -> str | None:
    """Say why no job can be given these variables; None: one can."""
    if sum(len(name) + len(value) for name, value in variables.items()) > MOST_ENVIRONMENT:
        return f"more than {MOST_ENVIRONMENT:,} characters"
    if any(name.startswith(OWN_PREFIX) for name in variables):
        return f"names that begin with {OWN_PREFIX} are Poise's own"
    return None


class JobRequest(Wire):
    """One job.

    command        program and arguments; no shell ever sees it
    setup          a command that is run once, before the first run
    gpus           size of the gang; `min_gpus` and `max_gpus` make the job elastic
    gpu_types      acceptable types; empty: any
    export         which variables of its submitter's environment it gets; its client reads them
    exported       those variables, which come with the submission, by the SHA-256 of their text (`environments.py`)
    cwd            working directory, absolute; the client fills it in
    files          archive of the working directory that was shipped, by its SHA-256; runs are in it, and `cwd` is None
    venv           virtual environment, of venv or conda, absolute; its programs come first in PATH. None: none
    steps          length of the job, if its owner knows; or `duration`: seconds on the reference GPU type
    model          what it trains, as throughput tables name it; jobs of one model are believed to be equally fast
    micro_batches  tasks that a step divides into; such a job runs on any mix of GPUs
    max_duration   seconds of running after which it is stopped for good
    after          jobs that have to end before it may start;  begin: a moment before which it does not start
    deadline       moment by which it should be done, for policies that look at deadlines; nothing ends it then
    array_cap      how many jobs of its array may hold GPUs at once. Its array are the jobs of its tenant with the same
                   `array`; without that, with the same `app`
    process_group  its script joins a process group of PyTorch by itself, as its client has seen
    image          container image that it runs in, if the service runs jobs on Kubernetes;  pod: what its pods ask for
    pods           of a job that was created in Kubernetes, by others: which pods it is. Only the service itself says so
    """

    name: Name | None = None
    command: Annotated[tuple[Argument, ...], FAST, Field(min_length=1, max_length=MOST_ARGUMENTS)]
    setup: Annotated[tuple[Argument, ...], FAST, Field(max_length=MOST_ARGUMENTS)] = ()
    tenant: Name | None = None
    app: Name | None = None
    gpus: Annotated[int, Field(ge=1, le=MOST_GPUS)] = 1
    min_gpus: Annotated[int, Field(ge=1, le=MOST_GPUS)] | None = None
    max_gpus: Annotated[int, Field(ge=1, le=MOST_GPUS)] | None = None
    gpu_types: Annotated[tuple[Name, ...], FAST, Field(max_length=64)] = ()
    replicas: Replicas = Replicas.NODE
    env: Environment = {}
    export: Export = EXPORT_ALL
    exported: Sha256 | None = None
    cwd: Path | None = None
    files: Sha256 | None = None
    venv: Path | None = None
    steps: Annotated[float, Field(gt=0, le=MOST_STEPS)] | None = None
    duration: Seconds | None = None
    model: Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")] | None = None
    batch_size: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    micro_batches: Annotated[int, Field(ge=1, le=MOST_GPUS)] | None = None
    weight: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0
    priority: Annotated[int, Field(ge=-1_000, le=1_000)] = 0
    preemption: PreemptionMode = PreemptionMode.CHECKPOINT
    checkpoint: Checkpoint = Checkpoint()
    retry: RetrySpec = RetrySpec()
    limits: Limits = Limits()
    max_duration: Seconds | None = None
    after: Annotated[tuple[After, ...], FAST, Field(max_length=MOST_AFTER)] = ()
    begin: Moment | None = None
    deadline: Moment | None = None
    array_cap: Annotated[int, Field(ge=1, le=MOST_JOBS)] | None = None
    array: Name | None = None
    hold: bool = False
    process_group: bool = False
    image: Image | None = None
    pod: PodOptions = PodOptions()
    pods: PodGang | None = None

    @pydantic.field_validator("gpu_types")
    @classmethod
    def _lower(cls, types: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.lower() for each in types))

    @pydantic.model_validator(mode="after")
    def _bounded(self) -> Self:
        if not self.command[0]:
            raise ValueError("command: the program has no name")
        if sum(map(len, (*self.command, *self.setup))) > MOST_COMMAND:
            raise ValueError(f"command: more than {MOST_COMMAND:,} characters")
        if (problem := environment_problem(self.env)) is not None:
            raise ValueError(f"env: {problem}")
        if not (self.min_gpus or self.gpus) <= self.gpus <= (self.max_gpus or self.gpus):
            raise ValueError("gpus: expected min_gpus <= gpus <= max_gpus")
        if self.micro_batches is not None and (self.min_gpus or self.max_gpus):
            raise ValueError("micro_batches: a job that divides takes any number of GPUs; ask for one number, not a range")
        if self.files is not None and self.cwd is not None:
            raise ValueError("cwd: the job runs in the files that were shipped; leave it out")
        if self.deadline is not None and self.begin is not None and self.deadline <= self.begin:
            raise ValueError(f"deadline: expected a moment after begin, which is {format_moment(self.begin)}")
        if self.pods is not None and self.pods.size * self.pods.gpus != self.gpus:
            raise ValueError("pods: they have other GPUs than the job")
        return self


class Submission(Wire):
    """Jobs that are accepted all together or not at all.

    key            chosen by the client: a submission that is sent twice (after a lost connection) is accepted once
    environments   variables of the submitter's environment; `exported` of each job names the one that it gets
    """

    jobs: Annotated[tuple[JobRequest, ...], FAST, Field(min_length=1, max_length=MOST_JOBS)]
    key: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{8,64}$")] | None = None
    environments: Annotated[tuple[Environment, ...], FAST, Field(max_length=MOST_ENVIRONMENTS)] = ()

    @pydantic.field_validator("environments")
    @classmethod
    def _givable(cls, environments: tuple[dict[str, str], ...]) -> tuple[dict[str, str], ...]:
        for each in environments:
            if (problem := environment_problem(each)) is not None:
                raise ValueError(f"environments: {problem}")
        return environments


# What is wrong with a request, in one line for people: the field, what was expected there, and what was given.

_NAMES = {"name", "tenant", "app", "gpu_types", "array"}
_PARTS: dict[str, type[Wire]] = {"checkpoint": Checkpoint, "retry": RetrySpec, "limits": Limits, "pod": PodOptions}
_BOUNDS = (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than"))
_SHOWN = 60  # characters of a wrong value that a message repeats
_EXPECTED_TEXTS = {
    **dict.fromkeys(_NAMES, "letters, digits, `.`, `_` and `-`, at most 64, the first a letter or a digit"),
    "key": "8 to 64 letters, digits, `_` and `-`",
    "checkpoint": f"`{RELAY}`, an absolute path that all nodes share, or a URL such as s3://bucket/folder",
    "image": EXPECTED_IMAGE,
    "pod": "a name of Kubernetes: small letters, digits, `-` and `.`",
    "after": "ids or names of jobs, and ended, succeeded or failed, such as 17, 17:succeeded or 17,20-29:failed",
    **dict.fromkeys(("files", "exported"), "a SHA-256, 64 digits from 0 to f"),
    "export": EXPECTED_EXPORT,
}
_UNPRINTABLE = "a character in it cannot be passed on"


def first_problem(error: ValidationError) -> tuple[str | None, str]:
    """The first thing that is wrong: its field, if one field is at fault, and the message.

    An unknown name comes before everything else: a field that is missing may have been meant by it.
    """
    wrong = error.errors(include_url=False)
    first = next((each for each in wrong if each["type"] == "extra_forbidden"), wrong[0])
    path = [str(part) for part in first["loc"]]
    if first["type"] == "value_error":  # raised by our own validators, as `FIELD: PROBLEM`
        name, colon, text = first["msg"].removeprefix("Value error, ").partition(": ")
        return (name, text) if colon else (None, name)
    if not path:
        return None, "expected a JSON object"
    if first["type"] == "extra_forbidden":
        known = _PARTS[path[0]].model_fields if path[0] in _PARTS else JobRequest.model_fields
        return ".".join(path[:-1]) or None, str(UnknownNameError("field", path[-1], known))
    inner = [part for part in path[1:] if not part.isdigit()] if path[0] not in ("env", "environments") else []
    return ".".join([path[0], *inner]), _expectation(first, path)


def _expectation(first: Any, path: Sequence[str]) -> str:  # noqa: ANN401 - pydantic's description of an error
    kind, context, value = first["type"], first.get("ctx", {}), first["input"]
    if kind == "missing":
        return "is missing"
    if kind == "too_long":
        return f"expected at most {context['max_length']:,} of them"
    if kind == "too_short":
        return f"expected at least {context['min_length']:,} of them, got {context['actual_length']:,}"
    if path[-1] == "[key]":
        wanted = "names of letters, digits and `_`"
    elif kind.startswith("string_"):
        wanted = _expected_text(kind, path[0])
    else:
        named = {"tuple_type": "a list", "enum": context.get("expected"), "dict_type": "names with values"}
        bounds = (f"{words} {context[name]:,.15g}" for name, words in _BOUNDS if name in context)
        wanted = next(bounds, None) or named.get(kind) or ""
    if wanted == _UNPRINTABLE:
        return wanted
    got = "several values" if isinstance(value, dict | list | tuple) else repr(value)
    got = got if len(got) <= _SHOWN else got[: _SHOWN - 1] + "…"
    return f"expected {wanted}, got {got}" if wanted else f"{first['msg'].replace('Input should be', 'expected')}, got {got}"


def _expected_text(kind: str, field: str) -> str:
    if field in _EXPECTED_TEXTS:
        return _EXPECTED_TEXTS[field]
    if kind == "string_pattern_mismatch":
        return "an absolute path" if field in ("cwd", "venv") else _UNPRINTABLE
    return "a text that is neither empty nor too long" if kind in ("string_too_long", "string_too_short") else "text"


NO_PRIORITIES = "no policy of the catalogue looks at priorities"
LONE_PROCESS = (
    "it calls init_process_group, and has one process per node, which sees all GPUs there: on one node WORLD_SIZE is 1; "
    "--replicas gpu starts one process per GPU"
)


def is_lone_process(request: JobRequest) -> bool:
    """Whether a job may have several GPUs on a node and one process there, although its script expects one per GPU."""
    most = request.micro_batches or request.max_gpus or request.gpus
    return request.process_group and request.replicas is Replicas.NODE and most > 1


def notes_on(requests: Iterable[JobRequest]) -> tuple[str, ...]:
    """One line for each thing that jobs ask for and that has no effect, or another one than their owner may expect."""
    jobs = tuple(requests)
    notes = [f"replicas: {LONE_PROCESS}"] if any(map(is_lone_process, jobs)) else []
    asked = sorted({each.priority for each in jobs if each.priority})
    if asked:
        shown = ", ".join(map(str, asked[:5])) + (", …" if len(asked) > 5 else "")
        notes.append(f"priority {shown} has no effect: {NO_PRIORITIES}; --weight counts under policies that share")
    return tuple(notes)
