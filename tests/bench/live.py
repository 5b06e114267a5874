"""`make bench`: what a live service costs with 50,000 jobs of 1,000 tenants queued on 2,000 virtual GPUs.

Bars (issue "Poise runs real training jobs"): at least 500 submissions a second over HTTP, one job each; `why` and `queue`
answered in under 100 ms in 99 of 100 cases, while jobs arrive and rounds end; a decision in under 1 s; under 1 GiB. Server
and client are processes of their own, and nothing is run (`--workers null`). Questions are asked at fixed moments, and an
answer's time is counted from that moment on, so that a service that stands still is not asked less.
"""

import argparse
import json
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import quantiles
from threading import Lock, Thread
from time import monotonic, process_time, sleep

from tests.bench.speed import say
from tests.shell import COMMAND

CLUSTER, ROUND = "v100:1000,k80:1000", 60.0
TENANTS, JOBS, LAST = 1_000, 50_000, 5_000
SENDERS = 64
"""Connections that submit."""
ASKERS, GAP = 10, 0.2
"""Connections that ask, and seconds between two questions of each; one question in five is for the queue."""
TRICKLE = 50.0
"""Submissions a second while questions are asked."""
LEAST_RATE, MOST_MILLISECONDS, MOST_DECISION, MOST_MEMORY = 500, 100.0, 1.0, 1 << 30
_SIZES = {1: 0.7, 2: 0.1, 4: 0.15, 8: 0.05}
_MODELS = ("ResNet-18", "ResNet-50", "Transformer", "LM", "Recommendation", "CycleGAN")


class Line:
    """One connection that is kept open. Requests are made beforehand and answers hardly looked at: the client is cheap."""

    def __init__(self, port: int, token: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = f"Host: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n"

    def request(self, method: str, path: str, body: object = None) -> bytes:
        """As it goes over the wire."""
        text = "" if body is None else json.dumps(body)
        more = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n"
        return f"{method} {path} HTTP/1.1\r\n{self._head}{more}\r\n{text}".encode()

    def send(self, request: bytes) -> bytes:
        """The answer's body; anything but 2xx ends the measurement."""
        self._socket.sendall(request)
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._received()
        head, _, body = data.partition(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head.lower())[1])  # type: ignore[index]
        while len(body) < length:
            body += self._received()
        if not head.startswith(b"HTTP/1.1 2"):
            raise RuntimeError(f"{head!r} {body!r}")
        return body

    def ask(self, method: str, path: str, body: object = None) -> bytes:
        """Make a request and send it."""
        return self.send(self.request(method, path, body))

    def _received(self) -> bytes:
        data = self._socket.recv(1 << 16)
        if not data:
            raise RuntimeError("the service hung up")
        return data


