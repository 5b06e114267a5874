"""Entry point of a runner: `python -I -S __main__.py RUN_DIRECTORY READY`.

Started as a file, without site-packages, so that Python has nothing to search for. `--try STATE JOB LEVEL` tries out a
sandbox instead (isolation.py).
"""

import os
import sys

if __name__ == "__main__":
    root = os.path.abspath(__file__)
    for _ in ("poise", "service", "backends", "local", "runner", "__main__.py"):
        root = os.path.dirname(root)
    sys.path.append(root)  # after the standard library, so that nothing there can shadow it

    if sys.argv[1] == "--try":
        from poise.service.backends.local.runner.isolation import try_out

        sys.exit(try_out(*sys.argv[2:5]))

    from poise.service.backends.local.runner.supervisor import main

    sys.exit(main(sys.argv[1], int(sys.argv[2])))
