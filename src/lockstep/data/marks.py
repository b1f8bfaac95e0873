"""The tokens that judge a step, where they are asked for, and a row's labels in them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.types import Origin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Marks:
    """The placeholder and the judging tokens, each a single one."""

    placeholder: str
    placeholder_id: int
    tokens: tuple[str, ...]
    token_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, placeholder: str, tokens: Sequence[str]) -> Marks:
        """Refuse what is several tokens here, before any row is read."""
        texts = [("prm.placeholder", placeholder), *(("prm.tokens", token) for token in tokens)]
        ids = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for _, text in texts]
        problems = [
            Problem(
                key,
                f"{text!r} is {len(found)} tokens ({', '.join(map(str, found))}) in this tokenizer, not one",
                f"set {key} to a text that is one token, or add {text!r} to the tokenizer",
            )
            for (key, text), found in zip(texts, ids, strict=True)
            if len(found) != 1
        ]
        token_ids = tuple(found[0] for found in ids[1:] if found)
        if not problems and len(set(token_ids)) < len(token_ids):
            problems.append(Problem("prm.tokens", f"{', '.join(tokens)} are not all different", "name each word once"))
        refuse_all(problems)
        return cls(placeholder, ids[0][0], tuple(tokens), token_ids)


def parse_labels(value: Any, key: str, marks: Marks, origin: Origin) -> list[tuple[float, ...]]:
    """The wanted distribution over the judging tokens at each step, of a list or of one written as JSON.

    A token is certain. A number (with two tokens) is the first one's probability: true, 1, 0.8.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise Refusal.at(
                origin, f"{key} is text, but not a JSON list: {error.msg}", 'write it as ["+", "-"] or [1, 0]'
            ) from error
    if not isinstance(value, list) or not value:
        raise Refusal.at(origin, f"{key} must be a list with a label for each step", "mend or remove the row")
    return [_distribution(label, number, key, marks, origin) for number, label in enumerate(value, 1)]


def _distribution(label: Any, number: int, key: str, marks: Marks, origin: Origin) -> tuple[float, ...]:
    if isinstance(label, str) and label in marks.tokens:
        return tuple(float(token == label) for token in marks.tokens)
    if isinstance(label, bool | int | float) and len(marks.tokens) == 2 and math.isfinite(label) and 0 <= label <= 1:
        return (float(label), 1.0 - label)
    numbers = ", or numbers from 0 to 1 (the probability of the first)" if len(marks.tokens) == 2 else ""
    raise Refusal.at(
        origin,
        f"label {number} of {key} is {label!r}",
        f"labels are the words of prm.tokens ({', '.join(marks.tokens)}){numbers}",
    )
