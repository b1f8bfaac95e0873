"""Columns that stand beside a prompt and belong to it: an input, a system message, earlier turns, tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.data.dialogue import Turns, as_turns
from lockstep.data.messages import as_tools, refuse_not_text
from lockstep.errors import Refusal
from lockstep.types import Message, Origin, Row

# By the names under which other projects publish them.
INPUTS = ("input", "context")
SYSTEMS = ("system", "system_prompt")
HISTORIES = ("history",)
TOOLS = ("tools", "functions")


@dataclass(frozen=True)
class Beside:
    """The columns; empty strings where there is no such column."""

    input: str = ""
    system: str = ""
    history: str = ""
    tools: str = ""

    @classmethod
    def of(cls, available: Sequence[str], *, prompt: str, used: Sequence[str] = ()) -> Beside:
        """Those of a source, for the prompt in the column `prompt`. Of an instruction the input is a part, where
        nobody else has `used` it."""
        free = [name for name in available if name != prompt and name not in used]

        def known(names: Sequence[str]) -> str:
            return next((name for name in names if name in free), "")

        return cls(
            input=known(INPUTS) if prompt == "instruction" else "",
            system=known(SYSTEMS),
            history=known(HISTORIES) if prompt == "instruction" else "",
            tools=known(TOOLS),
        )

    def prompt(self, value: Any, name: str, row: Row, origin: Origin) -> Turns:
        """The prompt with all that belongs to it: still a text where nothing makes a chat of it."""
        turns = as_turns(value, name, origin)
        if self.input:
            extra = self._text(self.input, row, origin)
            if extra and not isinstance(turns, str):
                raise Refusal.at(origin, f"{name} is a chat, and {self.input} has no place in it", "mend the row")
            turns = f"{turns}\n{extra}" if extra else turns
        earlier = self._history(row, origin)
        if earlier:
            turns = [*earlier, *([{"role": "user", "content": turns}] if isinstance(turns, str) else turns)]
        return self.chat(turns, row, origin)

    def chat(self, turns: Turns, row: Row, origin: Origin) -> Turns:
        """The turns after the row's system message, if it has one."""
        refuse_not_text(row, "the row", origin)
        system = self._text(self.system, row, origin)
        if not system:
            return turns
        if isinstance(turns, str):
            return [{"role": "system", "content": system}, {"role": "user", "content": turns}]
        if turns and turns[0]["role"] == "system" and str(turns[0]["content"] or "").strip():
            if str(turns[0]["content"]).strip() == system.strip():
                return turns
            raise Refusal.at(
                origin, f"has a system message in {self.system}, and another in its chat", "keep one of them"
            )
        # An empty one in the chat gives way.
        said = turns[1:] if turns and turns[0]["role"] == "system" else turns
        return [{"role": "system", "content": system}, *said]

    def tools_of(self, row: Row, origin: Origin) -> list[dict[str, Any]]:
        return as_tools(row.get(self.tools), self.tools, origin) if self.tools else []

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for name in (self.input, self.system, self.history, self.tools) if name)

    def told(self) -> str:
        """For the line that says what was found; empty where nothing stands beside the prompt."""
        parts = {
            "and {} on a new line": self.input,
            "system message from {}": self.system,
            "earlier turns from {}": self.history,
            "tools from {}": self.tools,
        }
        return "".join(f", {what.format(column)}" for what, column in parts.items() if column)

    def _text(self, column: str, row: Row, origin: Origin) -> str:
        value = row.get(column) if column else None
        if value is not None and not isinstance(value, str):
            raise Refusal.at(origin, f"{column} is {type(value).__name__}, not text", "mend or remove the row")
        return value if value and value.strip() else ""

    def _history(self, row: Row, origin: Origin) -> list[Message]:
        """Earlier questions with their answers, in pairs."""
        pairs = row.get(self.history) if self.history else None
        if not pairs:
            return []
        if not isinstance(pairs, list) or not all(
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in pairs
        ):
            raise Refusal.at(origin, f"{self.history} must be a list of [question, answer] pairs", "mend the row")
        return [
            {"role": role, "content": text}
            for pair in pairs
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]


NOTHING = Beside()
