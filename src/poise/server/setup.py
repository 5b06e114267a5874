"""What a live service is put together from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from poise.backends.local.isolating import Isolate
from poise.core.settings import Settings
from poise.model.cluster import Cluster
from poise.server.logs import Logbook
from poise.server.metrics import Metrics
from poise.server.quotas import Allowance

DEFAULT_POLICY = "max-min"
"""Of a service that never had another one."""


class AsRoot(StrEnum):
    """Whether a service that runs as root is wanted so (`--allow-root`), or warns of it."""

    ALLOWED = "allowed"
    WARNED = "warned"


class WorldKind(StrEnum):
    """What runs the jobs: processes of this machine, or nothing at all (for measurements of the service itself)."""

    LOCAL = "local"
    NULL = "null"


@dataclass(frozen=True, slots=True)
class Setup:
    """All choices of a live service but how it listens.

    state       a directory that is its owner's alone, and that this process has locked
    policy      None: the one that was in force when the service last ran
    devices     the UUIDs of real GPUs by node and slot; virtual ones have none
    allowance   what users may queue, keep and send
    isolate     what jobs are to be kept from
    as_root     whether root may run it without a word
    """

    state: Path
    cluster: Cluster
    policy: str | None
    placement: str
    settings: Settings
    world: WorldKind
    log: Logbook
    metrics: Metrics = field(default_factory=Metrics)
    devices: Mapping[tuple[str, int], str] = field(default_factory=dict)
    allowance: Allowance = field(default_factory=Allowance)
    isolate: Isolate = Isolate.OFF
    as_root: AsRoot = AsRoot.WARNED
