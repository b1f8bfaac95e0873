"""Parses requests of agents: bodies of OpenAI's chat completions and responses API, as messages for a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.environments.message_images import Content, image_part, joined
from lockstep.http_server.http_api import ApiError
from lockstep.http_server.request_body import BodyReader, bad_value, valid_text
from lockstep.types import Message, Sampling
from lockstep.vision.images import IMAGE_PARTS

MOST_CHOICES, MOST_STOPS = 16, 16
ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING = ("reasoning_content", "reasoning")
_TEXT = ("text", "input_text", "output_text")
_ON_POLICY = "would change the distribution that the policy is trained on, and is not supported"
# Keys of a request that set the sampling distribution, with the value that changes nothing (None: the recipe's value).
SAMPLING_KEYS: dict[str, float | None] = {
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "repetition_penalty": None,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
# Keys without an effect on the answer.
_UNUSED = (
    "model",
    "user",
    "store",
    "metadata",
    "service_tier",
    "parallel_tool_calls",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "seed",
    "reasoning_effort",
    "verbosity",
)


@dataclass(frozen=True)
class TurnSpec:
    """A request of an agent for `n` turns of the policy after a conversation."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] = ()
    calls: bool = True
    """Whether tool calls are read from the turn (`tool_choice` is not `none`)."""
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    usage: bool = False
    """Whether the last event of a stream of chat completions has the token counts."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """The sampling parameters of the request. They are not used: the policy samples with the recipe's."""
    model: str = ""
    instructions: bool = False
    """Whether the first message has the `instructions` of the responses API, which the next response does not keep."""

    def ignored(self, used: Sampling) -> bool:
        """Returns whether the request asks for another sampling distribution than that of the run."""
        neutral = {"top_k": (-1.0, 0.0)} if used.top_k == 0 else {}
        for key, value in self.sampling.items():
            default = SAMPLING_KEYS[key]
            expected = getattr(used, key) if default is None else default
            if value != expected and value not in neutral.get(key, ()):
                return True
        return False


def chat_turn(body: bytes) -> TurnSpec:
    """Parses the body of a request to `/chat/completions`. Raises `ApiError` for what is not supported."""
    fields = BodyReader(body)
    model = fields.text("model", "")
    messages = chat_messages(fields.take("messages"))
    most = fields.integer("max_completion_tokens", None, 1)
    most = fields.integer("max_tokens", most, 1)
    tools = _tools(fields.take("tools", []), flat=False)
    calls = _tool_choice(fields.take("tool_choice", "auto"))
    stream = fields.boolean("stream")
    options = fields.object("stream_options")
    n = fields.integer("n", 1, 1, MOST_CHOICES) or 1
    stop = _stops(fields.take("stop", []))
    logprobs = fields.boolean("logprobs")
    fields.accept_only("top_logprobs", (0,), "is not supported; logprobs returns those of the sampled tokens")
    fields.accept_only("response_format", ({"type": "text"},), _ON_POLICY)
    fields.accept_only("logit_bias", ({},), _ON_POLICY)
    fields.accept_only("modalities", (["text"],), "answers are text")
    fields.accept_only("functions", ([],), "is OpenAI's old form of tools; use tools")
    sampling = _sampling(fields)
    fields.ignore(*_UNUSED, "function_call", "prediction", "extra_body")
    fields.check_all_read()
    usage = bool(options.get("include_usage"))
    return TurnSpec(messages, tools, calls, n, most, stop, logprobs, stream, usage, sampling, model)


