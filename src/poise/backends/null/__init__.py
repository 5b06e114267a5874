"""Nothing at all: jobs that end by the clock, for measuring the service itself."""

from poise.backends.null.world import NullWorld

__all__ = ["NullWorld"]
