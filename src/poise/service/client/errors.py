"""What can go wrong between a client and its server.

RequestError
└── RefusedError        the server understood and said no: nothing was changed
PoiseError
├── UnavailableError    no answer, or none that can be understood
└── WaitTimeoutError    a job had not ended in time
"""

from poise.scheduler.model.errors import PoiseError, RequestError

NOT_FOUND = "not-found"


class ServerRefusedError(RequestError):
    """The server refused (4xx). `code` is the server's, for programs."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code


class UnavailableError(PoiseError):
    """There was no answer, or one that says that the server cannot do its work (5xx), or one that nobody understands."""


class WaitTimeoutError(PoiseError, TimeoutError):
    """A job had not ended when the time was up; it goes on."""
