"""Renders chats with the chat template, and finds the text of the trained messages in the result.

By default the assistant turns are trained. The template's generation markers (`{% generation %}`) delimit the trained
text. Without markers, the trained text of a turn is what the template adds after the generation prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from lockstep.data.encode.builtin_templates import (
    BUILTIN,
    append_only_version,
    builtin_text,
    closing_version,
    same_without_thoughts,
    without_closing,
    without_dropped,
)
from lockstep.data.encode.chat_text import NO_INPUTS, ChatText, TemplateInputs, refuse_unused, refused_by_template
from lockstep.data.encode.messages import REASONING, as_written, image_placeholder, with_image_surroundings
from lockstep.data.encode.template_checks import refuse_dropped_by_template
from lockstep.data.encode.template_refusals import LATER, not_after_prompt, refuse_changed_turn, rewritten_later
from lockstep.data.encode.trained_tokens import Spans
from lockstep.errors import Refusal
from lockstep.types import Message, Origin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ASSISTANT = ("assistant",)
MAY_BE_EMPTY = ("system", "developer", "tool")
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Codes of refusals that the append-only version of a template may avoid.
_REWRITTEN = ("template-unstable", "template-changes-chat")


def has_markers(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(tokenizer.chat_template) and _marked(tokenizer.get_chat_template())


@lru_cache(maxsize=16)
def _marked(template: str) -> bool:
    return bool(_MARKER.search(template))


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    origin: Origin,
    inputs: TemplateInputs = NO_INPUTS,
    *,
    roles: Sequence[str] = ASSISTANT,
    append_only: bool = False,
    remedy: str = LATER,
) -> Spans:
    """Renders a chat that passed `check_messages`. Each trained message must appear unchanged in the text.

    If the tokenizer's template changes a trained turn, or writes no end token after it, and `append_only` is set, the
    chat is rendered with the built-in append-only version of the template. `remedy` is the advice if a template changes
    a turn when later ones follow.
    """
    given = (tokenizer, messages, origin, inputs, roles)
    if not append_only:
        return _rendered(*given, remedy=remedy)
    version, spans = closing_version(tokenizer), None
    if version is None:
        try:
            return _rendered(*given, remedy=None)
        except Refusal as refusal:
            if refusal.problems[0].code not in _REWRITTEN:
                raise
        version = append_only_version(tokenizer)
    if version is None:
        return _rendered(*given, remedy=remedy)
    try:
        spans = _rendered(*given, version, remedy)
    except Refusal as refusal:
        if refusal.problems[0].code in _REWRITTEN:
            raise
    if spans is None or not _same_chat(tokenizer, messages, origin, inputs, spans):
        # The tokenizer's template has a feature that its append-only version lacks, so its refusal is reported.
        return _rendered(*given, remedy=remedy)
    return spans


def _same_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    origin: Origin,
    inputs: TemplateInputs,
    spans: Spans,
) -> bool:
    """Returns whether the tokenizer's template renders a chat as its append-only version does, except for reasoning and
    for what it moves or drops."""
    changes, count = BUILTIN[spans.version].rewrites, len(messages)
    if changes == "system":
        return True
    original = ChatText(tokenizer, messages, origin, inputs).upto(count, open_turn=False)
    if changes != "drops":
        text = without_closing(spans.version, spans.text) if messages[-1]["role"] == "assistant" else spans.text
        return same_without_thoughts(original, text)
    kept, template = without_dropped(messages), builtin_text(spans.version)
    tried = (inputs, TemplateInputs((), inputs.arguments))  # the tools are rendered, or dropped
    texts = (ChatText(tokenizer, kept, origin, one, template).upto(count, open_turn=False) for one in tried)
    return any(same_without_thoughts(original, text) for text in texts)


def render_turn(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    index: int,
    origin: Origin,
    inputs: TemplateInputs = NO_INPUTS,
    *,
    append_only: bool = False,
    where: str = "",
) -> Spans:
    """Renders a chat up to the assistant turn `index` and trains only this turn, in the context in which it is
    generated.

    The tokenizer's template renders the context. If this template does not render the turn as the model generates it
    (for example, without its reasoning), and `append_only` is set, its append-only version renders the turn.
    """
    messages = [
        {**turn, "weight": 0} if turn["role"] == "assistant" and number < index else turn
        for number, turn in enumerate(messages[: index + 1])
    ]
    if has_markers(tokenizer):
        return render_chat(tokenizer, messages, origin, inputs, append_only=append_only)
    chat = ChatText(tokenizer, messages, origin, inputs)
    before, text = chat.upto(index, open_turn=True), chat.upto(index + 1, open_turn=False)
    version = (closing_version(tokenizer) if append_only else None) or ""
    if version or not text.startswith(before):
        version = version or (append_only_version(tokenizer) if append_only else None) or ""
        turn = _turn_of_version(tokenizer, messages, origin, inputs, version, chat) if version else None
        if turn is None:
            raise not_after_prompt(tokenizer, messages, origin, inputs, where=where)
        text = before + turn
    spans = Spans(text, ((len(before), len(text)),), version=version)
    refuse_changed_turn(tokenizer, messages, index, (text, len(before), len(text)), origin, inputs)
    refuse_dropped_by_template(spans.text, messages, inputs.tools, origin, image_placeholder(tokenizer))
    return spans


def _turn_of_version(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    origin: Origin,
    inputs: TemplateInputs,
    version: str,
    original: ChatText,
) -> str | None:
    """Returns the last turn in the append-only version, or None if it does not fit the original generation prompt."""
    chat, count = ChatText(tokenizer, messages, origin, inputs, builtin_text(version)), len(messages)
    before, after = chat.upto(count - 1, open_turn=True), chat.upto(count, open_turn=False)
    prompts = [_generation_prompt(one, count - 1) for one in (original, chat)]
    fits = prompts[0] is not None and prompts[0] == prompts[1] and after.startswith(before)
    return after[len(before) :] if fits else None


def _generation_prompt(chat: ChatText, count: int) -> str | None:
    closed, opened = chat.upto(count, open_turn=False), chat.upto(count, open_turn=True)
    return opened[len(closed) :] if opened.startswith(closed) else None


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    origin: Origin,
    inputs: TemplateInputs,
    roles: Sequence[str],
    version: str = "",
    remedy: str | None = LATER,
) -> Spans:
    """Renders a chat with the tokenizer's template or its append-only version. If `remedy` is None, the error about a
    changed turn has no advice, because finding advice takes time."""
    numbers, template = trained_messages(messages, roles), builtin_text(version) if version else None
    marked = not version and tuple(roles) == ASSISTANT and has_markers(tokenizer)
    if marked:
        text, spans = _by_markers(tokenizer, messages, origin, inputs)
    else:
        text, spans = _by_prefixes(tokenizer, messages, origin, inputs, numbers, template, remedy)
    for number, span in zip(numbers, spans, strict=True):
        refuse_changed_turn(tokenizer, messages, number, (text, *span), origin, inputs, template)
    refuse_dropped_by_template(text, messages, inputs.tools, origin, image_placeholder(tokenizer))
    return Spans(text, tuple(sorted(spans)), marked, version)


def trained_messages(messages: Sequence[Message], roles: Sequence[str] = ASSISTANT) -> list[int]:
    """Returns the indices of trained messages, which have one of `roles` and no weight of 0. Messages other than
    assistant turns must also have text."""
    return [
        number
        for number, message in enumerate(messages)
        if message["role"] in roles
        and is_trained(message)
        and (message["role"] == "assistant" or str(message["content"]).strip())
    ]


def check_messages(messages: list[Message], origin: Origin) -> None:
    """Raises a `Refusal` for anything that is not a chat with an assistant turn to train."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise Refusal.at(
            origin,
            "a chat is a list of {role, content} messages",
            "set data.messages_key or data.shape",
            code="invalid-chat",
        )
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
        why = f"the chat has no assistant turn, so there is nothing to train: it has turns of {roles}"
        raise Refusal.at(origin, why, "fix or remove the row", code="no-answer")
    if messages[0]["role"] == "assistant":
        raise Refusal.at(
            origin,
            "empty prompt: the chat starts with the assistant",
            "remove the first assistant turn, or put a user turn before it",
            code="empty-prompt",
        )
    for number, message in enumerate(messages, 1):
        refuse_no_content(message, number, origin)
        _refuse_two_thoughts(message, number, origin)


