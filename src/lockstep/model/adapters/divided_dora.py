"""DoRA under tensor parallelism, where each rank has some outputs or some inputs of a weight.

A layer that is split by outputs has complete rows of the weight, so each rank computes the norms of its rows. A layer
that is split by inputs has a part of every row, so the squares are summed over the ranks. The formulas are those of
PEFT's `DoraLinearLayer`, in which no gradient flows through the norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lockstep.parallel.tensor import Style, TensorGroup, is_sliced


class DividedDora:
    """Replaces PEFT's DoRA variant of one layer."""

    def __init__(self, group: TensorGroup, style: Style):
        self.group, self.style = group, style

    def forward(
        self, module: Any, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **more: Any
    ) -> torch.Tensor:
        """Returns the output of the layer. `result` is the output of the base layer."""
        a, b, scale = module.lora_A[active_adapter], module.lora_B[active_adapter], module.scaling[active_adapter]
        base, magnitude = module.get_base_layer(), _part(module.lora_magnitude_vector[active_adapter].weight)
        norms = self.norms(_part(base.weight), _part(a.weight), _part(b.weight), scale).to(magnitude.dtype)
        factor = (magnitude / norms).view(1, -1)
        bias = base._parameters.get("bias")
        plain = result if bias is None else result - _part(bias)
        return result + (factor - 1) * plain + factor * b(a(x)) * scale

    @torch.no_grad()
    def norms(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
        """Returns the norms of the rows of the adapted weight, given this rank's parts of the matrices."""
        return self.row_norms(weight + scale * (b @ a))

    def row_norms(self, weight: torch.Tensor) -> torch.Tensor:
        if self.style == "columns":
            return torch.linalg.norm(weight, dim=1)
        return self.group.sum_(weight.float().square().sum(dim=1)).sqrt()


def _part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_sliced(tensor) else tensor


def divide_dora(decoder: nn.Module, styles: Mapping[str, Style], group: TensorGroup) -> None:
    """Replaces the DoRA variants of the layers that `styles` splits."""
    for name, style in styles.items():
        layer: Any = decoder.get_submodule(name)
        for adapter in getattr(layer, "lora_magnitude_vector", ()):
            layer.lora_variant[adapter] = DividedDora(group, style)
