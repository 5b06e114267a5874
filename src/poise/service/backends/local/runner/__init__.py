"""The runner: the small process that starts a run's replicas, watches its lease, and writes down how it ended."""
