"""The vocabulary: job, cluster, event, action, plan. Imports nothing of ours; no clock, no randomness, no I/O."""
