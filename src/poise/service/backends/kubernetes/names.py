"""Names that Poise gives to and reads from Kubernetes objects: labels, annotations, conditions, and names of pods.

Kubernetes' names are shorter than ours and know no capitals, so the name of a pod is made from the job's id by `pod_name`,
and what it stands for is said by labels and annotations, never read from the name.
"""

import hashlib
import re
from collections.abc import Mapping

PREFIX = "poise.run"

# Labels of what Poise creates.
SERVICE = f"{PREFIX}/service"  # identity of the service: another one never touches it
JOB = f"{PREFIX}/job"
EPOCH = f"{PREFIX}/epoch"
PART = f"{PREFIX}/part"  # number of the part of the run, from 0
TENANT = f"{PREFIX}/tenant"  # also a label of namespaces: whose the jobs are that others create there
MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "poise"

# Annotations that Poise writes.
TERM = f"{PREFIX}/term"  # of the leader that has acted
SLOTS = f"{PREFIX}/slots"  # by Poise's count; the device plug-in chooses the GPUs themselves
# JOB and EPOCH: of a pod that others have created, Poise's number of its job and the run that it was bound for. The same
# texts as the labels, on purpose: what has the label SERVICE was created by Poise, and says it by labels.

GANG_KEY = f"{PREFIX}/gang-key"  # of a bound pod: the key of its gang, which a restart would not find again
CERTIFICATE = f"{PREFIX}/certificate"  # of a pod of Poise: with what its agent checks the server
SUSPENDED_BY = f"{PREFIX}/suspended"  # of an owner that Poise has suspended: the epoch of the run that left

# Annotations that users may write on their pods (or pod templates).
GANG = f"{PREFIX}/gang"  # name of the gang, in its namespace
GANG_SIZE = f"{PREFIX}/gang-size"  # number of its pods
PREEMPTION = f"{PREFIX}/preemption"  # restart or never
DURATION = f"{PREFIX}/duration"  # seconds on the reference GPU type, if the owner knows
MODEL = f"{PREFIX}/model"  # what it trains, as throughput tables name it

# Of a namespace, which only administrators change.
WEIGHT = f"{PREFIX}/weight"

SCHEDULER = "poise"  # spec.schedulerName of pods that Poise is to place
GPU_RESOURCE = "nvidia.com/gpu"
OWN_TYPE_LABEL = "poise.run/gpu-type"  # a type as administrators want it called, before all other labels
PRODUCT_LABEL = "nvidia.com/gpu.product"  # of GPU feature discovery
RACK_LABELS = ("poise.run/rack", "topology.kubernetes.io/rack", "topology.kubernetes.io/zone")

LONGEST = 63  # characters of a label's value, and of a host name
_NUMBER = re.compile(r"[0-9]{1,18}")  # not \d, which knows digits that int() does not
_UNFIT = re.compile(r"[^a-z0-9-]+")


def pod_name(job: str, epoch: int, part: int) -> str:
    """Return the name of the pod that runs one part of a run: the same for the same part, and for no other."""
    return f"{service_name(job, epoch)}-{part}"


def service_name(job: str, epoch: int) -> str:
    """Return the name of the headless service through which the pods of a run find each other."""
    stem = _UNFIT.sub("-", job.lower()).strip("-")
    if stem != job or len(stem) > 30:  # what was lost of it has to tell it apart from others
        stem = f"{stem[:30].strip('-')}-{hashlib.sha256(job.encode()).hexdigest()[:8]}".strip("-")
    return f"poise-{stem}-{epoch}"


def run_key(texts: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the job and the epoch that labels or annotations name; None: no run. Users can write anything there."""
    epoch = number(texts.get(EPOCH, ""))
    return None if epoch is None else (texts.get(JOB, ""), epoch)


def number(text: str) -> int | None:
    """Read digits that users may have written; None: it is no number, or none that Poise gives."""
    return int(text) if _NUMBER.fullmatch(text) else None


def label_value(text: str) -> str:
    """Return what a label can hold of a text; the text itself wherever possible."""
    fit = re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:LONGEST].strip("._-")
    return fit or "unnamed"
