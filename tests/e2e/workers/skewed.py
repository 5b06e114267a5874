"""`poise` with a clock that can be set: `python skewed.py FOLDER WORD...`. FOLDER/shift says by how many seconds it is off.

Its runners are off by as much: they are started as `python skewed.py RUN_DIRECTORY READY`, with FOLDER five levels above.
"""

import runpy
import sys
import time
from pathlib import Path

MAIN = "src/poise/service/backends/local/runner/__main__.py"
is_runner = sys.argv[2].isdigit()
folder = Path(sys.argv[1]).parents[4] if is_runner else Path(sys.argv[1])
true = time.time  # noqa: TID251  the clock that is tampered with


def skewed() -> float:
    return true() + float((folder / "shift").read_text())


time.time = skewed  # noqa: TID251
if is_runner:
    runpy.run_path(str(Path(__file__).resolve().parents[3] / MAIN), run_name="__main__")
else:
    from poise.cli import main
    from poise.service.backends.local import processes

    processes.MAIN = __file__
    del sys.argv[1]
    main()
