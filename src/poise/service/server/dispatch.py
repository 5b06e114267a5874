"""Runs as the back end has to know them, and what it is told to do."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from poise.scheduler.model.errors import JournalError
from poise.service.backends.api import DesiredState, LiveBackend, RunEnded, RunEvent, RunOrder
from poise.service.server.dependencies import Dependencies
from poise.service.server.records import JobRecord, RunRecord
from poise.service.server.service_state import JOB_ENDED, RunOrders, ServiceState
from poise.service.server.storage.store import Store
from poise.service.wire.request import JobRequest


def held_runs(store: Store, situation: ServiceState) -> list[tuple[RunOrder, DesiredState]]:
    """Every run that the journal does not know the end of, and what is wanted of it."""
    runs = [(record, run) for record in situation.records.values() for run in record.open_runs()]
    return list(zip(_run_orders(store, situation, runs), (run.grip for _, run in runs), strict=True))


def carry_out(orders: RunOrders, situation: ServiceState, parts: Dependencies, backend: LiveBackend) -> None:
    """Have the back end do what is committed: who is to leave first, then who is to begin in their place."""
    for job, epoch, notice in orders.leaves:
        parts.metrics.preempted(notice.cause)
        parts.log.info("preempt", job=job, epoch=epoch, text=notice.text)
        backend.stop(job, epoch, notice)
    for job, epoch, reason in orders.kills:
        backend.kill(job, epoch, reason)
    runs = [(situation.records[job], run) for job, run in orders.launches]
    for (record, run), order in zip(runs, _run_orders(parts.store, situation, runs), strict=True):
        if record.launches == 1:
            parts.metrics.waited(record.waited)
        parts.metrics.launched()
        parts.log.info("launch", job=order.job, epoch=run.epoch, gpus=run.gpus)
        backend.launch(order)


def _run_orders(store: Store, situation: ServiceState, runs: Sequence[tuple[JobRecord, RunRecord]]) -> Iterator[RunOrder]:
    """What is to be started, where, and beside whom."""
    requests = store.submissions.requests([record.job.id for record, _ in runs])
    for record, run in runs:
        job = record.job
        request = _request(job.id, requests)
        beside = situation.partner(job.id)
        speeds = _speeds(situation, job.id) if run is record.current else {}
        reason = _reason(record, run)
        yield RunOrder(job.id, run.epoch, situation.parts(run), request, job.tenant, record.busy, beside, speeds, reason)


def _request(job: str, requests: Mapping[str, str]) -> JobRequest:
    try:
        return JobRequest.model_validate_json(requests[job])
    except (KeyError, ValueError) as error:
        raise JournalError(f"job {job}: what was submitted makes no sense any more: {error!r:.100}") from error


def _reason(record: JobRecord, run: RunRecord) -> str | None:
    """Why a run is to end, in the words that its worker was told, or was about to be; None: it is not to end."""
    return {DesiredState.RUN: None, DesiredState.LEAVE: run.cause, DesiredState.GONE: record.cause or JOB_ENDED}[run.grip]


def _speeds(situation: ServiceState, job: str) -> dict[str, float]:
    """Micro-batches a second of one GPU, by type, as the decision to start the job believed them; of a gang, nothing."""
    state = situation.scheduler.state
    row = state.rows.get(job)
    tasks = None if row is None else state.estimate(row).tasks
    if tasks is None:
        return {}
    return {name: 1.0 / each for name, each in zip(state.topology.types, tasks.seconds, strict=True) if each > 0}


# News that comes late: of runs that ended while nobody looked.


def told_late(news: Sequence[RunEvent], since: float) -> tuple[list[list[RunEvent]], list[RunEvent]]:
    """Runs that ended before `since`, in the order of their ends, each with all that is told of it; and the rest."""
    late = sorted((each for each in news if isinstance(each, RunEnded) and each.at < since), key=lambda each: each.at)
    runs = {(each.job, each.epoch) for each in late}
    before = _by_run(each for each in news if not isinstance(each, RunEnded))
    whole = [[*before.get((each.job, each.epoch), ()), each] for each in late]
    return whole, [each for each in news if (each.job, each.epoch) not in runs]


def _by_run(news: Iterable[RunEvent]) -> dict[tuple[str, int], list[RunEvent]]:
    found: dict[tuple[str, int], list[RunEvent]] = {}
    for each in news:
        found.setdefault((each.job, each.epoch), []).append(each)
    return found
