"""Recipe keys of environments: what is refused before training, with the key and a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import environment_classes
from environment_classes import Echo
from lockstep.device.cpu import Cpu
from lockstep.environments.agents.agent_setup import agent_setup
from lockstep.environments.builtin.calculator import calculator_tool
from lockstep.environments.setup import host_setup
from lockstep.environments.tools import FunctionTool
from lockstep.functions import class_path
from lockstep.preflight.prepared import PreparedOnline
from lockstep.preflight.run_checks import prepare_online
from lockstep.recipe import load_recipe
from lockstep.recipe.keys_environment import EnvironmentSettings
from lockstep.run.console import Console
from refusals import refuses

GAME = "rollout.environment=game.py:Game"


@pytest.mark.parametrize(
    ("words", "key", "code"),
    [
        ([GAME, "rollout.tools=[tools.py:add]"], "rollout.tools", "conflicting-keys"),
        ([GAME, "rollout.function=other.py:rollout"], "rollout.environment", "conflicting-keys"),
        (["rollout.tools=[a.py:add]", "rollout.function=other.py:rollout"], "rollout.tools", "conflicting-keys"),
        (["rollout.tools=[a.py:add]", "rollout.environment_args={a: 1}"], "rollout.environment_args", "needs-key"),
        ([GAME, "data.template=none"], "rollout.environment", "unsupported-combination"),
        ([GAME, "parallel.tensor_parallel=2"], "rollout.environment", "unsupported-combination"),
        ([GAME, "reward.process=prm"], "reward.process", "unsupported-combination"),
        ([GAME, "rollout.turn_tokens=13"], "rollout.turn_tokens", "out-of-range"),
        ([GAME, "rollout.trajectory_tokens=13"], "rollout.trajectory_tokens", "out-of-range"),
        (["rollout.environment=game"], "rollout.environment", "invalid-value"),
        (["rollout.tools=[add]"], "rollout.tools", "invalid-value"),
        (["val.environment=game"], "val.environment", "invalid-value"),
        ([GAME, "rollout.step_timeout=0"], "rollout.step_timeout", "invalid-value"),
        ([GAME, "rollout.history=forget"], "rollout.history", "invalid-value"),
    ],
)
def test_a_combination_that_cannot_work_is_refused(online_file: Path, words: list[str], key: str, code: str) -> None:
    with refuses(key, code):
        load_recipe(str(online_file), words)


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_turns", 2), ("turn_tokens", 4), ("history", "as_template"), ("environment_args", "{a: 1}"), ("parser", "x")],
)
def test_a_key_of_environments_needs_one(online_file: Path, key: str, value: Any) -> None:
    assert key in EnvironmentSettings.model_fields
    with refuses(f"rollout.{key}", "needs-key"):
        load_recipe(str(online_file), [f"rollout.{key}={value}"])


def test_limits_within_the_response_length_are_accepted(online_file: Path) -> None:
    words = [GAME, "rollout.turn_tokens=12", "rollout.trajectory_tokens=12", "val.environment=none"]
    rollout = load_recipe(str(online_file), words).rollout
    assert rollout.interactive
    assert (rollout.environment, rollout.tools, rollout.max_turns) == ("game.py:Game", [], 16)


@pytest.mark.parametrize("word", [GAME, "rollout.tools=[a.py:add]", "val.environment=game.py:Game"])
def test_an_offline_method_has_no_environment(recipe_file: Path, word: str) -> None:
    with refuses(word.partition("=")[0], "unused-key"):
        load_recipe(str(recipe_file), [word])


def test_secrets_of_tools_environments_and_agents_are_references(
    online_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "the value")
    tool = "rollout.tools=['mcp:https://host/mcp \"Authorization: Bearer ${env:THE_KEY}\"']"
    rollout = load_recipe(str(online_file), [tool]).rollout
    assert "${env:THE_KEY}" in rollout.tools[0]
    assert host_setup(rollout).arguments["tools"][0][2] == 'https://host/mcp "Authorization: Bearer the value"'
    words = ["rollout.environment=guess_number", "rollout.environment_args={token: '${env:THE_KEY}'}"]
    assert host_setup(load_recipe(str(online_file), words).rollout).arguments == {"token": "the value"}
    agent = load_recipe(str(online_file), ["rollout.agent='command:true ${env:THE_KEY}'"]).rollout
    assert agent_setup(agent).environment == "command:true the value"


def test_a_class_is_named_by_its_file() -> None:
    assert class_path("rollout.environment", Echo) == f"{environment_classes.__file__}:Echo"

    class Inner(Echo):
        pass

    with refuses("rollout.environment", "invalid-function"):
        class_path("rollout.environment", Inner)


# -- the plan counts the tokens of tools -------------------------------------------------------------------------------


def planned(file: Path, *words: str) -> PreparedOnline:
    given = ["data.template=qwen2.5", "rollout.max_tokens=20", "batch.tokens=4096", *words]
    return prepare_online(load_recipe(str(file), given), Cpu(), 1, Console.silent())


def lengths(prepared: PreparedOnline, tools: Any) -> list[int]:
    """The lengths of the prompts, with the template of the run."""
    chats = [prompt.question.prompt for prompt in prepared.train.items]
    render = prepared.tokenizer.apply_chat_template
    return [len(render(chat, tools=tools, add_generation_prompt=True)["input_ids"]) for chat in chats]


@pytest.mark.slow
def test_the_plan_counts_the_schemas_of_tools(online_file: Path) -> None:
    plain = planned(online_file)
    assert plain.train.longest == max(lengths(plain, None))
    prepared = planned(online_file, "rollout.tools=[calculator]", "data.max_prompt_tokens=2000")
    with_tools = lengths(prepared, [FunctionTool.of(calculator_tool("", "")).schema])
    assert prepared.train.added == with_tools[0] - lengths(prepared, None)[0] > 100
    assert prepared.train.longest == max(with_tools)
    assert prepared.batches.longest == max(with_tools) + 20
    assert f"{prepared.train.added} for tools" in prepared.train.sentence
    assert prepared.train.counts.longest == plain.train.longest  # a checkpoint compares this count


@pytest.mark.slow
def test_prompts_that_are_too_long_with_tools_are_reported(online_file: Path) -> None:
    full = planned(online_file, "rollout.tools=[calculator]", "data.max_prompt_tokens=2000")
    with_tools = lengths(full, [FunctionTool.of(calculator_tool("", "")).schema])
    limit = with_tools[0]
    over = sum(length > limit for length in with_tools)
    assert 0 < over < len(with_tools)
    prepared = planned(online_file, "rollout.tools=[calculator]", f"data.max_prompt_tokens={limit}")
    assert prepared.train.longest == limit
    (remark,) = (remark for remark in prepared.remarks if "rollout.tools" in remark)
    assert remark.startswith(f"{over} of {len(with_tools)} prompts")
