"""`poise bench solve`: what one allocation costs. `poise bench fidelity`: one workload live and simulated."""

from math import isfinite
from typing import TYPE_CHECKING, Any

import click

from poise.cli.options import DURATION, examples, json_option, print_json, with_options
from poise.cli.output import show_table
from poise.cli.outside import find_policy
from poise.lab.bench import WorkloadDraw, time_policy, with_defaults
from poise.lab.clusters import read_cluster
from poise.lab.progress import Bar
from poise.lab.report.page import HtmlTable
from poise.scheduler.model.units import counted
from poise.scheduler.policies.catalogue import policy_named

if TYPE_CHECKING:
    from poise.service.fidelity.comparison import Comparison

MOST_JOBS, MOST_TYPES = 1_000_000, 64
EPILOG = """\b
Examples:
  poise bench solve --policy max-min --jobs 2048
  poise bench solve --policy max-min+packed --jobs 512 --classes 26 --seed 1 --json
  poise bench solve --policy themis --jobs 1000
  poise bench solve --policy hare --jobs 1000
"""


@click.group(epilog=EPILOG + "  poise bench fidelity\n")
def bench() -> None:
    """Measure what Poise itself costs, and how far its simulator is from the real thing."""


_SOLVE_OPTIONS = (
    click.option("--policy", "spec", required=True,
        help="NAME, NAME:key=value,..., NAME+COMBINATOR; one that answers with shares, themis, or hare."),
    click.option("--jobs", required=True, type=click.IntRange(1, MOST_JOBS), help="Active jobs; with themis apps."),
    click.option("--types", default=3, show_default=True, type=click.IntRange(1, MOST_TYPES),
        help="GPU types; 1 with themis in any case."),
    click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of what is drawn."),
    click.option("--classes", type=click.IntRange(1, MOST_JOBS),
        help="Classes of equally fast jobs.  [default: each job its own; 26 with +packed]"),
    click.option("--gpus", type=click.IntRange(1),
        help="GPUs in all.  [default: 1 for every 4 wanted; 1 for 2 apps with themis]"),
    click.option("--gangs", help="gavel, or SIZE:SHARE/SIZE:SHARE/...  [default: gavel; 1:1 for allox]"),
    click.option("--repeat", "repeats", default=3, show_default=True, type=click.IntRange(1),
        help="Runs; the fastest counts."),
    json_option,
)  # fmt: skip


@bench.command(epilog=EPILOG, short_help="Time one allocation of a share policy, one auction, or one plan")
@with_options(_SOLVE_OPTIONS)
def solve(*, spec: str, repeats: int, as_json: bool, **drawing: int | str | None) -> None:
    """Time one allocation of a share policy, one auction, or one plan, in CPU seconds, on jobs that are drawn at random.

    Gangs and lengths are drawn as by Gavel's generator; speeds so that GPU types differ, and jobs in what they gain from a
    fast one. The same options draw the same jobs everywhere. In an auction each app is a sweep of up to 8 jobs, and all bid.
    A plan of hare places all tasks of jobs of up to 100 rounds; its objective is the sum of weighted completion times.
    """
    find_policy(spec)
    policy = policy_named(spec)
    draw = with_defaults(policy, WorkloadDraw(**drawing))  # type: ignore[arg-type]  # click has seen to the types
    with Bar(spec, repeats, quiet=as_json) as bar:
        figures = time_policy(policy, draw, repeats, bar.update)
    has_objective, has_bound = isfinite(figures.objective), isfinite(figures.bound)
    if as_json:
        found = {
            "policy": spec,
            "jobs": draw.jobs,
            "seconds": figures.best,
            "objective": figures.objective if has_objective else None,
            "types": draw.types,
            "seed": draw.seed,
            "classes": draw.classes,
            "gpus": figures.gpus,
            "repeats": len(figures.seconds),
            "bound": figures.bound if has_bound else None,
        }
        print_json(found)
        return
    where = f"{counted(draw.jobs, 'job')} on {counted(figures.gpus, 'GPU')} of {counted(figures.types, 'type')}"
    aim = f"; objective {figures.objective:.6g}" if has_objective else ""
    aim += f", none below {figures.bound:.6g} is possible" if has_bound else ""
    click.echo(f"{spec}: {where}: {figures.best:.4f} CPU seconds, best of {len(figures.seconds)}{aim}")


POLICIES = ("fifo", "las", "max-min")


