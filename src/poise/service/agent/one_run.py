"""An agent that is there for one run (`poise agent --once`), as in a pod: when it has nothing left to do, and how it ends.

It is done once the server has confirmed the end of its part, or wants nothing of it. Then the starter of the run, if there
is one, is told to end its container with an exit code that says how it went.
"""

import asyncio
from contextlib import suppress
from pathlib import Path

from poise.service.agent.node_state import NodeStateDir
from poise.service.backends.local import lease_files
from poise.service.backends.local.runner.starting import FAILED, exit_code, exit_code_of
from poise.service.backends.local.starters import tell_done
from poise.service.backends.local.state_dir import StateDir
from poise.service.backends.run_table import Key
from poise.service.wire.agent_messages import PartEnded

DONE_SECONDS = 1.0  # for the starter to hear that it is over; the next agent of the node tells it otherwise


class RunOverError(Exception):
    """There is nothing left to do. `code`: with which the agent ends."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class OneRun:
    """The only run of a node.

    starter   directory of what starts its runner; None: the agent does
    """

    def __init__(self, state: NodeStateDir, files: StateDir, starter: Path | None) -> None:
        self._state, self._files, self._starter = state, files, starter
        self._code: int | None = None  # of the run, once its end was told
        self._key: Key | None = None
        self.was_ordered = self._latest() is not None

    @property
    def has_ended(self) -> bool:
        """Whether the end of the run was told."""
        return self._code is not None

    def reopen(self) -> None:
        """Forget how it ended: the server says anew what is open here."""
        self._code = None

    def ended(self, news: PartEnded) -> None:
        """Note how it ended, as the server is told now."""
        self.was_ordered = True
        self._key, self._code = (news.job, news.epoch), exit_code(news.how, news.codes)

    async def finish(self) -> None:
        """Remember that it is over, and tell the starter."""
        key = self._key or self._latest()
        code = self._code
        if code is None:
            code = FAILED if key is None else exit_code_of(self._files.get(*key, lease_files.EXIT))
        path = None if key is None else str(self._files.run_path(*key))
        with suppress(OSError):  # a disk that is full: the next agent asks the server again
            self._state.note_over(code, path)
        await self._tell(code, path)

    async def is_over(self) -> bool:
        """Whether an earlier agent of the node has finished. Its starter is told again: it may not have been there yet."""
        over = self._state.over()
        if over is not None:
            await self._tell(*over)
        return over is not None

    async def _tell(self, code: int, path: str | None) -> None:
        if self._starter is not None:
            await asyncio.to_thread(tell_done, self._starter, code, path, DONE_SECONDS)

    def _latest(self) -> Key | None:
        """Return the run that has a directory here; None: none was ever begun."""
        with suppress(OSError):
            for job in sorted(each.name for each in self._files.path.iterdir()):
                epochs = self._files.epochs(job)
                if epochs:
                    return job, epochs[-1]
        return None
