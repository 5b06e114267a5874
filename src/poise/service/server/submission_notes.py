"""What the owner of new jobs should know: what has no effect, and where their checkpoints will be kept."""

from collections.abc import Callable, Sequence

from poise.scheduler.policies.catalogue import Capability, capabilities_of
from poise.service.backends.remote.relay import CheckpointPlaces
from poise.service.wire.request import RELAY, JobRequest, PreemptionMode, notes_on

ONE_MACHINE = "checkpoint.url has no effect: this service runs jobs on its own machine, and keeps checkpoints there"


def submission_notes(requests: Sequence[JobRequest], places: CheckpointPlaces | None) -> tuple[str, ...]:
    """Return one line for each such thing. `places`: where runs on other machines keep checkpoints; None: none are there."""
    notes = notes_on(requests)
    if places is None:
        return (*notes, ONE_MACHINE) if any(each.checkpoint.url is not None for each in requests) else notes
    saving = [each for each in requests if each.preemption is PreemptionMode.CHECKPOINT]
    kept_at = dict.fromkeys(each.checkpoint.url or places.at for each in saving)
    return (*notes, *(_kept_text(at, places) for at in kept_at))


def notes_under(
    policy: str, notes: Callable[[Sequence[JobRequest]], tuple[str, ...]], requests: Sequence[JobRequest]
) -> tuple[str, ...]:
    """Return the notes on jobs under this policy: one that looks at priorities makes those take effect."""
    if Capability.PRIORITIES in capabilities_of(policy):
        requests = [each.model_copy(update={"priority": 0}) for each in requests]
    return notes(requests)


def _kept_text(at: str, places: CheckpointPlaces) -> str:
    if at == RELAY:
        most = f"at most {places.relay_bytes >> 20:,} MiB each"
        return (
            f"checkpoints are kept through the server, {most}; --checkpoint-url names a shared path or a URL for larger ones"
        )
    return f"checkpoints are kept below {at}" + (", which all nodes have to share" if at.startswith("/") else "")
