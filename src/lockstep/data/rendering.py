"""A chat as text by the tokenizer's chat template, whole and up to any of its messages.

`apply_chat_template` copies every message and builds the template's surroundings anew for each text, which takes longer
than the text itself; a chat is rendered once for each turn. Messages of a role and a content alone go to the compiled
template as they are. What it gives is compared with `apply_chat_template` on the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from lockstep.data.call_arguments import as_written
from lockstep.errors import Refusal
from lockstep.types import Message, Origin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatText:
    """One chat in the tokenizer's template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: list[Message],
        tools: Sequence[dict[str, Any]],
        origin: Origin,
    ):
        self._tokenizer, self._tools, self._origin = tokenizer, tools, origin
        self._messages = as_written(tokenizer, messages)
        self._short = _short_way_of(tokenizer) if not tools and all(map(_is_plain, messages)) else None
        self._special = tokenizer.special_tokens_map if self._short is not None else {}

    def upto(self, count: int, *, open_turn: bool) -> str:
        """The first messages; with `open_turn` the text ends where the assistant begins to speak."""
        messages, short = self._messages[:count], self._short
        if short is None or not messages:
            return self._called(messages, open_turn)
        text = short(messages, self._special, open_turn)
        if text is not None and open_turn in short.tried:
            return text
        called = self._called(messages, open_turn)
        short.tried.add(open_turn)
        if text != called:
            self._short, short.sound = None, False
        return called

    def _called(self, messages: list[Message], open_turn: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=list(self._tools) or None, tokenize=False, add_generation_prompt=open_turn
            )
        except Exception as error:  # a template is a program, and may fail in any way
            raise refused_by_template(error, self._origin) from error
        return text


def refused_by_template(error: Exception, origin: Origin) -> Refusal:
    why = f"the chat template refuses this chat: {error}"
    return Refusal.at(origin, why, "mend or remove the row, or use another template (data.template)")


def _is_plain(message: Message) -> bool:
    return len(message) == 2 and type(message.get("role")) is str and type(message.get("content")) is str


class _ShortWay:
    """One compiled template."""

    def __init__(self, compiled: Any):
        self._compiled = compiled
        self._globals = {**compiled.globals, "tools": None, "documents": None}
        self.sound = True
        """False once it gave another text than the call."""
        self.tried: set[bool] = set()
        """Compared with the call: with and without an open turn."""

    def __call__(self, messages: list[Message], special: dict[str, Any], open_turn: bool) -> str | None:
        """None where the template fails."""
        said = {**self._globals, "messages": messages, "add_generation_prompt": open_turn, **special}
        compiled = self._compiled
        context = compiled.environment.context_class(compiled.environment, said, compiled.name, compiled.blocks)
        try:
            return "".join(compiled.root_render_func(context))
        except Exception:  # noqa: BLE001 - templates fail in any way; the call fails in the same one, and tells it
            return None


def _short_way_of(tokenizer: PreTrainedTokenizerBase) -> _ShortWay | None:
    """None where the call does something of its own."""
    from transformers import PreTrainedTokenizerBase

    kind, base = type(tokenizer), PreTrainedTokenizerBase
    if kind.apply_chat_template is not base.apply_chat_template or kind.get_chat_template is not base.get_chat_template:
        return None
    short = _short_way(tokenizer.get_chat_template())
    return short if short is not None and short.sound else None


@lru_cache(maxsize=16)
def _short_way(template: str) -> _ShortWay | None:
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template
    except ImportError:
        return None  # it is private to transformers
    try:
        return _ShortWay(_compile_jinja_template(template))
    except TemplateError:
        return None  # the call says what is wrong with it
