"""Hypothesis profiles, by the environment variable POISE_HYPOTHESIS; and a shell without a virtual environment.

check    the default: few examples, the same ones every time
quick    for `make quick`: a handful of examples, the same ones every time, reported as found
search   several hundred random examples, reported as found, without making them smaller first
long     many random examples
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from tests.kube.server import KubeServer, find_assets
from tests.ray_cluster import RayDaemons, ray_daemons

from poise.engine import outside
from poise.scheduler.policies import catalogue

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ignores it for what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("base", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("check", settings.get_profile("base"), derandomize=True, max_examples=40)
settings.register_profile("quick", settings.get_profile("check"), max_examples=5, phases=[Phase.explicit, Phase.generate])
settings.register_profile("long", settings.get_profile("base"), max_examples=1500, print_blob=True)
settings.register_profile("search", settings.get_profile("long"), max_examples=300, phases=[Phase.explicit, Phase.generate])
settings.load_profile(os.environ.get("POISE_HYPOTHESIS", "check"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail if pytest-xdist ignores groups. It relies on internals of pytest, and with another version does so silently.

    Two workers would then have a Ray cluster each, on the same addresses, and hang for an hour.
    """
    is_grouped = getattr(item.config.option, "loadgroup", False) and item.get_closest_marker("xdist_group") is not None
    if is_grouped and "@" not in item.nodeid:
        pytest.fail(f"pytest-xdist puts no test into its group with pytest {pytest.__version__}", pytrace=False)


@pytest.fixture(autouse=True)
def _no_policies_from_outside() -> Iterator[None]:
    """Policies that a test registers are unknown after it."""
    registered: tuple[dict[str, Any], ...] = (catalogue._OUTSIDE, outside._targets, outside._files)
    kept, referenced = [dict(each) for each in registered], set(outside._referenced)
    yield
    for each, before in zip(registered, kept, strict=True):
        each.clear()
        each.update(before)
    outside._referenced.intersection_update(referenced)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayDaemons]:
    """A Ray cluster; tests that use it are marked with `ray` and `xdist_group("ray")`: there is one at a time."""
    with ray_daemons() as daemons:
        yield daemons


@pytest.fixture(scope="session")
def ray_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the service of most tests on that cluster is."""
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="session")
def kube_server() -> Iterator[KubeServer]:
    """A Kubernetes API server; tests that use it are marked with `kubernetes` and `xdist_group("kubernetes")`."""
    assets = find_assets()
    if assets is None:
        pytest.skip("there is no etcd or no kube-apiserver here; `make kubernetes` gets them")
    with KubeServer(assets) as server:
        yield server


@pytest.fixture
def fresh_kube(kube_server: KubeServer) -> Iterator[KubeServer]:
    """That server without nodes, pods and the like; namespaces stay, so each test makes its own by `namespace`."""
    kube_server.wipe()
    yield kube_server
    kube_server.wipe()


@pytest.fixture
def no_venv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are submitted from a shell in which no virtual environment is active, whatever the tests run in."""
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
