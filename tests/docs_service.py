"""The service of a page: a real `poise serve` with real jobs, all of it gone once the page is over.

A page starts it with `poise serve ... &` and ends it with `kill %1` or `kill -9 %1`. It may do so several times: the state
directory is the page's, and stays. Agents of its nodes are started with `poise agent ... &`, and end with the page.
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from tests.e2e.service import Service, until

_SERVE = re.compile(r"(?P<words>poise serve\b.*[^&\s])\s*&")
_AGENT = re.compile(r"(?P<words>poise agent\b.*[^&\s])\s*&")
_AGENTS_ADDRESS = "127.0.0.1:8643"
_ENDS = {"kill %1": "stop", "kill -9 %1": "kill"}
_ADDRESSES = ("POISE_URL", "POISE_TOKEN", "POISE_CA")


def environment(folder: Path) -> dict[str, str]:
    """What commands of a page see: this Poise, and no service but the page's own."""
    ours = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "POISE_STATE": str(folder.resolve() / "state"),
        "XDG_CONFIG_HOME": str(folder.resolve() / "config"),
    }
    return {**{name: value for name, value in os.environ.items() if name not in _ADDRESSES}, **ours}


class PageService(Service):
    """At most one server at a time, started as the page says, but for the port, which is any that is free.

    Nor is it warned of root: pages look the same whoever runs them.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder.resolve())
        self._environment = environment(folder)
        self._agents: list[subprocess.Popen[bytes]] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._agents_address = f"127.0.0.1:{free.getsockname()[1]}"

    def takes(self, command: str) -> bool:
        """Start or end the server if the command says so, and wait until that is done; says whether it did."""
        if match := _SERVE.fullmatch(command):
            self._begin(match["words"])
        elif match := _AGENT.fullmatch(command):
            known = len(self._nodes())
            self._agents.append(self._spawn(match["words"]))
            until(lambda: len(self._nodes()) > known, "the node has not joined")
        elif command in _ENDS and self.is_up:
            {"stop": self.stop, "kill": self.kill}[_ENDS[command]]()
        else:
            return False
        return True

    @property
    def is_up(self) -> bool:
        """There is a server."""
        return self.process is not None and self.process.poll() is None

    def _begin(self, words: str) -> None:
        assert not self.is_up, "a page has one server at a time; end it with `$ kill %1`"
        self.process = self._spawn(f"{words} --listen 127.0.0.1:0 --allow-root")
        self.ready()

    def close(self) -> None:
        """End the agents, if any, and then all that runs."""
        for agent in self._agents:
            agent.kill()
            agent.wait()
        super().close()

    def _nodes(self) -> list[object]:
        words = ["poise", "nodes", "--json"]
        answer = subprocess.run(words, cwd=self._folder, env=self._environment, capture_output=True, check=True)
        nodes = json.loads(answer.stdout)["nodes"]
        assert isinstance(nodes, list)
        return nodes

    def _spawn(self, words: str) -> "subprocess.Popen[bytes]":
        words = words.replace(_AGENTS_ADDRESS, self._agents_address)
        with self._log.open("ab") as log:
            return subprocess.Popen(
                ["bash", "-c", f"exec {words}"],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def is_ready(self) -> bool:
        """This very server has said where it answers; an AssertionError if it never will."""
        said = "".join(path.read_text(errors="replace") for path in self._folder.glob("*.log"))
        assert self.is_up, f"the server ended with exit code {self.server.returncode}:\n{said}"
        try:
            address = json.loads((self.state / "server.json").read_bytes())
        except FileNotFoundError:
            return False
        return bool(address["pid"] == self.server.pid)
