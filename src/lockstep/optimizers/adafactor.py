"""Adafactor (Shazeer and Stern 2018, arXiv 1804.04235) as in `torch.optim.Adafactor`.

The second moment of a matrix is stored as the means of its rows and of its columns. A stack of matrices (experts) has
the means of each matrix. `optim.scale_parameter: false` uses the learning rate as it is, as Adafactor of transformers
with `scale_parameter=False, relative_step=False`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from lockstep.optimizers.update_rule import ParameterStep, Roles, ShardLayout, StateTensor
from lockstep.recipe.keys_optim import Optim

# The smallest root mean square of a parameter by which the learning rate is multiplied.
LEAST_SCALE = 1e-3
EPSILON = torch.finfo(torch.float32).eps


class AdafactorRule:
    keys: ClassVar[tuple[str, ...]] = ("row_var", "col_var", "variance")

    def __init__(self, settings: Optim, roles: Roles, moments: torch.dtype):
        # Means over rows and columns are small, so they are always stored in fp32.
        self.moments, self.settings = moments, settings

    def state(self, name: str, shape: Sequence[int], part: Sequence[int]) -> dict[str, StateTensor]:
        if len(shape) < 2:
            return {"variance": StateTensor(tuple(part), self.moments)}
        last, dtype = len(shape) - 1, torch.float32
        rows = StateTensor((*part[:-1], 1), dtype, last)
        columns = StateTensor((*part[:-2], 1, part[-1]), dtype, last - 1)
        return {"row_var": rows, "col_var": columns}

    def by_rows(self, name: str) -> bool:
        return False

    def update(self, one: ParameterStep) -> None:
        settings, layout, gradient = self.settings, one.layout, one.gradient
        size, every = torch.Size(layout.shape).numel(), tuple(range(len(layout.shape)))
        rate = one.lr
        if settings.scale_parameter:
            scale = float(layout.sum_over(_squares(one.weight), *every).sqrt()) / size**0.5
            rate = max(LEAST_SCALE, scale) * min(one.lr, one.count**-0.5)
        one.weight.mul_(1 - one.lr * one.decay)
        variance = self._variance(one.state, gradient, layout, one.count**-settings.decay_rate)
        change = variance.clamp_(min=EPSILON**2).rsqrt_().mul_(gradient)
        size_of_change = float(layout.sum_over(_squares(change), *every).sqrt()) / size**0.5
        one.weight.add_(change, alpha=-rate / max(1.0, size_of_change / settings.clip_threshold))

    def _variance(
        self, state: Mapping[str, torch.Tensor], gradient: torch.Tensor, layout: ShardLayout, share: float
    ) -> torch.Tensor:
        """Moves the stored means by `share` towards the squared gradient, and returns the estimate of the second
        moment."""
        if "variance" in state:
            return torch.clone(state["variance"].lerp_(gradient.square(), share))
        last = len(layout.shape) - 1
        for key, dimension in (("row_var", last), ("col_var", last - 1)):
            sums = layout.sum_over(torch.linalg.vector_norm(gradient, dim=dimension, keepdim=True).square_(), dimension)
            state[key].lerp_(sums.div_(layout.shape[dimension]), share)
        rows, columns = state["row_var"], state["col_var"]
        mean = layout.sum_over(rows.sum(dim=-2, keepdim=True), last - 1).div_(layout.shape[-2])
        return (rows @ columns).div_(mean.clamp_(min=EPSILON))


def _squares(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor).square()
