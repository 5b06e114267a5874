"""A job as it is submitted to a live Poise: what to run, on how many GPUs, and what may be done to it.

Every field is bounded: a request that passes here can be kept, shown and run without further checks of its shape. What
depends on the cluster or on the machine (a GPU type that is not there, a program that does not exist) is checked where it
is known, at submission.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticKnownError

MOST_ARGUMENTS = 1_000
MOST_COMMAND = 64 << 10
"""Characters of a command, all arguments together."""
MOST_VARIABLES = 500
MOST_ENVIRONMENT = 64 << 10
"""Characters of a job's environment, names and values together."""
MOST_PATH = 4_000
MOST_GPUS = 100_000
MOST_SECONDS = 10 * 365 * 86_400.0
MOST_STEPS = 1e15
MOST_JOBS = 1_000
"""Jobs of one submission."""

FAST = FailFast()
"""Of a list: the first item that is wrong is the last one looked at. To describe a megabyte of them would take seconds."""

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]{0,199}"

Name = Annotated[str, StringConstraints(pattern=f"^{NAME}$", max_length=64)]
"""Of a job, an app, a tenant, a GPU type, a model, a token: nothing that needs quoting anywhere."""
Argument = Annotated[str, StringConstraints(max_length=MOST_COMMAND, pattern=r"^[^\x00]*$")]
Variable = Annotated[str, StringConstraints(pattern=f"^{VARIABLE}$")]
Path = Annotated[str, StringConstraints(max_length=MOST_PATH, pattern=r"^/[^\x00]*$")]
Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS)]


class PreemptionMode(StrEnum):
    """What may be done to a run before its job has ended.

    CHECKPOINT   it is asked for a checkpoint at the end of its lease and goes on from there (scripts that use poise.worker);
                 a run that has not said that it can (any other script) keeps its GPUs until it does
    RESTART      it gets TERM at the end of its lease, and is started again: it finds its own checkpoints, or begins anew
    NEVER        it keeps its GPUs until it ends
    """

    CHECKPOINT = "checkpoint"
    RESTART = "restart"
    NEVER = "never"


class Replicas(StrEnum):
    """How many processes a run has: one a node that sees all GPUs it has there, or one a GPU (as torchrun does)."""

    NODE = "node"
    GPU = "gpu"


class Wire(BaseModel):
    """What crosses the boundary: frozen, and nothing in it that is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Checkpoint(Wire):
    """every: seconds between checkpoints that nobody asked for (None: only when asked); deadline: seconds to write one."""

    every: Seconds | None = None
    deadline: Annotated[float, Field(gt=0, le=86_400)] = 60.0


class RetrySpec(Wire):
    """on_errors: failed runs that are forgiven (None: as the service is set up); exit_codes: those that always are."""

    on_errors: Annotated[int, Field(ge=0, le=1_000)] | None = None
    exit_codes: Annotated[tuple[Annotated[int, Field(ge=1, le=255)], ...], FAST, Field(max_length=64)] = ()


class Limits(Wire):
    """Of each replica: bytes of address space, seconds of CPU time, open files, processes of the user. None: no limit."""

    memory: Annotated[int, Field(ge=1 << 20, le=1 << 50)] | None = None
    cpu_seconds: Annotated[int, Field(ge=1, le=1 << 40)] | None = None
    open_files: Annotated[int, Field(ge=16, le=1 << 20)] | None = None
    processes: Annotated[int, Field(ge=1, le=1 << 20)] | None = None


def _few(given: Any) -> Any:  # noqa: ANN401 - whatever was sent
    """Variables are counted before any of them is looked at: to describe a megabyte of mistakes would take seconds."""
    if isinstance(given, dict) and len(given) > MOST_VARIABLES:
        counts = {"field_type": "Dictionary", "max_length": MOST_VARIABLES, "actual_length": len(given)}
        raise PydanticKnownError("too_long", counts)
    return given


class JobRequest(Wire):
    """One job.

    command        program and arguments; no shell ever sees it
    setup          a command that is run once, before the first run
    gpus           the gang; `min_gpus` and `max_gpus` make the job elastic
    gpu_types      any of these; empty: any that there are
    cwd            working directory, absolute
    venv           virtual environment, of venv or conda, absolute; its programs come first in PATH. None: none
    steps          how long it is, if its owner knows; or `duration`: seconds on the reference GPU type
    model          what it trains, as throughput tables name it; jobs of one model are believed to be equally fast
    micro_batches  tasks that a step divides into: any mix of GPUs will do then
    max_duration   seconds of running after which it is stopped for good
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
    env: Annotated[dict[Variable, Argument], Field(max_length=MOST_VARIABLES), BeforeValidator(_few)] = {}
    cwd: Path | None = None
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
    hold: bool = False

    @field_validator("gpu_types")
    @classmethod
    def _lower(cls, types: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.lower() for each in types))

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if not self.command[0]:
            raise ValueError("command: the program has no name")
        if sum(map(len, (*self.command, *self.setup))) > MOST_COMMAND:
            raise ValueError(f"command: more than {MOST_COMMAND:,} characters")
        if sum(len(name) + len(value) for name, value in self.env.items()) > MOST_ENVIRONMENT:
            raise ValueError(f"env: more than {MOST_ENVIRONMENT:,} characters")
        if any(name.startswith("POISE_") for name in self.env):
            raise ValueError("env: names that begin with POISE_ are Poise's own")
        if not (self.min_gpus or self.gpus) <= self.gpus <= (self.max_gpus or self.gpus):
            raise ValueError("gpus: expected min_gpus <= gpus <= max_gpus")
        if self.micro_batches is not None and (self.min_gpus or self.max_gpus):
            raise ValueError("micro_batches: a job that divides takes any number of GPUs; ask for one number, not a range")
        return self


class Submission(Wire):
    """Jobs that are taken all together or not at all.

    key   made by the client: the same submission sent twice (after a lost connection) is taken once
    """

    jobs: Annotated[tuple[JobRequest, ...], FAST, Field(min_length=1, max_length=MOST_JOBS)]
    key: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{8,64}$")] | None = None


# What is taken and comes to nothing: said at submission, so that its owner does not count on it.

NO_PRIORITIES = "no policy of this version looks at priorities"


def notes_on(requests: Iterable[JobRequest]) -> tuple[str, ...]:
    """A line for people for each thing that jobs ask for and do not get."""
    asked = sorted({each.priority for each in requests if each.priority})
    if not asked:
        return ()
    shown = ", ".join(map(str, asked[:5])) + (", …" if len(asked) > 5 else "")
    return (f"priority {shown} has no effect: {NO_PRIORITIES}; --weight counts under policies that share",)


# Text from elsewhere on a terminal: no letter of it is a command to the terminal.


def plain(text: str) -> str:
    """The text with everything that is not to be seen (escape codes, line ends, changes of direction) written out."""
    return text if text.isprintable() else "".join(each if each.isprintable() else _written(each) for each in text)


def _written(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
