"""The trace-driven world."""
