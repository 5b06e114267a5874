"""Starts out of order: how many, and how many of them did harm."""

import numpy as np

from poise.analysis.delays import NO_STARTS
from poise.analysis.overtaking import out_of_order
from poise.analysis.parts import Part, Row, Unit, by_code, columns, ratio
from poise.analysis.records import Covers, Records, Room
from poise.model.arrays import Bools

_HEAD = columns(
    ("among", "among", Unit.TEXT),
    ("starts", "first starts", Unit.COUNT),
    ("out_of_order", "out of order", Unit.COUNT),
    ("out_of_order_share", "of starts", Unit.SHARE),
    ("harmful", "harmful", Unit.COUNT),
    ("harmful_share", "of those out of order", Unit.SHARE),
    ("hurt_jobs", "jobs hurt", Unit.COUNT),
    ("hurt_seconds", "time in which one was hurt", Unit.SECONDS),
)


def order(records: Records) -> Part:
    """First starts out of order, among all jobs and among those of one tenant."""
    title = "Starts out of order"
    if Covers.STARTS not in records.covers:
        return Part("order", title, "", missing=NO_STARTS)
    text = (
        "A first start is out of order if a job that was submitted earlier still waits for its own; within tenants, if that "
        "is a job of the same tenant."
    )
    everything = out_of_order(records.submitted, records.started, records.left)
    rows = [_row("all jobs", records, everything, records.room)]
    if Covers.TENANTS in records.covers:
        rows.append(_row("jobs of the same tenant", records, _within_tenants(records), None))
    if records.room is None:
        caveat = (
            "Whether that did harm cannot be told: the input does not describe the cluster. Jobs that it leaves out are not "
            "looked at."
        )
        return Part("order", title, text, _HEAD, tuple(rows), caveat=caveat)
    text += (
        " It is harmful if, at some moment while the job runs, the job that has waited longest for its first start was "
        "overtaken by it and would fit into the idle GPUs of a type that it can use together with those held by jobs which "
        "overtook it, but not into the idle ones alone. How close together GPUs are is not looked at."
    )
    return Part("order", title, text, _HEAD, tuple(rows))


def _within_tenants(records: Records) -> Bools:
    found = np.zeros(len(records.gpus), dtype=bool)
    for each in by_code(records.tenant, records.tenants):
        rows = each.members
        found[rows] = out_of_order(records.submitted[rows], records.started[rows], records.left[rows])
    return found


def _row(among: str, records: Records, late: Bools, room: Room | None) -> Row:
    starts, count = int(np.sum(~np.isnan(records.started))), int(late.sum())
    if room is None:
        return among, starts, count, ratio(count, starts), None, None, None, None
    harmful = int(np.sum(room.harm.harmful & late))
    harm = room.harm
    return among, starts, count, ratio(count, starts), harmful, ratio(harmful, count), harm.heads, harm.seconds
