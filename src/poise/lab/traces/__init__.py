"""Traces: readers of public formats, a synthetic generator, one schema."""
