"""The actor that says which service drives a Ray cluster. Two would both take its GPUs.

It is detached and has a fixed name, so it outlives servers, and a second server finds it. Its constructor has the service's
identity, with which Ray starts it again after a crash; who beats is then not known until the next beat.
"""

from time import monotonic
from typing import NamedTuple

NAMESPACE = "poise"
NAME = "poise-owner"
RECENT_SECONDS = 10.0  # a server that has beaten since is taken to be running


class OwnerState(NamedTuple):
    """Who drives the cluster. `age`: seconds since its server was last heard of; None: not since the actor was started."""

    service: str
    server: str
    age: float | None
    is_holder: bool


class RayOwner:
    """Keeps whose the cluster is, and which start of that service was the last. Times are of this process alone."""

    def __init__(self, service: str, server: str) -> None:
        self._service, self._server = service, server
        self._holder: str | None = None
        self._beat: float | None = None

    def claim(self, service: str, holder: str, server: str) -> OwnerState:
        """Say who drives the cluster. From now on it is this start of the service, if it is this service's."""
        if service == self._service:
            self._holder, self._server, self._beat = holder, server, monotonic()
        return self._state(holder)

    def beat(self, service: str, holder: str) -> OwnerState:
        """Note that this start of the service lives, and say whether the cluster is still its own."""
        if service == self._service and self._holder in (None, holder):
            self._holder, self._beat = holder, monotonic()
        return self._state(holder)

    def look(self) -> OwnerState:
        """Say who drives the cluster."""
        return self._state(None)

    def _state(self, holder: str | None) -> OwnerState:
        age = None if self._beat is None else monotonic() - self._beat
        return OwnerState(self._service, self._server, age, holder is not None and self._holder == holder)
