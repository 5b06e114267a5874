"""Who the service is to its nodes, and who they are to it; kept in the state directory, over restarts.

STATE/agents.token   shown by agents; a copy of it goes to every node
STATE/service.json   {"identity": of the service, "lease": the longest that a node may count on, "nodes": identity by name}
"""

import asyncio
import json
import secrets
from contextlib import suppress
from pathlib import Path

from poise.durable import replace_file
from poise.scheduler.model.errors import PoiseError

TOKEN_FILE, SERVICE_FILE = "agents.token", "service.json"


class ServiceIdentity:
    """What a service remembers for the sake of its nodes. A change is on the disk once `save` has returned.

    identity   of the service, made at its first start; agents remember it
    token      which agents show
    lease      seconds that a node may still count on from a server before this one
    nodes      identity of each node by its name: another machine of that name is none of them
    """

    def __init__(self, state: Path) -> None:
        self._path = state / SERVICE_FILE
        self._is_saved, self._saving = True, asyncio.Lock()
        self.identity, self.lease, self.token = secrets.token_hex(16), 0.0, ""
        self.nodes: dict[str, str] = {}
        try:
            found = json.loads(self._path.read_text())
            self.identity, self.lease = str(found["identity"]), float(found["lease"])
            self.nodes = {str(name): str(identity) for name, identity in found["nodes"].items()}
        except FileNotFoundError:
            self._is_saved = False
        except (ValueError, TypeError, KeyError, AttributeError):
            raise PoiseError(f"{self._path}: damaged; put a copy back: nodes know this service by what it says") from None
        with suppress(FileNotFoundError):
            self.token = (state / TOKEN_FILE).read_text().strip()
        if not self.token:
            self.token = "poise_agents_" + secrets.token_urlsafe(32)
            replace_file(state / TOKEN_FILE, self.token + "\n")

    def give(self, lease: float) -> None:
        """Note that nodes get leases of this length from now on, and none of a longer one is left."""
        if lease != self.lease:
            self.lease = lease
            self._is_saved = False

    def remember(self, node: str, identity: str) -> None:
        """Note which machine a node is."""
        if self.nodes.get(node) != identity:
            self.nodes[node] = identity
            self._is_saved = False

    def forget(self, node: str) -> None:
        """Forget a node that never comes back: its name may be that of another machine."""
        if self.nodes.pop(node, None) is not None:
            self._is_saved = False

    def save_now(self) -> None:
        """Force what has changed to the disk, before there is a loop."""
        if not self._is_saved:
            replace_file(self._path, self._text())
            self._is_saved = True

    async def save(self) -> None:
        """Force what has changed to the disk. Nodes that come together share one write."""
        async with self._saving:
            if not self._is_saved:
                self._is_saved = True
                try:
                    await asyncio.to_thread(replace_file, self._path, self._text())
                except BaseException:
                    self._is_saved = False
                    raise

    def _text(self) -> str:
        return json.dumps({"identity": self.identity, "lease": self.lease, "nodes": self.nodes}) + "\n"
