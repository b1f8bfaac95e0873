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
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from lockstep.data.rendering import ChatText
from lockstep.data.tokens import as_array, token_facts, token_ids, token_ids_and_offsets, token_runs
from lockstep.data.vanished import lost_beside, refuse_vanished
from lockstep.errors import Refusal
from lockstep.types import Example, Message, Origin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[dict[str, Any]]
"""What the assistant may call, as JSON schemas."""

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Spans:
    """Text and the character ranges of it that are trained, in order."""

    text: str
    trained: tuple[tuple[int, int], ...]


def has_markers(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(tokenizer.chat_template) and _marked(tokenizer.get_chat_template())


@lru_cache(maxsize=16)
def _marked(template: str) -> bool:
    return bool(_MARKER.search(template))


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
    if not any("weight" in message for message in messages):
        return spans
    turns = [message for message in messages if message["role"] == "assistant"]
    kept = (span for span, turn in zip(spans.trained, turns, strict=True) if turn.get("weight", 1))
    return Spans(spans.text, tuple(kept))


def _by_markers(tokenizer: PreTrainedTokenizerBase, messages: list[Message], origin: Origin, tools: Tools) -> Spans:
    from transformers.utils.chat_template_utils import render_jinja_template

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
    chat = ChatText(tokenizer, messages, tools, origin)
    text = chat.upto(len(messages), open_turn=False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = chat.upto(i, open_turn=True)
        after = text if i + 1 == len(messages) else chat.upto(i + 1, open_turn=False)
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
    return ChatText(tokenizer, messages, tools, origin).upto(len(messages), open_turn=open_turn)


def encode_spans(tokenizer: PreTrainedTokenizerBase, spans: Spans, origin: Origin) -> tuple[Example, bool]:
    """Tokens of the text; also whether it had to be split at the span borders.

    A prompt must be the same tokens in training as in generation, where it stands alone. If a token of the whole
    text reaches over a border, the pieces between the borders are tokenised by themselves.
    """
    found = _between_borders(tokenizer, spans)
    if found is None:
        ids, trained, split = _by_offsets(tokenizer, spans)
    else:
        (ids, trained), split = found, False
    if not has_markers(tokenizer):
        _untrain_after_end(tokenizer, ids, trained)
    return Example(ids, bytes(trained), origin), split


def _between_borders(tokenizer: PreTrainedTokenizerBase, spans: Spans) -> tuple[array[int], bytearray] | None:
    """Tokens and whether each is trained, where the tokens can be counted between the borders of the spans."""
    text, borders = spans.text, [border for span in spans.trained for border in span]
    # A token of spaces alone has no place in the text for some tokenizers, and may count to what follows it.
    if any(text[start - 1 : start] == " " for start in borders[::2]) or borders != sorted(borders):
        return None
    runs = token_runs(tokenizer, text, borders)
    if runs is None:
        return None
    ids = as_array(runs)
    flags = (bytes([number % 2]) * (len(run) // ids.itemsize) for number, run in enumerate(runs))
    return ids, bytearray(b"".join(flags))


def _by_offsets(tokenizer: PreTrainedTokenizerBase, spans: Spans) -> tuple[array[int], bytearray, bool]:
    """The same by the place of each token in the text, and whether the text was split."""
    ids, offsets = token_ids_and_offsets(tokenizer, spans.text)
    trained, split = _inside(offsets, spans.trained)
    if split:
        ids, trained = [], bytearray()
        borders = [0, *[border for span in spans.trained for border in span], len(spans.text)]
        for number, (start, end) in enumerate(itertools.pairwise(borders)):
            piece = token_ids(tokenizer, spans.text[start:end])
            ids += piece
            trained += bytes([number % 2]) * len(piece)
    return array("q", ids), trained, split


def _inside(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> tuple[bytearray, bool]:
    """1 for each token that lies inside a span, and whether any reaches over a border of one."""
    flat = np.fromiter(itertools.chain.from_iterable(offsets), np.int64, 2 * len(offsets))
    starts, ends = flat[0::2], flat[1::2]
    inside, across = np.zeros(len(starts), dtype=bool), False
    for first, last in spans:
        within = (starts >= first) & (ends <= last)
        across = across or bool(((starts < last) & (ends > first) & ~within).any())
        inside |= within
    return bytearray(inside.astype(np.uint8).tobytes()), across


def _untrain_after_end(tokenizer: PreTrainedTokenizerBase, ids: array[int], trained: bytearray) -> None:
    """Templates put a line break after the end token; the model stops before it, so it is not trained."""
    facts = token_facts(tokenizer)
    for ended in facts.where_special(ids):
        if trained[ended]:
            after = ended + 1
            while after < len(ids) and trained[after] and facts.blank(tokenizer, ids[after]):
                trained[after] = 0
                after += 1


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that are not text: end-of-turn, end-of-text and their like."""
    return token_facts(tokenizer).special
