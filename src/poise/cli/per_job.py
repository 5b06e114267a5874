"""One row a job, as CSV or JSON by the ending of the file."""

import csv
import json
from math import isfinite
from pathlib import Path

from poise.assembly import Outcome

COLUMNS = (
    "job", "tenant", "gpus", "submitted", "started", "finished", "jct", "rho", "preemptions",
    "gpu_seconds", "wait_fair_share", "wait_fragmentation", "wait_capacity", "status",
)  # fmt: skip
FIRST_COLUMNS = COLUMNS[:6]
"""Enough of them to know a file of ours by."""


def rows(outcome: Outcome) -> list[dict[str, object]]:
    """All jobs of the trace in order of submission; what never came about is None."""
    ends = {life.id: place for place, life in enumerate(outcome.measured.lives)}
    found: list[dict[str, object]] = []
    for life in outcome.history.jobs.values():
        place = ends.get(life.id)
        jct = None if place is None else float(outcome.measured.jcts[place])
        rho = None if place is None else float(outcome.measured.rhos[place])
        order, fragmentation, capacity = life.waited
        values = (
            life.id, life.tenant, life.gpus, life.submitted, _known(life.started), None if place is None else life.ended,
            jct, _known(rho), life.preemptions, life.gpu_seconds, order, fragmentation, capacity, life.status.name.lower(),
        )  # fmt: skip
        found.append(dict(zip(COLUMNS, values, strict=True)))
    return found


def _known(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def write_per_job(path: Path, outcome: Outcome) -> None:
    """Write the rows."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        if path.suffix == ".json":
            json.dump(rows(outcome), stream, allow_nan=False, indent=1)
            return
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows(outcome))
