"""Tools of MCP servers: a server process or a session over HTTP for each trajectory or each host, with limits of time
and length."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

import mcp_http_server
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


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def address() -> Iterator[str]:
    """A server in another process, with the tools of `mcp_server`."""
    command = [sys.executable, mcp_http_server.__file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["json", "events", "open"])
def test_a_server_over_http_has_a_session_for_each_trajectory(
    address: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers with JSON, with a stream that it closes, or with a stream that stays open."""

    monkeypatch.setenv("KEY_OF_THE_SERVER", "a secret")

    async def play() -> None:
        tool = f"mcp:{address}/{kind} 'X-Key: ${{env:KEY_OF_THE_SERVER}}'"
        one, two = opened(tool, result_chars=20), opened(tool, step_timeout=1.0)
        starts: list[Start] = [await environment.reset(ROW, 0) for environment in (one, two)]
        names = [tool["function"]["name"] for tool in starts[0].tools]
        assert names == [name for names, _ in mcp_server.PAGES.values() for name in names]
        assert await results(one, ("echo", {"text": "ü\n\n"}), ("fail", {}), ("refuse", {})) == [
            "ü\n\n\nend",
            "error: no such file",
            "error: refused",
        ]
        assert await results(one, ("long", {})) == ["x" * 10 + "\n[999,980 characters are left out]\n" + "x" * 10]
        for number in (1, 2):
            assert json.loads((await results(two, ("count", {})))[0])["count"] == number
        assert await results(two, ("hang", {})) == ["error: hang did not return within 1 s"]
        assert await results(two, ("cancelled", {})) == ["1"]
        assert json.loads((await results(one, ("count", {})))[0])["count"] == 1
        for environment in (one, two):
            await environment.close()

    asyncio.run(asyncio.wait_for(play(), HANG))
    with urllib.request.urlopen(f"{address}/sessions") as found:
        seen = json.loads(found.read())
    # Every message after the first has the session and the version; the server's own request was answered; the key is
    # sent; and the sessions are ended.
    assert seen == {"ended": 2, "keys": ["a secret"], "without": 2, "versions": ["2025-06-18"], "answers": 2}


@pytest.mark.slow
def test_a_server_over_http_that_is_lost_fails_the_trajectory(address: str) -> None:
    with played(tools=[f"mcp_shared:{address}/json"], step_timeout=HANG) as player:
        player.reset()
        lost = failed(player.say("", [("crash", {})]))
        assert f"the MCP server {address}/json " in lost.why
    for tool in (f"mcp:{address}/none", "mcp:http://127.0.0.1:9/mcp"):
        with pytest.raises(ToolServerLost):
            asyncio.run(opened(tool).reset(ROW, 0))


@pytest.mark.parametrize(
    ("tool", "code"),
    [
        ("mcp:no-such-program --x", "no-such-file"),
        ("mcp:", "invalid-value"),
        ("mcp:https://host/mcp header", "invalid-value"),
        ("mcp:https://host/mcp 'Authorization: Bearer ${env:NO_SUCH_SECRET}'", "missing-secret"),
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
