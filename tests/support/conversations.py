"""Generated conversations with tools and reasoning, and the rendering of a chat template up to any message."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

Chat = list[dict[str, Any]]
WORDS = (
    "Rome",
    "warm",
    "2+3",
    "äö",
    "東京",
    "x < y",
    "line\nbreak",
    "{json}",
    "end.",
    "née",
    "'quoted'",
    " padded ",
    "tail\n",
    "\n\nhead",
    "\U0001f600",
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Returns the {name} of a place.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
    for name in ("weather", "height")
]


@dataclass(frozen=True)
class Conversation:
    messages: Chat
    inputs: dict[str, Any] = field(default_factory=dict)
    """What the template gets besides the messages: tools, `enable_thinking`."""


def conversations(count: int, *, tools: bool = True, thoughts: bool = True, seed: int = 0) -> list[Conversation]:
    """Conversations of one to four user turns, with system messages, tool calls, and reasoning of every form."""
    made = random.Random(seed)
    return [_conversation(made, tools and number % 3 == 0, thoughts) for number in range(count)]


def _conversation(made: random.Random, tools: bool, thoughts: bool) -> Conversation:
    messages: Chat = [{"role": "system", "content": _words(made)}] if made.random() < 0.5 else []
    for turn in range(made.randint(1, 4)):
        messages.append({"role": "user", "content": _words(made)})
        for _ in range(made.randint(0, 2) if tools else 0):
            calls = made.randint(1, 2)
            messages.append(_assistant(made, thoughts, calls, f"{turn}"))
            results = [
                {"role": "tool", "content": _words(made), "tool_call_id": f"call{turn}{i:04}"} for i in range(calls)
            ]
            messages += results
        messages.append(_assistant(made, thoughts, 0, f"{turn}"))
    inputs: dict[str, Any] = {"tools": TOOLS} if tools else {}
    thinks = any("</think>" in str(turn["content"]) or turn.get("reasoning_content") for turn in messages)
    if thoughts and made.random() < 0.4:
        inputs["enable_thinking"] = thinks
    return Conversation(messages, inputs)


def _assistant(made: random.Random, thoughts: bool, calls: int, turn: str) -> dict[str, Any]:
    said = _words(made) if not calls or made.random() < 0.5 else ""
    message: dict[str, Any] = {"role": "assistant", "content": said}
    form = made.choice(("none", "field", "content", "tight", "empty")) if thoughts else "none"
    if form == "field":
        message["reasoning_content"] = f"Because {_words(made)}"
    elif form != "none":
        thought = {"content": f"\n{_words(made)}\n", "tight": _words(made), "empty": "\n\n"}[form]
        message["content"] = f"<think>{thought}</think>" + ("" if form == "tight" else "\n\n") + said
    if calls:
        message["tool_calls"] = [_call(made, f"call{turn}{number:04}") for number in range(calls)]
    return message


def _call(made: random.Random, name: str) -> dict[str, Any]:
    arguments = {"place": _words(made), **({"days": made.randint(1, 9)} if made.random() < 0.5 else {})}
    function = {"name": made.choice(("weather", "height")), "arguments": arguments}
    return {"id": name, "type": "function", "function": function}


def _words(made: random.Random) -> str:
    return " ".join(made.choices(WORDS, k=made.randint(1, 4)))


@dataclass(frozen=True)
class Rendered:
    """A conversation in a template: its whole text, and the texts before and after each assistant turn."""

    text: str
    borders: Sequence[tuple[str, str]]

    @property
    def append_only(self) -> bool:
        return all(after.startswith(before) and self.text.startswith(after) for before, after in self.borders)

    @property
    def trained(self) -> list[str]:
        """What the model generates in each turn."""
        return [after[len(before) :] for before, after in self.borders]


def rendered(template: str, chat: Conversation, special: dict[str, str]) -> Rendered | None:
    """Returns None if the template refuses the conversation."""

    def text(messages: Chat, *, prompt: bool) -> str:
        given = {"tools": None, **chat.inputs, **special}
        made = render_jinja_template([messages], chat_template=template, add_generation_prompt=prompt, **given)
        return str(made[0][0])

    try:
        turns = [number for number, turn in enumerate(chat.messages) if turn["role"] == "assistant"]
        borders = [
            (text(chat.messages[:turn], prompt=True), text(chat.messages[: turn + 1], prompt=False)) for turn in turns
        ]
        return Rendered(text(chat.messages, prompt=False), borders)
    except Exception:  # noqa: BLE001 - a template is a program, and may fail in any way
        return None
