"""Judging by the rules of data sources alone: for validation of offline runs and `lockstep eval`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from lockstep.recipe.keys_online import Reward
from lockstep.reward.rules import any_isolated, rule_for
from lockstep.reward.scorer import Scorer
from lockstep.types import Failure, Question, Score


class RuleJudge:
    """By the built-in rules, at once: for those that always end."""

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


@contextmanager
def judged_by(rules: Mapping[str, str], sources: Iterable[str], device: torch.device) -> Iterator[RuleJudge | Scorer]:
    """By these rules too, where some are named: one that may never end is checked in a process that can be killed."""
    sources = list(sources)
    if not rules and not any_isolated(sources):
        yield RuleJudge()
        return
    with Scorer.open(Reward(rules=dict(rules)), sources, device) as scorer:
        yield scorer
