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


def own_forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the module's class computes, whatever has taken its forward's place."""
    answer: torch.Tensor = type(module).forward(module, x)
    return answer
