"""Gandiva (OSDI'18): affinity, turns, pairs by trial, migration, growth. `planner.py` comes first."""

from poise.scheduler.policies.gandiva.planner import Gandiva

__all__ = ["Gandiva"]
