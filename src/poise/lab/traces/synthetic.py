"""Synthetic traces from a specification, `synthetic:jobs=1000,seed=0,...`: by default with the published shape of Philly.

One seed, one random generator per column: turning a knob changes its own column and no other (but a duration of the
`philly` kind depends on the job's GPUs, and a job that fails is no shorter than its failed attempts). The distributions
of the columns are in `distributions.py`, failures in `failure_model.py`.
"""

from importlib.resources import files
from typing import BinaryIO, NamedTuple, cast

import numpy as np

from poise.lab.traces import distributions
from poise.lab.traces.failure_model import add_failures, parse_failure_model
from poise.lab.traces.parsing import MOST_JOBS, FieldError, TraceInput, whole
from poise.lab.traces.registry import format_named
from poise.lab.traces.schema import Trace, TraceJob
from poise.scheduler.model.errors import RequestError, UnknownNameError
from poise.scheduler.model.job import Job

SYNTHETIC = "synthetic:"
HELP = "help"


class Knob(NamedTuple):
    """Something to choose about a synthetic trace."""

    name: str
    default: str
    meaning: str


KNOBS = (
    Knob("jobs", "1000", f"how many, 1 to {MOST_JOBS:,}"),
    Knob("seed", "0", "a whole number of at least 0; the same seed gives the same trace"),
    Knob(
        "arrivals",
        "poisson",
        "poisson; uniform (drawn evenly over jobs/rate hours); daily (poisson, rate swinging by 80 % with the hour); "
        f"bursty (bursts of {distributions.BURST} on average); at-once (all at 0)",
    ),
    Knob("rate", "philly", "jobs an hour on average; philly: 82,247 in 2,613.5 hours, 31.47 an hour"),
    Knob("sizes", "philly", f"GPUs: philly; gavel ({distributions.GAVEL_SIZES}); or SIZE:SHARE/SIZE:SHARE/..."),
    Knob(
        "durations",
        "philly",
        "seconds: philly (by size, from published quantiles and means); gavel (60·10^U(1.5,3) for 80 % of jobs, else "
        "60·10^U(3,4)); lognormal:MEDIAN:SIGMA; exponential:MEAN; fixed:SECONDS",
    ),
    Knob("tenants", "philly", "philly (15, by their published numbers of jobs); or N, the k-th with a share of 1/k (Zipf)"),
    Knob("models", "none", "none; or names a/b/c, each as likely as the next"),
    Knob("weights", "1", "WEIGHT, or WEIGHT:SHARE/WEIGHT:SHARE/..."),
    Knob(
        "failures",
        "0",
        "FRACTION of jobs that fail at least once before they pass; or philly (69.3 % pass, 13.5 % are killed, 17.2 % "
        "fail); or philly:rate=FRACTION/heal=FRACTION/killed=FRACTION; causes and run times to failure as published",
    ),
    Knob(
        "apps",
        "0",
        "FRACTION or FRACTION:JOBS of submissions that are sweeps: JOBS jobs of one app "
        f"({distributions.SWEEP} unless said), alike but for their losses, which they report",
    ),
)

_COLUMNS = ("arrivals", "sizes", "durations", "tenants", "models", "failures", "attempts", "weights", "apps", "losses")
"""Each has a random generator of its own, by its place here: add at the end only, or all traces change."""


def generate(spec: str) -> Trace:
    """Return the trace that a specification such as `synthetic:jobs=240,tenants=4` stands for; the same one every time.

    Raises UnknownNameError for an unknown knob, RequestError for a value that a knob does not take.
    """
    names = [knob.name for knob in KNOBS]
    given: dict[str, str] = {}
    for part in filter(None, spec.removeprefix(SYNTHETIC).split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise RequestError(f"{SYNTHETIC} expected knob=value, got {part!r}; the knobs are {', '.join(names)}")
        if name not in names:
            raise UnknownNameError("knob of a synthetic trace", name, names)
        if name in given:
            raise RequestError(f"{SYNTHETIC}{name}: expected it once, got it twice")
        given[name] = value
    try:
        with np.errstate(all="ignore"):
            jobs = _jobs({knob.name: given.get(knob.name, knob.default) for knob in KNOBS})
    except FieldError as refused:
        raise RequestError(f"{SYNTHETIC}{refused.field}: {refused.problem}") from None
    return Trace(spec if spec.startswith(SYNTHETIC) else SYNTHETIC + spec, jobs)


def _jobs(chosen: dict[str, str]) -> tuple[TraceJob, ...]:
    count = whole(chosen["jobs"], "jobs", 1, MOST_JOBS)
    seeds = np.random.SeedSequence(whole(chosen["seed"], "seed", 0, 2**63 - 1)).spawn(len(_COLUMNS))
    rng = {name: np.random.default_rng(seed) for name, seed in zip(_COLUMNS, seeds, strict=True)}
    first, is_sweep = distributions.sweeps(chosen["apps"], rng["apps"].random(count))
    submitted = distributions.submissions(
        chosen["arrivals"], count, distributions.hourly(chosen["rate"]), rng["arrivals"].random((count, 2))
    )[first]
    gpus = distributions.sizes(chosen["sizes"], rng["sizes"].random(count))[first]
    seconds = distributions.durations(chosen["durations"], gpus, rng["durations"].random((count, 2)))[first]
    weights = distributions.mixture(chosen["weights"], "weights").draw(rng["weights"].random(count))[first]
    tenants = distributions.tenants(chosen["tenants"], rng["tenants"].random(count))
    models = distributions.models(chosen["models"], rng["models"].random(count))
    model = parse_failure_model(chosen["failures"].replace("/", ","))
    losses = distributions.curves(seconds, rng["losses"].random((count, 3))) if is_sweep.any() else [None] * count
    rows = zip(
        first.tolist(), is_sweep.tolist(), submitted.tolist(), gpus.tolist(), seconds.tolist(), weights.tolist(), strict=True
    )
    found = []
    for index, (lead, sweep, at, gang, length, weight) in enumerate(rows):
        app = f"app-{lead}" if sweep else None
        job = Job(str(index), at, gang, length, tenant=tenants[lead], app=app, model=models[lead], weight=weight)
        found.append(TraceJob(job, loss=losses[index] if sweep else None))
    jobs = tuple(found)
    if not model:
        return jobs
    return add_failures(jobs, model, rng["failures"], rng["attempts"], lambda job: job.duration or 0.0)[0]


DEMO_SPEC = (
    "jobs=240,seed=7,rate=30,sizes=1:0.55/2:0.2/4:0.15/8:0.1,durations=lognormal:930:1,tenants=4,"
    "models=vae/superresolution/dcgan/gru/lstm/resnet50/resnext50"
)


def demo_trace() -> Trace:
    """Return the small trace that comes with Poise: 240 jobs of four tenants in 8.5 hours, 1.3 times the work of 24 GPUs.

    It is `synthetic:` + DEMO_SPEC, written down so that it can be looked at; a test compares the two.
    """
    with files("poise.lab.traces").joinpath("data", "demo.jsonl").open("rb") as stream:
        return Trace("demo", tuple(format_named("poise").read(TraceInput("demo.jsonl", cast(BinaryIO, stream)))))
