"""`python -m tests.bench.audit [POLICY ...]`: the table of docs/explanation/fairness-properties.md, one audit a policy.

All policies of the catalogue take about four minutes of two cores.
"""

import sys

from poise.cli.audit import run_tasks
from poise.lab.audit.audit import built_in_tasks, findings
from poise.lab.audit.findings import Finding, Property
from poise.lab.audit.misreporting import LieKind
from poise.lab.experiment import Experiment
from poise.lab.report.axes import amount
from poise.scheduler.model.cluster import parse_cluster
from poise.scheduler.policies.catalogue import POLICIES

COLUMNS = ("sharing incentive", "… of gangs", "envy", "Pareto", "lies: speed-ups", "inflated", "sizes", "bids", "starvation")


def main() -> int:
    """Print the table, row by row."""
    print(f"| policy | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
    for name in sys.argv[1:] or POLICIES:
        tasks = built_in_tasks(Experiment(parse_cluster("gpu:1"), name))
        print(
            f"| `{name}` | {' | '.join(map(_cell, _row(findings(tasks, run_tasks(tasks, name, quiet=True)))))} |",
            flush=True,
        )
    return 0


def _row(found: dict[Property, Finding]) -> list[Finding]:
    lies = found[Property.STRATEGY_PROOFNESS].parts
    return [
        found[Property.SHARING_INCENTIVE],
        found[Property.SHARING_INCENTIVE_OF_GANGS],
        found[Property.ENVY_FREENESS],
        found[Property.PARETO_EFFICIENCY],
        *(lies[kind] for kind in (LieKind.SPEED_UPS, LieKind.INFLATION, LieKind.SIZES, LieKind.BIDS)),
        found[Property.STARVATION_FREEDOM],
    ]


def _cell(finding: Finding) -> str:
    """What holds is set in bold."""
    worst = finding.worst
    if worst is None:
        return "–"
    measured = worst.measured if abs(worst.measured) >= 1 else round(worst.measured, 3) + 0.0
    text = amount(measured, "plain")
    return f"**{text}**" if finding.holds else text


if __name__ == "__main__":
    sys.exit(main())
