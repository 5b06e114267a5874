"""Placement: which of the free GPUs a claim gets."""
