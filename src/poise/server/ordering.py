"""Runs as the world has to know them."""

from collections.abc import Iterator, Sequence

from poise.engine.live import Grip, RunOrder
from poise.server.records import Record, RunRecord
from poise.server.situation import Situation
from poise.server.store import Store
from poise.wire.request import Request


def held_runs(store: Store, situation: Situation) -> list[tuple[RunOrder, Grip]]:
    """Every run that the journal does not know the end of, and what is wanted of it."""
    runs = [(record, run) for record in situation.records.values() for run in record.open_runs()]
    return list(zip(run_orders(store, situation, runs), (run.grip for _, run in runs), strict=True))


def run_orders(store: Store, situation: Situation, runs: Sequence[tuple[Record, RunRecord]]) -> Iterator[RunOrder]:
    """What is to be started, where, and beside whom."""
    requests = store.requests([record.job.id for record, _ in runs])
    for record, run in runs:
        job = record.job
        request = Request.model_validate_json(requests[job.id])
        beside = situation.partner(job.id)
        yield RunOrder(job.id, run.epoch, situation.parts(run), request, job.tenant, record.ran, beside)
