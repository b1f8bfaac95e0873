"""The parts `rule` and `format`: checks of a response's text."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.recipe.keys_online import Reward
from lockstep.reward.function import FunctionPart
from lockstep.reward.parts import PartOutcome, RewardPart, settled
from lockstep.reward.rules import Rule, rule_for
from lockstep.types import Failure, Question


class RulePart(RewardPart):
    """Scores each response with the rule of its data source: directly, or in a process if the check may hang."""

    name = "rule"

    def __init__(self, settings: Reward, sources: Iterable[str], *, output: Path | None = None):
        self._settings = settings
        self._output = output
        self._isolated: dict[str, FunctionPart] = {}
        self._lock = threading.Lock()
        problems: list[Problem] = []
        rules: list[Rule] = []
        for source in sorted(set(sources)):
            try:
                rules.append(self.rule(source))
            except Refusal as refusal:
                problems += refusal.problems
        refuse_all(problems)
        for rule in rules:
            if rule.isolated is not None:
                self._process(rule.name, rule.isolated)

    def rule(self, source: str) -> Rule:
        return rule_for(source, self._settings.rules)

    def submit(self, question: Question, text: str) -> Future[PartOutcome]:
        rule = self.rule(question.data_source)
        if rule.isolated is not None:
            return self._process(rule.name, rule.isolated).submit(question, text)
        try:
            return settled({self.name: rule(text, question.ground_truth)})
        except Refusal as refusal:
            # The ground truth of the row is invalid.
            return settled(Failure(self.name, f"{question.origin}: {refusal.problems[0]}"))

    def close(self) -> None:
        for part in self._isolated.values():
            part.close()

    def _process(self, name: str, reference: str) -> FunctionPart:
        with self._lock:
            if name not in self._isolated:
                output = self._output and self._output.with_name(f"{name}-{self._output.name}")
                self._isolated[name] = FunctionPart(
                    reference, self._settings, name=self.name, key="reward.rules", output=output
                )
            return self._isolated[name]


class FormatPart(RewardPart):
    """1 if the full response matches the expression (`.` also matches line breaks), else 0."""

    name = "format"

    def __init__(self, expression: str):
        try:
            self._pattern = re.compile(expression, re.DOTALL)
        except re.error as error:
            where = "" if error.pos is None else f" at character {error.pos + 1}"
            raise Refusal.at(
                "reward.format",
                f"{expression!r} is not a regular expression: {error.msg}{where}",
                "fix it",
                code="invalid-regex",
            ) from error

    def submit(self, question: Question, text: str) -> Future[PartOutcome]:
        return settled({self.name: 1.0 if self._pattern.fullmatch(text) else 0.0})
