"""The models of an online run: the policy that learns, the reference it is held to, the critic that judges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.data.batching import to_device
from lockstep.model.policy import Policy
from lockstep.parallel.world import World
from lockstep.train.evaluate import evaluating
from lockstep.train.step import Learner
from lockstep.types import MicroBatch


@dataclass(frozen=True)
class Roles:
    """`reference` is a frozen model of its own; None when there is none or it is the policy without its adapter."""

    policy: Learner
    reference: Policy | None
    critic: Learner | None
    world: World
    device: torch.device

    def logprobs(self, batches: Sequence[MicroBatch], count: int) -> torch.Tensor:
        """The policy's log-probabilities of `count` targets, as it is now."""
        return self._over(self.policy.module, batches, count, lambda scores: scores.logprobs_K)

    def reference_logprobs(self, batches: Sequence[MicroBatch], count: int) -> torch.Tensor:
        if self.reference is not None:
            return self._over(self.reference, batches, count, lambda scores: scores.logprobs_K)
        policy = self.policy.module
        assert isinstance(policy, Policy)
        with policy.without_adapter():
            return self._over(policy, batches, count, lambda scores: scores.logprobs_K)

    def values(self, batches: Sequence[MicroBatch], count: int) -> torch.Tensor:
        assert self.critic is not None
        return self._over(self.critic.module, batches, count, lambda values: values)

    def _over(
        self, module: nn.Module, batches: Sequence[MicroBatch], count: int, pick: Callable[[Any], torch.Tensor]
    ) -> torch.Tensor:
        return over_targets(module, batches, count, self.world, self.device, pick)


@torch.no_grad()
def over_targets(
    module: nn.Module,
    batches: Sequence[MicroBatch],
    count: int,
    world: World,
    device: torch.device,
    pick: Callable[[Any], torch.Tensor],
) -> torch.Tensor:
    """A number for each target, on the host: every rank fills in its share."""
    vector = torch.zeros(count)
    with evaluating(module):
        for batch in batches:
            vector[batch.index_K] = pick(module(to_device(batch, device))).cpu()
    return world.sum_tensor(vector)
