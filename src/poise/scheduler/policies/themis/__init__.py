"""Themis (NSDI'20): finish-time fairness by auctions. `planner.py` is the arbiter; read it first."""

from poise.scheduler.policies.themis.planner import Payment, Themis, themis

__all__ = ["Payment", "Themis", "themis"]
