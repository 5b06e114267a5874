"""The scheduler: a deterministic machine, facts in, wishes out. No clock, no randomness, no I/O."""
