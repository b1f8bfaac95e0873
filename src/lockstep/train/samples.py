"""Which responses of a step are stored in samples.jsonl."""

from __future__ import annotations

from lockstep.train.advantages import Advantages
from lockstep.train.rollouts import Rollouts
from lockstep.train.run import Run


def store_samples(run: Run, step: int, rollouts: Rollouts, advantages: Advantages) -> None:
    """Some responses of the step, and of those that could not be scored the first."""
    experience, count = rollouts.experience, run.recipe.log.samples
    first_tokens = [0, *(int(last) + 1 for last in experience.last_K[:-1])]
    chosen = experience.rollouts[:count]
    told = [float(advantages.advantages_K[first_tokens[i]]) for i in range(len(chosen))]
    run.store(step, "train", chosen, told)
    run.store(step, "failed", rollouts.failed[: max(count, 1)])
