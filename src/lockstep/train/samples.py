"""Which responses of a step are stored in samples.jsonl."""

from __future__ import annotations

from lockstep.run.sample_log import MOST_TOKENS
from lockstep.train.advantages import Advantages
from lockstep.train.experience import Experience
from lockstep.train.rollouts import Rollouts
from lockstep.train.run import Run


def store_samples(run: Run, step: int, rollouts: Rollouts, experience: Experience, advantages: Advantages) -> None:
    """Some responses of the step, and of those that could not be scored the first."""
    count = run.recipe.log.samples
    if count:
        ends = [int(last) + 1 for last in experience.last_K]
        # Cut to what is told of a response, before it travels.
        spans = [slice(first, min(end, first + MOST_TOKENS)) for first, end in zip([0, *ends], ends, strict=False)]
        own = zip(experience.numbers, experience.rollouts, spans, strict=True)
        shares = run.world.gather([(n, r, advantages.advantages_K[at].tolist()) for n, r, at in own if n < count])
        chosen = sorted((told for share in shares for told in share), key=lambda told: told[0])
        # Ranks that divide their micro-batches have the same responses.
        chosen = list({number: (number, rollout, own) for number, rollout, own in chosen}.values())
        told = [advantage for _, _, advantage in chosen]
        run.store(step, "train", [rollout for _, rollout, _ in chosen], told, tokens=True)
    run.store(step, "failed", rollouts.failed.first, tokens=count > 0)
