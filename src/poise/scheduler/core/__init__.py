"""The core of the scheduler: a deterministic machine, events in, actions out. Start with `scheduler.py`."""
