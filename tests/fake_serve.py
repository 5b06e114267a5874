"""`python -m tests.fake_serve OPTIONS`: `poise serve` over an engine in memory; a job whose command is `die` kills that."""

import sys
from concurrent.futures import Future

from tests.fake_engine import FakeEngine

from poise.cli import app
from poise.service.server import startup
from poise.service.wire.request import Submission
from poise.service.wire.views import Account, SubmittedView


class MortalEngine(FakeEngine):
    """Dies when it is told to."""

    def submit(self, by: Account, submission: Submission) -> "Future[SubmittedView]":
        if submission.jobs[0].command == ("die",):
            self.failed = ValueError("out of luck")
        return super().submit(by, submission)


if __name__ == "__main__":
    startup.open_service = lambda _setup: MortalEngine()  # type: ignore[assignment, return-value]
    sys.argv.insert(1, "serve")
    app.main()
