"""Hare (HPDC'22, TCC'24): any mix of GPUs for one job. `rank_sharing.py` comes first."""

from poise.scheduler.policies.hare.offline import hare
from poise.scheduler.policies.hare.online import hlas
from poise.scheduler.policies.hare.rank_sharing import StarvationGuard

__all__ = ["StarvationGuard", "hare", "hlas"]
