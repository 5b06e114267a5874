"""`poise demo`: the tour on built-in data."""

import json
from dataclasses import replace
from pathlib import Path

import click

from poise.assembly import Experiment
from poise.cli.compare import conclude, run_all
from poise.cli.outputs import Kind, check_file, force_option, over
from poise.cli.tables import show_notes, show_table
from poise.model.cluster import parse_cluster
from poise.report.comparison import comparison_page, table
from poise.traces.demo import demo_trace

CLUSTER = "k80:8,p100:8,v100:8"
POLICIES = ("fifo", "srtf", "las", "tiresias", "max-min", "max-min+agnostic", "themis", "gandiva-fair")

EPILOG = """\b
Example:
  poise demo --html report.html
"""


@click.command(epilog=EPILOG)
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), default=Path("poise-demo.html"), show_default=True,
    help="Where to write the report.",
)  # fmt: skip
@force_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option("--quiet", is_flag=True, help="No progress and no notes on stderr.")
def demo(html: Path, force: bool, as_json: bool, quiet: bool) -> int:
    """Run a built-in trace of 240 jobs on a mixed cluster under several policies; a table and an HTML report."""
    show_notes(check_file("--html", html, Kind.REPORT, over(force=force)), quiet=quiet)
    trace = demo_trace()
    base = Experiment(parse_cluster(CLUSTER))
    runs = run_all(trace, [replace(base, policy=name) for name in POLICIES], quiet=quiet)
    summaries = [run.summary for run in runs]
    tenants = len({each.job.tenant for each in trace.jobs})
    title = f"{len(trace.jobs)} jobs of {tenants} tenants on {CLUSTER}"
    html.write_text(comparison_page("Poise: the tour", f"{title}.", runs), encoding="utf-8")
    if as_json:
        click.echo(json.dumps([summary.document() for summary in summaries], allow_nan=False))
    else:
        show_table(table(summaries), title)
        click.echo(f"report: {html.resolve()}  (open it in a browser)")
        click.echo("next:   poise policies · poise simulate --help · poise compare --help")
    return conclude(runs, POLICIES)
