"""Themis (NSDI'20): finish-time fairness by auctions. `planner.py` is the arbiter; read it first."""

from poise.scheduler.policies.themis.auction import Payment
from poise.scheduler.policies.themis.planner import Themis

__all__ = ["Payment", "Themis"]
