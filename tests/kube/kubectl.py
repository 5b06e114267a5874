"""kubectl for a cluster whose kubelet is `Processes`: `exec` and `port-forward`, which need a kubelet, are played here.

    python -m tests.kube.kubectl …        everything else is done by the real kubectl, which `POISE_TEST_KUBECTL` names

Containers are found by the mark of their kubelet (`POISE_TEST_KUBELET_ROOT`). All containers share the network of this
machine, so a pod may listen on another port than its manifest says; `POISE_TEST_PORTS` has these: 8642=21001,8643=21002.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

MARK = "POISE_TEST_KUBELET"  # as in running.py, which is not imported: this runs for every command
REAL, ROOT, PORTS = "POISE_TEST_KUBECTL", "POISE_TEST_KUBELET_ROOT", "POISE_TEST_PORTS"


def first_process(root: str, pod: str, container: str) -> int | None:
    """Find the oldest process of a container; None: it does not run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "environ").read_bytes().split(b"\0")
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            mark = next((word for word in words if word.startswith(f"{MARK}={root}/".encode())), b"")
            if fields[0] != "Z" and mark.endswith(f"/{container}".encode()) and f"HOSTNAME={pod}".encode() in words:
                found.append((int(fields[19]), int(folder.name)))
    return min(found)[1] if found else None


def inside(process: int, command: Sequence[str]) -> list[str]:
    """Return the words that run a command in the container of a process: its mounts, user and environment."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines() if ":\t" in line)
    user, group = status["Uid"].split()[0], status["Gid"].split()[0]
    environment = Path(f"/proc/{process}/environ").read_text().strip("\0").split("\0")
    place = ["nsenter", f"--target={process}", "--mount", "--uts", f"--setuid={user}", f"--setgid={group}"]
    return [*place, "--", "env", "-i", *environment, *command]


def _exec(words: Sequence[str]) -> int:
    before, command = words[: words.index("--")], words[words.index("--") + 1 :]
    pod = next(word for word in before[before.index("exec") + 1 :] if not word.startswith("-"))
    process = first_process(os.environ[ROOT], pod, "poise")
    if process is None:
        sys.stderr.write(f'Error from server (NotFound): pods "{pod}" not found\n')
        return 1
    return subprocess.run(inside(process, command), check=False).returncode


async def _forward(words: Sequence[str]) -> int:
    """Forward one port to the pod of a service, as long as it is wanted."""
    at = words.index("port-forward")
    target, ports = words[at + 1], words[at + 2]
    asked = [os.environ[REAL], *words[:at], "get", target, "-o", "json"]
    service = json.loads(subprocess.run(asked, capture_output=True, check=True).stdout)
    local, _, remote = ports.partition(":")
    assert int(remote or local) in [each["port"] for each in service["spec"]["ports"]], f"{target} has no port {remote}"
    there = dict(each.split("=") for each in os.environ[PORTS].split(","))
    port = int(there.get(remote or local, remote or local))

    async def pipe(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
        target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pod_reader, pod_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pipe(reader, pod_writer), pipe(pod_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", int(local))
    sys.stdout.write(f"Forwarding from 127.0.0.1:{local} -> {remote or local}\n")
    sys.stdout.flush()
    async with server:
        await server.serve_forever()
    return 0


def main() -> int:
    """Do what kubectl is asked for."""
    words = sys.argv[1:]
    if "exec" in words and "--" in words:
        return _exec(words)
    if "port-forward" in words:
        return asyncio.run(_forward(words))
    return subprocess.run([os.environ[REAL], *words], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
