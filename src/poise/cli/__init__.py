"""The command line: one module a verb."""

from poise.cli.app import main

__all__ = ["main"]
