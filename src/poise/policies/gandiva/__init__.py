"""Gandiva (OSDI'18): affinity, turns, pairs by trial, migration, growth. `planner.py` comes first."""

from poise.policies.gandiva.planner import Gandiva

__all__ = ["Gandiva"]
