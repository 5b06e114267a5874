"""Optimus (EuroSys'18): GPUs by marginal gain. `planner.py` comes first."""

from poise.policies.optimus.evenly import Nodes
from poise.policies.optimus.planner import Optimus

__all__ = ["Nodes", "Optimus"]
