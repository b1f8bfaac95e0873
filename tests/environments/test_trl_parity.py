"""TRL's own trainer and lockstep's adapter read the same tools and the same prompt from an environment factory."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import trl_factories
from lockstep.environments.adapters.trl_env import TrlEnvironment
from lockstep.environments.environment import Reply
from lockstep.model.tiny import write_tiny
from lockstep.trajectory import ToolCall

ROW = {"prompt": [{"role": "user", "content": "Go."}], "target": 4}


def trainer(folder: Path) -> Any:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_chat_template

    write_tiny(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", trust_remote_code=False)
    tokenizer.chat_template = qwen3_chat_template  # TRL has parsers for known templates
    settings = GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=2,
        num_generations=2,
        max_steps=1,
        max_completion_length=8,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
    )
    return GRPOTrainer(
        model=str(folder / "model"),
        args=settings,
        train_dataset=Dataset.from_list([ROW] * 4),
        processing_class=tokenizer,
        tools=[trl_factories.double],
        environment_factory=trl_factories.Counter,
    )


def test_tools_prompt_and_reward_are_those_of_trl(tmp_path: Path) -> None:
    from transformers.utils import get_json_schema

    its = trainer(tmp_path)
    tools = [get_json_schema(tool) for tool in its._env_tools[None]]
    its.train()
    rewarded = [key for key in its.state.log_history[0] if key.startswith("rewards/") and key.endswith("/mean")]
    assert rewarded == ["rewards/Counter/mean"]
    environments = its.environments
    assert {environment.target for environment in environments} == {4}  # reset got the columns of the row

    async def ours() -> tuple[Any, Any, float]:
        path = f"{trl_factories.__file__}:Counter"
        environment = TrlEnvironment(path, 1000, 10.0, tools=[f"{trl_factories.__file__}:double"])
        start = await environment.reset({**ROW, "ground_truth": "", "extra_info": {}}, 0)
        calls = (ToolCall("add", {"amount": 3}, "a"), ToolCall("read", {}, "b"))
        turn = await environment.step(Reply("", calls=calls))
        return start, turn, await environment.score(None)  # type: ignore[attr-defined]

    start, turn, score = asyncio.run(ours())
    assert list(start.tools) == tools
    assert start.messages == [{"role": "user", "content": "Go." + environments[0].reset(**ROW)}]
    said = [environments[0].add(3), str(asyncio.run(environments[0].read()))]
    assert [message["content"] for message in turn.messages] == said
    assert score == environments[0].get_reward()
