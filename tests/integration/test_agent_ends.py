"""How an agent ends: all of it, on the first signal, and whatever it is doing."""

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path
from time import sleep

import pytest
from tests.backends import WAITS, LocalStage, a_request, until

from poise.service.agent.agent import Agent, AgentConfig, SessionOverError
from poise.service.backends.api import GangPart, RunEnded, RunEnding, RunOrder, RunPart
from poise.service.wire.agent_messages import NodeSpec, Welcome
from poise.service.wire.request import Wire

NODE = NodeSpec(name="n", gpu_type="v100", gpus=1)
NOWHERE = "http://127.0.0.1:1"
SERVES = f"""
import asyncio, sys
from pathlib import Path
from poise.service.agent.agent import Agent, AgentConfig
from poise.service.wire.agent_messages import NodeSpec

async def main():
    agent = Agent(AgentConfig("{NOWHERE}", "token", NodeSpec(name="n", gpu_type="v100", gpus=1), Path(sys.argv[1])))
    asyncio.get_running_loop().call_later(0.5, lambda: print("ready", flush=True))
    await agent.run_until_signalled()
    print(agent._checkpoints._is_closed, agent._http.is_closed, agent._state._lock)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_an_agent_in_order(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", SERVES, str(tmp_path / "n")], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.communicate(timeout=60)[0] == "True True None\n"
    assert process.returncode == 0


@pytest.mark.parametrize("turns", range(6))
def test_cancellation_is_not_lost_while_a_session_ends(tmp_path: Path, turns: int) -> None:
    async def story() -> None:
        agent = Agent(AgentConfig(NOWHERE, "token", NODE, tmp_path / "n"))
        running = asyncio.get_running_loop().create_task(agent.run())
        sessions = 0

        async def ask(_what: str, _message: Wire, _answer: type, _seconds: float) -> Welcome:
            nonlocal sessions
            sessions += 1
            return Welcome(service="0" * 32, session="1" * 32, lease=60.0, poll=12.0, version="x")

        def cancel_after(left: int) -> None:
            if left:
                asyncio.get_running_loop().call_soon(cancel_after, left - 1)
            else:
                running.cancel()

        async def pass_orders(_welcome: Welcome) -> None:
            if sessions == 1:
                cancel_after(turns)
            raise SessionOverError("session-over", "it is over")

        agent._ask, agent._pass_orders = ask, pass_orders  # type: ignore[method-assign, assignment]
        done, _ = await asyncio.wait([running], timeout=10.0)
        assert done, f"{sessions} sessions"

    asyncio.run(story())


def test_agent_that_cannot_be_made_lets_go_of_its_directory(tmp_path: Path) -> None:
    async def story() -> None:
        (tmp_path / "n").mkdir()
        (tmp_path / "n" / "jobs").write_text("in the way")
        for _ in range(2):
            with pytest.raises(OSError, match="jobs"):
                Agent(AgentConfig(NOWHERE, "token", NODE, tmp_path / "n"))

    asyncio.run(story())


def test_back_end_that_is_closed_twice_at_a_time_is_closed_when_either_returns(tmp_path: Path) -> None:
    stage = LocalStage(tmp_path)
    held, released = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        released.wait()

    stage.backend._loop.post(hold)
    held.wait()
    closing = [threading.Thread(target=stage.backend.close) for _ in range(2)]
    for each in closing:
        each.start()
    sleep(0.2)
    assert [each.is_alive() for each in closing] == [True, True]
    released.set()
    for each in closing:
        each.join()


def test_part_that_does_not_know_where_rank_0_is_does_not_begin(tmp_path: Path) -> None:
    stage = LocalStage(tmp_path)
    parts = RunPart("elsewhere", "v100", (0,)), RunPart("v100-0", "v100", (0,))
    request = a_request(WAITS, gpus=2)
    stage.backend.launch(RunOrder("1", 1, parts, request, part=GangPart("v100-0", "127.0.0.1", 0)))
    assert stage.wait(RunEnded, "1").how is RunEnding.FAILED
    until(lambda: not stage.processes())
    stage.backend.close()
