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
    requests = store.submissions.requests([record.job.id for record, _ in runs])
    for record, run in runs:
        job = record.job
        request = Request.model_validate_json(requests[job.id])
        beside = situation.partner(job.id)
        speeds = _speeds(situation, job.id) if run is record.current else {}
        yield RunOrder(job.id, run.epoch, situation.parts(run), request, job.tenant, record.ran, beside, speeds)


def _speeds(situation: Situation, job: str) -> dict[str, float]:
    """Micro-batches a second of one GPU, by type, as the decision to start the job believed them; of a gang, nothing."""
    state = situation.scheduler.state
    row = state.rows.get(job)
    tasks = None if row is None else state.estimate(row).tasks
    if tasks is None:
        return {}
    return {name: 1.0 / each for name, each in zip(state.topology.types, tasks.seconds, strict=True) if each > 0}
