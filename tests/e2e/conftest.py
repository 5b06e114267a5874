"""Services that are gone after the test, with everything that they started."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.e2e.service import Service

Started = Callable[..., Service]


@pytest.fixture
def a_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """Makes the service of a test; clients and commands of this process talk to it."""
    made: list[Service] = []

    def make(*options: object, **more: object) -> Service:
        service = Service(tmp_path, *options, **more)  # type: ignore[arg-type]
        made.append(service)
        monkeypatch.setenv("POISE_STATE", str(service.state))
        return service

    for name in ("POISE_URL", "POISE_TOKEN", "POISE_CA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    yield make
    for service in made:
        service.close()
