"""AdamW in plain torch, and Lion. Each element of a parameter is updated independently of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from lockstep.optimizers.update_rule import ParameterStep, Roles, StateTensor
from lockstep.recipe.keys_optim import Optim


class AdamwRule:
    """AdamW (Loshchilov and Hutter 2019) in fp32. Only the stored moments may have another dtype."""

    keys: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __init__(self, settings: Optim, roles: Roles, moments: torch.dtype):
        self.betas, self.eps, self.moments = settings.betas, settings.eps, moments

    def state(self, name: str, shape: Sequence[int], part: Sequence[int]) -> dict[str, StateTensor]:
        return dict.fromkeys(("exp_avg", "exp_avg_sq"), StateTensor(tuple(part), self.moments))

    def by_rows(self, name: str) -> bool:
        return True

    def update(self, one: ParameterStep) -> None:
        mean, square = one.state["exp_avg"], one.state["exp_avg_sq"]
        mean.lerp_(one.gradient, 1 - self.betas[0])
        square.lerp_(one.gradient.square(), 1 - self.betas[1])
        self.apply(one, mean, square)

    def apply(self, one: ParameterStep, mean: torch.Tensor, square: torch.Tensor) -> None:
        """Changes the weights, given the new moments."""
        corrections = [1 - beta**one.count for beta in self.betas]
        one.weight.mul_(1 - one.lr * one.decay)
        denominator = square.sqrt().div_(corrections[1] ** 0.5).add_(self.eps)
        one.weight.addcdiv_(mean, denominator, value=-one.lr / corrections[0])


class LionRule:
    """Lion (Chen et al. 2023, arXiv 2302.06675): the sign of a momentum, with decoupled weight decay."""

    keys: ClassVar[tuple[str, ...]] = ("exp_avg",)

    def __init__(self, settings: Optim, roles: Roles, moments: torch.dtype):
        self.betas, self.moments = settings.betas, moments

    def state(self, name: str, shape: Sequence[int], part: Sequence[int]) -> dict[str, StateTensor]:
        return {"exp_avg": StateTensor(tuple(part), self.moments)}

    def by_rows(self, name: str) -> bool:
        return True

    def update(self, one: ParameterStep) -> None:
        mean = one.state["exp_avg"]
        direction = mean.lerp(one.gradient, 1 - self.betas[0]).sign_()
        one.weight.mul_(1 - one.lr * one.decay).sub_(direction, alpha=one.lr)
        mean.lerp_(one.gradient, 1 - self.betas[1])
