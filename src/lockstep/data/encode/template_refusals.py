"""Refusals of chats whose trained turns a chat template changes. A remedy is advised only if it works for the row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.data.encode.builtin_templates import append_only_version, builtin_text
from lockstep.data.encode.chat_text import ChatText, TemplateInputs
from lockstep.data.encode.dialogue import common_length
from lockstep.data.encode.template_checks import dropped_by_template
from lockstep.errors import Refusal
from lockstep.types import Message, Origin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEEPS = "use a template that keeps the reasoning of assistant turns (data.template, a .jinja file)"
_ALIKE = "use a template that begins the assistant's turn with its generation prompt (data.template)"
LATER = (
    "set data.turns=each to train each assistant turn in the context in which it is generated, data.turns=last to "
    "train only the last turn, or use a template that only appends (data.template)"
)
_CLOSE = "</think>"


def rewritten_later(number: int, origin: Origin, remedy: str) -> Refusal:
    return Refusal.at(
        origin,
        f"the chat template renders message {number} differently once later messages follow, "
        "so its trained text cannot be found",
        remedy,
        code="template-unstable",
    )


def not_after_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    origin: Origin,
    inputs: TemplateInputs,
    template: str | None = None,
    where: str = "",
) -> Refusal:
    """Returns the refusal of a chat whose last turn the template does not append to the generation prompt."""
    where = where or f"message {len(messages)} ({messages[-1]['role']})"
    turn, content = messages[-1], str(messages[-1]["content"])

    def rendered(turn: Message, inputs: TemplateInputs, template: str | None) -> tuple[str, str, str]:
        """Returns the text before the turn without and with the generation prompt, and the text with the turn."""
        chat = ChatText(tokenizer, [*messages[:-1], turn], origin, inputs, template)
        count = len(messages) - 1
        closed, before = chat.upto(count, open_turn=False), chat.upto(count, open_turn=True)
        return closed, before, chat.upto(count + 1, open_turn=False)

    def works(turn: Message = turn, inputs: TemplateInputs = inputs, template: str | None = template) -> bool:
        try:
            _, before, after = rendered(turn, inputs, template)
        except Refusal:
            return False
        return after.startswith(before) and contains_turn(after, len(before), len(after), turn)

    closed, before, after = rendered(turn, inputs, template)
    same = common_length([before, after])
    opening = before[same:]
    thinks = TemplateInputs(inputs.tools, {**inputs.arguments, "enable_thinking": True})
    version = append_only_version(tokenizer) if template is None else None
    openings = [opening, *([f"{opening}?\n{_CLOSE}\n\n"] if "<think>" in opening else [])]
    why = f"the generation prompt of the chat template ends with {opening!r}, but {where} is rendered without it"
    if same < len(closed):
        why = f"the chat template renders the messages before {where} differently when its text follows"
    if _can_think(tokenizer, template) and works(inputs=thinks):
        why = f"the template argument enable_thinking is not true, but {where} has reasoning"
        remedy = "set enable_thinking to true (in the row, or data.template_arguments), or remove the reasoning"
    elif version is not None and works(template=builtin_text(version)):
        remedy = f"set data.template={version}, which only appends and keeps the reasoning of assistant turns"
    elif same < len(closed):
        remedy = "use a template that only appends (data.template)"
    elif opening.strip() not in content and all(works({**turn, "content": text + content}) for text in openings):
        remedy = f"begin the answer with {opening!r}, or use a template that adds it to assistant turns (data.template)"
    else:
        remedy = _KEEPS if "<think>" in before[same - len("<think>") :] else _ALIKE
    return Refusal.at(origin, why, remedy, code="template-unstable")


def _can_think(tokenizer: PreTrainedTokenizerBase, template: str | None) -> bool:
    return "enable_thinking" in (tokenizer.get_chat_template() if template is None else template)


def refuse_changed_turn(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    index: int,
    spans: tuple[str, int, int],
    origin: Origin,
    inputs: TemplateInputs,
    template: str | None = None,
) -> None:
    """Raises a `Refusal` if the trained text of a message lacks its content, its reasoning or a tool call.

    `spans` is the text of the chat, and where the trained text of the message begins and ends.
    """
    turn, (text, start, end) = messages[index], spans
    if turn["role"] != "assistant":
        return

    def where() -> str:
        number = sum(message["role"] == "assistant" for message in messages[: index + 1])
        return f"assistant turn {number} (message {index + 1})"

    if not contains_turn(text, start, end, turn):
        stripped = _CLOSE in str(turn["content"]) and _CLOSE not in text[start:end]
        raise Refusal.at(
            origin,
            f"the chat template drops or changes {where()}" + (": it strips the reasoning" if stripped else ""),
            _KEEPS if stripped else "use a template that renders assistant content as it is (data.template)",
            code="template-changes-chat",
        )
    dropped = dropped_by_template(turn, text[start:end])
    if dropped:
        written = _with_thought(turn, dropped)
        chat = ChatText(tokenizer, [*messages[:index], written], origin, inputs, template)
        shown = chat.upto(index + 1, open_turn=False)
        helps = dropped in turn and contains_turn(shown, 0, len(shown), written)
        raise Refusal.at(
            origin,
            f"the chat template drops the {dropped} from the trained text of {where()}",
            "use a template that renders it (data.template)"
            + (", write it as <think>...</think> into the content" if helps else "")
            + ", or remove it from the row",
            code="template-changes-chat",
        )


def _with_thought(turn: Message, key: str) -> Message:
    """Returns the turn with its reasoning inside its content."""
    content = f"<think>\n{turn.get(key)}\n</think>\n\n{turn['content']}"
    return {**{name: value for name, value in turn.items() if name != key}, "content": content}


def contains_turn(text: str, start: int, end: int, turn: Message) -> bool:
    """Returns whether the trained text, from `start` to `end`, contains the turn.

    The turn may begin before `start`, if the generation prompt already contains the first characters of the answer (for
    example `<think>`). White space around `<think>` and `</think>` may differ.
    """
    content = str(turn["content"]).strip()
    reached = max(0, start + 1 - len(content))
    if not content or text.find(content, reached, end) >= 0:
        return True
    if _CLOSE not in content:
        return False
    head, _, answer = content.partition(_CLOSE)
    before, _, thought = head.rpartition("<think>")
    for part in filter(None, map(str.strip, (before, thought, _CLOSE, answer))):
        found = text.find(part, reached, end)
        if found < 0:
            return False
        reached = found + len(part)
    return True
