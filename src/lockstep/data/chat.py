"""A chat as text with the spans that are trained, and such text as tokens.

Every assistant turn is trained and nothing else. Where the template has generation markers, they say what an
assistant turn is; elsewhere it is what the template adds after the prompt it would generate from.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from lockstep.data.vanished import lost_beside, refuse_vanished
from lockstep.errors import Refusal
from lockstep.types import Example, Message, Origin

Tools = Sequence[dict[str, Any]]
"""What the assistant may call, as JSON schemas."""

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Spans:
    """Text and the character ranges of it that are trained, in order."""

    text: str
    trained: tuple[tuple[int, int], ...]


def has_markers(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(tokenizer.chat_template) and bool(_MARKER.search(tokenizer.get_chat_template()))


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], origin: Origin, tools: Tools = ()
) -> Spans:
    """A checked chat in the tokenizer's template; each assistant turn must be there, whole."""
    spans = (_by_markers if has_markers(tokenizer) else _by_prefixes)(tokenizer, messages, origin, tools)
    turns = [message for message in messages if message["role"] == "assistant"]
    if len(spans.trained) != len(turns):
        raise Refusal.at(
            origin,
            f"the chat template renders {len(spans.trained)} of {len(turns)} assistant turns as trained text",
            "mend the template: each assistant turn needs its own generation markers",
        )
    for number, ((start, end), turn) in enumerate(zip(spans.trained, turns, strict=True), 1):
        if str(turn["content"]).strip() not in spans.text[start:end]:
            raise Refusal.at(
                origin,
                f"the chat template drops or changes assistant turn {number}",
                "use a template that renders assistant content as it is (no stripped reasoning), or split the row",
            )
        lost = lost_beside(turn, spans.text[start:end])
        if lost:
            raise Refusal.at(
                origin,
                f"the chat template drops the {lost} from what is trained of assistant turn {number}",
                "use a template that writes it (data.template), write it into the content, or remove it from the row",
            )
    refuse_vanished(spans.text, messages, tools, origin)
    return spans


def check_messages(messages: list[Message], origin: Origin) -> None:
    """Refuse what is no chat with something to train."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise Refusal.at(origin, "a chat is a list of {role, content} messages", "set data.messages_key or data.shape")
    if not any(message["role"] == "assistant" for message in messages):
        raise Refusal.at(origin, "the chat has no assistant turn, so there is nothing to train")
    if messages[0]["role"] == "assistant":
        raise Refusal.at(origin, "empty prompt: the chat starts with the assistant")
    for number, message in enumerate(messages, 1):
        refuse_no_content(message, number, origin)


def refuse_no_content(message: Message, number: int, origin: Origin, remedy: str = "") -> None:
    """A message is text, or calls tools; a weight of 0 says that a turn of the assistant is not trained."""
    content = message.get("content")
    if not isinstance(content, str) or not (content.strip() or message.get("tool_calls")):
        raise Refusal.at(origin, f"message {number} ({message['role']}) is empty or not text", remedy)
    if message.get("weight", 1) not in (0, 1):
        raise Refusal.at(origin, f"message {number} has a weight of {message['weight']!r}", "a weight is 0 or 1")


def trained_turns(spans: Spans, messages: list[Message]) -> Spans:
    """Without the assistant turns whose weight is 0."""
    turns = [message for message in messages if message["role"] == "assistant"]
    kept = (span for span, turn in zip(spans.trained, turns, strict=True) if turn.get("weight", 1))
    return Spans(spans.text, tuple(kept))


def _by_markers(tokenizer: PreTrainedTokenizerBase, messages: list[Message], origin: Origin, tools: Tools) -> Spans:
    try:
        texts, spans = render_jinja_template(
            [messages],
            tools=list(tools) or None,
            chat_template=tokenizer.get_chat_template(),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    except TemplateError as error:
        raise Refusal.at(origin, f"the chat template refuses this chat: {error}") from error
    return Spans(texts[0], tuple((start, end) for start, end in spans[0]))


def _by_prefixes(tokenizer: PreTrainedTokenizerBase, messages: list[Message], origin: Origin, tools: Tools) -> Spans:
    text = render_prompt(tokenizer, messages, origin, tools, open_turn=False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render_prompt(tokenizer, messages[:i], origin, tools, open_turn=True)
        after = render_prompt(tokenizer, messages[: i + 1], origin, tools, open_turn=False)
        if not (text.startswith(after) and after.startswith(before)):
            raise Refusal.at(
                origin,
                f"the chat template renders message {i + 1} differently once later messages follow, "
                "so its trained text cannot be found",
                "add generation markers to the template, or keep only the last assistant turn in the row",
            )
        spans.append((len(before), len(after)))
    return Spans(text, tuple(spans))


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    origin: Origin,
    tools: Tools = (),
    *,
    open_turn: bool = True,
) -> str:
    """The chat as text; with `open_turn` it ends where the assistant begins to speak."""
    try:
        return tokenizer.apply_chat_template(
            messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=open_turn
        )
    except TemplateError as error:
        raise Refusal.at(origin, f"the chat template refuses this chat: {error}") from error


def encode_spans(tokenizer: PreTrainedTokenizerBase, spans: Spans, origin: Origin) -> tuple[Example, bool]:
    """Tokens of the text; also whether it had to be split at the span borders.

    A prompt must be the same tokens in training as in generation, where it stands alone. If a token of the whole
    text reaches over a border, the pieces between the borders are tokenised by themselves.
    """
    encoded = tokenizer(spans.text, add_special_tokens=False, return_offsets_mapping=True)
    inside = [_inside(start, end, spans.trained) for start, end in encoded["offset_mapping"]]
    split = any(within is None for within in inside)
    if not split:
        ids, trained = encoded["input_ids"], [bool(within) for within in inside]
    else:
        ids, trained = [], []
        borders = [0, *[border for span in spans.trained for border in span], len(spans.text)]
        for number, (start, end) in enumerate(itertools.pairwise(borders)):
            piece = tokenizer(spans.text[start:end], add_special_tokens=False)["input_ids"]
            ids += piece
            trained += [number % 2 == 1] * len(piece)
    if not has_markers(tokenizer):
        _untrain_after_end(tokenizer, ids, trained)
    return Example(array("q", ids), bytes(trained), origin), split


def _inside(start: int, end: int, spans: tuple[tuple[int, int], ...]) -> bool | None:
    """True inside a span, False outside all, None across a border."""
    for first, last in spans:
        if start >= first and end <= last:
            return True
        if start < last and end > first:
            return None
    return False


def _untrain_after_end(tokenizer: PreTrainedTokenizerBase, ids: list[int], trained: list[bool]) -> None:
    """Templates put a line break after the end token; the model stops before it, so it is not trained."""
    special = special_ids(tokenizer)
    ended = False
    for i, token in enumerate(ids):
        if not trained[i]:
            ended = False
        elif ended and not tokenizer.decode([token]).strip():
            trained[i] = False
        else:
            ended = token in special


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that are not text: end-of-turn, end-of-text and their like."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))