_FIDELITY_OPTIONS = (
    click.option("--policy", "policies", multiple=True, help="May be repeated.  [default: fifo, las and max-min]"),
    click.option("--jobs", type=click.IntRange(1, 500), default=30, show_default=True,
        help="Real processes, one after the other."),
    click.option("--cluster", default="v100:6", show_default=True, metavar="SPEC", help="Virtual GPUs."),
    click.option("--round", "round_", type=DURATION, default=4.0, show_default=True, help="Length of a round."),
    click.option("--median", type=DURATION, default=6.0, show_default=True, help="Duration of half of the jobs at most."),
    click.option("--load", type=click.FloatRange(0.1, 10.0), default=1.5, show_default=True,
        help="Work that arrives ÷ work that can be done."),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the workload."),
    click.option("--backend", type=click.Choice(["local", "remote"]), default="local", show_default=True,
        help="Where jobs run: as processes of the service, or of an agent for each node, all on this machine."),
    click.option("--runs", type=click.IntRange(1, 100), default=1, show_default=True,
        help="Workloads, each drawn from the next seed; their mean counts."),
    click.option("--tolerance", type=click.FloatRange(0.0, 1.0), default=0.05, show_default=True,
        help="Largest difference; beyond it, exit code 1."),
    click.option("--quiet", is_flag=True, help="No progress bar."),
    json_option,
)  # fmt: skip


@bench.command(
    short_help="Run one workload twice: live and in the simulator",
    epilog=examples("poise bench fidelity", "poise bench fidelity --policy las --jobs 12 --json"),
)
@with_options(_FIDELITY_OPTIONS)
def fidelity(policies: tuple[str, ...], quiet: bool, as_json: bool, **options: Any) -> int:  # noqa: ANN401
    """Run one workload twice, under a live service and in the simulator, and compare makespan and average completion time.

    Jobs are real processes that take a few seconds each. What a start costs is measured live and told the simulator.
    """
    # `bench solve` needs no service.
    from poise.service.fidelity.comparison import compare, mean_of
    from poise.service.fidelity.live_run import FidelitySetup, draw_workload, on_agents, on_this_machine

    cluster, count, length = read_cluster(options["cluster"]), options["jobs"], options["round_"]
    chosen = policies or POLICIES
    for spec in chosen:
        find_policy(spec)
        policy_named(spec)
    seeds = range(options["seed"], options["seed"] + options["runs"])
    served = {"local": on_this_machine, "remote": on_agents}[options["backend"]]
    found, each_run = [], []
    for spec in chosen:
        runs = []
        for seed in seeds:
            jobs = draw_workload(count, seed, cluster, options["load"], options["median"])
            with Bar(f"{spec}, live", count, quiet=quiet or as_json) as bar:
                runs.append(compare(jobs, FidelitySetup(cluster, spec, length), bar.update, served))
        found.append(mean_of(runs))
        each_run += [(f"{spec}, seed {seed}", run) for seed, run in zip(seeds, runs, strict=True)]
    if as_json:
        setup = {"cluster": str(cluster), "jobs": count, "round": length, "load": options["load"], "seed": options["seed"]}
        setup |= {
            "median": options["median"],
            "backend": options["backend"],
            "runs": options["runs"],
            "tolerance": options["tolerance"],
        }
        print_json(setup | {"policies": [*map(_fidelity_document, found)]})
    else:
        title = f"{counted(count, 'job')} on {cluster}, rounds of {length:g} s"
        rows = [(each.policy, each) for each in found]
        if options["runs"] > 1:
            title += f"; mean of {options['runs']} workloads, and each"
            rows += each_run
        show_table(_fidelity_table(rows), title)
    return int(any(each.worst > options["tolerance"] for each in found))


def _fidelity_table(found: "list[tuple[str, Comparison]]") -> HtmlTable:
    measured = ("makespan", "average JCT")
    columns = ("policy", *(word for each in measured for word in (each, "simulated", "off by")), "preemptions", "simulated")
    rows = [
        (
            name,
            f"{each.live.makespan:.2f} s", f"{each.simulated.makespan:.2f} s", f"{each.makespan_error:+.1%}",
            f"{each.live.avg_jct:.2f} s", f"{each.simulated.avg_jct:.2f} s", f"{each.jct_error:+.1%}",
            str(each.live.preemptions), str(each.simulated.preemptions), f"{each.overhead:.3f} s",
        )
        for name, each in found
    ]  # fmt: skip
    return HtmlTable((*columns, "a start"), tuple(rows), words=("policy",))


def _fidelity_document(each: "Comparison") -> dict[str, object]:
    found: dict[str, object] = {"policy": each.policy, "overhead": each.overhead}
    for key, error in (("makespan", "makespan_error"), ("avg_jct", "jct_error"), ("preemptions", None), ("jcts", None)):
        found |= {key: getattr(each.live, key), f"simulated_{key}": getattr(each.simulated, key)}
        found |= {error: getattr(each, error)} if error else {}
    return found
