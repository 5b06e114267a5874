"""The command line: each module holds a verb or a group of related verbs; `app` knows which."""

import sys

INTERRUPTED = 130
"""Exit code after Ctrl-C."""
UNREAD = 141
"""Exit code if the reader of the output has gone, as `head` does: 128 + SIGPIPE, as if the signal had ended the process."""


def main() -> None:
    """Run a command. Ctrl-C while it is still being imported is an interruption like any other."""
    try:
        from poise.cli.app import main as run
    except KeyboardInterrupt:
        sys.stderr.write("\npoise: interrupted before anything was finished\n")
        sys.exit(INTERRUPTED)
    run()
