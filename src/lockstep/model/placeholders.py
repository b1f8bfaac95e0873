"""Tokens that stand for pictures or sound in a model of several senses: its own forward puts something else there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from lockstep.errors import Problem, shortened
from lockstep.types import Origin

_NAMES = re.compile(r"(image|video|audio|vision|speech)_token_(id|index)")


def placeholder_ids(config: Any) -> dict[int, str]:
    """Token ids that mean no word, with the configuration's key of each."""
    found = {}
    parts = [config.to_dict()]
    while parts:
        for name, value in parts.pop().items():
            if isinstance(value, dict):
                parts.append(value)
            elif _NAMES.fullmatch(str(name)) and isinstance(value, int):
                found[value] = str(name)
    return found


def refuse_placeholders(config: Any, rows: Iterable[tuple[Origin, Iterable[int]]]) -> list[Problem]:
    """Rows of text with such a token: the model would see its embedding where transformers puts a picture's."""
    ids = placeholder_ids(config)
    if not ids:
        return []
    problems = []
    for origin, tokens in rows:
        token = next((token for token in tokens if token in ids), None)
        if token is not None:
            why = f"holds token {token}, which stands for a picture or sound ({ids[token]} of config.json)"
            problems.append(Problem(str(origin), why, "take it out: only text is trained on here"))
    return shortened(problems, "rows")
