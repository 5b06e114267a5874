"""A server that gives answers that are made up, for the tests of the client."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from poise.service.client import Client

SUBMITTED = {"jobs": ["j1"]}
ROW: dict[str, Any] = {
    "id": "j1", "name": "n", "tenant": "t", "app": None, "state": "PENDING", "flags": [], "position": 1, "gpus": 0,
    "wanted": 1, "reason": {"code": "capacity", "text": "no GPU is free"}, "gpu_type": None, "gpu_types": [],
    "submitted": 1.0, "started": None, "finished": None, "waited": 0.0, "ran": 0.0, "restarts": 0, "eta": None,
    "share": None,
}  # fmt: skip
DETAIL: dict[str, Any] = {
    "job": ROW, "preemptions": 0, "failures": 0, "gpu_seconds": 0.0, "lost_gpu_seconds": 0.0, "steps": 0.0,
    "total_steps": None, "checkpoint_steps": None, "throughput": None, "loss": None, "cause": None, "runs": [],
    "request": None,
}  # fmt: skip
QUEUE = {"jobs": [ROW], "total": 1, "counts": {"PENDING": 1}}

Reply = httpx.Response | type[Exception]


def problem(status: int, code: str, detail: str) -> httpx.Response:
    return httpx.Response(status, json={"code": code, "detail": detail})


@dataclass
class Desk:
    """Answers one request after the other; the last answer is given again and again."""

    replies: list[Reply | Callable[[httpx.Request], httpx.Response]]
    seen: list[httpx.Request] = field(default_factory=list)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, httpx.Response):
            return reply
        if isinstance(reply, type):
            raise reply("it broke")
        return reply(request)

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(request.content) for request in self.seen]


def talking(*replies: Any, patience: float = 15.0) -> tuple[Client, Desk]:
    desk = Desk([httpx.Response(200, json=each) if isinstance(each, dict) else each for each in replies])
    return Client("http://server:1", "secret-token", transport=httpx.MockTransport(desk), patience=patience), desk
