"""Poise shares a cluster of mixed GPUs among people who train deep-learning models.

One deterministic scheduler core (`poise.core`) runs in several worlds (`poise.backends`); see ARCHITECTURE.md.
"""

__version__ = "0.1.0"
