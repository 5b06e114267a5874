"""Answers of a server that may be newer than this client: keys that are not known are dropped, unknown words refused."""

import json
from typing import Any, TypeVar

from pydantic import ValidationError

from poise import __version__
from poise.client.errors import UnavailableError
from poise.wire.request import Wire

Answer = TypeVar("Answer", bound=Wire)


def understood(kind: type[Answer], content: bytes) -> Answer:
    """The answer that these bytes are."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        unknown = [each["loc"] for each in error.errors(include_url=False) if each["type"] == "extra_forbidden"]
        if not unknown:
            raise _unclear(error) from None
    document = json.loads(content)
    for path in unknown:
        _drop(document, path)
    try:
        return kind.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise _unclear(error) from None


def _drop(document: Any, path: tuple[int | str, ...]) -> None:  # noqa: ANN401 - JSON
    for part in path[:-1]:
        document = document[part]
    del document[path[-1]]


def _unclear(error: ValidationError) -> UnavailableError:
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"])) or "the whole"
    got = repr(first["input"])
    shown = got if len(got) <= 40 else got[:39] + "…"
    return UnavailableError(
        f"the server's answer is not understood by poise {__version__}: {place} is {shown}; is the server a newer Poise?"
    )
