"""The Python side of a live Poise: `Client`, with the verbs of the command line, and `JobHandle`, one job of it."""

from poise.client.client import Client
from poise.client.errors import RefusedError, UnavailableError, WaitTimeoutError
from poise.client.handle import JobHandle
from poise.wire.request import Request

__all__ = ["Client", "JobHandle", "RefusedError", "Request", "UnavailableError", "WaitTimeoutError"]
