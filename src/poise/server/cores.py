"""The core as a live service uses it."""

from dataclasses import replace
from math import inf

from poise.assembly import planned
from poise.core.scheduler import Scheduler
from poise.core.settings import Retry, Settings
from poise.engine.journal import Header
from poise.model.cluster import Cluster
from poise.placement.strategies import placement_named
from poise.policies.catalogue import policy_named
from poise.policies.hare.dealing import Dealer
from poise.policies.hare.offline import Hare
from poise.throughput.speeds import GENERIC
from poise.throughput.table import shipped

NEVER = 1_000_000
"""Retries that the core itself counts to: how many are forgiven depends on the job, and is counted by the engine."""


def live(settings: Settings) -> Settings:
    """The same settings, where failures are judged by their cause and counted by the engine."""
    return replace(settings, retries=NEVER, retry=Retry.CAUSE)


def known(cluster: Cluster) -> Cluster:
    """The same cluster; GPU types that nobody has measured are taken to be as fast as the reference type."""
    names = {*shipped().gpu_types, *cluster.speeds, GENERIC}
    return replace(cluster, speeds=cluster.speeds | {name: 1.0 for name in cluster.gpu_types if name not in names})


def core_of(header: Header) -> Scheduler:
    """A fresh core. GPUs are lent for a lease, never for a single task of a step: no process is started for that."""
    policy = planned(policy_named(header.policy), header.settings, header.seed)
    match policy.answer:
        case Dealer() as dealer:
            policy = replace(policy, answer=replace(dealer, long=inf))
        case Hare(dealer):
            policy = replace(policy, answer=Hare(replace(dealer, long=inf)))
        case _:
            pass
    return Scheduler(header.cluster, policy, placement_named(header.placement), header.settings)
