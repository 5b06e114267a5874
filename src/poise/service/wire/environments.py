"""Environments that submitters bring along: how an export is written, the text that one is kept as, a request with one.

The jobs of a submission share them, so that a thousand jobs are sent and kept with one copy. A request has the SHA-256 of
the text in the place of the variables, which are filled in when a run is ordered (`joined`).
"""

import hashlib
import json
import re
from collections.abc import Mapping

from poise.scheduler.model.errors import RequestError
from poise.service.wire.request import (
    EXPECTED_EXPORT,
    EXPORT_ALL,
    EXPORT_NONE,
    MOST_ENVIRONMENT,
    MOST_VARIABLES,
    VARIABLE,
    JobRequest,
)

_KINDS = (EXPORT_ALL, EXPORT_NONE)
_WORDS = {EXPORT_ALL: EXPORT_ALL, EXPORT_NONE: EXPORT_NONE, "nil": EXPORT_NONE}  # as sbatch has it, in whatever case


def parse_export(text: str) -> tuple[str, dict[str, str]]:
    """The value of `export` and variables of `all`, `none` or `NAME,NAME=VALUE`, as of sbatch; ValueError: it is neither.

    A value ends at a comma. As in sbatch, variables that are given with values do not keep out what `all` brings along.
    """
    words, given = [], {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        word = _WORDS.get(name.lower(), name)
        if not re.fullmatch(VARIABLE, name) or (equals and word in _KINDS):
            raise ValueError(f"expected {EXPECTED_EXPORT}, got {text[:60]!r}")
        if equals:
            given[name] = value
        else:
            words.append(word)
    kinds = [each for each in words if each in _KINDS]
    if EXPORT_NONE in kinds and (EXPORT_ALL in kinds or len(words) > len(kinds)):
        raise ValueError("`none` does not go together with names or `all`; leave one of them out")
    return (EXPORT_ALL if EXPORT_ALL in kinds else ",".join(dict.fromkeys(words)) or EXPORT_NONE), given


def text_of(variables: Mapping[str, str]) -> str:
    """The variables as text, which is the same in whatever order they come."""
    return json.dumps(variables, sort_keys=True, separators=(",", ":"))


def sha256_of(text: str) -> str:
    """The name of an environment."""
    return hashlib.sha256(text.encode()).hexdigest()


def joined(request: JobRequest, exported: Mapping[str, str]) -> JobRequest:
    """The request with the variables that were exported in its `env`, in which those of its own win over them.

    RequestError: they are too much together.
    """
    env = {**exported, **request.env}
    if len(env) > MOST_VARIABLES or sum(len(name) + len(value) for name, value in env.items()) > MOST_ENVIRONMENT:
        most = f"{MOST_VARIABLES:,} variables and {MOST_ENVIRONMENT:,} characters"
        raise RequestError(f"env: more than {most}, with what is exported; export less (--export none)")
    return request.model_copy(update={"env": env, "exported": None})
