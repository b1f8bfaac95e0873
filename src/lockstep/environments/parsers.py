"""Parses the reply of a model: content, reasoning and tool calls.

`tokenizer.response_template` of transformers is used if the tokenizer has one. Otherwise the format of tool calls is
found in the chat template, or given by name (`call_formats.py`). Whatever the model wrote, the result is a `Reply`: an
invalid call becomes an error text for the model. Nothing in a reply is executed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from lockstep.environments.call_formats import FORMATS, THINK, CallFormat, RawCall, Reasoning, call_of_message
from lockstep.environments.environment import Reply
from lockstep.environments.json_schema import fitted_arguments, shown
from lockstep.environments.tools import FunctionTool
from lockstep.errors import Refusal
from lockstep.trajectory import ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_CALLS = 64
"""Maximum number of calls that are read from a reply. A model that repeats itself could write thousands."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
# An id appears in the message with the result of its call, so it must not contain special tokens.
_IDENTITY = re.compile(r"[\w.:-]{1,64}")


def detect_parser(tokenizer: PreTrainedTokenizerBase | str | None) -> str:
    """Returns the name of the tool-call format of a tokenizer, or of the text of its chat template; `plain` if the
    template has no tool calls."""
    if tokenizer is None or isinstance(tokenizer, str):
        return _detected(tokenizer or "")
    template = tokenizer.chat_template
    texts = template.values() if isinstance(template, Mapping) else [template or ""]
    found = [_detected(str(text)) for text in texts]
    return next((name for name in found if name != "plain"), "plain")


@lru_cache(maxsize=64)
def _detected(template: str) -> str:
    marked = ((name, form) for name, form in FORMATS.items() if form.marks)
    return next((name for name, form in marked if all(mark in template for mark in form.marks)), "plain")


def format_named(name: str, key: str = "parser") -> CallFormat:
    """Returns a tool-call format. Raises a `Refusal` for an unknown name; `key` is the recipe key with the name."""
    if name not in FORMATS:
        raise Refusal.at(
            key, f"there is no parser {name!r}", f"use auto, or one of {', '.join(FORMATS)}", code="unknown-name"
        )
    return FORMATS[name]


def parse_reply(
    reply: str | Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None = None,
    template_family: str = "auto",
    tools: Sequence[FunctionTool | Mapping[str, Any]] = (),
    *,
    prompt: str = "",
    finish: str = "stop",
    first_call: int = 0,
) -> Reply:
    """Parses the sampled text or token ids of a turn.

    `tools` are function tools, or tool schemas as in a chat template. `prompt` is the text before the turn: templates
    may open the reasoning in the generation prompt. `first_call` is the number of calls in earlier turns, for the ids
    of calls without an id.
    """
    form = format_named(detect_parser(tokenizer) if template_family == "auto" else template_family)
    ids = () if isinstance(reply, str) else tuple(map(int, reply))
    sampled = (reply if isinstance(reply, str) else _decoded(ids, tokenizer)).encode("utf-8", "replace").decode()
    text = _without_ends(sampled, form, tokenizer)
    schemas = _parameters(tools)
    content, reasoning, found = _read(text, form, prompt, schemas)
    if getattr(tokenizer, "response_template", None) is not None:
        given = _read_by_template(sampled, tokenizer, prompt)
        if isinstance(given, tuple):
            content, reasoning, valid = given
            found = [*valid, *(call for call in found if call.error)]
        elif form is FORMATS["plain"]:
            found = [RawCall(error=f"cannot be read: {given}")]
    special = _special_tokens(tokenizer) if found else ()
    calls, errors = list[ToolCall](), list[str]()
    for number, call in enumerate(found[:MOST_CALLS], 1):
        error, arguments = _checked(call, number, schemas)
        identity = call.id or f"call{first_call + number:05}"
        if not _IDENTITY.fullmatch(identity):
            error = error or f"Tool call {number} ({call.name}): the id {shown(identity)} is not possible here."
            identity = f"call{first_call + number:05}"
        error = _without(special, error)
        if call.name:
            calls.append(ToolCall(call.name, arguments, identity, error))
        errors += [error] if error else []
    if len(found) > MOST_CALLS:
        errors.append(f"The turn has more than {MOST_CALLS} tool calls.")
    if any(call.error for call in found) and form.shows_example:
        errors.append(f"Write a call as:\n{form.example}")
    return Reply(text, content, reasoning, tuple(calls), "\n".join(errors), finish, ids)


