"""The Philly study (Jeon et al., ATC'19; ALGORITHMS §6) of anybody's jobs: all its parts, from records."""

import numpy as np

from poise.lab.analysis.delays import causes, delays_by_size, delays_by_tenant, order, waits
from poise.lab.analysis.exhibits import StudyPart
from poise.lab.analysis.failures import attempts, failures, losses
from poise.lab.analysis.records import Covers, Records
from poise.lab.analysis.sizes import gangs, overview, sizes, statuses, tenants
from poise.lab.analysis.spread import nodes, speed_by_nodes, speed_by_size

PARTS = (
    overview,
    sizes,
    gangs,
    statuses,
    tenants,
    delays_by_size,
    delays_by_tenant,
    waits,
    causes,
    order,
    nodes,
    speed_by_size,
    speed_by_nodes,
    attempts,
    failures,
    losses,
)
"""In the order in which they are shown. Each has its name for a key."""

KEYS = tuple(part.__name__ for part in PARTS)


def study(records: Records) -> tuple[StudyPart, ...]:
    """All parts; those that the input does not cover say so."""
    with np.errstate(over="ignore", invalid="ignore"):  # a sum that is beyond all floats is infinite, and shown as nothing
        return tuple(part(records) for part in PARTS)


def covered(records: Records) -> tuple[list[str], list[str]]:
    """What the input tells of its jobs, and what it does not."""
    return (
        [str(each) for each in Covers if each in records.covers],
        [str(each) for each in Covers if each not in records.covers],
    )
