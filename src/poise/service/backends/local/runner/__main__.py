"""Started as a file, so that Python need not look for anything: `python -I -S __main__.py RUN_DIRECTORY READY`.

`python -I -S __main__.py --try STATE JOB LEVEL` tries an enclosure out (trying.py).
"""

import os
import sys

if __name__ == "__main__":
    root = os.path.abspath(__file__)
    for _ in ("poise", "service", "backends", "local", "runner", "__main__.py"):
        root = os.path.dirname(root)
    sys.path.append(root)  # behind the standard library: nothing there can stand in its way

    if sys.argv[1] == "--try":
        from poise.service.backends.local.runner.isolation import try_out

        sys.exit(try_out(*sys.argv[2:5]))

    from poise.service.backends.local.runner.supervisor import main

    sys.exit(main(sys.argv[1], int(sys.argv[2])))
