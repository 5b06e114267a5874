"""Policies from outside the package that are named on the command line, also those of modules in the current folder."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from poise.engine.outside import find
from poise.scheduler.policies.catalogue import POLICIES


def find_policy(spec: str) -> None:
    """Make the policy of a specification known, if it is one from outside; raises RequestError if it is none."""
    if spec.partition(":")[0] in POLICIES:
        find(spec)
        return
    with _current_folder():
        find(spec)


@contextmanager
def _current_folder() -> Iterator[None]:
    """Look for modules in the current folder first, as `python -m` does; afterwards last, so that they hide no others."""
    folder = os.getcwd()
    had = list(sys.path)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        if folder not in had:
            sys.path.append(folder)
