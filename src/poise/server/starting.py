"""How a live service is put together: the core, the store, the world and the engine."""

import os
from functools import partial

from poise.backends.local.checking import checked
from poise.backends.local.folders import JOBS, highest_number, latest_epoch
from poise.backends.local.isolating import Isolate, Isolated, isolated
from poise.backends.local.orders import Isolation, LocalSettings
from poise.backends.local.world import LocalWorld
from poise.backends.null.world import NullWorld
from poise.engine.journal import Header, read_header
from poise.engine.live import Tell, World
from poise.model.errors import JournalError
from poise.server.cores import core_of, known, live
from poise.server.engine import Loop
from poise.server.intake import Intake
from poise.server.logs import Logbook
from poise.server.mark import MARK
from poise.server.parts import Parts
from poise.server.reading import LiveEngine
from poise.server.schema import VERSION
from poise.server.setup import DEFAULT_POLICY, AsRoot, Setup, WorldKind
from poise.server.store import LARGEST_CHECKED, Store
from poise.wire.request import Request

AS_ROOT = (
    "this service runs as root, and so does every job of every user: whoever may submit can do anything on this machine;"
    " run it as a user of its own, or say --allow-root"
)

NO_MARK = (
    f"{MARK} is missing or damaged: whether the journal has lost its end cannot be checked;"
    f" numbers of jobs go on after the highest in the journal and in {JOBS}/"
)


def open_engine(setup: Setup) -> LiveEngine:
    """An engine on the store of this state directory, ready to be started."""
    cluster = known(setup.cluster)
    isolation = _isolated(setup)
    hidden = None if isolation.level is Isolation.NONE else str(setup.state)
    check = partial(checked, hidden=hidden) if setup.world is WorldKind.LOCAL else _anything

    def world_of(tell: Tell) -> World:
        if setup.world is WorldKind.NULL:
            return NullWorld(tell)
        settings = LocalSettings(isolation=isolation.level)
        return LocalWorld(cluster, setup.state, tell, devices=setup.devices, settings=settings)

    store, taken = Store(setup.state), highest_number(setup.state)
    _tell_of(store, setup.log)
    last = store.chapter()
    if last is None and taken and not store.is_to_be_restored:
        store.close()
        raise JournalError(
            f"{store.path}: empty, but {setup.state / JOBS} has jobs up to number {taken:,}, which may run;"
            " put the journal back, or move that folder away to begin anew"
        )
    policy = setup.policy or (DEFAULT_POLICY if last is None else read_header(last[0]).policy)
    header = Header("live", cluster, policy, setup.placement, live(setup.settings), 0)
    core_of(header)
    if taken > store.highest:
        # The journal was restored beside newer directories: whoever got such an id would find another job's checkpoints.
        setup.log.warning("jobs-not-in-journal", last=store.highest, highest=taken, next=taken + 1)
    parts = Parts(
        store=store,
        header=header,
        scheduler_of=core_of,
        intake_of=lambda each: Intake(each.cluster, check, each.policy),
        world_of=world_of,
        log=setup.log,
        metrics=setup.metrics,
        retries=setup.settings.retries,
        taken=taken,
        keeps_policy=setup.policy is None,
        allowance=setup.allowance,
        warnings=_warnings(setup, isolation),
        epoch_of=lambda job: latest_epoch(setup.state, job),
    )
    return LiveEngine(Loop(parts))


def _isolated(setup: Setup) -> Isolated:
    """What jobs are kept from; said in the log, with a warning where it is less than was wanted."""
    if setup.world is not WorldKind.LOCAL:
        return Isolated(Isolation.NONE, None)
    found = isolated(setup.isolate, setup.state)
    say = setup.log.info if found.problem is None else setup.log.warning
    say("isolation", level=found.level.value, text=found.text)
    return found


def _warnings(setup: Setup, isolation: Isolated) -> tuple[str, ...]:
    """What whoever runs the service should know of how it was started."""
    said = []
    if setup.world is WorldKind.LOCAL and os.geteuid() == 0 and setup.as_root is AsRoot.WARNED:
        setup.log.warning("running-as-root", text=AS_ROOT)
        said.append(AS_ROOT)
    if setup.world is WorldKind.LOCAL and setup.isolate is not Isolate.OFF and isolation.problem is not None:
        said.append(isolation.text)
    return tuple(said)


def _tell_of(store: Store, log: Logbook) -> None:
    """What there is to say of a journal before anything is decided by it."""
    if store.migrated_from not in (0, VERSION):
        log.info("journal-migrated", before=store.migrated_from, now=VERSION)
    if store.lacks_mark:
        log.warning("journal-mark-missing", text=NO_MARK)
    if not store.is_checked:
        log.warning("journal-not-checked", bytes=store.path.stat().st_size, most=LARGEST_CHECKED)


def _anything(_request: Request) -> None:
    """Where nothing is started, anything can be."""
