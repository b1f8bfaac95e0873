"""Finds the column of each field of a row, and columns that extend the prompt (input, system, history, tools)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from lockstep.data.encode.chat_text import RESERVED, TemplateInputs
from lockstep.data.encode.dialogue import Turns, as_turns
from lockstep.data.encode.messages import as_object, as_tools, refuse_not_text
from lockstep.errors import Refusal
from lockstep.recipe.keys_data import Data, Source
from lockstep.types import Message, Origin, Row

# Column names that other projects use for additions to the prompt.
INPUTS = ("input", "context")
SYSTEMS = ("system", "system_prompt")
HISTORIES = ("history",)
TOOLS = ("tools", "functions")
THINKING = ("enable_thinking",)
ARGUMENTS = ("chat_template_kwargs",)


@dataclass(frozen=True)
class ExtraColumns:
    """Columns that extend the prompt: input, system message, earlier turns, tools, arguments of the chat template. An
    empty name means that the rows have no such column."""

    input: str = ""
    system: str = ""
    history: str = ""
    tools: str = ""
    thinking: str = ""
    arguments: str = ""

    @classmethod
    def of(cls, available: Sequence[str], *, prompt: str, used: Sequence[str] = ()) -> ExtraColumns:
        """Finds the extra columns of a source. Columns in `used` are skipped, because they have another use.

        Input and history columns are found only if the prompt column is `instruction`.
        """
        free = [name for name in available if name != prompt and name not in used]

        def first(names: Sequence[str]) -> str:
            return next((name for name in names if name in free), "")

        return cls(
            input=first(INPUTS) if prompt == "instruction" else "",
            system=first(SYSTEMS),
            history=first(HISTORIES) if prompt == "instruction" else "",
            tools=first(TOOLS),
            thinking=first(THINKING),
            arguments=first(ARGUMENTS),
        )

    def prompt(self, value: Any, name: str, row: Row, origin: Origin) -> Turns:
        """Returns the prompt with its extra columns. A text stays a text, unless an extra column makes it a chat."""
        turns = as_turns(value, name, origin)
        if self.input:
            extra = self._text(self.input, row, origin)
            if extra and not isinstance(turns, str):
                raise Refusal.at(
                    origin,
                    f"{name} is a chat, and the text of {self.input} cannot be added to a chat",
                    "fix the row",
                    code="invalid-chat",
                )
            turns = f"{turns}\n{extra}" if extra else turns
        earlier = self._history(row, origin)
        if earlier:
            turns = [*earlier, *([{"role": "user", "content": turns}] if isinstance(turns, str) else turns)]
        return self.chat(turns, row, origin)

    def chat(self, turns: Turns, row: Row, origin: Origin) -> Turns:
        """Returns the turns, preceded by the row's system message if it has one."""
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
                origin,
                f"has a system message in {self.system}, and a different one in its chat",
                "keep one of them",
                code="invalid-chat",
            )
        # An empty system message in the chat is replaced.
        others = turns[1:] if turns and turns[0]["role"] == "system" else turns
        return [{"role": "system", "content": system}, *others]

    def inputs(self, row: Row, origin: Origin) -> TemplateInputs:
        """Returns the tools of the row and its arguments of the chat template."""
        tools = as_tools(row.get(self.tools), self.tools, origin) if self.tools else []
        return TemplateInputs(tools, self._arguments(row, origin))

    def _arguments(self, row: Row, origin: Origin) -> dict[str, Any]:
        given = as_object(row.get(self.arguments), self.arguments, origin) if self.arguments else {}
        for name in given:
            if name in RESERVED or not name.isidentifier():
                raise Refusal.at(
                    origin,
                    f"{self.arguments} has {name!r}, which is not an argument of a chat template",
                    "remove it" if name != "tools" else "put the tools of the row into a column tools",
                    code="invalid-name",
                )
        thinks = row.get(self.thinking) if self.thinking else None
        if thinks is None:
            return given
        if not isinstance(thinks, bool) or given.get("enable_thinking", thinks) is not thinks:
            raise Refusal.at(
                origin,
                f"{self.thinking} is {thinks!r}"
                + (f", but {self.arguments} has another value" if isinstance(thinks, bool) else ""),
                "set it to true or false" if not isinstance(thinks, bool) else "keep one of them",
                code="invalid-value",
            )
        return {**given, "enable_thinking": thinks}

    def prompts(self, prompt: str) -> tuple[str, ...]:
        """Returns the columns of the prompt that may contain images, in the order of their texts."""
        return tuple(name for name in (self.history, prompt, self.input) if name)

    @property
    def columns(self) -> tuple[str, ...]:
        names = (self.input, self.system, self.history, self.tools, self.thinking, self.arguments)
        return tuple(name for name in names if name)

    def description(self) -> str:
        """Describes the extra columns for the data report; empty without extra columns."""
        parts = {
            "and {} on a new line": self.input,
            "system message from {}": self.system,
            "earlier turns from {}": self.history,
            "tools from {}": self.tools,
            "enable_thinking from {}": self.thinking,
            "template arguments from {}": self.arguments,
        }
        return "".join(f", {what.format(column)}" for what, column in parts.items() if column)

    def _text(self, column: str, row: Row, origin: Origin) -> str:
        value = row.get(column) if column else None
        if value is not None and not isinstance(value, str):
            raise Refusal.at(
                origin, f"{column} is {type(value).__name__}, not text", "fix or remove the row", code="not-text"
            )
        return value if value and value.strip() else ""

    def _history(self, row: Row, origin: Origin) -> list[Message]:
        """Returns earlier turns, from [question, answer] pairs."""
        pairs = row.get(self.history) if self.history else None
        if not pairs:
            return []
        if not isinstance(pairs, list) or not all(
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in pairs
        ):
            raise Refusal.at(
                origin, f"{self.history} must be a list of [question, answer] pairs", "fix the row", code="invalid-chat"
            )
        return [
            {"role": role, "content": text}
            for pair in pairs
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]


