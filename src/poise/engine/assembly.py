"""How a scheduler is put together: from a journal's header, or from the preset of a published system.

The simulator, the live service and replay all build their core here, so that one header means one core.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from poise.engine import outside
from poise.engine.journal import Header, JournalReader
from poise.engine.loop import Replayed, replay
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.mechanism.rounds import HopelessClaims, LateArrivals, Rounds
from poise.scheduler.model.errors import JournalError, UnknownNameError
from poise.scheduler.model.plan import Policy
from poise.scheduler.model.workload import Allocator, Filling
from poise.scheduler.placement.strategies import placement_named
from poise.scheduler.policies.catalogue import policy_named

FIRST_STREAM = 36
"""Random stream of drawn orders for seed 0.

Of the first 64 streams it comes nearest to the authors' unpublished draws for `isolated`
(docs/how-to/reproduce-a-published-number.md has the spread over all of them).
"""


def build_scheduler(header: Header) -> Scheduler:
    """Build the core that a journal's header describes. Its policy may be one that an installed distribution names."""
    outside.find_installed(header.policy)
    policy = with_rounds(policy_named(header.policy), header.settings, header.seed)
    return Scheduler(header.cluster, policy, placement_named(header.placement), header.settings)


def with_rounds(policy: Policy, settings: Settings, seed: int = 0) -> Policy:
    """Let the round mechanism turn the shares of an allocator into plans. Other policies are returned as they are."""
    if not isinstance(policy.answer, Allocator):
        return policy
    # Without backfill, GPUs freed inside a round stay idle, so a job that came after the shares waits for the next shares.
    waits = settings.cadence is Cadence.ROUNDS and not settings.backfill
    late = LateArrivals.WAIT if waits else LateArrivals.FILL
    # Where jobs wait for close GPUs, it is not known beforehand which claims will be granted: all of them are made.
    hopeless = HopelessClaims.CLAIM if settings.packed_wait or settings.rack_wait else HopelessClaims.LEAVE_OUT
    rounds = Rounds(
        policy.answer, settings.round, settings.recompute, settings.credit, late, seed + FIRST_STREAM,
        settings.patience, hopeless, settings.filling,
    )  # fmt: skip
    return replace(policy, answer=rounds)


def replay_journal(path: str | Path) -> tuple[Header, Replayed]:
    """Run the core again on the events of a journal; raises ReplayError where an action differs."""
    reader = JournalReader(path)
    if reader.newer:
        raise JournalError(reader.newer)
    outside.check_recorded(reader.header.policy, str(path))
    return reader.header, replay(build_scheduler(reader.header), reader.entries())


@dataclass(frozen=True, slots=True)
class Preset:
    """The conventions of a published system. Explicit options override them.

    combinators  added to the policy, each where it applies
    """

    summary: str
    settings: Settings
    placement: str
    combinators: str = ""


_EVENTS = Settings(cadence=Cadence.EVENTS)

PRESETS = {
    "none": Preset("Poise's own: decide at every change, and at rounds where time matters", Settings(), "consolidate"),
    "gavel": Preset(
        "rounds of 360 s, shares at most every 1,920 s, GPUs freed inside a round stay idle, GPUs are counted",
        Settings(
            cadence=Cadence.ROUNDS, round=360.0, backfill=False, recompute=1920.0, patience=0.0, filling=Filling.BY_TYPE
        ),
        "count",
        "+plain",
    ),
    "tiresias": Preset(
        "the authors' simulator: events, GPUs are counted, whole seconds, ties as in the list kept from the previous event",
        Settings(cadence=Cadence.EVENTS),
        "count",
        "+stable+ticks",
    ),
    "themis": Preset(
        "its policy keeps leases of 10 minutes; decide at every change, tight placement", _EVENTS, "consolidate"
    ),
    "gandiva-fair": Preset("its policy keeps slices of 1 minute; decide at every change", _EVENTS, "consolidate"),
    "gandiva": Preset("its policy keeps slices of 1 minute; decide at every change", _EVENTS, "consolidate"),
    "optimus": Preset("its policy keeps intervals of 10 minutes; decide at every change", _EVENTS, "consolidate"),
    "ffdl": Preset("decide at every change, pack nodes, failed runs retried", _EVENTS, "pack"),
    "philly": Preset("decide at every change, tight placement, failed runs retried 4 times", _EVENTS, "consolidate"),
}


def preset_named(name: str) -> Preset:
    """Return the preset with this name; raises UnknownNameError."""
    if name not in PRESETS:
        raise UnknownNameError("preset", name, PRESETS)
    return PRESETS[name]
