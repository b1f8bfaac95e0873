"""A policy loss: the ratio, damped beyond the bounds of the clip."""

import torch

from lockstep.algorithms.policy_loss import LOSSES, PolicyTokens, user_loss
from lockstep.recipe import registry
from lockstep.types import Sums


def leaky(tokens: PolicyTokens, *, low: float, high: float) -> Sums:
    """The ratio; beyond the bounds only a tenth of it counts."""

    def at_tokens(counted: PolicyTokens) -> torch.Tensor:
        ratio_K = (counted.logprobs_K - counted.old_K).clamp(-20, 20).exp()
        bounded_K = ratio_K.clamp(1 - low, 1 + high)
        return -counted.advantages_K * (bounded_K + 0.1 * (ratio_K - bounded_K))

    return user_loss(tokens, function=at_tokens)


LOSSES["leaky"] = leaky
registry.LOSSES["leaky"] = registry.LossRow({"low": "clip_low", "high": "clip_high"})