def responses_turn(body: bytes, earlier: Mapping[str, Sequence[Message]]) -> TurnSpec:
    """Parses the body of a request to `/responses`. `earlier` has the conversations of earlier responses by id."""
    fields = BodyReader(body)
    model = fields.text("model", "")
    previous = fields.take("previous_response_id", None)
    if previous is not None and previous not in earlier:
        why = f"previous_response_id: this trajectory has no response {str(previous)[:80]!r}"
        raise ApiError(400, why, param="previous_response_id", code="previous_response_not_found")
    # As in OpenAI's API, the instructions of an earlier response are not part of the next one.
    messages = [*(earlier[previous] if previous is not None else ()), *_input_messages(fields.take("input"))]
    instructions = fields.text("instructions", "")
    if instructions:
        messages = [{"role": "system", "content": valid_text(instructions, "instructions")}, *messages]
    if not messages:
        raise bad_value("input", "is empty")
    named_results(messages)
    most = fields.integer("max_output_tokens", None, 1)
    tools = _tools(fields.take("tools", []), flat=True)
    calls = _tool_choice(fields.take("tool_choice", "auto"))
    stream = fields.boolean("stream")
    text = fields.object("text")
    if text.get("format") not in (None, {"type": "text"}):
        raise bad_value("text.format", _ON_POLICY)
    fields.accept_only("background", (False,), "is not supported; responses are returned directly")
    fields.accept_only("conversation", (), "is not supported; use previous_response_id, or send all items")
    fields.accept_only("prompt", (), "is not supported; send the text as input")
    fields.accept_only("top_logprobs", (0,), "is not supported")
    sampling = _sampling(fields)
    fields.ignore(*_UNUSED, "reasoning", "include", "truncation", "max_tool_calls", "stream_options")
    fields.check_all_read()
    return TurnSpec(
        messages, tools, calls, 1, most, (), False, stream, False, sampling, model, instructions=bool(instructions)
    )


def _sampling(fields: BodyReader) -> dict[str, float]:
    given = {key: fields.take(key, None) for key in SAMPLING_KEYS}
    for key, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise bad_value(key, "is not a number")
    return {key: float(value) for key, value in given.items() if value is not None}


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise bad_value("stop", "is neither text nor a list of texts")
    if len(stops) > MOST_STOPS:
        raise bad_value("stop", f"has {len(stops)} texts, over the limit of {MOST_STOPS}")
    return tuple(valid_text(stop, "stop") for stop in stops)


def _tool_choice(value: Any) -> bool:
    """Returns whether tool calls are read."""
    if value in ("auto", "none"):
        return value == "auto"
    raise bad_value("tool_choice", f"{str(value)[:80]} would force a call, which {_ON_POLICY}; use auto")


def _tools(value: Any, *, flat: bool) -> list[dict[str, Any]]:
    """Returns the tools as chat templates read them. With `flat`, the tools have the form of the responses API."""
    if not isinstance(value, list):
        raise bad_value("tools", "is not a list")
    found = []
    for number, tool in enumerate(value):
        where = f"tools[{number}]"
        if not isinstance(tool, dict):
            raise bad_value(where, "is not an object")
        if tool.get("type") != "function":
            raise bad_value(f"{where}.type", f"{str(tool.get('type'))[:40]!r} is not supported; use function")
        function = {key: tool[key] for key in tool if key != "type"} if flat else tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_value(f"{where}.{'name' if flat else 'function'}", "has no name")
        kept = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
        found.append({"type": "function", "function": kept})
    return found


# -- messages


def chat_messages(value: Any) -> list[Message]:
    """Returns the messages of a chat as chat templates read them."""
    if not isinstance(value, list) or not value:
        raise bad_value("messages", "is not a list of messages")
    return named_results([_chat_message(message, f"messages[{number}]") for number, message in enumerate(value)])


def _chat_message(message: Any, where: str) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise bad_value(f"{where}.role", f"{str(role)[:40]!r} is not one of {', '.join(ROLES)}")
    made: Message = {"role": _role(role), "content": _content(message.get("content"), where, role)}
    if role == "assistant":
        reasoning = next((message[key] for key in _REASONING if isinstance(message.get(key), str)), "")
        made |= {"reasoning_content": valid_text(reasoning, where)} if reasoning else {}
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise bad_value(f"{where}.tool_calls", "is not a list")
        made |= (
            {"tool_calls": [_chat_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]}
            if (calls)
            else {}
        )
    if role == "tool":
        made["tool_call_id"] = str(message.get("tool_call_id") or "")
    if isinstance(message.get("name"), str):
        made["name"] = valid_text(message["name"], f"{where}.name")
    return made


