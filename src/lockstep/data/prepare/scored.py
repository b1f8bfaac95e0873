"""Scored responses by question: what `lockstep sample` wrote, read and checked, and what of it can be used."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field

from lockstep.data.read import read_rows
from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.types import Message, Row

COLUMNS = ("question", "prompt", "response", "reward", "stop", "tokens")
NO_SCORE, CUT, EMPTY = "without a score", "cut off at the length limit", "empty"


@dataclass(frozen=True)
class ScoredResponse:
    text: str
    reward: float
    tokens: int


@dataclass
class ScoredQuestion:
    """A question with its responses that can be used, in the order of the file."""

    prompt: list[Message]
    responses: list[ScoredResponse] = field(default_factory=list)

    @property
    def tied(self) -> bool:
        return len(self.responses) > 1 and len({response.reward for response in self.responses}) == 1


@dataclass(frozen=True)
class Scored:
    """`unused` counts the responses that belong to no group, by reason."""

    groups: list[ScoredQuestion]
    responses: int
    unused: Counter[str]


def read_scored(samples: str, *, keep_cut: bool = False) -> Scored:
    """The responses behind a file or pattern. Files that answer the same question of the same data go together."""
    rows = read_rows(samples)
    missing = [column for column in COLUMNS if column not in rows.columns]
    if missing:
        raise Refusal.at(
            samples,
            f"lacks the columns {', '.join(missing)}; it has {', '.join(rows.columns)}",
            "give a file that `lockstep sample` wrote",
        )
    groups: dict[tuple[int, str], ScoredQuestion] = {}
    unused: Counter[str] = Counter()
    problems: list[Problem] = []
    for number, row in enumerate(rows):
        wrong = _wrong(row)
        if wrong:
            problems.append(Problem(str(rows.origin(number)), wrong, "mend or remove the row"))
            continue
        key = row["question"], json.dumps(row["prompt"], ensure_ascii=False, sort_keys=True)
        group = groups.setdefault(key, ScoredQuestion(row["prompt"]))
        reason = _unusable(row, keep_cut)
        if reason:
            unused[reason] += 1
        else:
            group.responses.append(ScoredResponse(row["response"], float(row["reward"]), row["tokens"]))
    refuse_all(problems, "rows")
    return Scored(list(groups.values()), len(rows), unused)


def _wrong(row: Row) -> str:
    """What makes the row no response at all, or nothing."""
    prompt, reward = row["prompt"], row["reward"]
    if not isinstance(prompt, list) or not prompt or not all(isinstance(m, dict) and m.get("role") for m in prompt):
        return "prompt is not a list of chat messages"
    if not isinstance(row["response"], str):
        return "response is not text"
    if reward is not None and (isinstance(reward, str | bool) or not math.isfinite(reward)):
        return f"reward is {reward!r}, not a number"
    if not isinstance(row["tokens"], int) or not isinstance(row["question"], int):
        return "question and tokens must be whole numbers"
    return ""


def _unusable(row: Row, keep_cut: bool) -> str:
    if row["reward"] is None:
        return NO_SCORE
    if row["stop"] == "length" and not keep_cut:
        return CUT
    return "" if row["response"].strip() else EMPTY
