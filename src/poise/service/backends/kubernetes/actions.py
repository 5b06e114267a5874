"""How Poise changes something in Kubernetes: again until it is done. Its client sends changes only while it leads.

Every change is written so that doing it twice is the same as once: names and uids are given, and an answer that says that it
has been done already counts as done. So an answer that was lost, a conflict, a server that is busy or away: all of them are
tried again, and nothing happens twice.
"""

import asyncio
from collections.abc import Awaitable, Callable
from random import uniform
from typing import TypeVar

from poise.service.backends.kubernetes.client import KubeClient
from poise.service.backends.kubernetes.errors import ApiError, ApiUnavailableError
from poise.service.backends.kubernetes.leadership import Leadership

Done = TypeVar("Done")
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0  # seconds between two tries


class Actions:
    """The API server as this service may change it."""

    def __init__(self, client: KubeClient, leadership: Leadership) -> None:
        self.client, self._leadership = client, leadership

    @property
    def term(self) -> int:
        """The number of this leadership, written on what Poise creates, binds, suspends or resumes."""
        return self._leadership.term

    async def persist(
        self, change: Callable[[], Awaitable[Done]], is_wanted: Callable[[], bool] = lambda: True
    ) -> Done | None:
        """Make a change; wait as long as the server is away. None: it is not wanted any more.

        Raise `ApiError` if it is refused for good, and `LeadershipLostError` if this service must not act any more.
        """
        pause = FIRST_PAUSE
        while is_wanted():
            try:
                return await change()
            except ApiUnavailableError as error:
                await asyncio.sleep(max(uniform(0.5, 1.0) * pause, min(error.retry_after or 0.0, LONGEST_PAUSE)))
                pause = min(2 * pause, LONGEST_PAUSE)
        return None

    async def delete(self, path: str, uid: str, grace: int | None = None) -> None:
        """Have the object with this uid deleted; what is gone, or has another uid by now, is left as it is.

        Raise `ApiError` if that is refused for another reason.
        """

        async def change() -> None:
            try:
                await self.client.delete(path, uid=uid, grace=grace)
            except ApiError as error:
                if error.status != 409:
                    raise
                found = await self.client.get(path)
                if found["metadata"]["uid"] == uid:  # the conflict was one with another change, and passes
                    raise ApiUnavailableError(error.message, status=error.status) from error

        try:
            await self.persist(change)
        except ApiError as error:
            if error.status != 404:
                raise
