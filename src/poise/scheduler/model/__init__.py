"""The vocabulary of the scheduler: job, cluster, event, action, plan. No clock, no randomness, no input or output."""
