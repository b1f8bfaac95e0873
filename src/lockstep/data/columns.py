"""Which column holds which part of a row, where no setting says so."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.errors import Refusal
from lockstep.recipe.schema import Data, Source

# Names that users of other trainers know, looked for in this order.
PROMPTS = ("prompt", "question", "input", "instruction", "query")
CHATS = ("messages", "conversations")


def setting(source: Source, data: Data, key: str) -> str:
    """The source's own setting, else the recipe's; empty when neither is given."""
    return getattr(source, key) or getattr(data, key) or ""


def column(source: Source, data: Data, key: str, known: Sequence[str], available: Sequence[str]) -> str:
    """The column that `key` sets, else the first well-known name there is; empty when there is none."""
    return setting(source, data, key) or next((name for name in known if name in available), "")


def prompt_column(source: Source, data: Data, available: Sequence[str]) -> str:
    """Where the shared beginning of the responses is: a prompt, or a chat that they continue. Empty when nowhere."""
    given = setting(source, data, "prompt_key") or setting(source, data, "messages_key")
    if not given and "prompt" not in available and {"instruction", "input"} <= set(available):
        raise Refusal.at(
            source.path,
            "has an instruction and an input column, and one of them would be left out of the prompt",
            "name the prompt's column with data.prompt_key",
        )
    return given or next((name for name in (*PROMPTS, *CHATS) if name in available), "")


def unknown_columns(source: Source, what: str, available: Sequence[str], remedy: str) -> Refusal:
    return Refusal.at(source.path, f"cannot tell which columns hold {what}; it has {', '.join(available)}", remedy)