def _role(role: str) -> str:
    # `developer` is OpenAI's newer name of the role `system`; chat templates do not know it.
    return "system" if role == "developer" else role


def _chat_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_value(where, "has no function with a name")
    return _call(str(call.get("id") or ""), function["name"], function.get("arguments"), where)


def _call(call_id: str, name: str, arguments: Any, where: str) -> dict[str, Any]:
    """Returns a call as chat templates read it: arguments that are a JSON object become a dict."""
    if isinstance(arguments, str):
        valid_text(arguments, where)
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    function = {"name": valid_text(name, where), "arguments": {} if arguments is None else arguments}
    return {"id": call_id, "type": "function", "function": function}


def _content(content: Any, where: str, role: str) -> Content:
    """Returns the content as text, or as parts if it has images."""
    if isinstance(content, list):
        return joined([_part(part, f"{where}.content[{number}]") for number, part in enumerate(content)])
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, str):
        raise bad_value(f"{where}.content", "is not text")
    return valid_text(content, f"{where}.content")


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "refusal":
        return _text_part(str(part.get("refusal") or ""), where)
    if kind in IMAGE_PARTS:
        if (image := image_part(part)) is None:
            raise bad_value(where, "has no data URI; images are sent as data:image/png;base64,..., not as addresses")
        return image
    if kind not in _TEXT or not isinstance(part.get("text"), str):
        raise bad_value(where, f"is of type {str(kind)[:40]!r}; only text and images are supported")
    return _text_part(part["text"], where)


def _text_part(text: str, where: str) -> dict[str, Any]:
    return {"type": "text", "text": valid_text(text, where)}


def named_results(messages: list[Message]) -> list[Message]:
    """Adds the name of the tool to the results of calls, because some chat templates need it."""
    names = {
        call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls") or () if call
    }
    for message in messages:
        if message["role"] == "tool" and not message.get("name") and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
    return messages


def _input_messages(value: Any) -> list[Message]:
    """Returns the messages of the items of the responses API. Reasoning, text and calls of one turn become one
    assistant message."""
    if isinstance(value, str):
        return [{"role": "user", "content": valid_text(value, "input")}]
    if not isinstance(value, list):
        raise bad_value("input", "is neither text nor a list of items")
    messages: list[Message] = []
    for number, item in enumerate(value):
        where = f"input[{number}]"
        if not isinstance(item, dict):
            raise bad_value(where, "is not an object")
        kind = item.get("type", "message")
        if kind == "message":
            _add_message(messages, _chat_message(item, where))
        elif kind == "function_call":
            call = _call(str(item.get("call_id") or ""), str(item.get("name")), item.get("arguments"), where)
            turn = _open_turn(messages)
            turn["tool_calls"] = [*turn.get("tool_calls", []), call]
        elif kind == "function_call_output":
            output = _content(item.get("output"), where, "tool")
            messages.append({"role": "tool", "content": output, "tool_call_id": str(item.get("call_id") or "")})
        elif kind == "reasoning":
            parts = [*(item.get("content") or ()), *(item.get("summary") or ())]
            text = "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))
            messages.append({"role": "assistant", "content": "", **({"reasoning_content": text} if text else {})})
        else:
            raise bad_value(f"{where}.type", f"{str(kind)[:40]!r} is not supported")
    return [message for message in messages if message["role"] != "assistant" or len(message) > 2 or message["content"]]


def _add_message(messages: list[Message], message: Message) -> None:
    last = messages[-1] if messages else {}
    both = message["role"] == "assistant" == last.get("role")
    if both and not last["content"] and "tool_calls" not in last:
        messages[-1] = {**last, **message}  # the reasoning and the text of one turn
    else:
        messages.append(message)


def _open_turn(messages: list[Message]) -> Message:
    """Returns the assistant message to which a call belongs."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]
