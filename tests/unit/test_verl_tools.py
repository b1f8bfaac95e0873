"""Tools of verl: instances per call, rewards, arguments of rows, limits of calls and results, and files that are
refused."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import pytest

from adapter_runs import played, question, trained_text
from lockstep.data.encode.builtin_templates import builtin_text
from lockstep.environments.adapters.verl_tools import verl_tools
from lockstep.environments.environment import Reply, Turn
from lockstep.environments.setup import try_environment
from lockstep.environments.tool_environment import ToolEnvironment, shortened
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.registry import TOOLS
from lockstep.reward.environment_rewards import with_trajectory
from lockstep.trajectory import ToolCall
from lockstep.types import Prompt
from refusals import refuses

# A tool with state, as verl's users write it: it checks an answer, and a second wrong answer costs more.
CLASSES = '''
from uuid import uuid4
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

CALLS = []

class CheckTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instances = {}

    async def create(self, instance_id=None, **kwargs):
        instance_id = instance_id or str(uuid4())
        self._instances[instance_id] = {"truth": kwargs.get("create_kwargs", {}).get("ground_truth"), "calls": 0}
        CALLS.append("create")
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        state = self._instances[instance_id]
        state["calls"] += 1
        CALLS.append("execute")
        seen = kwargs["agent_data"].extra_fields
        seen["calls"] = seen.get("calls", 0) + 1
        if parameters["answer"] == "boom":
            raise RuntimeError("the server is gone")
        right = parameters["answer"] == state["truth"]
        text = f"{state['calls']} {seen['calls']} {right} {'.'.join(CALLS)}" + self.config.get("more", "")
        return ToolResponse(text=text), 0.5 if right else -0.05, {"right": right}

    async def calc_reward(self, instance_id, **kwargs):
        raise AssertionError("verl 0.9 does not call it")

    async def release(self, instance_id, **kwargs):
        CALLS.append("release")
        del self._instances[instance_id]

class OldTool(BaseTool):
    """As in verl 0.4: arguments of create, plain text as result."""

    async def create(self, instance_id=None, ground_truth=None):
        self.truth = ground_truth
        return "one"

    async def execute(self, instance_id, parameters):
        return f"{instance_id} {self.truth} {sorted(parameters)}", 1.0, {}

class NoName(BaseTool):
    def __init__(self, config, tool_schema):
        raise KeyError("url")
'''
SCHEMA = """
    tool_schema:
      type: function
      function:
        name: {name}
        description: Checks an answer.
        parameters:
          type: object
          properties:
            answer: {{type: string, description: The answer., items: dropped}}
          required: [answer]