def _decoded(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Decodes with special tokens, because some formats consist of them."""
    if tokenizer is None:
        raise TypeError("token ids need a tokenizer")
    known = [token for token in ids if 0 <= token < len(tokenizer)]  # the head of a model may have more outputs
    text = tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text if isinstance(text, str) else "".join(text)


def _without_ends(text: str, form: CallFormat, tokenizer: PreTrainedTokenizerBase | None) -> str:
    own = (tokenizer.eos_token, tokenizer.pad_token) if tokenizer is not None else ()
    ends = tuple(str(token) for token in (*form.ends, *own) if token)
    while ends and text.endswith(ends):
        text = next(text[: -len(end)] for end in ends if text.endswith(end))
    return text


def _parameters(tools: Sequence[FunctionTool | Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Returns the schema of the arguments of each tool, by its name."""
    found = {}
    for tool in tools:
        schema = tool.schema if isinstance(tool, FunctionTool) else tool
        function = schema.get("function", schema)
        parameters = function.get("parameters")
        found[str(function["name"])] = parameters if isinstance(parameters, Mapping) else {}
    return found


def _read(text: str, form: CallFormat, prompt: str, schemas: Mapping[str, Any]) -> tuple[str, str, list[RawCall]]:
    """Returns content, reasoning and calls. Calls inside the reasoning are not calls."""
    thought, rest = _split_reasoning(text, form, prompt)
    content, reasoning, calls = [""], [thought], list[RawCall]()
    for part in form.read(rest) if schemas or not form.needs_tools else [rest]:
        if isinstance(part, RawCall):
            calls.append(part)
            content.append("")
            if len(calls) > MOST_CALLS:
                break
        elif isinstance(part, Reasoning):
            reasoning.append(part)
        else:
            content[-1] += part
    texts = ("\n".join(filter(None, map(str.strip, parts))) for parts in (content, reasoning))
    return next(texts), next(texts), calls


def _split_reasoning(text: str, form: CallFormat, prompt: str) -> tuple[str, str]:
    opening, closing = form.think
    if not opening:
        return "", text
    if text.lstrip().startswith(THINK[0]):  # also models whose template has other marks
        opening, closing = THINK
    opened, body = prompt.rstrip().endswith(opening), text
    if text.lstrip().startswith(opening):
        opened, body = True, text.lstrip()[len(opening) :]
    thought, closed, rest = body.partition(closing)
    if closed and (opened or opening not in thought):
        return thought.strip(), rest
    return (body.strip(), "") if opened else ("", text)


def _read_by_template(text: str, tokenizer: Any, prompt: str) -> tuple[str, str, list[RawCall]] | str:
    """Returns content, reasoning and calls as the tokenizer's response template finds them, or why it fails."""
    try:
        message = tokenizer.parse_response(text, prefix=prompt)
        calls = [call_of_message(call) for call in message.get("tool_calls") or []]
        reasoning = next((message[key] for key in _REASONING if isinstance(message.get(key), str)), "")
        content = message.get("content")
    except Exception as error:  # noqa: BLE001 - a response template may fail in any way
        return (str(error).splitlines() or [type(error).__name__])[0]
    return content.strip() if isinstance(content, str) else "", reasoning.strip(), calls


def _checked(call: RawCall, number: int, schemas: Mapping[str, Mapping[str, Any]]) -> tuple[str, Mapping[str, Any]]:
    """Checks a call against the tools. Returns its error, and its arguments with the types of the schema."""
    label, given = f"Tool call {number}", call.arguments if isinstance(call.arguments, dict) else {}
    if call.error:
        return f"{label}{f' ({call.name})' if call.name else ''} {call.error}.", given
    if call.name not in schemas:
        near = get_close_matches(call.name, list(schemas), 1)
        names = f"the tools are: {', '.join(schemas)}" if schemas else "there are no tools"
        hint = f" Did you mean {near[0]}?" if near else ""
        return f"{label}: there is no tool named {shown(call.name)}; {names}.{hint}", given
    fitted, errors = fitted_arguments(call.arguments, schemas[call.name])
    return (f"{label} ({call.name}): {'; '.join(errors)}.", given) if errors else ("", fitted)


def _special_tokens(tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()  # some tokenizer classes have no such table
    return sorted((str(token) for token in added if token.special), key=len, reverse=True)


def _without(tokens: Sequence[str], text: str) -> str:
    """Removes special tokens that the model wrote into a call: in a message to the model they would end the message."""
    while found := next((token for token in tokens if token in text), None):  # a removal can join two parts of a token
        text = text.replace(found, "")
    return text
