"""Renders chats with the chat template, finds the trained text of the assistant, and tokenises the result."""

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

from lockstep.data.encode.dialogue import common_length
from lockstep.data.encode.messages import as_written
from lockstep.data.encode.template_checks import dropped_by_template, refuse_dropped_by_template
from lockstep.data.encode.tokenizer_cache import as_array, token_facts, token_ids, token_ids_and_offsets, token_runs
from lockstep.errors import Refusal
from lockstep.types import Example, Message, Origin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatText:
    """One chat, rendered by the tokenizer's template up to any of its messages.

    A chat is rendered once per turn, and `apply_chat_template` is slow, because it copies every message and rebuilds
    the template context in each call. Messages that have only role and content are therefore rendered directly by the
    compiled template. The output of the compiled template is compared with `apply_chat_template` on first use.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: list[Message],
        tools: Sequence[dict[str, Any]],
        origin: Origin,
    ):
        self._tokenizer, self._tools, self._origin = tokenizer, tools, origin
        self._messages = as_written(tokenizer, messages)
        self._fast = _fast_template_of(tokenizer) if not tools and all(map(_is_plain, messages)) else None
        self._special = tokenizer.special_tokens_map if self._fast is not None else {}

    def upto(self, count: int, *, open_turn: bool) -> str:
        """Renders the first `count` messages. With `open_turn` the text ends with the generation prompt."""
        messages, fast = self._messages[:count], self._fast
        if fast is None or not messages:
            return self._apply_template(messages, open_turn)
        text = fast(messages, self._special, open_turn)
        if text is not None and open_turn in fast.checked:
            return text
        expected = self._apply_template(messages, open_turn)
        fast.checked.add(open_turn)
        if text != expected:
            self._fast, fast.correct = None, False
        return expected

    def _apply_template(self, messages: list[Message], open_turn: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=list(self._tools) or None, tokenize=False, add_generation_prompt=open_turn
            )
        except Exception as error:  # a template is a program, and may fail in any way
            raise refused_by_template(error, self._origin) from error
        return text


def refused_by_template(error: Exception, origin: Origin) -> Refusal:
    why = f"the chat template refuses this chat: {error}"
    return Refusal.at(
        origin, why, "fix or remove the row, or use another template (data.template)", code="template-error"
    )


def _is_plain(message: Message) -> bool:
    return len(message) == 2 and type(message.get("role")) is str and type(message.get("content")) is str


class _FastTemplate:
    """A compiled chat template that renders without `apply_chat_template`."""

    def __init__(self, compiled: Any):
        self._compiled = compiled
        self._globals = {**compiled.globals, "tools": None, "documents": None}
        self.correct = True
        """Becomes False when an output differs from that of `apply_chat_template`."""
        self.checked: set[bool] = set()
        """Values of `open_turn` for which the output was compared with `apply_chat_template`."""

    def __call__(self, messages: list[Message], special: dict[str, Any], open_turn: bool) -> str | None:
        """Renders the chat; returns None if the template fails."""
        variables = {**self._globals, "messages": messages, "add_generation_prompt": open_turn, **special}
        compiled = self._compiled
        context = compiled.environment.context_class(compiled.environment, variables, compiled.name, compiled.blocks)
        try:
            return "".join(compiled.root_render_func(context))
        except Exception:  # noqa: BLE001 - any failure: `apply_chat_template` fails in the same way and reports why
            return None


def _fast_template_of(tokenizer: PreTrainedTokenizerBase) -> _FastTemplate | None:
    """Returns the compiled template, or None if the tokenizer overrides `apply_chat_template`."""
    from transformers import PreTrainedTokenizerBase

    kind, base = type(tokenizer), PreTrainedTokenizerBase
    if kind.apply_chat_template is not base.apply_chat_template or kind.get_chat_template is not base.get_chat_template:
        return None
    fast = _fast_template(tokenizer.get_chat_template())
    return fast if fast is not None and fast.correct else None


@lru_cache(maxsize=16)
def _fast_template(template: str) -> _FastTemplate | None:
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template
    except ImportError:
        return None  # the function is private to transformers and may be missing
    try:
        return _FastTemplate(_compile_jinja_template(template))
    except TemplateError:
        return None  # `apply_chat_template` reports the error


# Only assistant turns are trained. The template's generation markers (`{% generation %}`) delimit the trained text.
# Without markers, the trained text is what the template adds after the generation prompt.

Tools = Sequence[dict[str, Any]]
"""Tools of a chat, as JSON schemas."""

MAY_BE_EMPTY = ("system", "developer", "tool")
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Spans:
    """A rendered text and the character ranges of its trained parts, in order."""

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
    """Renders a chat that passed `check_messages`. Each trained assistant turn must appear unchanged in the text."""
    spans = (_by_markers if has_markers(tokenizer) else _by_prefixes)(tokenizer, messages, origin, tools)
    turns = [(number, turn) for number, turn in enumerate(_assistants(messages), 1) if is_trained(turn)]
    for (start, end), (number, turn) in zip(spans.trained, turns, strict=True):
        if not contains_turn(spans.text, start, end, turn):
            raise Refusal.at(
                origin,
                f"the chat template drops or changes assistant turn {number}",
                "use a template that renders assistant content as it is (no stripped reasoning), or split the row",
                code="template-changes-chat",
            )
        dropped = dropped_by_template(turn, spans.text[start:end])
        if dropped:
            raise Refusal.at(
                origin,
                f"the chat template drops the {dropped} from the trained text of assistant turn {number}",
                "use a template that renders this part (data.template), write the part into the content, or remove it",
                code="template-changes-chat",
            )
    refuse_dropped_by_template(spans.text, messages, tools, origin)
    return spans


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


def contains_turn(text: str, start: int, end: int, turn: Message) -> bool:
    """Returns whether the trained text, from `start` to `end`, contains the turn.

    The turn may begin before `start`, if the generation prompt already contains the first characters of the answer (for
    example `<think>`).
    """
    content = str(turn["content"]).strip()
    return not content or text.find(content, max(0, start + 1 - len(content)), end) >= 0


def is_trained(turn: Message) -> bool:
    """Returns whether an assistant turn is trained. A turn with weight 0 is not trained."""
    return bool(turn.get("weight", 1))


def _assistants(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message["role"] == "assistant"]


def _by_markers(tokenizer: PreTrainedTokenizerBase, messages: list[Message], origin: Origin, tools: Tools) -> Spans:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, spans = render_jinja_template(
            [as_written(tokenizer, messages)],
            tools=list(tools) or None,
            chat_template=tokenizer.get_chat_template(),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    except Exception as error:  # a template is a program, and may fail in any way
        raise refused_by_template(error, origin) from error
    turns = _assistants(messages)
    if len(spans[0]) != len(turns):
        raise Refusal.at(
            origin,
            f"the chat template renders {len(spans[0])} of {len(turns)} assistant turns as trained text",
            "fix the template: put generation markers ({% generation %}) around each assistant turn",
            code="template-changes-chat",
        )
    trained = ((first, last) for (first, last), turn in zip(spans[0], turns, strict=True) if is_trained(turn))
    return Spans(texts[0], tuple(trained))


def _by_prefixes(tokenizer: PreTrainedTokenizerBase, messages: list[Message], origin: Origin, tools: Tools) -> Spans:
    chat = ChatText(tokenizer, messages, tools, origin)
    text = chat.upto(len(messages), open_turn=False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or not is_trained(message):
            continue
        before = chat.upto(i, open_turn=True)
        after = text if i + 1 == len(messages) else chat.upto(i + 1, open_turn=False)
        if not after.startswith(before):
            refuse_another_opening(before, after, message, f"message {i + 1}", origin)
        if not (text.startswith(after) and after.startswith(before)):
            raise Refusal.at(
                origin,
                f"the chat template renders message {i + 1} differently once later messages follow, "
                "so its trained text cannot be found",
                "add generation markers to the template, or train only the last assistant turn: give the other turns "
                "a weight of 0",
                code="template-unstable",
            )
        spans.append((len(before), len(after)))
    return Spans(text, tuple(spans))


def refuse_another_opening(before: str, after: str, turn: Message, where: str, origin: Origin) -> None:
    """Raises a `Refusal` for a turn that does not begin with the end of the generation prompt `before`."""
    same = common_length([before, after])
    if after[same:].lstrip().startswith(str(turn["content"]).strip() or "\0"):
        opening = before[same:]
        raise Refusal.at(
            origin,
            f"the generation prompt of the chat template ends with {opening!r}, but {where} is rendered without it",
            f"begin the answer with {opening!r}, or use a template with the same text in both (data.template)",
            code="template-unstable",
        )


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    origin: Origin,
    tools: Tools = (),
    *,
    open_turn: bool = True,
) -> str:
    """Renders the chat as text. With `open_turn` the text ends with the generation prompt."""
    return ChatText(tokenizer, messages, tools, origin).upto(len(messages), open_turn=open_turn)


def encode_spans(tokenizer: PreTrainedTokenizerBase, spans: Spans, origin: Origin) -> tuple[Example, bool]:
    """Tokenises the text of `spans`; also returns whether the text was split at the borders of trained ranges.

    A prompt must have the same tokens in training as in generation. If a token of the full text crosses the start or
    end of a trained range, the text is therefore split at these positions, and the parts are tokenised separately.
    """
    counted = _between_borders(tokenizer, spans)
    if counted is None:
        ids, trained, split = _by_offsets(tokenizer, spans)
    else:
        (ids, trained), split = counted, False
    if not has_markers(tokenizer):
        _untrain_after_end(tokenizer, ids, trained)
    return Example(ids, bytes(trained), origin), split


def _between_borders(tokenizer: PreTrainedTokenizerBase, spans: Spans) -> tuple[array[int], bytearray] | None:
    """Returns the tokens and a trained flag per token, or None if tokens cannot be counted per trained range."""
    text, borders = spans.text, [border for span in spans.trained for border in span]
    # Some tokenizers report no offset for a token of spaces, or add its range to the following token.
    if any(text[start - 1 : start] == " " for start in borders[::2]) or borders != sorted(borders):
        return None
    runs = token_runs(tokenizer, text, borders)
    if runs is None:
        return None
    ids = as_array(runs)
    flags = (bytes([number % 2]) * (len(run) // ids.itemsize) for number, run in enumerate(runs))
    return ids, bytearray(b"".join(flags))


def _by_offsets(tokenizer: PreTrainedTokenizerBase, spans: Spans) -> tuple[array[int], bytearray, bool]:
    """Returns the tokens, a trained flag per token (from token offsets), and whether the text was split."""
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
    """Returns 1 for each token inside a trained range (else 0), and whether a token crosses the border of a range."""
    flat = np.fromiter(itertools.chain.from_iterable(offsets), np.int64, 2 * len(offsets))
    starts, ends = flat[0::2], flat[1::2]
    inside, across = np.zeros(len(starts), dtype=bool), False
    for first, last in spans:
        within = (starts >= first) & (ends <= last)
        across = across or bool(((starts < last) & (ends > first) & ~within).any())
        inside |= within
    return bytearray(inside.astype(np.uint8).tobytes()), across


def _untrain_after_end(tokenizer: PreTrainedTokenizerBase, ids: array[int], trained: bytearray) -> None:
    """Masks white space after the end token: templates add a line break there, but generation stops before it.

    White space after a special token inside an assistant turn is not masked, so it is part of the loss.
    """
    facts = token_facts(tokenizer)
    for ended in facts.where_special(ids):
        if trained[ended]:
            after = ended + 1
            while after < len(ids) and trained[after] and facts.blank(tokenizer, ids[after]):
                after += 1
            if after == len(ids) or not trained[after]:
                trained[ended + 1 : after] = bytes(after - ended - 1)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Returns the special tokens, such as end-of-turn and end-of-text."""
    return token_facts(tokenizer).special