"""
CONFIG = "tools:\n  - class_name: ck_tools.CheckTool\n    config: {type: native}" + SCHEMA.format(name="check")
CALL = '<tool_call>\n{"name": "%s", "arguments": {"answer": "%s"}}\n</tool_call>'
KWARGS = {"tools_kwargs": {"check": {"create_kwargs": {"ground_truth": "5"}}}}


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    """A tokenizer whose template shows tools."""
    tokenizer = load_tokenizer(str(tiny_folder))
    tokenizer.chat_template = builtin_text("qwen2.5")
    return tokenizer


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    sys.modules.pop("ck_tools", None)
    (tmp_path / "ck_tools.py").write_text(CLASSES, encoding="utf-8")
    (tmp_path / "tools.yaml").write_text(CONFIG, encoding="utf-8")
    invalidate_caches()
    monkeypatch.chdir(tmp_path)  # verl finds classes in the working directory
    return tmp_path / "tools.yaml"


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Removes the stand-ins for verl, which otherwise only host processes install."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("verl", "ck_tools", "functions")]:
        del sys.modules[name]


def test_each_call_has_an_instance_and_rewards_go_to_the_turns(tokenizer: Any, tools: Path) -> None:
    says = [CALL % ("check", "4"), CALL % ("check", "5"), "The answer is 5."]
    (made,), requests = played(tokenizer, says, [question(extra=KWARGS)], tools=[f"verl:{tools}"], max_tokens=900)
    assert made.failure == ""
    found = made.trajectory
    assert found is not None
    # The state of an instance is new in each call; the data of the trajectory is not.
    results = [message["content"] for message in found.messages if message["role"] == "tool"]
    assert results == ["1 1 False create.execute", "1 2 True create.execute.release.create.execute"]
    assert [turn.reward for turn in found.turns] == [-0.05, 0.5, 0.0]
    assert found.info == {"calls": 2, "tool_rewards": [-0.05, 0.5]}
    assert found.metrics["right"] == 1.0
    assert found.stop == "completed"
    assert trained_text(tokenizer, made) == [f"{said}<|im_end|>" for said in says]
    shown = tokenizer.decode(requests[0].ids)
    assert '"name": "check"' in shown
    assert "dropped" not in shown  # verl's schema has no such field
    # verl's reward managers put these fields into extra_info.
    extra = with_trajectory(question(), found).extra_info
    assert (extra["tool_rewards"], extra["turn_scores"], extra["num_turns"]) == ([-0.05, 0.5], [], 6)
    assert "tool_rewards" not in with_trajectory(question(), replace(found, info={})).extra_info


def environment(source: Path, parallel: int | None = None) -> ToolEnvironment:
    text = f"verl:{source}"
    return ToolEnvironment([(text, TOOLS["verl"], str(source))], 8192, 60.0, parallel=parallel)


def stepped(source: Path, calls: Sequence[ToolCall], parallel: int | None = None) -> tuple[ToolEnvironment, Turn]:
    """Starts a trajectory in this process, and runs the calls of one turn."""
    made = environment(source, parallel)

    async def run() -> Turn:
        await made.reset({"prompt": question().prompt, "extra_info": KWARGS}, 0)
        return await made.step(Reply("", calls=tuple(calls)))

    return made, asyncio.run(run())


def checks(*answers: str) -> list[ToolCall]:
    return [ToolCall("check", {"answer": answer}) for answer in answers]


def test_a_tool_that_raises_is_a_message_with_the_reward_0(tools: Path, stand_ins: None) -> None:
    made, turn = stepped(tools, [*checks("boom", "5"), ToolCall("nothing", error="no such tool")])
    first, second, third = (message["content"] for message in turn.messages)
    assert "the server is gone" in first
    assert "True" in second
    assert third == "no such tool"
    assert made.info["tool_rewards"] == [0.0, 0.5]
    assert turn.metrics["tool_errors"] == 1.0


def test_calls_above_the_limit_of_a_turn_do_not_run(tools: Path, stand_ins: None) -> None:
    made, turn = stepped(tools, checks("4", "5", "6"), parallel=2)
    first, second, third = (message["content"] for message in turn.messages)
    assert ("False" in first, "True" in second, "2 calls" in third) == (True, True, True)
    assert made.info["tool_rewards"] == [-0.05, 0.5]
    assert turn.reward == 0.45


def test_rows_select_tools_and_agents(tools: Path, stand_ins: None) -> None:
    more = SCHEMA.format(name="other")
    tools.write_text(CONFIG + "  - class_name: ck_tools.CheckTool\n    config: {type: native}" + more, encoding="utf-8")

    def names(extra: dict[str, Any], **columns: Any) -> list[str]:
        row = {"prompt": question().prompt, "extra_info": extra, **columns}
        start = asyncio.run(environment(tools).reset(row, 0))
        return [tool["function"]["name"] for tool in start.tools]

    assert names({}) == names({}, agent_name="tool_agent") == ["check", "other"]
    assert names({"tool_selection": ["other", "unknown"]}) == ["other"]
    assert names({}, agent_name="single_turn_agent") == []
    with refuses("rollout.tools", "unknown-name", "react_agent"):
        names({}, agent_name="react_agent")


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [
        ("left", "[4 characters are left out]\nefghij"),
        ("right", "abcdef\n[4 characters are left out]"),
        ("middle", "abc\n[4 characters are left out]\nhij"),
    ],
)
def test_results_are_truncated_at_a_side(truncation: str, expected: str) -> None:
    assert shortened("abcdefghij", 6, truncation) == expected
    assert shortened("abcdef", 6, truncation) == "abcdef"


FUNCTIONS = '''
from verl.tools.function_tool import function_tool

@function_tool
def check(answer: str) -> dict:
    """Checks an answer.

    Args:
        answer: The answer.
    """
    return {"answer": answer}, 0.25, {"asked": 1}

@function_tool("look")
async def lookup(answer: str) -> str:
    """Looks.

    Args:
        answer: The answer.
    """
    return answer.upper()
'''


def test_decorated_functions_are_tools(tmp_path: Path, stand_ins: None) -> None:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS, encoding="utf-8")
    made, turn = stepped(file, [*checks("5"), ToolCall("look", {"answer": "abc"})])
    assert [message["content"] for message in turn.messages] == ['{"answer": "5"}', "ABC"]
    # The rewards are in the order of the calls, although the second call ends first.
    assert made.info["tool_rewards"] == [0.25, 0.0]
    assert turn.metrics["asked"] == 1.0


def test_tools_of_verl_0_4_get_their_own_arguments(tools: Path, stand_ins: None) -> None:
    tools.write_text(CONFIG.replace("CheckTool", "OldTool"), encoding="utf-8")
    loaded = verl_tools(str(tools), "rollout.tools")
    reported: list[Any] = []

    async def call() -> str:
        row = {"prompt": [], "extra_info": KWARGS}
        session = await loaded.open(row, lambda reward, metrics: reported.append(reward))
        return await session.tools[0].call({"answer": "5"})

    assert asyncio.run(call()) == "one 5 ['answer']"
    assert reported == [None, 1.0]


BAD = {
    "not YAML": ("tools: [", "invalid-yaml", "rollout.tools"),
    "no list": ("tools: {}", "wrong-type", "tools.yaml: tools"),
    "nothing": ("", "wrong-type", "tools.yaml: tools"),
    "no class": ("tools: [{config: {type: native}}]", "invalid-function", "tools[0].class_name"),
    "no config": ("tools: [{class_name: ck_tools.CheckTool}]", "not-set", "tools[0].config"),
    "mcp": ("tools: [{class_name: a.B, config: {type: mcp}}]", "unsupported-setting", "tools[0].config.type"),
    "unknown key": ("tools: [{klass: a.B}]", "unknown-key", "tools[0].klass"),
    "no module": (
        "tools: [{class_name: no_such.Tool, config: {type: native}}]",
        "import-failed",
        "tools[0].class_name",
    ),
    "no attribute": ("tools: [{class_name: ck_tools.No, config: {type: native}}]", "import-failed", "class_name"),
    "raises": ("tools: [{class_name: ck_tools.NoName, config: {type: native}}]", "function-raised", "class_name"),
    "no schema": (
        "tools: [{class_name: ck_tools.CheckTool, config: {type: native}}]",
        "function-raised",
        "class_name",
    ),
    "not a class": (
        "tools: [{class_name: ck_tools.CALLS, config: {type: native}}]",
        "invalid-function",
        "class_name",
    ),
    "bad schema": (CONFIG.replace("type: string, ", ""), "invalid-tool", "properties.answer.type"),
    "twice": (CONFIG + CONFIG.removeprefix("tools:\n"), "duplicate-name", "tools[1]"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_with_their_key(tools: Path, stand_ins: None, name: str) -> None:
    text, code, where = BAD[name]
    tools.write_text(text, encoding="utf-8")
    with refuses(where, code):
        verl_tools(str(tools), "rollout.tools")


def test_a_class_of_verl_itself_needs_verl(tools: Path, stand_ins: None) -> None:
    tools.write_text(CONFIG.replace("ck_tools.CheckTool", "verl.tools.gsm8k_tool.Gsm8kTool"), encoding="utf-8")
    with refuses("class_name", "import-failed", remedy="pip install verl"):
        verl_tools(str(tools), "rollout.tools")


def test_a_file_without_decorated_functions_is_refused(tmp_path: Path, stand_ins: None) -> None:
    file = tmp_path / "functions.py"
    file.write_text("def check(): pass", encoding="utf-8")
    with refuses("rollout.tools", "invalid-function", "function_tool"):
        verl_tools(str(file), "rollout.tools")


@pytest.mark.slow
def test_a_bad_file_is_refused_before_training(tokenizer: Any, tools: Path) -> None:
    tools.write_text(BAD["no module"][0], encoding="utf-8")
    ids = tokenizer.apply_chat_template(question().prompt, add_generation_prompt=True)["input_ids"]
    settings = RolloutSettings(tools=[f"verl:{tools}"])
    with refuses("rollout.tools", "import-failed", "tools.yaml: tools[0].class_name", "no_such.Tool"):
        try_environment(settings, Prompt(question(), ids), tokenizer, 300, 0)
