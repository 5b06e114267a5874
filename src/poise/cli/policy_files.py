"""What `poise new-policy` writes: a working policy of each kind, and its test, page and package."""

from collections.abc import Mapping
from dataclasses import dataclass

_ORDER = '''"""{NAME}: jobs of larger weight first, equal ones in order of submission.

Order jobs by -w_m, where w_m is the weight of job m. A job that has waited for
`patience` seconds comes before all that have not. O(log J) an event, no memory.
"""

from poise.policies import (
    Family,
    JobView,
    Listing,
    Order,
    Parameter,
    PolicyProperty,
    PreemptionRule,
    Rank,
    Unfitting,
    positive,
)


def by_weight(patience: float = 86400.0) -> Order:
    """Jobs of larger weight first; those that have waited for long before them."""

    def rank(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
        """Smaller comes first. Asked when the job arrives, starts or stops, and at `until`."""
        if job.running:
            return Rank(-job.weight, section=1)
        patient_until = job.waiting_since + patience
        if job.now >= patient_until:
            return Rank(job.waiting_since, section=0)
        return Rank(-job.weight, section=1, until=patient_until)

    return Order(rank, PreemptionRule.NEVER, Unfitting.SKIPPED)


POLICY = Listing(
    "{NAME}",
    Family.QUEUE,
    "jobs of larger weight first",
    "an example",
    (
        PolicyProperty.NO_PREEMPTION,
        PolicyProperty.NO_DURATIONS,
        PolicyProperty.WORK_CONSERVING,
    ),
    by_weight,
    (
        Parameter(
            "patience",
            "86400",
            "seconds of waiting after which a job comes first",
            positive,
        ),
    ),
)
'''

_PLANNER = '''"""{NAME}: the smallest gangs first, equal ones in order of submission.

Claim GPUs for jobs by ascending gang g_m at every decision. Running jobs of larger
gangs make room. O(J log J) a decision, no memory.
"""

from dataclasses import dataclass

import numpy as np
from poise.policies import (
    Claim,
    Family,
    Listing,
    Parameter,
    Plan,
    PolicyProperty,
    PreemptionRule,
    Snapshot,
    Unfitting,
    whole_number,
)


@dataclass(frozen=True)
class SmallestFirst:
    """Gangs of up to `small` GPUs count as equal."""

    small: int = 1

    def start(self) -> None:
        """No memory."""

    def plan(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Claims in order. Rows ascend with the time of submission."""
        order = np.lexsort((snapshot.rows, np.maximum(snapshot.gang, self.small)))
        claims = tuple(Claim(row) for row in snapshot.rows[order].tolist())
        return Plan(claims, Unfitting.SKIPPED, PreemptionRule.BY_RANK), memory


POLICY = Listing(
    "{NAME}",
    Family.MARKET,
    "the smallest gangs first",
    "an example",
    (PolicyProperty.NO_DURATIONS,),
    SmallestFirst,
    (
        Parameter(
            "small", "1", "gangs of up to so many GPUs count as equal", whole_number
        ),
    ),
)
'''

_ALLOCATOR = '''"""{NAME}: every job gets a part of each GPU type by its weight.

With w_m the weight of job m, g_m its gang and n_c the GPUs of type c, m runs on c for
the fraction x_mc = n_c w_m / (W g_m) of the time, where W is the sum of all weights,
and never for more than all of it. O(J C), no memory.
"""

from dataclasses import dataclass

import numpy as np
from poise.policies import (
    Allocation,
    Family,
    Listing,
    Parameter,
    PolicyProperty,
    Workload,
    fraction,
)


@dataclass(frozen=True)
class ByWeight:
    """At most `most` of the time for any job."""

    most: float = 1.0

    def start(self) -> None:
        """No memory."""

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """The share of each job on each GPU type; the mechanism makes rounds of it."""
        share = np.zeros(workload.speed.shape)
        if workload.jobs:
            part = workload.weight / workload.weight.sum()
            time = workload.gpus[None, :] * part[:, None] / workload.gang[:, None]
            can_run = workload.speed[:, : workload.types] > 0
            share[:, : workload.types] = np.where(can_run, time, 0.0)
            share *= np.minimum(
                1.0, self.most / np.maximum(share.sum(axis=1, keepdims=True), 1e-12)
            )
        return Allocation(share), memory


POLICY = Listing(
    "{NAME}",
    Family.SHARE,
    "a part of each GPU type by weight",
    "an example",
    (PolicyProperty.NO_DURATIONS,),
    ByWeight,
    (Parameter("most", "1", "largest fraction of time for a job", fraction),),
)
'''

