"""Which responses of a step are stored in samples.jsonl."""

from __future__ import annotations

from lockstep.train.advantages import Advantages
from lockstep.train.experience import Experience
from lockstep.train.rollouts import Rollouts
from lockstep.train.run import Run


def store_samples(run: Run, step: int, rollouts: Rollouts, experience: Experience, advantages: Advantages) -> None:
    """Some responses of the step, and of those that could not be scored the first."""
    count = run.recipe.log.samples
    if count:
        first_tokens = [0, *(int(last) + 1 for last in experience.last_K[:-1])]
        own = zip(experience.numbers, experience.rollouts, first_tokens, strict=False)
        shares = run.world.gather([(n, r, float(advantages.advantages_K[at])) for n, r, at in own if n < count])
        chosen = sorted((told for share in shares for told in share), key=lambda told: told[0])
        # Ranks that divide their micro-batches have the same responses.
        chosen = list({number: (number, rollout, own) for number, rollout, own in chosen}.values())
        run.store(step, "train", [rollout for _, rollout, _ in chosen], [advantage for _, _, advantage in chosen])
    run.store(step, "failed", rollouts.failed.first)
