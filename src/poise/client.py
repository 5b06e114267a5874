"""The Python client of a live Poise: `Client`, with the verbs of the command line, and `JobHandle`, one job of it."""

from poise.service.client import (
    Client,
    JobHandle,
    JobRequest,
    ServerRefusedError,
    UnavailableError,
    WaitTimeoutError,
)

Request = JobRequest  # its name until 0.1
RefusedError = ServerRefusedError  # its name until 0.1

__all__ = [
    "Client",
    "JobHandle",
    "JobRequest",
    "RefusedError",
    "Request",
    "ServerRefusedError",
    "UnavailableError",
    "WaitTimeoutError",
]
