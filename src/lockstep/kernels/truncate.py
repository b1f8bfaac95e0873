"""Leaving unlikely tokens out of a distribution (top-k, top-p, min-p), the same in the engine and in the trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# Stands for minus infinity: its exponential is 0, and 0 times it is 0 rather than not-a-number.
LEFT_OUT = -1e30


def left_out_below(dtype: torch.dtype) -> float:
    """What is not above this was left out of logits of `dtype`, whose reach may be shorter than LEFT_OUT."""
    return max(LEFT_OUT / 2, torch.finfo(dtype).min)


@dataclass(frozen=True)
class Truncation:
    """Which tokens stay: the `top_k` likeliest, the likeliest that hold `top_p`, those not under `min_p` of the best.

    The likeliest token always stays. Tokens of equal logits at the border of top-k stay together.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def active(self) -> bool:
        return bool(self.top_k) or self.top_p < 1 or self.min_p > 0


def truncate_(logits_RV: torch.Tensor, how: Truncation, keep_R: torch.Tensor | None = None) -> torch.Tensor:
    """Fill what is left out with LEFT_OUT, in place; `keep_R` are entries that stay whatever happens.

    Logits are those of the temperature that is sampled at.
    """
    if not how.active:
        return logits_RV
    rows = logits_RV.float()
    stay = torch.ones_like(rows, dtype=torch.bool)
    if how.top_k and how.top_k < rows.shape[-1]:
        stay &= rows >= rows.topk(how.top_k, dim=-1).values[..., -1:]
    if how.min_p:
        stay &= rows >= rows.amax(-1, keepdim=True) + math.log(how.min_p)
    if how.top_p < 1:
        # Stable: of equal logits the lower entry counts as likelier, wherever the rows are computed.
        ordered, order = rows.masked_fill(~stay, LEFT_OUT).sort(dim=-1, descending=True, stable=True)
        shares = ordered.softmax(-1)
        before = shares.cumsum(-1) - shares
        held = before < how.top_p
        held[..., 0] = True  # a top-p that is 0 in these digits leaves the likeliest too
        stay &= torch.empty_like(stay).scatter_(-1, order, held)
    if keep_R is not None:
        stay.scatter_(-1, keep_R[:, None], True)
    return logits_RV.masked_fill_(~stay, LEFT_OUT)
