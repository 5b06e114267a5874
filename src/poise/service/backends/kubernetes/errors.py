"""What an API server's client may be told instead of an answer.

Errors are of two kinds. `ApiError` is an answer: the server refused, and asking again changes nothing. `ApiUnavailableError`
is no answer, or one that may pass: a write may then have been done or not.
"""

from poise.scheduler.model.errors import PoiseError


class ApiError(PoiseError):
    """The API server refused a request. `reason` is its word: `NotFound`, `AlreadyExists`, `Conflict`, `Forbidden`."""

    def __init__(self, status: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status, self.reason, self.message, self.retry_after = status, reason, message, retry_after


class ExpiredError(ApiError):
    """A resource version or a page is too old for the server (410): list again."""


class LeadershipLostError(PoiseError):
    """This process may no longer act on the cluster."""


class NotLeadingError(LeadershipLostError):
    """A request was not sent, as this process does not lead any more. Why it does not, its lease says soon."""


class ApiUnavailableError(PoiseError):
    """The API server gave no answer, or one that may pass. A write may have been done or not.

    status        of the answer; None: there was none
    retry_after   seconds for which the server asks to be left alone; None: it does not say
    """

    def __init__(self, text: str, *, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.text, self.status, self.retry_after = text, status, retry_after


def words_of(error: BaseException) -> str:
    """Say what an error is, also if it has no words."""
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(words.split()) or type(error).__name__
