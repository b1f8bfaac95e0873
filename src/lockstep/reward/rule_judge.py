"""Judging by the rules of data sources alone, at once: for validation of offline runs and `lockstep eval`."""

from __future__ import annotations

from concurrent.futures import Future

from lockstep.reward.rules import rule_for
from lockstep.types import Failure, Question, Score


class RuleJudge:
    def submit(self, question: Question, text: str) -> Future[Score | Failure]:
        rule = rule_for(question.data_source)
        future: Future[Score | Failure] = Future()
        value = rule(text, question.ground_truth)
        future.set_result(Score(value, {"rule": value}))
        return future

    def flush(self) -> None:
        """Nothing waits."""

    def answer_of(self, question: Question, text: str) -> str | None:
        return rule_for(question.data_source).answer(text)