def refuse_no_content(message: Message, number: int, origin: Origin) -> None:
    """Raises a `Refusal` for an empty message without tool calls. Tool results and system messages may be empty."""
    content, role = message.get("content"), message["role"]
    if not isinstance(content, str) or not (content.strip() or message.get("tool_calls") or role in MAY_BE_EMPTY):
        raise Refusal.at(
            origin,
            f"message {number} ({role}) is empty or not text",
            "write the message as text, or remove the row",
            code="empty-field",
        )


def _refuse_two_thoughts(message: Message, number: int, origin: Origin) -> None:
    if len(message) == 2:
        return
    keys = [key for key in REASONING if isinstance(message.get(key), str) and message[key].strip()]
    keys += ["content (<think>)"] if keys and "</think>" in str(message["content"]) else []
    if len(keys) > 1:
        raise Refusal.at(
            origin,
            f"message {number} ({message['role']}) has its reasoning twice: in {' and in '.join(keys)}",
            "keep one of them",
            code="invalid-chat",
        )


def is_trained(turn: Message) -> bool:
    """Returns whether a message is trained. A message with weight 0 is not trained."""
    return bool(turn.get("weight", 1))


Found = tuple[str, list[tuple[int, int]]]
"""The text of a chat, and the character range of each trained message."""


