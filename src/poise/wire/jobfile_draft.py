"""A job as it was written down, before it is a request: options may still be laid over it, and it may become many.

`Draft.requests` is the one way from words to requests, for job files, `#SBATCH` scripts, command lines and Python alike.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any, Self

from pydantic import ValidationError

from poise.model.errors import RequestError, Where
from poise.wire.jobfile_complaints import complaint
from poise.wire.jobfile_words import Word, fill, literal_words
from poise.wire.request import MOST_JOBS, Request

ARRAY_INDEX, ARRAY_COUNT = "ARRAY_INDEX", "ARRAY_COUNT"
LONGEST_NAME = 64
KEY_SHOWN = 4
"""Characters of a submission's key in the name of an app."""
KEY_OF = {"command": "run", "min_gpus": "gpus", "max_gpus": "gpus", "gpu_types": "gpus"}
"""Fields of a request that go by another word in a job file."""

Variant = Mapping[str, str]
"""What one job of many has in its environment besides what all have."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a draft was written down, and the lines of its keys, so that errors can be found again."""

    file: str | None = None
    lines: Mapping[str, int] = field(default_factory=dict)

    def error(self, key: str | None, problem: str) -> RequestError:
        """What is wrong with a key."""
        if self.file is None:
            return RequestError(f"{key}: {problem}" if key else problem)
        return RequestError(f"{Where(self.file, self.lines.get(key or ''), key)}: {problem}")


@dataclass(frozen=True, slots=True)
class Draft:
    """A job, or a family of jobs that differ in their environments.

    fields     of a Request, as far as they were given; all but `command`, `setup` and `env`
    variants   one for each job of an array or a sweep; empty: a single job
    notes      what its author should know: options that mean nothing here
    """

    command: tuple[Word, ...] = ()
    setup: tuple[Word, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[Variant, ...] = ()
    source: Source = Source()
    notes: tuple[str, ...] = ()

    def overlaid(self, fields: Mapping[str, Any], env: Mapping[str, str]) -> Self:
        """The same with these fields and variables instead; of fields that have parts, the parts that are given."""
        merged = {
            name: {**self.fields.get(name, {}), **value} if isinstance(value, dict) else value
            for name, value in fields.items()
        }
        lines = {
            key: line for key, line in self.source.lines.items() if key not in {KEY_OF.get(each, each) for each in fields}
        }
        return replace(
            self,
            fields={**self.fields, **merged},
            env={**self.env, **env},
            source=replace(self.source, lines=lines),
        )

    def requests(self, key: str = "") -> tuple[Request, ...]:
        """One request, or one for each variant; RequestError says what is wrong, and where.

        key   of the submission: it tells apps apart whose owner gave them no name, though they are of one script
        """
        if not self.command:
            raise self.source.error("run", "is missing; it says what to run, e.g. `run: python train.py`")
        if not self.variants:
            return (self._request(self.env, self.fields),)
        return tuple(self._of_variant(place, variant, key) for place, variant in enumerate(self.variants))

    def _of_variant(self, place: int, variant: Variant, key: str) -> Request:
        twice = next((name for name in variant if name in self.env), None)
        if twice is not None:
            raise self.source.error("env", f"{twice} is set for each job of the array or sweep; leave it out here")
        env = {**self.env, **variant}
        name = self.fields.get("name")
        fields = {**self.fields, "app": self.fields.get("app") or name or self._own_app(env, key)}
        if isinstance(name, str):
            suffix = f"-{variant.get(ARRAY_INDEX, place)}"
            fields["name"] = name[: LONGEST_NAME - len(suffix)] + suffix
        return self._request(env, fields)

    def _own_app(self, env: Mapping[str, str], key: str) -> str:
        """What an app is called whose owner gave it no name: as its script or program, and by the submission."""
        words = fill(self.command, env)
        script = next((word for word in words if word.endswith((".py", ".sh"))), words[0])
        suffix = f"-{key[:KEY_SHOWN]}" if key else ""
        return clean_name(re.sub(r"\.(py|sh)$", "", script.rsplit("/", 1)[-1]))[: LONGEST_NAME - len(suffix)] + suffix

    def _request(self, env: Mapping[str, str], fields: Mapping[str, Any]) -> Request:
        given = {**fields, "env": dict(env), "command": self._filled("run", self.command, env)}
        given["setup"] = self._filled("setup", self.setup, env)
        try:
            return Request.model_validate(given)
        except ValidationError as error:
            name, problem = complaint(error)
            raise self.source.error(KEY_OF.get(name or "", name) if self.source.file else name, problem) from None

    def _filled(self, key: str, words: Sequence[Word], env: Mapping[str, str]) -> tuple[str, ...]:
        try:
            return fill(words, env)
        except ValueError as error:
            raise self.source.error(key, str(error)) from None


def draft_of(request: Request) -> Draft:
    """A request as a draft, so that it can become many."""
    fields = {name: getattr(request, name) for name in request.model_fields_set - {"command", "setup", "env"}}
    return Draft(literal_words(request.command), literal_words(request.setup), request.env, fields)


def clean_name(text: str) -> str:
    """A name that is allowed, as near as can be."""
    return re.sub(r"^[^A-Za-z0-9]+", "", re.sub(r"[^A-Za-z0-9._-]", "-", text))[:LONGEST_NAME] or "job"


def array_of(count: int) -> tuple[Variant, ...]:
    """An array of so many jobs: each knows its index, from 0, and how many there are. ValueError: none, or too many."""
    if count < 1:
        raise ValueError(f"expected at least 1 job, got {count}")
    _check_count(count)
    return tuple({ARRAY_INDEX: str(index), ARRAY_COUNT: str(count)} for index in range(count))


def sweep_of(values: Mapping[str, Sequence[str]]) -> tuple[Variant, ...]:
    """Every combination of values; the last variable changes fastest. ValueError: none, or too many."""
    empty = next((name for name, each in values.items() if not each), None)
    if empty is not None or not values:
        raise ValueError(f"{f'{empty} has no values' if empty else 'nothing to vary'}; e.g. LR: [0.1, 0.01]")
    _check_count(prod(len(each) for each in values.values()))
    return tuple(dict(zip(values, chosen, strict=True)) for chosen in product(*values.values()))


def _check_count(jobs: int) -> None:
    if jobs > MOST_JOBS:
        raise ValueError(f"{jobs:,} jobs are more than the {MOST_JOBS:,} that one submission may have; divide them")
