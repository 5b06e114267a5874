"""An API server that is in trouble, as its clients see it: a transport that spoils requests and answers at random.

Leases and reviews are left alone: who leads, and what an account may do, is not what is tried with it.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx

from poise.service.backends.kubernetes.client import KubeClient

SPARED = ("/leases", "reviews")
RATE = 0.04
"""Of each fault: 429, 500, a conflict, and an answer that is lost after everything was done."""
CUT_RATE, SLOW_RATE = 0.02, 0.2
"""Of pieces of a watch after which it breaks, and which come late."""
LATE_SECONDS = 0.5


class Troubled(httpx.AsyncBaseTransport):
    """Hands requests on to another transport, and now and then does not, or loses the answer."""

    def __init__(self, inner: httpx.AsyncBaseTransport, seed: int) -> None:
        self._inner, self._random = inner, random.Random(seed)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if any(each in request.url.path for each in SPARED):
            return await self._inner.handle_async_request(request)
        if "watch" in request.url.params:
            response = await self._inner.handle_async_request(request)
            assert isinstance(response.stream, httpx.AsyncByteStream)
            response.stream = _Broken(response.stream, self._random)
            return response
        fault = int(self._random.random() / RATE)
        if fault == 0:
            return _said(429, "TooManyRequests", **{"Retry-After": "1"})
        if fault == 1:
            return _said(500, "InternalError")
        if fault == 2 and request.method != "GET":
            return _said(409, "Conflict")
        response = await self._inner.handle_async_request(request)
        if fault == 3:
            await response.aread()
            await response.aclose()
            raise httpx.ReadError("the answer was lost")
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Broken(httpx.AsyncByteStream):
    """A watch that is behind, and breaks."""

    def __init__(self, inner: httpx.AsyncByteStream, draw: random.Random) -> None:
        self._inner, self._random = inner, draw

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._inner:
            if self._random.random() < SLOW_RATE:
                await asyncio.sleep(self._random.uniform(0.0, LATE_SECONDS))
            yield piece
            if self._random.random() < CUT_RATE:
                raise httpx.ReadError("the watch broke")

    async def aclose(self) -> None:
        await self._inner.aclose()


def _said(status: int, reason: str, **headers: str) -> httpx.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status, "reason": reason, "message": "a test"}
    return httpx.Response(status, json=body, headers=headers)


def trouble(seed: int) -> None:
    """Have all clients of this process that are made from now on meet an API server in trouble."""
    made = KubeClient._new_http

    def spoilt(self: KubeClient) -> Any:
        http = made(self)
        http._transport = Troubled(http._transport, seed)
        return http

    KubeClient._new_http = spoilt  # type: ignore[method-assign]
