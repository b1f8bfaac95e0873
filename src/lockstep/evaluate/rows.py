"""Validation on rows: an objective's loss and metrics without an update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from lockstep.data.batching import run_on
from lockstep.data.updates import even_groups
from lockstep.methods.base import MethodModels, Objective
from lockstep.model.policy import evaluating
from lockstep.parallel.world import World
from lockstep.types import Item

# Rows planned into micro-batches together: enough to pack well, few enough to plan quickly.
GROUP = 512


class Measured(MethodModels, Protocol):
    """A model in use, and those that its objective asks."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def world(self) -> World: ...


@torch.no_grad()
def measure(items: Sequence[Item], objective: Objective, models: Measured) -> dict[str, float]:
    """The mean loss over all rows as `loss`, and what the objective reports beside it."""
    total, divisor = 0.0, 0.0
    sums: dict[str, float] = {}
    for group in even_groups(items, GROUP):
        task = objective.task(models.arrange(group), models)
        divisor += task.divisor
        with evaluating(models.module):
            for batch in task.batches:
                found = task.loss(run_on(models.module, batch, models.device), batch)
                total += found.loss.item()
                for name, value in found.metrics.items():
                    sums[name] = sums.get(name, 0.0) + value.item()
    names = sorted(sums)
    total, *values = models.world.sum([total, *(sums[name] for name in names)])
    return {"loss": total / divisor, **objective.report(dict(zip(names, values, strict=True)), divisor)}
