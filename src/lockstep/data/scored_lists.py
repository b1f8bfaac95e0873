"""Responses with scores, best first: texts beside a list of scores, or objects that hold both (UltraFeedback)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import Refusal
from lockstep.types import Origin

# Keys of an object that holds a response and its score, looked for in this order.
TEXTS = ("response", "text", "content", "completion")
SCORES = ("overall_score", "score", "rating", "reward")


@dataclass(frozen=True)
class RankedResponses:
    """Responses, best first, with what to call each of them; `alike` counts those left out for an equal score."""

    names: list[str]
    responses: list[Any]
    alike: int = 0


def is_objects(responses: Sequence[Any]) -> bool:
    """Whether each response is an object with a score of its own, and not a message."""
    return all(isinstance(one, dict) and "role" not in one and "from" not in one for one in responses)


def of_objects(responses: Sequence[dict[str, Any]], column: str, origin: Origin) -> tuple[list[Any], list[Any], str]:
    """The responses, their scores, and the key of the scores."""
    text = next((key for key in TEXTS if all(isinstance(one.get(key), str) for one in responses)), None)
    score = next((key for key in SCORES if all(is_number(one.get(key)) for one in responses)), None)
    if text is None or score is None:
        missing = f"a text ({', '.join(TEXTS)})" if text is None else f"a number ({', '.join(SCORES)})"
        raise Refusal.at(origin, f"not every response of {column} has {missing}", "mend or remove the row")
    return [one[text] for one in responses], [one[score] for one in responses], score


def best_first(responses: Sequence[Any], names: Sequence[str], scores: Sequence[float]) -> RankedResponses:
    """By falling score; of equal scores, which do not say what is better, the first alone stays."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    kept = [i for place, i in enumerate(order) if not place or scores[i] != scores[order[place - 1]]]
    return RankedResponses([names[i] for i in kept], [responses[i] for i in kept], len(order) - len(kept))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
