"""Renders the messages of a chat with a chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from lockstep.data.encode.messages import as_written, with_image_surroundings
from lockstep.errors import Refusal
from lockstep.types import Message, Origin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Names that a row or a request must not pass to a chat template as variables. These names are arguments of
# `apply_chat_template`, or other columns or keys set them.
RESERVED = frozenset(
    {"messages", "conversation", "chat_template", "tools", "documents", "tokenize", "add_generation_prompt"}
    | {"continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs"}
)


@dataclass(frozen=True)
class TemplateInputs:
    """What a row gives to its chat template besides the messages."""

    tools: Sequence[dict[str, Any]] = ()
    """The tools of the chat, as JSON schemas."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template, such as `enable_thinking`."""

    def __bool__(self) -> bool:
        return bool(self.tools or self.arguments)


NO_INPUTS = TemplateInputs()


class ChatText:
    """One chat, rendered by the tokenizer's template up to any of its messages.

    A chat is rendered once per turn. `apply_chat_template` would be slow, because each call copies every message and
    rebuilds the template context. Messages that have only role and content are therefore rendered directly by the
    compiled template. The output of the compiled template is compared with `apply_chat_template` on first use.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: list[Message],
        origin: Origin,
        inputs: TemplateInputs = NO_INPUTS,
        template: str | None = None,
    ):
        """`template` replaces the tokenizer's template."""
        self._tokenizer, self._origin, self._inputs, self._replaced = tokenizer, origin, inputs, template
        written = template_of(tokenizer, inputs, origin) if template is None else template
        refuse_unused(written, inputs.arguments, origin)
        self._messages = as_written(tokenizer, messages, written)
        plain = not inputs.tools and all(map(_is_plain, messages))
        self._fast = _fast_template_of(tokenizer, written) if plain else None
        self._special = {**tokenizer.special_tokens_map, **inputs.arguments} if self._fast is not None else {}

    def upto(self, count: int, *, open_turn: bool) -> str:
        """Renders the first `count` messages. With `open_turn` the text ends with the generation prompt."""
        return with_image_surroundings(self._tokenizer, self._upto(count, open_turn))

    def _upto(self, count: int, open_turn: bool) -> str:
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
            return self._call_template(messages, open_turn=open_turn)
        except Exception as error:  # a template is a program, and may fail in any way
            raise refused_by_template(error, self._origin, self.first_refused()) from error

    def _call_template(self, messages: list[Message], *, open_turn: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages,
            tools=list(self._inputs.tools) or None,
            chat_template=self._replaced,
            tokenize=False,
            add_generation_prompt=open_turn,
            **self._inputs.arguments,
        )
        return text

    def first_refused(self) -> int:
        """Returns the number of the first message at which the template fails. The test starts at the first user
        message."""
        roles = [str(message["role"]) for message in self._messages]
        first = roles.index("user") + 1 if "user" in roles else 1
        for count in range(first, len(roles)):
            try:
                self._call_template(self._messages[:count], open_turn=False)
            except Exception:  # noqa: BLE001 - the caller reports the error
                return count
        return len(roles)


def template_of(tokenizer: PreTrainedTokenizerBase, inputs: TemplateInputs, origin: Origin) -> str:
    """Returns the text of the tokenizer's template. Some tokenizers have a separate template for chats with tools."""
    try:
        return tokenizer.get_chat_template(tools=list(inputs.tools) or None)
    except Exception as error:  # the tokenizer has no template, or is of a class with its own code
        raise refused_by_template(error, origin) from error


def refused_by_template(error: Exception, origin: Origin, number: int = 0) -> Refusal:
    """Returns the refusal of a chat for which the template fails. `number` is the message at which the template
    fails."""
    why = f"the chat template refuses this chat{f' at message {number}' if number else ''}: {error}"
    return Refusal.at(
        origin, why, "fix or remove the row, or use another template (data.template)", code="template-error"
    )


def refuse_unused(template: str, arguments: Mapping[str, Any], origin: Origin) -> None:
    """Refuses template arguments of a row that the chat template does not read."""
    for name in arguments:
        if not uses(template, name):
            raise Refusal.at(
                origin,
                f"gives the template argument {name}, which the chat template does not use",
                f"use a template that reads {name} (data.template), or remove it from the row",
                code="unused-key",
            )


def uses(template: str, name: str) -> bool:
    """Returns whether the text of a template contains the variable `name`."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _is_plain(message: Message) -> bool:
    return len(message) == 2 and type(message.get("role")) is str and type(message.get("content")) is str


class _FastTemplate:
    """A compiled chat template that renders without `apply_chat_template`."""

    def __init__(self, compiled: Any):
        self._compiled = compiled
        self._globals = {**compiled.globals, "tools": None, "documents": None}
        self.correct = True
        """False after the output differed from that of `apply_chat_template`."""
        self.checked: set[bool] = set()
        """Values of `open_turn` for which the output was compared with `apply_chat_template`."""

    def __call__(self, messages: list[Message], special: dict[str, Any], open_turn: bool) -> str | None:
        """Renders the chat; returns None if the template fails."""
        variables = {**self._globals, "messages": messages, "add_generation_prompt": open_turn, **special}
        compiled = self._compiled
        context = compiled.environment.context_class(compiled.environment, variables, compiled.name, compiled.blocks)
        try:
            return "".join(compiled.root_render_func(context))
        except Exception:  # noqa: BLE001 - any failure: `apply_chat_template` fails in the same way and reports it
            return None


def _fast_template_of(tokenizer: PreTrainedTokenizerBase, template: str) -> _FastTemplate | None:
    """Returns the compiled template, or None if it cannot replace the tokenizer's `apply_chat_template`."""
    from transformers import PreTrainedTokenizerBase

    kind, base = type(tokenizer), PreTrainedTokenizerBase
    if kind.apply_chat_template is not base.apply_chat_template or kind.get_chat_template is not base.get_chat_template:
        return None
    fast = _fast_template(template)
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


_MARK = "Zq0Xk0Zq"


def messages_after_turn(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    origin: Origin,
    inputs: TemplateInputs = NO_INPUTS,
) -> str:
    """Renders messages that follow an assistant turn, and the generation prompt. The text begins after the end token of
    the assistant turn.

    Tokens of this text can be appended to generated tokens, also if the template would change the earlier turns.
    """
    turn: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    chat = [*turn, *messages]
    rest = ChatText(tokenizer, chat, origin, inputs).upto(len(chat), open_turn=True).partition(_MARK)[2]
    ends = [token for token in tokenizer.all_special_tokens if token and rest.startswith(token)]
    if not ends:
        raise Refusal.at(
            origin,
            "the chat template does not end an assistant turn with a special token, so no messages can be appended",
            "append text with generate.encode, or use another template (data.template)",
            code="no-end-token",
        )
    return rest[len(max(ends, key=len)) :]


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    origin: Origin,
    inputs: TemplateInputs = NO_INPUTS,
    *,
    open_turn: bool = True,
) -> str:
    """Renders the chat as text. With `open_turn` the text ends with the generation prompt."""
    return ChatText(tokenizer, messages, origin, inputs).upto(len(messages), open_turn=open_turn)
