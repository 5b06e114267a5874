"""Gandiva_fair (EuroSys'20): tickets, split stride, load balance, trade. `planner.py` comes first."""

from poise.policies.gandiva_fair.entitling import Profiling, Trading
from poise.policies.gandiva_fair.planner import GandivaFair, gandiva_fair
from poise.policies.gandiva_fair.tickets import Division

__all__ = ["Division", "GandivaFair", "Profiling", "Trading", "gandiva_fair"]
