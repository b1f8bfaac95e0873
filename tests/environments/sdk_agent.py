"""Agents of OpenAI's Agents SDK (package openai-agents), as their authors write them: with tools, without lockstep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def run(row: Mapping[str, Any], base_url: str, api: str = "chat") -> dict[str, Any]:
    client = AsyncOpenAI(base_url=base_url)
    kinds: dict[str, Any] = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
    model = kinds[api](model="policy", openai_client=client)
    agent = Agent(
        name="adder", instructions="Use the tool.", model=model, tools=[add], model_settings=ModelSettings(store=False)
    )
    result = await Runner.run(agent, row["prompt"][-1]["content"], max_turns=4)
    right = row["ground_truth"] in str(result.final_output)
    return {"reward": float(right), "info": {"output": str(result.final_output)}}
