"""TRL's `environment_factory` and `tools=`: public methods are tools, `reset` writes text, `get_reward` scores."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import trl_factories
from host_player import played
from lockstep.environments.adapters.trl_env import TrlEnvironment
from lockstep.environments.setup import host_setup
from lockstep.errors import Refusal
from lockstep.recipe.keys_environment import EnvironmentSettings

FILE = trl_factories.__file__
ROW = {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}], "extra_info": {}}


def made(path: str, **arguments: Any) -> TrlEnvironment:
    settings = EnvironmentSettings(environment=f"trl:{path}", environment_args=arguments)
    return TrlEnvironment(**host_setup(settings).arguments)


def code_of(path: str, row: dict[str, Any] | None = None, **arguments: Any) -> str:
    with pytest.raises(Refusal) as refused:
        asyncio.run(made(path, **arguments).reset({**ROW, **(row or {})}, 0))
    return refused.value.problems[0].code


def test_a_conversation_through_the_host() -> None:
    arguments = {"tools": [f"{FILE}:double"]}
    with played(environment=f"trl:{FILE}:Counter", environment_args=arguments, result_chars=16) as player:
        start = player.reset({**ROW, "target": 5})
        assert [message["content"] for message in start["messages"]] == ["Be brief.", "Go. Count to 5."]
        assert [tool["function"]["name"] for tool in start["tools"]] == ["double", "add", "break_down", "read"]
        # The second call starts after the first has ended, else both would read the same counter.
        calls = [("add", {"amount": 1}), ("add", {"amount": 3}), ("read", {}), ("double", {"number": 4})]
        turn = player.say("", [*calls, ("break_down", {}), ("add", {"amount": "x"})])
        said = [message["content"] for message in turn["messages"]]
        assert said[1:] == ["The coun\n[1 characters are left out]\ner is 4.", "4", "8", *said[4:]]
        assert said[4] == "error: RuntimeError: broken"
        assert said[5].startswith("error: the argument amount must be an integer")
        assert (turn["done"], turn["reward"], turn["metrics"]) == (False, 0.0, {"tool_errors": 1.0})
        assert player.say("done")["done"]
        assert player.finish()["score"] == {"score": pytest.approx(0.9)}


def test_the_row_selects_one_of_several_factories() -> None:
    async def play() -> tuple[Any, TrlEnvironment]:
        environment = made(f"{FILE}:FACTORIES")
        start = await environment.reset({**ROW, "environment": "silent", "answer": "42"}, 0)
        return start, environment

    start, environment = asyncio.run(play())
    assert start.messages == ROW["prompt"]
    assert [tool["function"]["name"] for tool in start.tools] == ["look"]
    assert environment._object.answer == "42"
    assert not hasattr(environment, "score")
    assert code_of(f"{FILE}:FACTORIES", {"environment": "other"}) == "unknown-name"


def test_a_function_makes_environments_that_share_nothing() -> None:
    one, two = made(f"{FILE}:several"), made(f"{FILE}:several")
    for environment in (one, two):
        asyncio.run(environment.reset(ROW, 0))
    assert one._object is not two._object
    assert asyncio.run(one.score(None)) == pytest.approx(0.7)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (f"{FILE}:Nothing", "invalid-function"),
        (f"{FILE}:NUMBER", "invalid-function"),
        (f"{FILE}:NoReset", "invalid-function"),
        ("no_such_file.py:Counter", "no-such-file"),
        ("no_such_module:Counter", "import-failed"),
    ],
)
def test_what_is_no_factory_is_refused(path: str, code: str) -> None:
    assert code_of(path) == code
