"""Verdicts on steps as their projects publish them: Math-Shepherd's written into the text, PRM800K's ratings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.errors import Refusal
from lockstep.types import Origin

# Stands after each step of Math-Shepherd's `input`; its `label` is the same text with a verdict in that place.
SHEPHERD = "ки"
_VERDICTS = {"+": 1, "-": 0}


def shepherd(text: str, labelled: str, names: tuple[str, str], origin: Origin) -> tuple[list[str], list[int]]:
    """The pieces of the text before each placeholder and after the last, and the verdict in each place."""
    pieces = text.split(SHEPHERD)
    verdicts: list[int] = []
    rest = labelled
    for number, piece in enumerate(pieces, 1):
        if not rest.startswith(piece):
            raise _parts(names, number, origin)
        rest = rest[len(piece) :]
        if number < len(pieces):
            if rest[:1] not in _VERDICTS:
                raise _parts(names, number, origin)
            verdicts.append(_VERDICTS[rest[0]])
            rest = rest[1:]
    if rest:
        raise _parts(names, len(pieces), origin)
    return pieces, verdicts


def _parts(names: tuple[str, str], number: int, origin: Origin) -> Refusal:
    return Refusal.at(
        origin,
        f"{names[1]} is not {names[0]} with + or - in place of each {SHEPHERD!r}: they part at step {number}",
        "mend or remove the row",
    )


@dataclass(frozen=True)
class Rated:
    """The steps that were gone on from, with their verdicts; `others` were rated too, and led nowhere."""

    problem: str
    steps: list[str]
    verdicts: list[int]
    others: int


def is_rated(label: Any) -> bool:
    return isinstance(label, dict) and isinstance(label.get("steps"), list)


def rated(question: Any, label: dict[str, Any], names: tuple[str, str], origin: Origin) -> Rated:
    """A solution of PRM800K: at each step the completion that was chosen, or a person's own, or the last one rated.

    A rating of 1 is good and so is 0 (neutral), as its paper scores them; -1 is bad. At a step that nobody rated the
    solution ends.
    """
    problem = question.get("problem") if isinstance(question, dict) else None
    if not isinstance(problem, str) or not problem.strip():
        raise Refusal.at(origin, f"{names[0]} has no problem", "mend or remove the row")
    steps: list[str] = []
    verdicts: list[int] = []
    others = 0
    for number, step in enumerate(label["steps"], 1):
        completions = (step.get("completions") if isinstance(step, dict) else None) or []
        if not isinstance(step, dict) or not all(isinstance(one, dict) for one in completions):
            raise Refusal.at(origin, f"step {number} of {names[1]} is not one of PRM800K", "mend or remove the row")
        chosen, own = step.get("chosen_completion"), step.get("human_completion")
        if chosen is None and isinstance(own, dict):
            taken: dict[str, Any] = {"rating": 1, **{key: own[key] for key in own if own[key] is not None}}
            others += len(completions)
        elif completions and (chosen is None or (isinstance(chosen, int) and 0 <= chosen < len(completions))):
            taken = completions[chosen or 0]
            others += len(completions) - 1
        else:
            break
        text, rating = taken.get("text"), taken.get("rating")
        if rating is None:
            break
        if rating not in (-1, 0, 1) or not isinstance(text, str) or not text.strip():
            raise Refusal.at(
                origin, f"step {number} of {names[1]} has the rating {rating!r} or no text", "mend or remove the row"
            )
        steps.append(text)
        verdicts.append(int(rating >= 0))
        if chosen is None and not isinstance(own, dict):
            break
    return Rated(problem, steps, verdicts, others)
