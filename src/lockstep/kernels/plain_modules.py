"""The modules of transformers that a fused operator may stand for, found by what they look like, not by their names."""

from __future__ import annotations

import torch
from torch import nn

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def is_rms_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    known = isinstance(weight, nn.Parameter) and weight.dim() == 1 and not list(module.children())
    return known and getattr(module, "bias", None) is None and epsilon_of(module) is not None


def epsilon_of(module: nn.Module) -> float | None:
    value = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return value if isinstance(value, float) else None


def is_gated(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in PROJECTIONS)


def is_silu_gated(module: nn.Module) -> bool:
    """Nothing else among its parts: dropout would not show in a trial."""
    silu = type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    return is_gated(module) and silu and {name for name, _ in module.named_children()} <= {*PROJECTIONS, "act_fn"}


def fused_feed_forwards(model: nn.Module) -> int:
    """How many feed-forwards a fused kernel takes as a whole, with all three projections."""
    return sum(
        is_silu_gated(module) and all(_without_bias(module, name) for name in PROJECTIONS) for module in model.modules()
    )


def _without_bias(module: nn.Module, name: str) -> bool:
    projection = getattr(module, name)
    return type(projection) is nn.Linear and projection.bias is None


def own_forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the module's class computes, whatever has taken its forward's place."""
    answer: torch.Tensor = type(module).forward(module, x)
    return answer
