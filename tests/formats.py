"""What is stored, field by field, as text: `tests/data/formats/store-VERSION.txt`.

`python -m tests.formats` writes the file of the version in force. The text names what a stored document shows: tables,
keys and positions, their types, and the words that a field may hold. It does not name classes, unless the name itself is
stored, as those of events and actions are; so renaming a class changes nothing here, and changing a field always does.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import EnumMeta
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from poise.engine.journal import VERSION as JOURNAL_VERSION
from poise.engine.journal import Header
from poise.scheduler.core.settings import Settings
from poise.scheduler.model import action, event
from poise.scheduler.model.action import Waited
from poise.scheduler.model.cluster import Cluster, Node, Slots
from poise.scheduler.model.job import Job
from poise.scheduler.model.micro_batches import Tasks
from poise.scheduler.model.speed import Estimate
from poise.service.server.node_records import NodeRecord
from poise.service.server.records import JobRecord, RunRecord
from poise.service.server.storage.schema import INDEXES, TABLES, VERSION
from poise.service.wire.request import JobRequest

FOLDER = Path(__file__).parent / "data" / "formats"
FILE = FOLDER / f"store-{VERSION}.txt"
_DOCUMENTS: dict[type, str] = {
    JobRecord: "job record", RunRecord: "run record", NodeRecord: "node record", Header: "journal header",
    Settings: "settings", Cluster: "cluster", Node: "node", Slots: "slots", Job: "job", Estimate: "estimate",
    Tasks: "tasks", Waited: "waited",
    **{kind: f"event {kind.__name__.lower()}" for kind in event.Event.__args__},
    **{kind: f"action {kind.__name__.lower()}" for kind in action.Action.__args__},
}  # fmt: skip
"""Every document that is stored. Events and actions are stored under the names of their classes in lower case."""


def described() -> str:
    """Tables; fields of records, headers, events and actions, with the words that they may hold; what a request may be."""
    parts = [f"store {VERSION}, journal {JOURNAL_VERSION}", TABLES.strip(), INDEXES.strip()]
    for kind, label in _DOCUMENTS.items():
        types = get_type_hints(kind)
        names = [each.name for each in fields(kind) if each.init] if is_dataclass(kind) else list(types)
        parts.append(f"{label}: {', '.join(f'{name} {_type(types[name])}' for name in names)}")
    schema = JobRequest.model_json_schema()
    parts.append(json.dumps(_inlined(schema, schema.get("$defs", {})), indent=1, sort_keys=True))
    return "\n".join(parts) + "\n"


def _type(of: Any) -> str:
    """A type without names of classes: other documents by their labels, enumerations by the words that stand for them."""
    if of in (str, int, float, bool, NoneType):
        return "None" if of is NoneType else str(of.__name__)
    if isinstance(of, EnumMeta):
        return f"one of {'|'.join(str(each.value) for each in of)}"  # type: ignore[var-annotated]
    if get_origin(of) in (Union, UnionType):
        return " | ".join(map(_type, get_args(of)))
    if get_origin(of) in (tuple, list, dict):
        return f"{get_origin(of).__name__}[{', '.join('...' if each is ... else _type(each) for each in get_args(of))}]"
    return _DOCUMENTS[of]


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """A schema without what is said for people, and with definitions in the places that refer to them by name."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            schema = definitions[schema["$ref"].rpartition("/")[2]] | {key: schema[key] for key in schema if key != "$ref"}
        return {
            key: _inlined(each, definitions) for key, each in schema.items() if key not in {"$defs", "description", "title"}
        }
    return [_inlined(each, definitions) for each in schema] if isinstance(schema, list) else schema


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    FILE.write_text(described(), encoding="utf-8")
