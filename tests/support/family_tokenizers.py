"""The byte tokenizer of the tiny model with the special tokens and the chat templates of ten model families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.data.encode.builtin_templates import BUILTIN
from lockstep.environments.conversation import ChatFormat
from lockstep.model.load import load_tokenizer
from original_templates import ORIGINALS, SPECIAL

FAMILIES = (
    "chatml",
    "qwen2.5",
    "qwen3",
    "qwen3.5",
    "llama3.1",
    "gemma",
    "mistral",
    "deepseek-r1",
    "glm4.5",
    "gpt-oss",
)
WITHOUT_TOOLS = ("chatml", "gemma", "deepseek-r1")
# More special tokens of the families than the markers of the built-in templates, and the tokens that end a turn.
MORE = {
    "mistral": ["[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
    "deepseek-r1": [
        *(f"<｜tool▁{what}▁{edge}｜>" for what in ("calls", "call", "outputs", "output") for edge in ("begin", "end")),
        "<｜tool▁sep｜>",
    ],
}
ENDS = {"glm4.5": ("<|user|>", "<|observation|>"), "gpt-oss": ("<|return|>", "<|call|>")}


def tokenizer_of(folder: Path, name: str, template: str | None = None) -> Any:
    """Returns the tokenizer of a family; without `template`, with the family's original template."""
    tokenizer = load_tokenizer(str(folder))
    named = SPECIAL.get(name, {})
    words = [*BUILTIN[name].tokens, *MORE.get(name, []), *named.values()]
    tokenizer.add_special_tokens({"additional_special_tokens": list(dict.fromkeys(words))})
    tokenizer.bos_token = named.get("bos_token", tokenizer.bos_token)
    tokenizer.eos_token = ENDS.get(name, (BUILTIN[name].tokens[-1],))[-1]
    tokenizer.chat_template = template or ORIGINALS[name]
    return tokenizer


def chat_of(tokenizer: Any, name: str, history: str) -> ChatFormat:
    ends = {*ENDS.get(name, ()), tokenizer.eos_token}
    return ChatFormat(tokenizer, frozenset(map(tokenizer.convert_tokens_to_ids, ends)), history)
