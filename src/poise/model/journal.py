"""What happened: facts and wishes in order. Metrics, replay and bug reports all read this."""

from typing import NamedTuple

from poise.model.action import Action
from poise.model.event import Event


class Entry(NamedTuple):
    """One instant: the facts that arrived and the wishes they led to."""

    now: float
    events: tuple[Event, ...]
    actions: tuple[Action, ...]
