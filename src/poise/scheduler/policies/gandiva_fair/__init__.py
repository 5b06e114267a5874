"""Gandiva_fair (EuroSys'20): tickets, split stride, load balance, trade. `planner.py` comes first."""

from poise.scheduler.policies.gandiva_fair.entitlements import Profiling, TicketDivision, Trading
from poise.scheduler.policies.gandiva_fair.planner import GandivaFair

__all__ = ["GandivaFair", "Profiling", "TicketDivision", "Trading"]
