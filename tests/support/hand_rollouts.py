"""Hand-made responses, and checked recipes in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.recipe import Recipe
from lockstep.recipe.methods import with_method_defaults
from lockstep.recipe.recipe_checks import combination_problems, with_derived_defaults
from lockstep.recipe.schema import Batch
from lockstep.train.experience import Experience, UpdatePlan, pack_minibatches, plan_updates
from lockstep.train.models import Models
from lockstep.types import Failure, Origin, Prompt, Question, Rollout, Score


def recipe_of(path: str = "m", method: str = "grpo", **dotted: Any) -> Recipe:
    """A checked recipe; dots of a key are written `__`, as in `algorithm__entropy=0.1`."""
    values: dict[str, Any] = {"method": method, "device": "cpu", "model": {"path": path}, "data": {"train": "rows"}}
    for key, value in dotted.items():
        *parents, leaf = key.split("__")
        target = values
        for parent in parents:
            target = target.setdefault(parent, {})
        target[leaf] = value
    recipe = Recipe.model_validate(with_method_defaults(values))
    assert not list(combination_problems(recipe))
    return with_derived_defaults(recipe)


def question(row: int = 0, source: str = "arithmetic") -> Question:
    return Question(source, [{"role": "user", "content": f"{row}?"}], "4", Origin("rows.jsonl", row))


def rollout(
    place: int,
    ids: Sequence[int],
    score: float | Failure | Score,
    *,
    sample: int = 0,
    prompt: Sequence[int] = (5, 6, 7),
    logprobs: Sequence[float] | None = None,
    stop: str = "token",
    text: str = "",
    source: str = "arithmetic",
    trained: Sequence[int] = (),
    earned: tuple[tuple[int, float], ...] = (),
) -> Rollout:
    return Rollout(
        prompt=Prompt(question(place, source), list(prompt)),
        prompt_index=place,
        sample=sample,
        ids=list(ids),
        logprobs=list(logprobs) if logprobs is not None else [-0.5] * len(ids),
        stop=stop,
        text=text,
        score=Score(float(score)) if isinstance(score, int | float) else score,
        loss_mask=trained,
        token_rewards=earned,
    )


FAILED = Failure("function", "no idea")


def plans_of(experience: Experience, models: Models, batch: Batch) -> list[UpdatePlan]:
    """The updates of a step whose responses are all here."""
    return plan_updates(experience, pack_minibatches(experience, models, batch), models)
