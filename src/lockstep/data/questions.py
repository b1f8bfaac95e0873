"""Rows of the RL schema as questions with a checkable answer."""

from __future__ import annotations

from lockstep.data.fields import lookup
from lockstep.data.read import RowSet
from lockstep.errors import Problem, Refusal, shortened
from lockstep.types import Question


def read_questions(rows: RowSet, limit: int | None = None) -> list[Question]:
    """The first `limit` rows (all by default); rows that do not fit the schema are refused together."""
    questions: list[Question] = []
    problems: list[Problem] = []
    for i in range(len(rows) if limit is None else min(limit, len(rows))):
        row, origin = rows[i], rows.origin(i)
        try:
            source = lookup(row, "data_source", origin)
            prompt = lookup(row, "prompt", origin)
            truth = lookup(row, "reward_model.ground_truth", origin)
        except Refusal as refusal:
            problems += refusal.problems
            continue
        if not isinstance(prompt, list) or not prompt:
            problems.append(Problem(str(origin), "prompt is not a list of chat messages"))
        elif truth is None or not str(truth).strip():
            problems.append(Problem(str(origin), "reward_model.ground_truth is empty"))
        else:
            extra = row.get("extra_info")
            questions.append(
                Question(str(source), prompt, str(truth), origin, extra if isinstance(extra, dict) else {})
            )
    if problems:
        raise Refusal(shortened(problems, "rows"))
    return questions
