"""Replies to agents: the policy's turns as bodies and events of OpenAI's chat completions and responses API.

The events of a stream are sent when the turn is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.environments.agents.agent_requests import TurnSpec
from lockstep.environments.environment import Reply
from lockstep.trajectory import ToolCall
from lockstep.types import Message

_THINK_END = "</think>"


@dataclass(frozen=True)
class AgentAnswer:
    """The turns that answer a request, with the number of tokens before them."""

    replies: Sequence[Reply]
    prompt_tokens: int
    id: str
    """Depends on the trajectory and on the number of the request, so that a run can be repeated exactly."""
    created: int
    logprobs: Sequence[Sequence[tuple[str, float]]] = ()
    """The text and the log-prob of each sampled token of each turn. Only if the request asks for them."""

    @property
    def usage(self) -> dict[str, int]:
        sampled = sum(len(reply.ids) for reply in self.replies)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self.prompt_tokens + sampled,
        }


def as_sent(reply: Reply) -> Reply:
    """Returns the turn as the agent gets it. A turn whose calls could not be read is text."""
    if not reply.parse_error or reply.calls:
        return reply
    _, ended, rest = reply.text.partition(_THINK_END)
    return replace(reply, content=(rest if ended else reply.text).strip())


def message_of(reply: Reply) -> Message:
    """Returns the turn as an assistant message of the chat completions API."""
    message: Message = {"role": "assistant", "content": reply.content or (None if reply.calls else "")}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [_call(call) for call in reply.calls]
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}
    return {"id": call.id, "type": "function", "function": function}


def _finish(reply: Reply) -> str:
    return "length" if reply.finish == "length" else "tool_calls" if reply.calls else "stop"


# -- chat completions


def chat_body(spec: TurnSpec, answer: AgentAnswer) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": message_of(reply),
            "finish_reason": _finish(reply),
            "logprobs": _logprobs(answer.logprobs[index]) if spec.logprobs else None,
        }
        for index, reply in enumerate(answer.replies)
    ]
    return {**_chat(spec, answer, "chat.completion"), "choices": choices, "usage": answer.usage}


def chat_events(spec: TurnSpec, answer: AgentAnswer) -> Iterator[dict[str, Any]]:
    base = {**_chat(spec, answer, "chat.completion.chunk"), **({"usage": None} if spec.usage else {})}
    for index, reply in enumerate(answer.replies):
        message = message_of(reply)
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"reasoning_content": reply.reasoning}] if reply.reasoning else []
        deltas += [{"content": message["content"]}] if message["content"] else []
        deltas += [
            {"tool_calls": [{"index": number, **call}]} for number, call in enumerate(message.get("tool_calls", ()))
        ]
        logprobs = _logprobs(answer.logprobs[index]) if spec.logprobs else None
        for delta in deltas:
            yield {**base, "choices": [{"index": index, "delta": delta, "finish_reason": None, "logprobs": logprobs}]}
            logprobs = None
        yield {**base, "choices": [{"index": index, "delta": {}, "finish_reason": _finish(reply), "logprobs": None}]}
    if spec.usage:
        yield {**base, "choices": [], "usage": answer.usage}


def _chat(spec: TurnSpec, answer: AgentAnswer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": spec.model}


def _logprobs(tokens: Sequence[tuple[str, float]]) -> dict[str, Any]:
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace")), "top_logprobs": []}
            for text, logprob in tokens
        ],
        "refusal": None,
    }


# -- responses


def response_body(spec: TurnSpec, answer: AgentAnswer) -> dict[str, Any]:
    reply = answer.replies[0]
    cut = reply.finish == "length"
    usage = answer.usage
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "model": spec.model,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "output": _items(answer),
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto" if spec.calls else "none",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in spec.tools],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _items(answer: AgentAnswer) -> list[dict[str, Any]]:
    reply = answer.replies[0]
    status = "incomplete" if reply.finish == "length" else "completed"
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        text = {"type": "reasoning_text", "text": reply.reasoning}
        items.append({"type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "content": [text], "status": status})
    if reply.content or not reply.calls:
        part = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "status": status}
        items.append({**message, "content": [part]})
    for number, call in enumerate(reply.calls):
        function = _call(call)["function"]
        named = {"type": "function_call", "id": f"fc_{answer.id}_{number}", "call_id": call.id, "status": status}
        items.append({**named, **function})
    return items


def response_events(spec: TurnSpec, answer: AgentAnswer) -> Iterator[dict[str, Any]]:
    number = iter(range(10**9))

    def event(kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(number), **fields}

    body = response_body(spec, answer)
    begun = {**body, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(body["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield event("response.output_item.added", output_index=index, item={**item, "status": "in_progress", **empty})
        yield from _item_events(event, item, place)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event(f"response.{body['status']}", response=body)


def _item_events(event: Callable[..., dict[str, Any]], item: dict[str, Any], place: dict[str, Any]) -> Iterator[Any]:
    if item["type"] == "function_call":
        arguments = item["arguments"]
        yield event("response.function_call_arguments.delta", **place, delta=arguments)
        yield event("response.function_call_arguments.done", **place, name=item["name"], arguments=arguments)
        return
    part = item["content"][0]
    place = {**place, "content_index": 0}
    kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
    more: dict[str, Any] = {"logprobs": []}
    if kind == "reasoning_text":
        yield event(f"response.{kind}.delta", **place, delta=part["text"])
        yield event(f"response.{kind}.done", **place, text=part["text"])
        return
    yield event("response.content_part.added", **place, part={**part, "text": ""})
    yield event(f"response.{kind}.delta", **place, delta=part["text"], **more)
    yield event(f"response.{kind}.done", **place, text=part["text"], **more)
    yield event("response.content_part.done", **place, part=part)
