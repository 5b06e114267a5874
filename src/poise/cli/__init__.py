"""The command line: one module a verb."""

import sys

INTERRUPTED = 130
"""The exit code after Ctrl-C."""
UNREAD = 141
"""The exit code where the reader of the output has gone, as `head` does: 128 + SIGPIPE, as if the signal had ended it."""


def main() -> None:
    """Run a command. Ctrl-C while it is still being loaded is an interruption like any other."""
    try:
        from poise.cli.app import main as run
    except KeyboardInterrupt:
        sys.stderr.write("\npoise: interrupted before anything was finished\n")
        sys.exit(INTERRUPTED)
    run()
