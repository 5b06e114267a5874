"""Hare (HPDC'22, TCC'24): any mix of GPUs for one job. `dealing.py` comes first."""

from poise.policies.hare.dealing import Guard
from poise.policies.hare.offline import hare
from poise.policies.hare.online import hlas

__all__ = ["Guard", "hare", "hlas"]
