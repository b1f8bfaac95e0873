"""Which column holds which part of a row, and columns that extend the prompt (input, system, history, tools)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from lockstep.data.encode.dialogue import Turns, as_turns
from lockstep.data.encode.messages import as_tools, refuse_not_text
from lockstep.errors import Refusal
from lockstep.recipe.keys_data import Data, Source
from lockstep.types import Message, Origin, Row

# Columns that stand beside a prompt and belong to it: an input, a system message, earlier turns, tools.

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


# Which column holds which part of a row: where a setting says so, else by the names that other trainers use.

# Names that users of other trainers know, looked for in this order.
PROMPTS = ("prompt", "question", "instruction", "input", "query", "problem")
CHATS = ("messages", "conversations", "conversation")

_LISTED = 20


@dataclass(frozen=True)
class ColumnFinder:
    """Finds the columns of one source: `available` are those that it has."""

    source: Source
    data: Data
    available: Sequence[str]
    partly: Mapping[str, int] = field(default_factory=dict)
    """Those that only some rows have, and how many do."""

    def setting(self, key: str) -> str:
        """The source's own setting, else the recipe's; empty when neither is given."""
        return getattr(self.source, key) or getattr(self.data, key) or ""

    def known(self, names: Sequence[str]) -> str:
        """The first of the names that is a column; empty when none is."""
        return next((name for name in names if name in self.available), "")

    def known_pair(self, pairs: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
        """The first of the pairs whose names are both columns."""
        return next((pair for pair in pairs if set(pair) <= set(self.available)), None)

    def find(self, key: str, names: Sequence[str]) -> str:
        """The column that `key` sets, else the first well-known name there is; empty when there is none."""
        return self.setting(key) or self.known(names)

    def prompt(self) -> str:
        """Where the shared beginning of the responses is: a prompt, or a chat that they continue. Empty: nowhere."""
        given = self.setting("prompt_key") or self.setting("messages_key")
        return given or self.known((*PROMPTS, *CHATS))

    def beside(self, prompt: str, *used: str) -> Beside:
        """What belongs to the prompt and stands in columns of its own; a prompt that a setting names is the prompt."""
        named = bool(self.setting("prompt_key"))
        return Beside.of(self.available, prompt="" if named else prompt, used=(prompt, *used))

    def unread(self, *used: str) -> str:
        """The columns that no part of an item comes from, for the line that says what was found."""
        tops = {key if key in self.available else key.split(".")[0] for key in used}
        left = [column for column in self.available if column not in tops]
        told = (name + (f" (in {self.partly[name]:,} rows)" if name in self.partly else "") for name in left)
        return f"; not read: {', '.join(told)}" if left else ""

    def unknown(self, what: str, remedy: str) -> Refusal:
        return Refusal.at(
            self.source.path, f"cannot tell which columns {what}; it has {', '.join(self.available)}", remedy
        )


def filled(row: Row, key: str, origin: Origin) -> Any:
    """The value at `key`, which must hold something."""
    value = lookup(row, key, origin)
    if value is None or (isinstance(value, str) and not value.strip()) or (isinstance(value, list) and not value):
        raise Refusal.at(origin, f"{key} is empty", "remove the row or fill it in")
    return value


def lookup(row: Row, key: str, origin: Origin) -> Any:
    """The value at `key`; dots go into objects and lists: "extra_info.question", "choices.0".

    A column whose own name holds dots wins over a path."""
    value: Any = row
    parts = key.split(".")
    done = 0
    while done < len(parts):
        taken = _step(value, parts[done:])
        if taken is None:
            raise _missing(row, key, ".".join(parts[:done]), value, origin)
        done += taken
        name = ".".join(parts[done - taken : done])
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value


def _step(value: Any, parts: list[str]) -> int | None:
    """How many of the parts name something directly inside `value`: the most that do, None if none do."""
    if isinstance(value, dict):
        return next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in value), None)
    if isinstance(value, list) and parts[0].isascii() and parts[0].isdecimal():
        return 1 if int(parts[0]) < len(value) else None
    return None


def _missing(row: Row, key: str, reached: str, value: Any, origin: Origin) -> Refusal:
    inside = f"{reached!r}" if reached else "the row"
    if isinstance(value, dict):
        held = f"{inside} has the keys {_listed(list(value))}" if value else f"{inside} has no keys"
    elif isinstance(value, list):
        held = f"{inside} is a list of {len(value)}"
    else:
        held = f"{inside} is {'null' if value is None else 'a ' + type(value).__name__}, with nothing inside"
    near = _nearest(row, key)
    return Refusal.at(
        origin, f"has no {key!r}: {held}", f"did you mean {near!r}?" if near else "mend or remove the row"
    )


def _listed(keys: list[str]) -> str:
    more = len(keys) - _LISTED
    return ", ".join(map(repr, keys[:_LISTED])) + (f" and {more} more" if more > 0 else "")


def _nearest(row: Row, key: str) -> str | None:
    """The likeliest meant path: one that ends in the same name (a forgotten parent), else one spelled alike."""
    paths = list(row)
    paths += [f"{column}.{inner}" for column, value in row.items() if isinstance(value, dict) for inner in value]
    same_end = [path for path in paths if path.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    return next(iter(same_end or get_close_matches(key, paths, n=1)), None)
