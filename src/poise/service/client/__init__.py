"""The Python side of a live Poise: `Client`, with the verbs of the command line, and `JobHandle`, one job of it."""

from poise.service.client.client import Client, JobHandle
from poise.service.client.connection import ServerRefusedError, UnavailableError, WaitTimeoutError
from poise.service.wire.request import JobRequest

__all__ = ["Client", "JobHandle", "JobRequest", "ServerRefusedError", "UnavailableError", "WaitTimeoutError"]