@dataclass
class Service:
    """`poise serve` in a process of its own."""

    state: Path
    options: Sequence[str]
    process: subprocess.Popen[str] = field(init=False)
    port: int = 0
    token: str = ""
    url: str = ""
    agents: str = ""
    """Where agents connect, if there are any."""

    def start(self) -> float:
        """Start it; seconds until it answers."""
        began = monotonic()
        self.process = subprocess.Popen(
            [COMMAND, "serve", "--state", str(self.state), "--listen", "127.0.0.1:0", "--json", "--quiet", *self.options],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        running = json.loads(self.process.stdout.readline())
        self.url, self.agents = running["url"], running.get("agents", "")
        self.port = int(self.url.rpartition(":")[2])
        self.token = Path(running["token_file"]).read_text(encoding="ascii").strip()
        self.line().ask("GET", "/v1/service")
        return monotonic() - began

    def line(self) -> Line:
        """A new connection."""
        return Line(self.port, self.token)

    def kill(self) -> None:
        """As if by a power failure, as far as a process can tell."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def peak(self) -> int:
        """Bytes of memory that it held at most since it started."""
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return int(re.search(r"VmHWM:\s+(\d+) kB", text)[1]) << 10  # type: ignore[index]

    def cpu(self) -> float:
        """CPU seconds that it has used."""
        words = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / 100


def a_job(draw: random.Random, number: int) -> dict[str, object]:
    """One submission of one job; every twentieth is short, so that runs end all the time."""
    (gpus,) = draw.choices(tuple(_SIZES), tuple(_SIZES.values()))
    seconds = draw.uniform(5.0, 60.0) if number % 20 == 0 else draw.uniform(600.0, 36_000.0)
    job = {
        "command": ["train.py", "--seed", str(number)], "tenant": f"t{draw.randrange(TENANTS)}", "gpus": gpus,
        "duration": round(seconds, 1), "model": draw.choice(_MODELS), "name": f"job-{number}",
    }  # fmt: skip
    return {"jobs": [job]}


def together(work: Callable[[int], None], threads: int) -> None:
    """Do it in so many threads; what fails in one of them fails."""
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    everyone = [Thread(target=guarded, args=(number,)) for number in range(threads)]
    for each in everyone:
        each.start()
    for each in everyone:
        each.join()
    if failures:
        raise failures[0]


def submit(service: Service, jobs: int, senders: int) -> list[float]:
    """Submit so many jobs, one a request, as fast as they are taken; moments of the answers, seconds from the first on."""
    lines = [service.line() for _ in range(senders)]
    draw = random.Random(0)
    requests = [lines[0].request("POST", "/v1/jobs", a_job(draw, number)) for number in range(jobs)]
    moments: list[float] = []
    left = iter(requests)
    lock = Lock()
    began = monotonic()

    def send(number: int) -> None:
        line = lines[number]
        while True:
            with lock:
                request = next(left, None)
            if request is None:
                return
            line.send(request)
            moments.append(monotonic() - began)

    together(send, senders)
    return sorted(moments)


@dataclass
class Asked:
    """Seconds that answers took, by question."""

    why: list[float] = field(default_factory=list)
    queue: list[float] = field(default_factory=list)
    submit: list[float] = field(default_factory=list)


def question(service: Service, seconds: float, jobs: int) -> Asked:
    """Ask for `why` and for the queue, and submit, all at fixed moments."""
    asked, began, numbers = Asked(), monotonic() + 0.1, count(jobs)

    def every(gap: float, offset: float) -> Iterator[float]:
        for turn in count():
            due = began + offset + turn * gap
            if due > began + seconds:
                return
            sleep(max(0.0, due - monotonic()))
            yield due

    def ask(number: int) -> None:
        line, draw = service.line(), random.Random(number)
        for turn, due in enumerate(every(GAP, number * GAP / ASKERS)):
            wants_queue = (turn + number) % 5 == 0
            path = "/v1/jobs?limit=50" if wants_queue else f"/v1/jobs/{draw.randrange(jobs) + 1}/why"
            line.ask("GET", path)
            (asked.queue if wants_queue else asked.why).append(monotonic() - due)

    def trickle() -> None:
        line, draw = service.line(), random.Random(1)
        for due in every(1 / TRICKLE, 0.0):
            line.ask("POST", "/v1/jobs", a_job(draw, next(numbers)))
            asked.submit.append(monotonic() - due)

    together(lambda number: ask(number) if number < ASKERS else trickle(), ASKERS + 1)
    return asked


def decisions(service: Service) -> tuple[int, float, float]:
    """How many decisions there were, seconds that one took on average, and a bound that all kept to."""
    text = service.line().ask("GET", "/metrics").decode()
    total = int(float(re.search(r"poise_decision_seconds_count (\S+)", text)[1]))  # type: ignore[index]
    seconds = float(re.search(r"poise_decision_seconds_sum (\S+)", text)[1])  # type: ignore[index]
    bounds = re.findall(r'poise_decision_seconds_bucket{le="(\S+)"} (\S+)', text)
    return total, seconds / max(1, total), next(float(bound) for bound, within in bounds if int(float(within)) == total)


def counter(service: Service, name: str) -> int:
    """The sum of a counter over its labels."""
    text = service.line().ask("GET", "/metrics").decode()
    return int(sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))


def _took(name: str, seconds: list[float], *, barred: bool = True) -> bool:
    cuts = quantiles(seconds, n=100, method="inclusive")
    middle, late, most = cuts[49] * 1e3, cuts[98] * 1e3, max(seconds) * 1e3
    text = f"{name}: p50 {middle:.1f} ms, p99 {late:.1f} ms, at most {most:.0f} ms, {len(seconds):,} requests"
    return say(text, not barred or late < MOST_MILLISECONDS, f"p99 under {MOST_MILLISECONDS:.0f} ms" if barred else "no bar")


def measure(service: Service, jobs: int, seconds: float) -> Iterator[bool]:
    """All figures, one after the other; whether each is within its bar."""
    say(f"start: answers after {service.start():.1f} s", held=True, bar="no bar")
    yield from _submissions(service, jobs)
    before = service.cpu()
    asked = question(service, seconds, jobs)
    busy = (service.cpu() - before) / seconds
    yield _took("why", asked.why)
    yield _took("queue", asked.queue)
    _took("submit", asked.submit, barred=False)
    total, mean, bound = decisions(service)
    text = f"{total:,} decisions, {mean * 1e3:.1f} ms on average, all within {bound:g} s"
    yield say(text, bound <= MOST_DECISION, f"under {MOST_DECISION:g} s")
    preempted, launched = counter(service, "poise_preemptions_total"), counter(service, "poise_runs_launched_total")
    say(f"{launched:,} launches, {preempted:,} preemptions; server busy for {busy:.0%} of a core", preempted > 0, "some")
    peak = service.peak()
    service.kill()
    say(f"restart after kill -9: answers after {service.start():.1f} s", held=True, bar="no bar")
    _change_policy(service)
    peak = max(peak, service.peak())
    yield say(f"peak memory {peak / (1 << 20):,.0f} MiB", peak < MOST_MEMORY, "under 1 GiB")


def _submissions(service: Service, jobs: int) -> Iterator[bool]:
    client, server = process_time(), service.cpu()
    moments = submit(service, jobs, SENDERS)
    client, server = process_time() - client, service.cpu() - server
    last = min(LAST, jobs - 1)
    late = last / (moments[-1] - moments[-1 - last])
    rate = jobs / moments[-1]
    text = f"{jobs:,} submissions: {rate:,.0f} a second, the last {last:,} {late:,.0f} a second"
    text += f"; CPU of client {client / moments[-1]:.0%}, of server {server / moments[-1]:.0%} of a core"
    yield say(text, min(rate, late) >= LEAST_RATE, f"at least {LEAST_RATE}")


def _change_policy(service: Service) -> None:
    line = service.line()
    for policy in ("las", "max-min"):
        began = monotonic()
        line.ask("PUT", "/v1/policy", {"policy": policy})
        say(f"policy changed to {policy} in {monotonic() - began:.1f} s", held=True, bar="no bar")


@contextmanager
def _served(options: Sequence[str]) -> Iterator[Service]:
    state = Path(tempfile.mkdtemp(prefix="poise-bench-"))
    service = Service(state / "state", options)
    try:
        yield service
    finally:
        service.kill()
        shutil.rmtree(state)


def main() -> int:
    """Measure, print, and say by the exit code whether all bars hold."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--seconds", type=float, default=200.0, help="of asking")
    parser.add_argument("--round", type=float, default=ROUND)
    parser.add_argument("--policy", default="max-min")
    given = parser.parse_args()
    options = ("--workers", "null", "--cluster", CLUSTER, "--round", str(given.round), "--policy", given.policy)
    print(f"poise serve {' '.join(options)}; {TENANTS:,} tenants, {given.jobs:,} jobs", flush=True)
    with _served(options) as service:
        held = list(measure(service, given.jobs, given.seconds))
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
