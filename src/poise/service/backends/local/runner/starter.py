"""Entry point of a starter: `python3 starter.py DIRECTORY [TERMINATION_LOG]`, the first process of a user's container.

It says in one sentence what the container lacks, and exits with 78; otherwise `starting.py` does the rest. The Python is
whatever the image has, so this file is one that versions from 3.7 on can read.
"""

from __future__ import annotations

import os
import sys

LEAST = (3, 10)  # what the runner and `poise.worker` need
UNUSABLE = 78  # exit code of a starter that cannot work in its container (EX_CONFIG)


def problem() -> str | None:
    """Say why no run can be started in this container; None: one can be."""
    if not sys.platform.startswith("linux"):
        return f"runs need Linux, and this container is {sys.platform}"
    if sys.version_info < LEAST:
        found = "{}.{}".format(*sys.version_info)
        return f"runs need Python {LEAST[0]}.{LEAST[1]} or later as python3 in the image, and it has {found}"
    if not sys.executable:
        return "the Python of the image does not know where it is; start it by its path"
    return None


def _refuse(text: str) -> None:
    sys.stderr.write(f"poise: {text}\n")
    sys.exit(UNUSABLE)


if __name__ == "__main__":
    found = problem()
    if found is not None:
        _refuse(found)
    if not sys.flags.isolated:
        # Nothing that the image has put into PYTHONPATH, or installed, may stand in for a module of the standard library.
        here = os.path.abspath(__file__)
        os.execv(sys.executable, [sys.executable, "-I", "-S", "-X", "utf8", here, *sys.argv[1:]])
    root = os.path.abspath(__file__)
    for _ in ("poise", "service", "backends", "local", "runner", "starter.py"):
        root = os.path.dirname(root)
    sys.path.append(root)  # after the standard library, so that nothing there can shadow it
    try:
        import poise.service.backends.local.runner.supervisor  # noqa: F401 - what each runner will need
        from poise.service.backends.local.runner.starting import main
    except (ImportError, OSError) as error:  # a Python that was built without ctypes; a copy of Poise that cannot be read
        _refuse(f"runs cannot be started with the Python of the image ({sys.executable}): {error}")
        raise
    sys.exit(main(*sys.argv[1:]))
