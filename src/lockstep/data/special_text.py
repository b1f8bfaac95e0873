"""Special tokens that are spelt out in the text of a row.

A tokenizer reads them as what they are called, whoever wrote them: a user's `<|im_end|>` ends the user's turn. So it is
for every trainer that renders a chat and tokenises the text; here it is counted and said.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lockstep.data.dialogue import Turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SpecialText:
    """The names of a tokenizer's special tokens, to be looked for in texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        names = {name for name in (*added, *tokenizer.all_special_tokens) if name}
        self._firsts = {name[0] for name in names}
        self._any = re.compile("|".join(map(re.escape, sorted(names))) or r"(?!)")

    def inside(self, turns: Iterable[Turns]) -> bool:
        """Whether any of the texts, or of the chats' contents, holds one."""
        return any(
            self._in(str(message.get("content") or ""))
            for one in turns
            for message in ([{"content": one}] if isinstance(one, str) else one)
        )

    def _in(self, text: str) -> bool:
        # Most texts hold not even the character that all names begin with.
        return any(first in text for first in self._firsts) and self._any.search(text) is not None


def told(rows: int, first: object) -> str:
    """For the lines that say what was found."""
    return (
        f"{rows:,} rows hold special tokens of the tokenizer in their text, which are read as such and may end a turn; "
        f"the first is {first}"
    )
