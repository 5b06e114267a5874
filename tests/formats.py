"""What is stored, field by field, as text: `tests/data/formats/store-VERSION.txt`.

python -m tests.formats writes the file of the version in force.
"""

import json
from dataclasses import fields, is_dataclass
from enum import EnumMeta
from pathlib import Path
from typing import Any

from poise.engine.journal import VERSION as JOURNAL_VERSION
from poise.engine.journal import Header
from poise.scheduler.core.settings import Cadence, RetryRule, Settings
from poise.scheduler.model import action, event
from poise.scheduler.model.action import PreemptionCause, Waited
from poise.scheduler.model.cluster import Cluster, Node, Slots
from poise.scheduler.model.job import Job, Yields
from poise.scheduler.model.micro_batches import Tasks
from poise.scheduler.model.speed import Estimate
from poise.service.backends.api import DesiredState
from poise.service.server.records import JobRecord, RunRecord
from poise.service.server.storage.schema import INDEXES, TABLES, VERSION
from poise.service.wire.request import JobRequest, PreemptionMode
from poise.service.wire.views import Flag, JobState

FOLDER = Path(__file__).parent / "data" / "formats"
FILE = FOLDER / f"store-{VERSION}.txt"
_KINDS = (
    JobRecord, RunRecord, Header, Settings, Cluster, Node, Slots, Job, Estimate, Tasks, Waited,
    *event.Event.__args__, *action.Action.__args__,
)  # fmt: skip
_WORDS = (JobState, Flag, DesiredState, PreemptionMode, PreemptionCause, Yields, Cadence, RetryRule)


def described() -> str:
    """Tables; fields of records, headers, events and actions; words that fields may hold; what a request may be."""
    parts = [f"store {VERSION}, journal {JOURNAL_VERSION}", TABLES.strip(), INDEXES.strip()]
    parts += [f"{kind.__name__}: {', '.join(_fields(kind))}" for kind in _KINDS]
    parts += [f"{kind.__name__}: {', '.join(_words(kind))}" for kind in _WORDS]
    parts.append(json.dumps(_plain(JobRequest.model_json_schema()), indent=1, sort_keys=True))
    return "\n".join(parts) + "\n"


def _fields(kind: Any) -> list[str]:
    if is_dataclass(kind):
        return [f"{each.name} {_type(each.type)}" for each in fields(kind) if each.init]
    return [f"{name} {_type(of)}" for name, of in kind.__annotations__.items()]


def _type(of: Any) -> str:
    return of.__name__ if type(of) is type else str(of)


def _words(kind: EnumMeta) -> list[str]:
    return [str(each.value) for each in kind]  # type: ignore[var-annotated]


def _plain(schema: Any) -> Any:
    """A schema without what is said for people."""
    if isinstance(schema, dict):
        return {name: _plain(each) for name, each in schema.items() if name not in {"description", "title"}}
    return [_plain(each) for each in schema] if isinstance(schema, list) else schema


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    FILE.write_text(described(), encoding="utf-8")