NO_EXTRA_COLUMNS = ExtraColumns()


# Common column names, as other trainers use them, in order of preference.
PROMPTS = ("prompt", "question", "instruction", "input", "query", "problem")
CHATS = ("messages", "conversations", "conversation")

_LISTED = 20


@dataclass(frozen=True)
class ColumnFinder:
    """Finds the columns of one source, by setting or by name. `available` lists its columns."""

    source: Source
    data: Data
    available: Sequence[str]
    partly: Mapping[str, int] = field(default_factory=dict)
    """For each column that only some rows have, the number of rows that have it."""
    also_read: set[str] = field(default_factory=set)
    """Columns that are read beside those of the row format, such as images."""

    def setting(self, key: str) -> str:
        """Returns the source's value of `key`, or else that of the recipe's `data`; empty if neither is set."""
        return getattr(self.source, key) or getattr(self.data, key) or ""

    def first_column(self, names: Sequence[str]) -> str:
        """Returns the first of `names` that is a column of the source, or an empty string if there is none."""
        return next((name for name in names if name in self.available), "")

    def first_pair(self, pairs: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
        """Returns the first of `pairs` whose two names are both columns of the source."""
        return next((pair for pair in pairs if set(pair) <= set(self.available)), None)

    def find(self, key: str, names: Sequence[str]) -> str:
        """Returns the column that the setting `key` names, else the first of `names` that is a column, else ""."""
        return self.setting(key) or self.first_column(names)

    def prompt(self) -> str:
        """Returns the column of the prompt or of the chat that the responses continue; empty if there is none."""
        given = self.setting("prompt_key") or self.setting("messages_key")
        return given or self.first_column((*PROMPTS, *CHATS))

    def extra_columns(self, prompt: str, *used: str) -> ExtraColumns:
        """Returns the columns that extend the prompt. If `data.prompt_key` is set, input and history are empty."""
        named = bool(self.setting("prompt_key"))
        return ExtraColumns.of(self.available, prompt="" if named else prompt, used=(prompt, *used))

    def unread(self, *used: str) -> str:
        """Returns a text for the data report: the names of the columns that are not read."""
        tops = {key if key in self.available else key.split(".")[0] for key in used}
        left = [column for column in self.available if column not in tops | self.also_read]
        names = (name + (f" (in {self.partly[name]:,} rows)" if name in self.partly else "") for name in left)
        return f"; not read: {', '.join(names)}" if left else ""

    def unknown(self, what: str, remedy: str) -> Refusal:
        return Refusal.at(
            self.source.path,
            f"cannot tell which columns {what}; the columns are {', '.join(self.available)}",
            remedy,
            code="unclear-columns",
        )


def filled(row: Row, key: str, origin: Origin) -> Any:
    """Returns the value at `key`, which must not be empty."""
    value = lookup(row, key, origin)
    if value is None or (isinstance(value, str) and not value.strip()) or (isinstance(value, list) and not value):
        raise Refusal.at(origin, f"{key} is empty", "remove the row or fill in the value", code="empty-field")
    return value


def lookup(row: Row, key: str, origin: Origin) -> Any:
    """Returns the value of a row at `key`. Dots select inside objects and lists: "extra_info.question", "choices.0".

    A column whose name contains dots takes precedence over a path.
    """
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
    """Returns how many leading elements of `parts`, joined by dots, are a key or index of `value`; None if none are."""
    if isinstance(value, dict):
        return next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in value), None)
    if isinstance(value, list) and parts[0].isascii() and parts[0].isdecimal():
        return 1 if int(parts[0]) < len(value) else None
    return None


def _missing(row: Row, key: str, reached: str, value: Any, origin: Origin) -> Refusal:
    inside = f"{reached!r}" if reached else "the row"
    if isinstance(value, dict):
        content = f"{inside} has the keys {_listed(list(value))}" if value else f"{inside} has no keys"
    elif isinstance(value, list):
        content = f"{inside} is a list of {len(value)} values"
    else:
        content = f"{inside} is {'null' if value is None else 'a ' + type(value).__name__}, which has no inner values"
    near = _nearest(row, key)
    return Refusal.at(
        origin,
        f"has no {key!r}: {content}",
        f"did you mean {near!r}?" if near else "fix or remove the row",
        code="missing-column",
    )


def _listed(keys: list[str]) -> str:
    more = len(keys) - _LISTED
    return ", ".join(map(repr, keys[:_LISTED])) + (f" and {more} more" if more > 0 else "")


def _nearest(row: Row, key: str) -> str | None:
    """Returns the path that was probably meant: one with the same last component, else one with similar spelling."""
    paths = list(row)
    paths += [f"{column}.{inner}" for column, value in row.items() if isinstance(value, dict) for inner in value]
    same_end = [path for path in paths if path.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    return next(iter(same_end or get_close_matches(key, paths, n=1)), None)
