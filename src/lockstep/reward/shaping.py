"""What is added to a reward for the shape of a response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lockstep.recipe import Recipe
from lockstep.reward.scorer import Scorer
from lockstep.types import Failure, Rollout, Score


def overlong_penalty(length: int, limit: int, buffer: int, factor: float) -> float:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, eq. 13), scaled by `factor`.

    0 up to `limit - buffer` tokens, then a straight line down to `-factor` at the limit and beyond.
    A buffer of 0 is off.
    """
    over = length - (limit - buffer)
    if buffer <= 0 or over <= 0:
        return 0.0
    return -factor * min(over / buffer, 1.0)


def shaped(rollout: Rollout, recipe: Recipe) -> Rollout:
    """Its score within the recipe's bounds, less what the recipe takes off for length."""
    settings, bounds = recipe.algorithm.overlong, recipe.reward.clip
    if isinstance(rollout.score, Failure) or not (settings.buffer or bounds or settings.cut is not None):
        return rollout
    total, parts = rollout.score.total, dict(rollout.score.parts)
    if settings.cut is not None and rollout.stop == "length":
        total = total * settings.cut if settings.cut >= 0 else settings.cut
    if bounds:
        total = min(max(total, bounds[0]), bounds[1])
    if settings.buffer:
        parts["overlong"] = overlong_penalty(
            len(rollout.ids), recipe.rollout.max_tokens, settings.buffer, settings.factor
        )
        total += parts["overlong"]
    return replace(rollout, score=Score(total, parts))


def rescored(rollouts: Sequence[Rollout], scorer: Scorer, recipe: Recipe) -> list[Score | Failure]:
    """What responses are worth by this run's rewards, however they came about."""
    waiting = [scorer.submit(rollout.prompt.question, rollout.text) for rollout in rollouts]
    scorer.flush()
    pairs = zip(rollouts, waiting, strict=True)
    return [shaped(replace(rollout, score=future.result()), recipe).score for rollout, future in pairs]
