"""Policy filtration (PF-PPO, arXiv 2409.06957): responses whose reward can be relied on are learned from more often.

Shapes: S responses of a step. The paper draws the step's responses anew from themselves, with replacement, by weights
of their rewards. Here a response keeps its place and counts as often as it was drawn, which is the same sum; verl
shuffles the copies over the updates of a step.
"""

from __future__ import annotations

import torch

from lockstep.errors import Refusal

METHODS = ("none", "pow", "max_min", "max_random")
# Nothing is impossible to draw, as in verl.
LEAST = 1e-8


def drawn_times(scores_S: torch.Tensor, method: str, power: float, generator: torch.Generator) -> torch.Tensor:
    """How often each response is drawn: S draws with replacement, by weight.

    `pow` weighs |s|^power, `max_min` the step's best and worst scores 1 and others 0, `max_random` the best ones 0.4
    and others 0.1. Drawn on the generator's device: with generators of one seed every rank draws the same.
    """
    scores_S = scores_S.double()
    if method == "pow":
        weights_S = scores_S.abs().pow(power)
    elif method == "max_min":
        weights_S = ((scores_S == scores_S.max()) | (scores_S == scores_S.min())).double()
    elif method == "max_random":
        weights_S = torch.where(scores_S == scores_S.max(), 0.4, 0.1).double()
    else:
        raise Refusal.at("algorithm.filtration.method", f"{method!r} is not known", f"one of {', '.join(METHODS)}")
    drawn = torch.multinomial(weights_S + LEAST, len(scores_S), replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=len(scores_S)).to(torch.float32)
