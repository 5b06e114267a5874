"""Services that are gone after the test, with everything that they started."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.machines import NODES, Machines, Network, why_no_network
from tests.e2e.service import Service

Started = Callable[..., Service]


@pytest.fixture
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing of the user's settings reaches clients and commands of this process."""
    for name in ("POISE_URL", "POISE_TOKEN", "POISE_CA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return monkeypatch


@pytest.fixture
def a_service(tmp_path: Path, own_settings: pytest.MonkeyPatch) -> Iterator[Started]:
    """Makes the service of a test; clients and commands of this process talk to it."""
    made: list[Service] = []

    def make(*options: object, **more: object) -> Service:
        service = Service(tmp_path, *options, **more)  # type: ignore[arg-type]
        made.append(service)
        own_settings.setenv("POISE_STATE", str(service.state))
        return service

    yield make
    for service in made:
        service.close()


@pytest.fixture(scope="session")
def network() -> Iterator[Network | None]:
    """Network namespaces for nodes; None: there can be none here, which is said."""
    problem = why_no_network()
    if problem is not None:
        warnings.warn(f"nodes are cut off by stopping their processes only: {problem}", stacklevel=1)
        yield None
        return
    network = Network([*NODES])
    yield network
    network.close()


@pytest.fixture
def a_cluster(
    tmp_path: Path, own_settings: pytest.MonkeyPatch, network: Network | None
) -> Iterator[Callable[..., Machines]]:
    """Makes the server and the nodes of a test, in network namespaces if there can be any and it does not say otherwise."""
    made: list[Machines] = []

    def make(*options: object, **more: Any) -> Machines:
        machines = Machines(tmp_path, *options, **{"network": network, **more})
        made.append(machines)
        own_settings.setenv("POISE_STATE", str(machines.state))
        return machines

    yield make
    for machines in made:
        machines.close()
    if network is not None:
        for name in NODES:
            network.heal(name)
