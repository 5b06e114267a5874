"""What a hold does to a job that runs: it is stopped if that loses nothing that its owner has not agreed to lose.

Otherwise it goes on, and keeps its GPUs, until it has reported that it can save its work, or has ended. Until then only its
record says that it is held (`is_awaited`). The core does not know: nothing is decided about GPUs that are not free.
"""

from poise.model.job import Yields
from poise.model.units import format_seconds
from poise.server.records import Record, RunRecord
from poise.server.wishes import Verb


def is_awaited(record: Record) -> bool:
    """The job is to be held, and goes on until that costs nothing."""
    return record.held and _running(record) is not None


def defers(record: Record) -> bool:
    """To hold the job now would lose work that its owner has not agreed to lose."""
    run = _running(record)
    return run is not None and record.job.yields is not Yields.ANY_TIME and not _can_save(record, run)


def awaited(record: Record) -> str:
    """What a job goes on for that is to be held."""
    if record.job.yields is Yields.NEVER:
        return "it is held when it ends, as its owner wants it never to be preempted"
    return "it is held as soon as it has reported that it can save its work, or when it ends"


def remedy(record: Record) -> str:
    """How it is made to leave all the same, and what that costs."""
    what = "sends it TERM now" if record.job.yields is Yields.NEVER else "asks it to save and to leave"
    return f"poise hold --stop {record.job.id} {what}{_cost(record)}"


def outcome(record: Record, verb: Verb) -> str | None:
    """What comes of a wish that is about to be met; None: the state says it all."""
    run = _running(record)
    if verb is Verb.RELEASE:
        return "it goes on, and is no longer to be held" if is_awaited(record) else None
    if run is None or verb is Verb.CANCEL:
        return None
    if verb is Verb.HOLD and defers(record):
        return f"it goes on and keeps its GPUs: {awaited(record)}; {remedy(record)}"
    if _can_save(record, run):
        return "it is asked to save its work and to leave"
    if record.job.yields is Yields.ANY_TIME:
        return f"it gets TERM now, as --preemption restart has it{_cost(record)}"
    what = "gets TERM now" if record.job.yields is Yields.NEVER else "is asked to save and to leave"
    return f"it {what}{_cost(record)}"


def _cost(record: Record) -> str:
    """How long a job has that may not be able to save, and what is lost then. Only `checkpoint` gives it any time."""
    if record.job.yields is not Yields.ATTACHED:
        return ": what it has not saved itself is lost"
    return f", with TERM at its deadline of {format_seconds(record.deadline)}: what it has not saved by then is lost"


def _running(record: Record) -> RunRecord | None:
    """The run that has GPUs, and has not ended as far as is known."""
    run = record.current
    return run if run is not None and run.ended is None else None


def _can_save(record: Record, run: RunRecord) -> bool:
    return record.job.yields is Yields.ATTACHED and run.attached is not None
