"""Dispatch: what the back end is told once it is committed, and the orders that describe a run to it."""

from collections.abc import Iterator, Sequence

from poise.scheduler.model.errors import JournalError
from poise.service.backends.api import DesiredState, LiveBackend, RunOrder
from poise.service.server.dependencies import Dependencies
from poise.service.server.records import JobRecord, RunRecord
from poise.service.server.service_state import JOB_ENDED, Outcome, ServiceState
from poise.service.server.storage.store import Store
from poise.service.wire.request import JobRequest


def dispatch(outcome: Outcome, state: ServiceState, deps: Dependencies, backend: LiveBackend) -> None:
    """Tell the back end what was decided: first which runs have to leave, then which begin in their place.

    Only after the commit. A crash before it or in the middle loses nothing: at the next start the back end is handed every
    run whose end is not known (`open_orders`), and carrying out an order twice is the same as once.
    """
    for job, epoch, notice in outcome.stops:
        deps.metrics.preempted.labels(notice.cause).inc()
        deps.log.info("preempt", job=job, epoch=epoch, text=notice.text)
        backend.stop(job, epoch, notice)
    for job, epoch, reason in outcome.kills:
        backend.kill(job, epoch, reason)
    for (record, run), order in zip(outcome.launches, _orders(deps.store, state, outcome.launches), strict=True):
        if record.launches == 1:
            deps.metrics.wait.observe(record.waited)
        deps.metrics.launched.inc()
        deps.log.info("launch", job=order.job, epoch=run.epoch, gpus=run.gpus)
        backend.launch(order)


def open_orders(store: Store, state: ServiceState) -> list[tuple[RunOrder, DesiredState]]:
    """Every run whose end the journal does not know, and what is wanted of it."""
    runs = [(record, run) for record in state.records.values() for run in record.open_runs()]
    return list(zip(_orders(store, state, runs), (run.grip for _, run in runs), strict=True))


def _orders(store: Store, state: ServiceState, runs: Sequence[tuple[JobRecord, RunRecord]]) -> Iterator[RunOrder]:
    """What to start, where, and beside which other job."""
    requests, core = store.submissions.requests([record.job.id for record, _ in runs]), state.scheduler.state
    for record, run in runs:
        job = record.job.id
        try:
            request = JobRequest.model_validate_json(requests[job])
        except (KeyError, ValueError) as error:
            raise JournalError(f"job {job}: what was submitted makes no sense any more: {error!r:.100}") from error
        row = core.rows.get(job, -1)
        partner = core.ledger.partner.get(row)
        beside = None if partner is None else core.columns.ids[partner]
        # Only a job whose steps divide into micro-batches has speeds: those that the decision to start it was based on.
        tasks = core.estimate(row).tasks if row >= 0 and run is record.current else None
        types = () if tasks is None else zip(core.topology.types, tasks.seconds, strict=True)
        speeds = {name: 1.0 / seconds for name, seconds in types if seconds > 0}
        # Why a run has to end, in the words that its worker gets.
        reasons = {DesiredState.LEAVE: run.cause, DesiredState.GONE: record.cause or JOB_ENDED}
        yield RunOrder(
            job, run.epoch, state.run_parts(run), request, record.job.tenant, record.busy, beside, speeds,
            reasons.get(run.grip),
        )  # fmt: skip
