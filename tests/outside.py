"""What tests of policies from outside are written with: modules and distributions in a folder of their own."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import pytest

from poise.engine import outside
from poise.scheduler.policies import catalogue

ORDER = """
from poise.policies import JobView, Listing, Order, Parameter, PreemptionRule, Rank, Unfitting

def by_weight(factor: float = 1.0) -> Order:
    '''Heavier jobs first.'''
    return Order(lambda job, _previous, _memory: Rank(-job.weight * factor), PreemptionRule.NEVER, Unfitting.SKIPPED)
"""
"""A module with one policy, `by_weight`."""


@contextmanager
def folder_of_modules(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path, and a process that knows no policy from outside before or afterwards."""
    modules = set(sys.modules)
    for name in ("_targets", "_referenced", "_files", "_importing"):
        kept = getattr(outside, name)
        monkeypatch.setattr(outside, name, type(kept)())
    monkeypatch.setattr(catalogue, "_OUTSIDE", {})
    monkeypatch.syspath_prepend(str(path))
    try:
        yield path
    finally:
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).is_relative_to(path):
                del sys.modules[name]


def write_module(folder: Path, name: str, text: str = ORDER) -> Path:
    """Write a module, `package.module` into a folder of that name."""
    file = folder.joinpath(*name.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dedent(text), encoding="utf-8")
    return file


def install(folder: Path, distribution: str, **points: str) -> None:
    """Install a distribution with entry points for policies: `name="module:attribute"`, `_` in names written as `-`."""
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n", encoding="utf-8")
    lines = [f"{name.replace('_', '-')} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[poise.policies]", *lines, ""]), encoding="utf-8")