def _by_markers(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], origin: Origin, inputs: TemplateInputs
) -> Found:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = tokenizer.get_chat_template()
    refuse_unused(template, inputs.arguments, origin)
    try:
        texts, spans = render_jinja_template(
            [as_written(tokenizer, messages, template)],
            tools=list(inputs.tools) or None,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**tokenizer.special_tokens_map, **inputs.arguments},
        )
    except Exception as error:  # a template is a program, and may fail in any way
        number = ChatText(tokenizer, messages, origin, inputs).first_refused()
        raise refused_by_template(error, origin, number) from error
    turns = [message for message in messages if message["role"] == "assistant"]
    if len(spans[0]) != len(turns):
        raise Refusal.at(
            origin,
            f"the chat template renders {len(spans[0])} of {len(turns)} assistant turns as trained text",
            "fix the template: put generation markers ({% generation %}) around each assistant turn",
            code="template-changes-chat",
        )
    kept = [span for span, turn in zip(spans[0], turns, strict=True) if is_trained(turn)]

    def written(text: str) -> str:
        return with_image_surroundings(tokenizer, text)

    return written(texts[0]), [(len(written(texts[0][:start])), len(written(texts[0][:end]))) for start, end in kept]


def _by_prefixes(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    origin: Origin,
    inputs: TemplateInputs,
    numbers: Sequence[int],
    template: str | None,
    remedy: str | None,
) -> Found:
    chat = ChatText(tokenizer, messages, origin, inputs, template)
    text = chat.upto(len(messages), open_turn=False)
    spans = []
    for i in numbers:
        if messages[i]["role"] != "assistant":
            spans.append(_content_span(tokenizer, messages, i, text, origin, inputs, template))
            continue
        before = chat.upto(i, open_turn=True)
        after = text if i + 1 == len(messages) else chat.upto(i + 1, open_turn=False)
        if not (after.startswith(before) and text.startswith(after)):
            if remedy is None or after.startswith(before):
                raise rewritten_later(i + 1, origin, remedy or "")
            raise not_after_prompt(tokenizer, messages[: i + 1], origin, inputs, template)
        spans.append((len(before), len(after)))
    return text, spans


def _content_span(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    index: int,
    text: str,
    origin: Origin,
    inputs: TemplateInputs,
    template: str | None,
) -> tuple[int, int]:
    """Returns the character range of a non-assistant message's content, including the special token after it.

    The message is replaced by a mark, because its words may also occur in other messages or in the template.
    """
    mark = next(mark for n in range(len(text) + 1) if (mark := f"Zq{n}Xk{n}Zq") not in text)
    marked = [*messages[:index], {**messages[index], "content": mark}, *messages[index + 1 :]]
    shown = ChatText(tokenizer, marked, origin, inputs, template).upto(len(messages), open_turn=False)
    head, _, tail = shown.partition(mark)
    start, end, content = len(head), len(text) - len(tail), str(messages[index]["content"]).strip()
    spellings = (content, json.dumps(content, ensure_ascii=False)[1:-1])
    if not (text.startswith(head) and text.endswith(tail) and mark in shown and text[start:end].strip() in spellings):
        raise Refusal.at(
            origin,
            f"the chat template changes message {index + 1} ({messages[index]['role']}), so it cannot be trained",
            "remove its role from data.train_roles, or give the message a weight of 0",
            code="template-changes-chat",
        )
    special = (token for token in tokenizer.all_special_tokens if token and text.startswith(token, end))
    return start, end + len(max(special, key=len, default=""))
