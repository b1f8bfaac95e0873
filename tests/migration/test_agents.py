"""Conversations through the adapters against the loops of OpenRLHF and verl themselves: tokens, masks, rewards."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapter_runs import played, question
from lockstep.data.encode.builtin_templates import builtin_text
from lockstep.data.encode.prompt_rows import prompt_ids
from lockstep.model.load import load_tokenizer

from .peers import agent_module, module

pytestmark = pytest.mark.peers

AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.steps = 0

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"] + "Think. "}

    async def step(self, states, **kwargs):
        self.steps += 1
        right = states["action_text"] == states["label"]
        done = right or self.steps == 3
        feedback = "" if done else "\\n<|im_start|>user\\nno<|im_end|>\\n<|im_start|>assistant\\n"
        return {"rewards": torch.tensor(1.0 if right else -0.25), "scores": torch.tensor(float(right)),
                "environment_feedback": feedback, "done": done, "sampling_params": states["sampling_params"],
                "extra_logs": {"steps": torch.tensor(self.steps), "seen": len(states["observation_text"])}}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


@pytest.mark.parametrize("says", [["5"], ["4", "5"], ["4", "6", "7"]])
def test_an_agent_sees_and_gives_the_same_as_in_openrlhf(tiny_folder: Path, tmp_path: Path, says: list[str]) -> None:
    tokenizer: Any = load_tokenizer(str(tiny_folder))
    file = tmp_path / "agent_func.py"
    file.write_text("import torch\n" + AGENT, encoding="utf-8")
    (made,), _ = played(tokenizer, says, [question()], environment=f"openrlhf:{file}")
    found = made.trajectory
    assert found is not None
    theirs = asyncio.run(_execute(tokenizer, says))
    assert [*made.prompt_ids, *made.ids] == theirs["observation_tokens"]
    start, place = len(made.prompt_ids), 0
    mask = [0] * len(made.ids)
    for first, last in theirs["action_ranges"]:
        mask[first - start : last - start] = [1] * (last - first)
        place = last
    assert made.loss_mask == mask
    assert place == len(theirs["observation_tokens"])
    assert found.reward == pytest.approx(theirs["reward"])
    assert found.info["scores"] == float(theirs["scores"])
    logs = {name: float(value) for name, value in theirs["extra_logs"].items()}
    assert found.info["extra_logs"] == logs == {name: found.metrics[name] for name in logs}


async def _execute(tokenizer: Any, says: list[str]) -> Any:
    """Runs OpenRLHF's executor with an engine that says the texts. vLLM's text has no end token."""
    real = module("openrlhf", "0.11.2", "utils.agent")
    scope: dict[str, Any] = {**vars(real), "torch": torch}
    exec(AGENT.replace("from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor", ""), scope)
    turns = iter(says)

    async def generate(ids: list[int], params: Any, **more: Any) -> Any:
        text = next(turns)
        tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        return SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=tokens, text=text, logprobs=None, finish_reason="stop")]
        )

    prompt = tokenizer.apply_chat_template(question().prompt, tokenize=False, add_generation_prompt=True)
    params = SimpleNamespace(max_tokens=200, logprobs=None)
    engine = SimpleNamespace(generate=generate)
    return await scope["AgentExecutor"]().execute(prompt, "5", params, 600, tokenizer, engine)


TOOLS = """
tools:
  - class_name: peer_tools.CheckTool
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: check
        description: Checks an answer.
        parameters: {type: object, properties: {answer: {type: string, description: The answer.}}, required: [answer]}
"""
CLASSES = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

class CheckTool(BaseTool):
    async def create(self, instance_id=None, **kwargs):
        self.truth = kwargs["create_kwargs"]["ground_truth"]
        return "one", ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        right = parameters["answer"] == self.truth
        return ToolResponse(text="right" if right else "wrong"), 1.0 if right else -0.5, {}
"""
CALL = '<tool_call>\n{"name": "check", "arguments": {"answer": "%s"}}\n</tool_call>'
KWARGS = {"tools_kwargs": {"check": {"create_kwargs": {"ground_truth": "5"}}}}


def test_tools_see_and_give_the_same_as_in_verl(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer: Any = load_tokenizer(str(tiny_folder))
    tokenizer.chat_template = builtin_text("qwen2.5")
    (tmp_path / "peer_tools.py").write_text(CLASSES, encoding="utf-8")
    (tmp_path / "tools.yaml").write_text(TOOLS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    says = [CALL % "4", CALL % "5", "It is 5."]
    asked = question(extra=KWARGS)
    (made,), _ = played(tokenizer, says, [asked], tools=[f"verl:{tmp_path}/tools.yaml"], max_tokens=900)
    found = made.trajectory
    assert found is not None
    theirs = asyncio.run(_run_tools(tokenizer, says, tmp_path))
    assert made.prompt_ids == theirs.prompt_ids
    assert made.ids == theirs.response_ids
    assert made.loss_mask == theirs.response_mask
    assert found.info["tool_rewards"] == theirs.extra_fields["tool_rewards"] == [-0.5, 1.0]
    assert 2 * len(found.turns) == theirs.num_turns


async def _run_tools(tokenizer: Any, says: list[str], folder: Path) -> Any:
    """Runs verl's tool agent loop with a server that says the texts."""
    from omegaconf import OmegaConf

    real = agent_module("0.9.1", "experimental.agent_loop.tool_agent_loop")
    scope: dict[str, Any] = {
        "BaseTool": agent_module("0.9.1", "tools.base_tool").BaseTool,
        "ToolResponse": real.ToolResponse,
    }
    exec("\n".join(line for line in CLASSES.splitlines() if not line.startswith("from")), scope)
    entry = OmegaConf.to_container(OmegaConf.load(folder / "tools.yaml"))["tools"][0]  # type: ignore[call-overload, index]
    schema = agent_module("0.9.1", "tools.schemas").OpenAIFunctionToolSchema.model_validate(entry["tool_schema"])
    tool = scope["CheckTool"](config=entry["config"], tool_schema=schema)
    turns = iter(says)

    async def generate(request_id: Any, *, prompt_ids: list[int], sampling_params: Any, **more: Any) -> Any:
        ids = [*tokenizer(next(turns), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        return real.TokenOutput(token_ids=ids)

    rollout = {
        "prompt_length": 900, "response_length": 900, "full_determinism": False,
        "multi_turn": {"max_user_turns": None, "max_assistant_turns": None, "max_parallel_calls": 1, "format": "hermes",
                       "max_tool_response_length": 256, "tool_response_truncate_side": "middle"},
    }  # fmt: skip
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    loop = real.ToolAgentLoop(
        trainer_config=SimpleNamespace(config=config),
        server_manager=SimpleNamespace(generate=generate),
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=None,
        data_config=SimpleNamespace(config=config.data),
        # With an unknown model, verl drops the line break after an end token.
        hf_model_type="qwen2",
        tools=SimpleNamespace(tools=[tool]),
    )
    asked = question(extra=KWARGS)
    assert prompt_ids(tokenizer, asked)
    return await loop.run({}, raw_prompt=asked.prompt, extra_info=KWARGS, **KWARGS)
