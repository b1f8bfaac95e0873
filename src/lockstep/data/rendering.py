"""Chats as text by the tokenizer's chat template.

`apply_chat_template` copies every message and builds the template's surroundings anew for each text, which takes longer
than the text itself; a chat is rendered once for each turn. Messages of a role and a content alone go to the compiled
template as they are. It is compared with `apply_chat_template` on the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from lockstep.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def rendered(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: Sequence[dict[str, Any]], *, open_turn: bool
) -> str:
    """The chat as text; with `open_turn` it ends where the assistant begins to speak."""
    short = _short_way_of(tokenizer) if messages and not tools and all(map(_is_plain, messages)) else None
    text = short and short(messages, tokenizer.special_tokens_map, open_turn)
    if text is not None and short is not None and open_turn in short.tried:
        return text
    called: str = tokenizer.apply_chat_template(
        messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=open_turn
    )
    if short is not None:
        short.tried.add(open_turn)
        short.sound = called == text
    return called


def _short_way_of(tokenizer: PreTrainedTokenizerBase) -> _ShortWay | None:
    """None where the call does something of its own."""
    from transformers import PreTrainedTokenizerBase

    kind, base = type(tokenizer), PreTrainedTokenizerBase
    own = (kind.apply_chat_template, kind.get_chat_template) != (base.apply_chat_template, base.get_chat_template)
    short = None if own else _short_way(tokenizer.get_chat_template())
    return short if short is not None and short.sound else None


def _is_plain(message: Message) -> bool:
    return len(message) == 2 and type(message.get("role")) is str and type(message.get("content")) is str


class _ShortWay:
    """One compiled template."""

    def __init__(self, compiled: Any):
        self._compiled = compiled
        self._globals = dict(compiled.globals)
        self.sound = True
        """False once it gave another text than the call."""
        self.tried: set[bool] = set()
        """Compared with the call: with and without an open turn."""

    def __call__(self, messages: list[Message], special: dict[str, Any], open_turn: bool) -> str | None:
        """None where the template fails."""
        said = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": open_turn, **special}
        context = self._compiled.new_context({**self._globals, **said}, shared=True)
        try:
            return "".join(self._compiled.root_render_func(context))
        except Exception:  # a template can fail in any way; the call fails in the same way, and says so
            return None


@lru_cache(maxsize=16)
def _short_way(template: str) -> _ShortWay | None:
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template
    except ImportError:
        return None  # it is private to transformers
    return _ShortWay(_compile_jinja_template(template))
