"""One job of a live Poise."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, overload

from poise.client.waiting import wait_for
from poise.wire.views import Done, JobDetail, State, Why

if TYPE_CHECKING:
    from poise.client.client import Client


class JobHandle:
    """A job, by its id or its name. Nothing about it is remembered: every question is asked anew."""

    def __init__(self, client: "Client", job: str, notes: tuple[str, ...] = ()) -> None:
        self._client = client
        self.id = job
        self.notes = notes
        """What the server said of its submission: what was asked for and has no effect."""

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
        """Hold it, and make its run leave: asked to save, it gets TERM at its deadline. What it has not saved is lost."""
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
        return wait_for(self._client, [self.id], timeout=timeout)[self.id]
