"""Hypothesis profiles, by the environment variable POISE_HYPOTHESIS; and a shell without a virtual environment.

check    the default: few examples, the same ones every time
quick    for `make quick`: a handful of examples, the same ones every time, reported as found
search   several hundred random examples, reported as found, without making them smaller first
long     many random examples
"""

import os
import sys

import pytest
from hypothesis import HealthCheck, Phase, settings

settings.register_profile("base", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("check", settings.get_profile("base"), derandomize=True, max_examples=40)
settings.register_profile("quick", settings.get_profile("check"), max_examples=5, phases=[Phase.explicit, Phase.generate])
settings.register_profile("long", settings.get_profile("base"), max_examples=1500, print_blob=True)
settings.register_profile("search", settings.get_profile("long"), max_examples=300, phases=[Phase.explicit, Phase.generate])
settings.load_profile(os.environ.get("POISE_HYPOTHESIS", "check"))


@pytest.fixture
def no_venv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are submitted from a shell in which no virtual environment is active, whatever the tests run in."""
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
