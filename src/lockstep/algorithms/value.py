"""The critic's loss as a weighted sum over tokens."""

from __future__ import annotations

import torch

from lockstep.types import Sums


def value_loss(
    values_K: torch.Tensor,
    old_values_K: torch.Tensor,
    returns_K: torch.Tensor,
    weights_K: torch.Tensor,
    *,
    clip: float | None,
) -> Sums:
    """Half the squared error to the return, the worse of the value and of the value held near the old one.

    PPO's clipped value loss, as in the code of the paper (arXiv 1707.06347): 0.5 max((v - R)^2,
    (clip(v, old +- clip) - R)^2). `clip` None is the plain half square. A token of weight 0 is left out whatever its
    numbers are. Metrics are sums over the other tokens: `vf_clipfrac` where the bound decided, `vpred` the values.
    """
    counted_K = weights_K > 0
    values_K = torch.where(counted_K, values_K, 0.0)
    old_values_K = torch.where(counted_K, old_values_K, 0.0)
    returns_K = torch.where(counted_K, returns_K, 0.0)
    square_K = (values_K - returns_K).square()
    clipped_K = torch.zeros_like(counted_K)
    if clip is not None:
        near_K = torch.clamp(values_K, old_values_K - clip, old_values_K + clip)
        near_square_K = (near_K - returns_K).square()
        clipped_K = near_square_K > square_K
        square_K = torch.maximum(square_K, near_square_K)
    metrics = {
        "vf_clipfrac": (clipped_K & counted_K).sum().to(square_K.dtype),
        "vpred": values_K.detach().sum(),
    }
    return Sums(loss=0.5 * (weights_K * square_K).sum(), metrics=metrics)
