"""Philly (ATC'19): virtual clusters with quotas, locality that relaxes. `planner.py` comes first."""

from poise.policies.philly.planner import Philly

__all__ = ["Philly"]
