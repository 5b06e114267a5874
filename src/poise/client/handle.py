"""One job of a live Poise."""

from collections.abc import Iterator
from time import monotonic
from typing import TYPE_CHECKING, Literal, overload

from poise.client.errors import WaitTimeoutError
from poise.client.following import Pauses
from poise.wire.views import Done, JobDetail, State, Why

if TYPE_CHECKING:
    from poise.client.client import Client


class JobHandle:
    """A job, by its id. Nothing about it is remembered: every question is asked anew."""

    def __init__(self, client: "Client", job: str) -> None:
        self._client = client
        self.id = job

    def __repr__(self) -> str:
        return f"JobHandle({self.id!r})"

    @property
    def state(self) -> State:
        """Where it stands now."""
        return self.show().job.state

    def show(self) -> JobDetail:
        """Everything about it."""
        return self._client.show(self.id)

    def why(self) -> Why:
        """Why it runs, waits or has ended."""
        return self._client.why(self.id)

    def cancel(self) -> Done:
        """Withdraw it."""
        return self._client.cancel(self.id)

    def hold(self) -> Done:
        """Keep it from running until it is released; it is preempted as soon as that loses no work."""
        return self._client.hold(self.id)

    def stop(self) -> Done:
        """Hold it, and end its run at once: what it has done since its last checkpoint is lost."""
        return self._client.stop(self.id)

    def release(self) -> Done:
        """End a hold."""
        return self._client.release(self.id)

    @overload
    def logs(self, *, follow: Literal[False] = False, replica: int = 0) -> str: ...
    @overload
    def logs(self, *, follow: Literal[True], replica: int = 0) -> Iterator[str]: ...
    def logs(self, *, follow: bool = False, replica: int = 0) -> str | Iterator[str]:
        """What a replica has printed; with `follow`, part by part as it prints more, until the job has ended."""
        if follow:
            return self._client.logs(self.id, follow=True, replica=replica)
        return self._client.logs(self.id, replica=replica)

    def wait(self, timeout: float | None = None) -> State:
        """The final state, once it is reached; WaitTimeoutError after `timeout` seconds. Look at it: FAILED is final too."""
        deadline = None if timeout is None else monotonic() + timeout
        pauses = Pauses()
        while not (state := self.state).is_final:
            if deadline is not None and monotonic() >= deadline:
                raise WaitTimeoutError(f"job {self.id} is {state} after {timeout:g} s; it goes on")
            pauses.take(after_news=False, until=deadline)
        return state
