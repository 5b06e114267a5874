"""The trace-driven back end: a simulated cluster."""
