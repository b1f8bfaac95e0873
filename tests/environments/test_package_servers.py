"""OpenEnv's real server and real MCP servers: sessions, typed actions, tools, rewards."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from hang import HANG
from host_player import failed, played


def contents(fields: dict[str, Any]) -> list[str]:
    return [str(message["content"]) for message in fields["messages"]]


def test_openenv_plays_games_with_json_actions(openenv_server: str) -> None:
    arguments = {"observation": "text", "high": 9}
    number = random.Random(4).randint(1, 9)
    with played(environment=f"openenv:{openenv_server}", environment_args=arguments) as player:
        for trajectory in (0, 1):  # two sessions of one server
            start = player.reset({"seed": 4}, seed=trajectory, trajectory=trajectory)
            assert contents(start) == ["Play.\n\nGuess a number from 1 to 9."]
        for text in ("nine", "[9]", '{"number": "x"}', '{"other": 1}'):
            turn = player.say(text)
            assert (turn["metrics"], turn["done"]) == ({"invalid_actions": 1.0}, False), text
        below, above = player.say(f'I say {{"number": {number - 1}}}.'), player.say(json.dumps({"number": number + 1}))
        assert (contents(below), contents(above)) == (["higher"], ["lower"])
        assert below["reward"] == pytest.approx(-0.1)
        last = player.say(json.dumps({"number": number}), trajectory=1)
        assert (last["reward"], last["done"]) == (1.0, True)
        assert player.finish(1)["info"] == {"steps": 1}
        player.finish(0)
        start = player.reset({"options": {"high": 2}}, trajectory=2)  # the options of the row
        assert contents(start)[0].endswith("1 to 2.")


def test_openenv_gets_the_text_of_the_model_in_a_field(openenv_server: str) -> None:
    with played(environment=f"openenv:{openenv_server}/words/", environment_args={"action": "message"}) as player:
        assert json.loads(contents(player.reset({"seed": 4}))[0].partition("\n\n")[2])["low"] == 1
        assert json.loads(contents(player.say("0"))[0])["text"] == "higher"
        assert "invalid literal" in failed(player.say("three")).why  # the environment raised


def test_openenv_tools_are_the_tools_of_the_model(openenv_server: str) -> None:
    with played(environment=f"openenv:{openenv_server}/tools", environment_args={"tools": True}) as player:
        start = player.reset()
        assert contents(start) == ["Play."]
        (tool,) = start["tools"]
        assert tool["function"]["name"] == "add"
        assert tool["function"]["parameters"]["required"] == ["amount"]
        turn = player.say("", [("add", {"amount": 1}), ("add", {"amount": 1})])
        assert contents(turn) == ["the counter is 1", "the counter is 2"]
        last = player.say("", [("add", {"amount": 1})])
        assert (last["reward"], last["done"]) == (1.0, True)
        player.reset(trajectory=1)
        assert contents(player.say("", [("none", {})], trajectory=1))[0].startswith("error: ")
        assert player.say("no call", trajectory=1)["done"]


def test_openenv_mistakes_are_refused_with_a_remedy(openenv_server: str) -> None:
    for environment, arguments, code in (
        ("openenv:localhost:8000", {}, "invalid-address"),
        ("openenv:http://127.0.0.1:9", {}, "server-lost"),
        (f"openenv:{openenv_server}", {"observation": "board"}, "unknown-name"),
    ):
        with played(environment=environment, environment_args=arguments) as player:
            answer = failed(player.reset())
            assert answer.code == code
            assert answer.remedy


def test_mcp_servers_keep_the_state_of_a_trajectory(mcp_command: str) -> None:
    with played(tools=[f"mcp:{mcp_command}"], step_timeout=HANG) as player:
        start = player.reset()
        functions = {tool["function"]["name"]: tool["function"] for tool in start["tools"]}
        assert list(functions) == ["add", "broken"]
        assert functions["add"]["description"] == "Adds to the total and returns it."
        assert functions["add"]["parameters"]["properties"]["amount"]["type"] == "integer"
        assert contents(player.say("", [("add", {"amount": 2})])) == ["2"]
        player.reset(trajectory=1)
        assert contents(player.say("", [("add", {"amount": 5})], trajectory=1)) == ["5"]
        turn = player.say("", [("add", {"amount": 2}), ("broken", {"text": "x"})])
        assert contents(turn)[0] == "4"
        assert contents(turn)[1].lower().startswith("error")
        assert turn["metrics"]["tool_errors"] == 1
        assert player.finish()["info"] == {"calls": 3}


@pytest.mark.parametrize("entry", ["mcp", "mcp_shared"])
def test_mcp_servers_over_http(mcp_address: str, entry: str) -> None:
    with played(tools=[f"{entry}:{mcp_address}"], step_timeout=HANG) as player:
        start = player.reset()
        functions = {tool["function"]["name"]: tool["function"] for tool in start["tools"]}
        assert list(functions) == ["add", "broken"]
        player.reset(trajectory=1)
        total = int(contents(player.say("", [("add", {"amount": 0})]))[0])  # the server counts for all sessions
        assert contents(player.say("", [("add", {"amount": 5})], trajectory=1)) == [str(total + 5)]
        turn = player.say("", [("add", {"amount": 2}), ("broken", {"text": "x"})])
        assert contents(turn)[0] == str(total + 7)
        assert contents(turn)[1].lower().startswith("error")
        assert turn["metrics"]["tool_errors"] == 1
        player.finish(1)
        assert player.finish()["info"] == {"calls": 3}
