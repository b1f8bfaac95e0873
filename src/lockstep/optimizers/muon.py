"""Muon as in `torch.optim.Muon`, for the matrices of linear layers and experts; AdamW for all other parameters.

The update of a matrix is its momentum, orthogonalised by Newton-Schulz iterations in bf16. The iterations need the full
matrix, so the ranks among which its rows or columns are divided gather it. Each expert of a stack is a matrix of its
own. If ranks have different experts, nothing is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch

from lockstep.kernels.bf16_matmul import prepare_products
from lockstep.optimizers.elementwise_rules import AdamwRule
from lockstep.optimizers.update_rule import ParameterStep, Roles, StateTensor
from lockstep.recipe.keys_optim import Optim

# Coefficients of the Newton-Schulz polynomial, and the smallest norm by which a matrix is divided (Keller Jordan 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7


def orthogonalised(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    """Returns matrices whose singular values are between about 0.5 and 1.5, with the singular vectors of `matrices`.
    The last two dimensions are rows and columns."""
    a, b, c = COEFFICIENTS
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.bfloat16()
    x = (x.mT if tall else x).flatten(0, -3) if x.ndim > 2 else (x.mT if tall else x)
    # A stack of matrices is divided by their own norms, a single matrix as in torch.
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) if x.ndim > 2 else x.norm()
    x = x / norm.clamp(min=EPSILON)
    multiply = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply(x, multiply(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrices.shape)


class MuonRule(AdamwRule):
    keys: ClassVar[tuple[str, ...]] = (*AdamwRule.keys, "momentum_buffer")

    def __init__(self, settings: Optim, roles: Roles, moments: torch.dtype):
        super().__init__(settings, roles, moments)
        self.settings, self.matrices = settings, roles.matrices
        prepare_products(torch.bfloat16)

    def state(self, name: str, shape: Sequence[int], part: Sequence[int]) -> dict[str, StateTensor]:
        if name not in self.matrices:
            return super().state(name, shape, part)
        return {"momentum_buffer": StateTensor(tuple(part), self.moments)}

    def by_rows(self, name: str) -> bool:
        return name not in self.matrices

    def update(self, one: ParameterStep) -> None:
        if one.name not in self.matrices:
            super().update(one)
            return
        settings, layout = self.settings, one.layout
        momentum = one.state["momentum_buffer"].lerp_(one.gradient, 1 - settings.momentum)
        change = one.gradient.lerp_(momentum, settings.momentum) if settings.nesterov else momentum
        last = len(layout.shape) - 1
        if layout.divides(last, last - 1):
            change = layout.own_part(orthogonalised(layout.gathered(change.bfloat16()), settings.ns_steps))
        elif change.numel():
            change = orthogonalised(change, settings.ns_steps)
        one.weight.mul_(1 - one.lr * one.decay).add_(change, alpha=-one.lr * self.lr_factor(layout.shape))

    def lr_factor(self, shape: Sequence[int]) -> float:
        rows, columns = shape[-2:]
        if self.settings.adjust_lr == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / columns))
