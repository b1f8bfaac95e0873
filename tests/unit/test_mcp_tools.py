"""Tools of MCP servers: a server process for each trajectory or for each host, with limits of time and length."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import pytest

import mcp_server
from hang import HANG, wait_until
from host_player import failed, played
from lockstep.environments.environment import Reply, Start
from lockstep.environments.setup import host_setup
from lockstep.environments.tool_environment import ToolEnvironment
from lockstep.environments.tools import ToolServerLost
from lockstep.errors import Refusal
from lockstep.recipe.keys_environment import EnvironmentSettings
from lockstep.trajectory import ToolCall

COMMAND = f"{sys.executable} {mcp_server.__file__}"
ROW = {"prompt": [{"role": "user", "content": "?"}]}


def opened(tool: str, **settings: Any) -> ToolEnvironment:
    return ToolEnvironment(**host_setup(EnvironmentSettings(tools=[tool], **settings)).arguments)


async def results(environment: ToolEnvironment, *calls: tuple[str, dict[str, Any]]) -> list[str]:
    made = tuple(ToolCall(name, arguments, str(number)) for number, (name, arguments) in enumerate(calls))
    turn = await environment.step(Reply("", calls=made))
    return [str(message["content"]) for message in turn.messages]


def living(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_trajectory_has_its_own_server_whose_tools_the_model_sees() -> None:
    async def play() -> list[int]:
        one, two = opened(f"mcp:{COMMAND}", result_chars=20), opened(f"mcp:{COMMAND}")
        starts: list[Start] = [await environment.reset(ROW, 0) for environment in (one, two)]
        functions = {tool["function"]["name"]: tool["function"] for tool in starts[0].tools}
        assert list(functions) == [name for names, _ in mcp_server.PAGES.values() for name in names]
        assert functions["echo"]["parameters"] == mcp_server.TEXT
        assert await results(one, ("echo", {"text": "ü"}), ("fail", {}), ("picture", {})) == [
            "ü\nend",
            "error: no such file",
            "[image con\n[7 characters are left out]\n left out]",
        ]
        assert await results(one, ("long", {})) == ["x" * 10 + "\n[999,980 characters are left out]\n" + "x" * 10]
        assert await results(one, ("echo", {})) == ['error: the argument "text" is missing']
        counts = [json.loads((await results(two, ("count", {})))[0]) for _ in range(2)]
        assert [one["count"] for one in counts] == [1, 2]
        other = opened(f"mcp:{COMMAND}")
        await other.reset(ROW, 0)
        fresh = json.loads((await results(other, ("count", {})))[0])
        assert (fresh["count"], fresh["process"] == counts[0]["process"]) == (1, False)
        for environment in (one, two, other):
            await environment.close()
        return [counts[0]["process"], fresh["process"]]

    processes = asyncio.run(asyncio.wait_for(play(), HANG))
    assert not [process for process in processes if living(process)]


def test_a_shared_server_is_replaced_when_it_has_ended() -> None:
    with played(tools=[f"mcp_shared:{COMMAND}"], step_timeout=HANG) as player:
        player.reset()
        player.reset(trajectory=1)
        counts = [player.say("", [("count", {})], trajectory=number)["messages"][0]["content"] for number in (0, 1)]
        assert [json.loads(text)["count"] for text in counts] == [1, 2]
        lost = failed(player.say("", [("crash", {})], trajectory=1))
        assert "has ended" in lost.why
        assert failed(player.say("", [("count", {})])).why == lost.why
        player.reset(trajectory=2)
        text = player.say("", [("count", {})], trajectory=2)["messages"][0]["content"]
        assert json.loads(text)["count"] == 1
        server = json.loads(text)["process"]
    wait_until(lambda: not living(server))


def test_a_call_over_the_time_limit_is_a_message_and_is_cancelled_in_the_server() -> None:
    async def play() -> list[str]:
        environment = opened(f"mcp:{COMMAND}", step_timeout=1.0)
        await environment.reset(ROW, 0)
        said = await results(environment, ("hang", {})) + await results(environment, ("cancelled", {}), ("refuse", {}))
        await environment.close()
        return said

    assert asyncio.run(asyncio.wait_for(play(), HANG)) == [
        "error: hang did not return within 1 s",
        "1",
        "error: refused",
    ]


@pytest.mark.parametrize(
    ("tool", "code"),
    [
        ("mcp:no-such-program --x", "no-such-file"),
        ("mcp:", "invalid-value"),
        ("mcp:https://host/mcp", "invalid-value"),
        ("mcp:'open", "invalid-syntax"),
    ],
)
def test_a_server_that_cannot_be_started_is_refused(tool: str, code: str) -> None:
    with pytest.raises(Refusal) as refused:
        opened(tool)
    assert refused.value.problems[0].code == code
    assert refused.value.problems[0].where.startswith("rollout.tools")


def test_a_program_that_is_no_server_fails_its_trajectory() -> None:
    with pytest.raises(ToolServerLost):
        asyncio.run(opened(f"mcp:{sys.executable} -c 1").reset(ROW, 0))
