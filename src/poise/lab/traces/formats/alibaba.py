"""Alibaba's GPU cluster, v2023 (`openb_pod_list_*.csv`): CSV with a header, one row a pod.

| column | becomes |
|---|---|
| `name` | id |
| `num_gpu` | gpus; pods that ask for none are left out and counted |
| `gpu_milli` | thousandths of a GPU: a pod that asks for a part gets a whole one, and is counted |
| `gpu_spec` | gpu_types, in lower case: `V100M16\\|V100M32` may run on either; empty means any |
| `qos` | tenant: there is no owner in the trace |
| `pod_phase` | outcome: Failed failed; Succeeded, Running and Pending passed |
| `creation_time` | submitted: seconds since the trace began |
| `scheduled_time`, `deletion_time` | duration, s: from the one to the other; from creation if it was never scheduled |
| `cpu_milli`, `memory_mib` | not read |

observed   from `scheduled_time` to `deletion_time`, of pods that were scheduled

Pods without a deletion time have no duration: they are left out and counted.
"""

from poise.lab.traces.parsing import Cells, TraceInput, amount, field_refusal, label, whole
from poise.lab.traces.schema import JobOutcome, RunAttempt, TraceJob
from poise.scheduler.model.job import Job

COLUMNS = (
    "name", "num_gpu", "gpu_milli", "gpu_spec", "qos", "pod_phase", "creation_time", "deletion_time", "scheduled_time",
)  # fmt: skip
OUTCOMES = {**dict.fromkeys(("Succeeded", "Running", "Pending"), JobOutcome.PASSED), "Failed": JobOutcome.FAILED}


def job_of(cells: Cells, source: TraceInput) -> TraceJob | None:
    """Return the job of a pod; None if it has no GPU or no end."""
    name, gpus, milli, spec, tenant, phase, created, deleted, scheduled = cells
    gang = whole(gpus, "num_gpu", 0)
    if gang == 0:
        source.count("pods left out because they ask for no GPU")
        return None
    if not deleted:
        source.count("pods left out because they have no deletion time")
        return None
    outcome = OUTCOMES.get(phase)
    if outcome is None:
        raise field_refusal("pod_phase", f"one of {', '.join(OUTCOMES)}", phase)
    if whole(milli, "gpu_milli") < 1000:
        source.count("pods that ask for a part of a GPU and get a whole one")
    if not scheduled:
        source.count("pods never scheduled, whose duration is counted from their creation")
    submitted = amount(created, "creation_time")
    start = amount(scheduled, "scheduled_time") if scheduled else submitted
    end = amount(deleted, "deletion_time")
    if end < start:
        raise field_refusal("deletion_time", f"a time of at least {start:g}, at which the pod starts", f"{end:g}")
    job_id, owner = source.prefix + label(name, "name"), label(tenant, "qos")
    types = tuple(label(part, "gpu_spec") for part in spec.lower().split("|")) if spec else ()
    job = Job(job_id, submitted, gang, end - start, tenant=owner, gpu_types=types)
    return TraceJob(job, outcome, observed=(RunAttempt(start, end),) if scheduled else ())
