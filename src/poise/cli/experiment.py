"""The options that `simulate`, `compare` and `audit` share; `lab.options` reads what they describe."""

from pathlib import Path
from typing import Any

import click

from poise.cli.options import DURATION, FILE, choice_of, only_json_option, with_options
from poise.cli.outside import find_policy
from poise.engine.assembly import PRESETS
from poise.lab.analysis.fairness import Fairness
from poise.lab.options import NAMES, ExperimentOptions, ExperimentRequest
from poise.lab.options import read_experiment as read_from_options
from poise.lab.output_files import OutputKind, check_file
from poise.lab.traces.registry import format_names
from poise.scheduler.core.settings import Cadence, RetryRule
from poise.scheduler.model.errors import RequestError
from poise.scheduler.placement.strategies import PLACEMENTS

_OPTIONS = (
    click.option("--format", default="auto", show_default=True, help=f"One of {', '.join(format_names())}."),
    click.option("--cluster", default="gpu:64", show_default=True, metavar="SPEC",
        help="v100:12,k80:8@4 (GPUs of each type, 4 a node unless @n), or a YAML or TOML file."),
    click.option("--throughputs", metavar="FILE", help="Believed speeds: our CSV or Gavel's JSON.  [default: shipped]"),
    click.option("--true-throughputs", metavar="FILE", help="The world's speeds where they differ from the believed ones."),
    click.option("--estimate", metavar="SPEC",
        help="Believe speeds estimated from a short profile, profiled:types=1,pairs=0.2,...; "
        "the world keeps the true ones."),
    click.option("--preset", default="none", show_default=True, help=f"Set-up of a published system: {', '.join(PRESETS)}."),
    click.option("--round", type=DURATION, help="Length of a round.  [default: 360, or the preset's]"),
    click.option("--cadence", type=choice_of(Cadence), help="When to decide.  [default: both, or the preset's]"),
    click.option("--recompute", type=DURATION,
        help="Least time between two solves of a share policy; others ignore it.  [default: 0, or the preset's]"),
    click.option("--patience", type=click.FloatRange(min=0),
        help="Rounds that a job may run ahead of its share; share policies.  [default: 1, or the preset's]"),
    click.option("--backfill/--no-backfill", default=None, help="Use GPUs that become free inside a round at once."),
    click.option("--placement", metavar="NAME", help=f"One of {', '.join(PLACEMENTS)}.  [default: consolidate]"),
    click.option("--restart-overhead", type=DURATION, help="Time without progress at each start.  [default: 0]"),
    click.option("--minimum-run", type=DURATION, help="A job that just started is not preempted for this long."),
    click.option("--checkpoint-every", type=DURATION, default=600.0,
        help="Running time between checkpoints.  [default: 600]"),
    click.option("--retries", type=click.IntRange(0), help="Failed runs of a job that are forgiven.  [default: 4]"),
    click.option("--retry", type=choice_of(RetryRule),
        help="Forgive failed runs by their count or by their cause.  [default: count]"),
    click.option("--backoff", type=DURATION,
        help="Before a first retry after a cause that passes; doubled each time.  [default: 60]"),
    click.option("--packed-wait", type=DURATION,
        help="A waiting job insists on the fewest nodes for this long.  [default: 0]"),
    click.option("--rack-wait", type=DURATION, help="A waiting job insists on one rack for this long.  [default: 0]"),
    click.option("--defragment", type=DURATION,
        help="Move small jobs, at most this often each, to make room on one node; 0: never.  [default: 0]"),
    click.option("--validation-pool", type=click.IntRange(0), metavar="GPUS",
        help="GPUs set aside on which jobs of several GPUs are tried first: broken ones fail cheaply.  [default: 0]"),
    click.option("--validation-time", type=DURATION, help="How long such a trial takes.  [default: 300]"),
    click.option("--elastic", is_flag=True,
        help="Jobs that state no bounds may run on 1 GPU up to as many as they ask for."),
    click.option("--micro-batches", type=click.IntRange(1), metavar="N",
        help="Steps of jobs that state none divide into N tasks a GPU that the job asks for; any mix of GPUs will do."),
    click.option("--switching", metavar="SPEC", default="resident=0.003",
        help="What turning a GPU to another job costs where steps divide into tasks: "
        "resident=SECONDS,bandwidth=BYTES,size=BYTES,keep=JOBS; naive (the restart overhead); or free.  "
        "[default: 3 ms if its model is resident, else model size / 12 GB/s]"),
    click.option("--faults", metavar="SPEC", help="Outages of nodes: mtbf=30d,repair=4h, or a JSON-lines file."),
    click.option("--drain", multiple=True, metavar="NODE@FROM..UNTIL",
        help="Drain a node, p100-0@1h..3h, or some of its GPUs, p100-0:0,1@1h..3h; times count from the first submission. "
        "May be given more than once."),
    click.option("--failures", metavar="SPEC", default="none",
        help="Failures of jobs, for traces that have none: philly (as published), philly:rate=FRACTION,heal=FRACTION,"
        "killed=FRACTION, or a fraction of jobs, all of which pass in the end.  [default: none]"),
    click.option("--fairness", type=choice_of(Fairness), default="job", show_default=True, help="N of the 1/N slice."),
    click.option("--seed", type=click.IntRange(0), default=0, show_default=True,
        help="Of drawn outages and failures, and of the order of GPU types under policies that do not tell them apart; "
        "a synthetic trace has its own."),
    click.option("--jobs", type=click.IntRange(1), help="Only the first N jobs of the trace."),
    click.option("--load", type=float, default=1.0, show_default=True, help="Jobs arrive this many times as fast."),
    click.option("--until", type=DURATION, help="Stop this long after the first submission."),
    only_json_option,
    click.option("--quiet", is_flag=True, help="No progress and no notes on stderr."),
)  # fmt: skip
experiment_options = with_options(_OPTIONS)
"""The options that describe a trace, a cluster and a simulation of the two."""

per_job_option = click.option("--per-job", type=FILE, help="Write one row a job: .csv or .json.")


def check_rows_ending(path: Path | None) -> None:
    """Refuse a file of --per-job that does not say by its ending what to write."""
    if path is not None and path.suffix not in (".csv", ".json"):
        raise RequestError(f"--per-job {path}: expected a file that ends in .csv or .json")


def check_rows(path: Path | None, *, force: bool) -> list[str]:
    """Refuse a file of --per-job that cannot be written or is of another kind; the notes on one that is replaced."""
    kind = OutputKind.ROWS_JSON if path is not None and path.suffix == ".json" else OutputKind.ROWS_CSV
    return check_file("--per-job", path, kind, force=force)


def read_experiment(source: str, options: dict[str, Any], policy: str) -> ExperimentRequest:
    """Read what the options of a command name; raises RequestError for anything wrong, cheap checks first."""
    find_policy(policy)
    return read_from_options(source, experiment_options_of(options), policy)


def experiment_options_of(options: dict[str, Any]) -> ExperimentOptions:
    """Return the options of a command that say something about the experiment."""
    return ExperimentOptions(**{name: options[name] for name in NAMES})
