"""Stand-ins for verl's base class of agent loops, for machines without verl.

`apply_chat_template` is the method of verl 0.5 to 0.7, and the methods `ct_*` are those of verl 0.9. Loops of text work
with both.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, Field

# The loops that `@register` has registered in this process, by name.
LOOPS: dict[str, Any] = {}


class AgentLoopMetrics(BaseModel):
    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(BaseModel):
    """What `run` returns: the tokens of the trajectory, and which of them the model sampled (`response_mask`)."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics = Field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = Field(default_factory=dict)


class TokenOutput(BaseModel):
    """What `server_manager.generate` returns. lockstep keeps the log-probs itself."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = Field(default_factory=dict)


class ToolListWrap:
    def __init__(self, tools: list[Any]):
        self.tools = tools


@dataclass(frozen=True)
class MergedTokens:
    """The tokens after a merge."""

    token_ids: list[int]
    inserted: list[int] = field(default_factory=list)


class AgentLoopBase(ABC):
    """The base class of agent loops."""

    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: Any = None,
        **kwargs: Any,
    ):
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager, self.tokenizer, self.processor = server_manager, tokenizer, processor
        self.dataset_cls = dataset_cls
        self.data_config = self.dataset_config = data_config.config
        self.apply_chat_template_kwargs = dict(self.data_config.get("apply_chat_template_kwargs") or {})
        self.loop = asyncio.get_running_loop()

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput: ...

    async def process_vision_info(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {}

    async def process_multi_modal_info(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {}

    async def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """Returns the tokens of messages with the generation prompt. With `remove_system_prompt`, without the system
        message that the template adds to every chat."""
        ids = self._ids(self._text(messages, tools, open_turn=True))
        if not remove_system_prompt:
            return ids
        system = self._ids(self._text([{"role": "user", "content": ""}], None, open_turn=False))
        twice = self._ids(self._text([{"role": "user", "content": ""}] * 2, None, open_turn=False))
        return ids[2 * len(system) - len(twice) :]

    async def ct_build_initial_tokens(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **media: Any
    ) -> list[int]:
        return self._ids(self._text(messages, tools, open_turn=True))

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: list[int],
        assistant_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        assistant_logprobs: list[float] | None = None,
    ) -> tuple[MergedTokens, list[int], list[float] | None]:
        """Appends a turn of the model."""
        mask = [*response_mask, *[1] * len(assistant_token_ids)]
        logprobs = None if response_logprobs is None else [*response_logprobs, *(assistant_logprobs or [])]
        return MergedTokens([*runtime_token_ids, *assistant_token_ids]), mask, logprobs

    async def ct_merge_context_msg(
        self,
        previous_messages: list[dict[str, Any]],
        updated_messages: list[dict[str, Any]],
        runtime_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> tuple[MergedTokens, list[int], list[float] | None]:
        """Appends messages that follow a turn of the model, without a loss."""
        before = self._text(previous_messages, tools, open_turn=False)
        text = self._text(updated_messages, tools, open_turn=True)
        if not text.startswith(before):
            raise ValueError("the chat template changes earlier turns, so new messages cannot be appended")
        # The template writes separators after the end token, which the model has not sampled.
        end = str(self.tokenizer.decode(runtime_token_ids[-1:]))
        separator = before[before.rindex(end) + len(end) :] if end in before else ""
        new = self._ids((separator if not separator.strip() else "") + text[len(before) :])
        logprobs = None if response_logprobs is None else [*response_logprobs, *[0.0] * len(new)]
        return MergedTokens([*runtime_token_ids, *new], new), [*response_mask, *[0] * len(new)], logprobs

    def _text(self, messages: Any, tools: Any, *, open_turn: bool) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                add_generation_prompt=open_turn,
                tokenize=False,
                **self.apply_chat_template_kwargs,
            )
        )

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


class SingleTurn(AgentLoopBase):
    """verl's `single_turn_agent`: one turn of the model."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        found = await self.server_manager.generate(prompt_ids=prompt, sampling_params=sampling_params)
        mask = [1] * len(found.token_ids)
        return AgentLoopOutput(prompt_ids=prompt, response_ids=found.token_ids, response_mask=mask, num_turns=2)


def register(agent_name: str) -> Callable[[Any], Any]:
    """Registers an agent loop under a name."""

    def add(created: Any) -> Any:
        LOOPS[agent_name] = created
        return created

    return add


def loop_modules() -> dict[str, dict[str, Any]]:
    """Returns the names of verl's modules of agent loops."""
    names = {one.__name__: one for one in (AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, ToolListWrap, register)}
    return {
        "verl.experimental.agent_loop": names,
        "verl.experimental.agent_loop.agent_loop": names,
        "verl.workers.rollout.replica": {"TokenOutput": TokenOutput},
    }
