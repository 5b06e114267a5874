"""Over how many nodes jobs were spread, and what that did to their delay and their speed."""

import numpy as np

from poise.lab.analysis.exhibits import (
    HOUR,
    Row,
    StudyPart,
    TableColumn,
    ValueUnit,
    bars,
    by_value,
    columns,
    known,
    mean,
    nearest,
    ratio,
)
from poise.lab.analysis.history import RunEnd
from poise.lab.analysis.records import ENDS, Covers, Records
from poise.scheduler.model.arithmetic import Ints

LARGE = 5
"""GPUs from which on the Philly study looks at the delay by locality."""
_DONE = tuple(ENDS.index(each) for each in (RunEnd.FINISHED, RunEnd.PREEMPTED))
"""Ends at which nothing is lost, so that what was done says how fast the job was."""

_NODES = columns(
    ("nodes", "nodes", ValueUnit.COUNT),
    ("jobs", "jobs", ValueUnit.COUNT),
    ("jobs_share", "of jobs", ValueUnit.SHARE),
    ("large_jobs", f"jobs of {LARGE} GPUs or more", ValueUnit.COUNT),
    ("large_delay_median", "their median delay", ValueUnit.SECONDS),
    ("large_delay_mean", "their mean delay", ValueUnit.SECONDS),
    ("large_delay_p90", "their p90 delay", ValueUnit.SECONDS),
)
_SPEED = columns(
    ("runs", "runs", ValueUnit.COUNT),
    ("gpu_hours", "GPU-hours", ValueUnit.PLAIN),
    ("speed", "of packed speed", ValueUnit.SHARE),
    ("speed_p10", "p10 of runs", ValueUnit.SHARE),
    ("speed_p50", "p50 of runs", ValueUnit.SHARE),
)
_NO_SPEED = "The input does not say how fast jobs ran, nor how busy their GPUs were."


def nodes(records: Records) -> StudyPart:
    """Jobs by the number of nodes of their first attempt, and the delay of large ones."""
    title = "Jobs and delay by number of nodes"
    if Covers.NODES not in records.covers:
        return StudyPart("nodes", title, "", missing="The input does not say on which nodes jobs ran.")
    known_of = int(np.sum(records.first_nodes > 0))
    rows = tuple(_node_row(records, count, members, known_of) for count, members in by_value(records.first_nodes) if count)
    text = (
        f"Nodes of a job's first attempt, of the {known_of:,} of {len(records.gpus):,} jobs of which they are known. The "
        f"delay is that from submission to first start, of jobs of {LARGE} GPUs or more, as in the Philly study."
    )
    charts = (bars("Jobs by number of nodes", _NODES, rows, "jobs_share"),)
    return StudyPart("nodes", title, text, _NODES, rows, charts, bar="jobs_share")


def _node_row(records: Records, count: int, members: Ints, all_known: int) -> Row:
    large = members[records.gpus[members] >= LARGE]
    delays = known(records.delays[large])
    figures = (nearest(delays, 0.5), mean(delays), nearest(delays, 0.9))
    return count, len(members), ratio(len(members), all_known), len(large), *figures


def speed_by_size(records: Records) -> StudyPart:
    """Share of packed speed by size of the gang."""
    title = "Utilisation by size"
    if Covers.CLUSTER not in records.covers:
        return StudyPart("speed_by_size", title, "", missing=_NO_SPEED)
    spells = records.spells
    measured = _measured(records)
    groups = by_value(spells.gpus[measured])
    rows = tuple((gpus, *_speed_figures(records, measured[members])) for gpus, members in groups)
    head = (TableColumn("gpus", "GPUs", ValueUnit.COUNT), *_SPEED)
    charts = (bars(title, head, rows, "speed"),)
    return StudyPart("speed_by_size", title, _speed_text(records), head, rows, charts, bar="speed")


def speed_by_nodes(records: Records) -> StudyPart:
    """Share of packed speed by size of the gang and number of nodes."""
    title = "Utilisation by size and number of nodes"
    if Covers.CLUSTER not in records.covers:
        return StudyPart("speed_by_nodes", title, "", missing=_NO_SPEED)
    spells, measured = records.spells, _measured(records)
    rows: list[Row] = []
    for gpus, members in by_value(spells.gpus[measured]):
        of_size = measured[members]
        for count, spread in by_value(spells.nodes[of_size]):
            rows.append((gpus, count, *_speed_figures(records, of_size[spread])))
    head = columns(("gpus", "GPUs", ValueUnit.COUNT), ("nodes", "nodes", ValueUnit.COUNT))
    return StudyPart("speed_by_nodes", title, _speed_text(records), (*head, *_SPEED), tuple(rows))


def _measured(records: Records) -> Ints:
    """Spells of whole gangs that tell how fast their jobs were."""
    spells = records.spells
    told = np.isin(spells.ended, _DONE) & ~np.isnan(spells.ideal) & (spells.seconds > 0)
    return np.flatnonzero(told & (spells.gpus == records.gpus[spells.job]))


def _speed_text(records: Records) -> str:
    text = (
        "How fast jobs were on the GPUs they held, as a share of the believed speed of a packed gang alone on that type: "
        "being spread, sharing GPUs and restart overhead make it less. Weighted by GPU time; of runs of the whole gang that "
        "finished or were preempted, since of others the journal does not say what they did."
    )
    if records.room is None:
        return text
    return f"{text} In all, {records.room.utilisation:.1%} of the GPU time of the cluster was held by jobs."


def _speed_figures(records: Records, rows: Ints) -> Row:
    spells = records.spells
    ideal, seconds, gpus = spells.ideal[rows], spells.seconds[rows], spells.gpus[rows]
    shares = np.sort(ideal / seconds)
    held = float(np.sum(seconds * gpus))
    speed = ratio(float(np.sum(ideal * gpus)), held)
    return len(rows), held / HOUR, speed, nearest(shares, 0.1), nearest(shares, 0.5)