TESTS = '''"""{NAME}: a small example, and the laws that every policy keeps."""

import poise
from poise.policies import check_policy

from {MODULE} import POLICY

TRACE = poise.Trace.of(
    [
        {"job": "first", "submitted": 0, "gpus": 2, "duration": 2000},
        {"job": "large", "submitted": 1, "gpus": 2, "duration": 2000},
        {"job": "{BETTER}", "submitted": 2, {BETTER_JOB}},
    ]
)


def test_{TEST}() -> None:
    result = poise.simulate(TRACE, cluster="gpu:2", policy=POLICY)
    finished = {row["job"]: row["finished"] for row in result.jobs}
    assert finished["{BETTER}"] < finished["large"]


def test_the_laws_that_every_policy_keeps() -> None:
    report = check_policy(POLICY, seeds=10)
    assert not report.broken, str(report)
'''

PAGE = """# {NAME}

**Idea.** {IDEA}

**Problem in symbols.** {SYMBOLS}

## Example

```console
$ poise compare synthetic:jobs=200 --policies fifo,{MODULE}:POLICY --cluster gpu:16
```

## Parameters and claims

`{PARAMETER}`: {MEANING}. `poise policies {MODULE}:POLICY` shows all parameters, and what the policy claims;
`poise check-policy {MODULE}:POLICY` checks the claims.

## When not to use it

{NOT}
"""

PACKAGE = """[build-system]
requires = ["setuptools>=68"]
build-backend = "setuptools.build_meta"

[project]
name = "{NAME}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["poise"]

[project.entry-points."poise.policies"]
{NAME} = "{MODULE}:POLICY"

[tool.setuptools]
py-modules = ["{MODULE}"]
"""


@dataclass(frozen=True, slots=True)
class PolicyTemplate:
    """A policy of one kind: its file, and the words of its test and page."""

    policy: str
    words: Mapping[str, str]


KINDS = {
    "order": PolicyTemplate(
        _ORDER,
        {
            "BETTER": "heavy",
            "BETTER_JOB": '"gpus": 2, "duration": 2000, "weight": 3',
            "TEST": "the_job_of_larger_weight_comes_first",
            "IDEA": "Jobs of larger weight come first. Nobody is preempted, and whoever has waited for long comes first.",
            "SYMBOLS": "Order jobs by -w_m, where w_m is the weight of job m.",
            "PARAMETER": "patience",
            "MEANING": "seconds of waiting after which a job comes first",
            "NOT": "Where weights are all equal it is first come, first served, with gangs that do not fit passed over.",
        },
    ),
    "planner": PolicyTemplate(
        _PLANNER,
        {
            "BETTER": "small",
            "BETTER_JOB": '"gpus": 1, "duration": 10',
            "TEST": "the_smallest_gang_comes_first",
            "IDEA": "Small gangs come first, and preempt larger ones: they fit almost anywhere.",
            "SYMBOLS": "Order jobs by g_m, the GPUs that job m needs at once.",
            "PARAMETER": "small",
            "MEANING": "gangs of up to so many GPUs count as equal",
            "NOT": "Where small jobs keep coming, large gangs starve.",
        },
    ),
    "allocator": PolicyTemplate(
        _ALLOCATOR,
        {
            "BETTER": "heavy",
            "BETTER_JOB": '"gpus": 2, "duration": 2000, "weight": 3',
            "TEST": "the_job_of_larger_weight_is_done_earlier",
            "IDEA": "Every job gets a part of each GPU type, by its weight.",
            "SYMBOLS": "x_mc = n_c w_m / (W g_m): the fraction of time of job m on GPU type c.",
            "PARAMETER": "most",
            "MEANING": "largest fraction of time for a job",
            "NOT": "It does not look at how fast jobs are on each type; `max-min` does.",
        },
    ),
}
