"""The part `model` where the recipe names several reward models: their weighted sum."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack

import torch

from lockstep.reward.model import ModelPart
from lockstep.reward.parts import Countdown, PartOutcome, RewardPart, promised
from lockstep.types import Failure, Question


class ModelsPart(RewardPart):
    """Each model's own score is logged as `model/1`, `model/2`, ... in the order of the recipe."""

    name = "model"

    def __init__(self, paths: Sequence[str], weights: Sequence[float], device: torch.device, *, offload: bool = False):
        self._weights = list(weights) or [1.0] * len(paths)
        with ExitStack() as opened:
            self._parts: list[ModelPart] = []
            for path in paths:
                self._parts.append(ModelPart(path, device, offload=offload))
                opened.callback(self._parts[-1].close)
            opened.pop_all()

    def submit(self, question: Question, text: str) -> Future[PartOutcome]:
        outcomes = [part.submit(question, text) for part in self._parts]
        future = promised()
        remaining = Countdown(len(outcomes), lambda: future.set_result(self._sum([o.result() for o in outcomes])))
        for outcome in outcomes:
            outcome.add_done_callback(remaining)
        return future

    def flush(self) -> None:
        for part in self._parts:
            part.flush()

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _sum(self, outcomes: Sequence[PartOutcome]) -> PartOutcome:
        """The first failure in the order of the models, or the weighted sum of their scores."""
        scores: list[float] = []
        for outcome in outcomes:
            if isinstance(outcome, Failure):
                return outcome
            scores.append(outcome[self.name])
        total = sum(weight * score for weight, score in zip(self._weights, scores, strict=True))
        return {self.name: total, **{f"{self.name}/{i}": score for i, score in enumerate(scores, 1)}}
