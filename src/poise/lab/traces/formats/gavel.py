"""Gavel (Narayanan et al., OSDI'20): tab-separated, no header, 10 columns, or 7 in its older form.

| column | older | becomes |
|---|---|---|
| 1 job type, `ResNet-18 (batch size 128)` | 1 | model `ResNet-18`, batch_size 128, if it is there |
| 2 command, 3 directory, 4 steps argument | 2, -, 3 | not read |
| 5 needs data directory, 0 or 1 | 4 | checked, not kept |
| 6 total steps | 5 | steps |
| 7 gang | 7 | gpus |
| 8 priority weight | - | weight |
| 9 SLO, a multiple of the duration; below 0 none | - | counted, not kept: there is no duration to multiply |
| 10 arrival | 6 | submitted: seconds since the trace began |

A row has no id: the job is called by the number of its row, from 0, as Gavel does.
"""

import re
from functools import lru_cache

from poise.lab.traces.parsing import (
    Cells,
    FieldError,
    TraceInput,
    amount,
    field_refusal,
    label,
    number,
    positive,
    whole,
)
from poise.lab.traces.schema import TraceJob
from poise.scheduler.model.job import Job

WIDTHS = (10, 7)
_KIND = re.compile(r"(?P<model>.+?) \(batch size (?P<size>[0-9]{1,9})\)")


@lru_cache(maxsize=1024)
def kind_of(job_type: str) -> tuple[str, int | None]:
    """Return model and batch size, if any, of `ResNet-18 (batch size 128)`. Cached: few types recur in many jobs."""
    match = _KIND.fullmatch(job_type)
    if match is None:
        return label(job_type, "job_type"), None
    return label(match["model"], "job_type"), whole(match["size"], "job_type", 1, 10**9)


def check_flag(text: str) -> None:
    """Check the column that says whether a job needs the data directory: it tells a shifted row from a sound one."""
    if text not in ("0", "1"):
        raise field_refusal("needs_data", "0 or 1", text)


def slo_of(text: str) -> float | None:
    """Return a service-level objective as a multiple of the duration; None if it is below 0."""
    value = number(text, "SLO")
    if value == 0:
        raise field_refusal("SLO", "-1 for none, or a multiple of the duration", text)
    return value if value > 0 else None


def job_of(cells: Cells, source: TraceInput) -> TraceJob:
    """Return the job of a row."""
    if len(cells) == 7:
        kind, _, _, flag, steps, arrival, gpus = cells
        weight, slo = "1", "-1"
    elif len(cells) == 10:
        kind, _, _, _, flag, steps, gpus, weight, slo, arrival = cells
    else:
        raise FieldError(None, f"expected 10 tab-separated cells, or the older 7, got {len(cells)}")
    check_flag(flag)
    if slo_of(slo) is not None:
        source.count("SLOs left out because the format has no duration to multiply")
    model, batch_size = kind_of(kind)
    name, at, gang = f"{source.prefix}{source.rows}", amount(arrival, "arrival"), whole(gpus, "gang")
    work, factor = amount(steps, "total_steps"), positive(weight, "weight")
    return TraceJob(Job(name, at, gang, steps=work, model=model, batch_size=batch_size, weight=factor))
