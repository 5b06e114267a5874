"""Shockwave (Zheng et al., NSDI'23): Gavel's format with two columns more; tab-separated, no header, 12 columns.

| column | becomes |
|---|---|
| 1 job type, `ResNet-18 (batch size 32)` | model, and batch_size at the start |
| 2 command, 3 directory, 4 steps argument | not read |
| 5 needs data directory, 0 or 1 | checked, not kept |
| 6 total steps | steps |
| 7 gang | gpus |
| 8 mode: static, accordion, gns | checked, not kept; that the last two change the batch size is not followed |
| 9 priority weight | weight |
| 10 SLO, a multiple of the duration; below 0 none | deadline: submitted + SLO x duration |
| 11 duration | duration, s |
| 12 arrival | submitted: seconds since the trace began |

A row has no id: the job is called by the number of its row, from 0.
"""

from poise.lab.traces.formats.gavel import check_flag, kind_of, slo_of
from poise.lab.traces.parsing import Cells, FieldError, TraceInput, amount, field_refusal, positive, whole
from poise.lab.traces.schema import TraceJob
from poise.scheduler.model.job import Job

WIDTHS = (12,)
MODES = ("static", "accordion", "gns")


def job_of(cells: Cells, source: TraceInput) -> TraceJob:
    """Return the job of a row."""
    if len(cells) != 12:
        raise FieldError(None, f"expected 12 tab-separated cells, got {len(cells)}")
    kind, _, _, _, flag, steps, gpus, mode, weight, slo, duration, arrival = cells
    check_flag(flag)
    if mode not in MODES:
        raise field_refusal("mode", f"one of {', '.join(MODES)}", mode)
    if mode != "static":
        source.count("jobs whose changes of batch size are not followed")
    model, batch_size = kind_of(kind)
    submitted, seconds, slack = amount(arrival, "arrival"), amount(duration, "duration"), slo_of(slo)
    name, gang, work = f"{source.prefix}{source.rows}", whole(gpus, "gang"), amount(steps, "total_steps")
    factor, deadline = positive(weight, "weight"), None if slack is None else submitted + slack * seconds
    job = Job(name, submitted, gang, seconds, work, model=model, batch_size=batch_size, weight=factor, deadline=deadline)
    return TraceJob(job)
