"""The two verbs of training: `forward_backward(batch, loss)` and `optim_step()`.

Micro-batches, loss scaling, sharding and master weights live below them. Losses are sums; the trained tokens of the
whole update are counted over all ranks first and divided by once, so none of those can change a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from lockstep.data.batching import to_device
from lockstep.errors import Refusal
from lockstep.model.policy import Policy
from lockstep.parallel.world import World
from lockstep.train.optim import LossScale, Optimizer
from lockstep.types import MicroBatch, Origin, Sums

Loss = Callable[[torch.Tensor], Sums]
SHOWN_ROWS = 8


class Learner:
    """A policy and its optimizer on one device of the world."""

    def __init__(
        self, policy: Policy, optimizer: Optimizer, device: torch.device, world: World, scale: LossScale | None = None
    ):
        self.policy = policy
        self.optimizer = optimizer
        self.device = device
        self.world = world
        self.scale = scale
        self.skipped = 0
        self._origins: list[Origin] = []

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> dict[str, float]:
        """Gradients of the mean loss over the update's trained tokens; returns that mean and the counts."""
        counts = [sum(len(b.targets_K) for b in micro_batches), sum(b.tokens for b in micro_batches)]
        targets, tokens = self.world.sum(counts)
        self._origins = [origin for batch in micro_batches for origin in batch.origins]
        if not targets:
            raise Refusal.at(self._rows(self._origins), "no token of the whole update is trained")
        factor = (self.scale.value if self.scale else 1.0) / targets
        losses = []
        for batch in micro_batches:
            sums = loss(self.policy(to_device(batch, self.device)))
            (sums.loss * factor).backward()
            self.optimizer.collect()
            losses.append(sums.loss.detach())
        # One wait for the device a step: the losses come over together, and are added up in double precision.
        values = torch.stack(losses).tolist()
        mean = self.world.sum([sum(values)])[0] / targets
        if not math.isfinite(mean):
            self._refuse_loss(values, micro_batches)
        return {"train/loss": mean, "train/tokens": tokens, "train/trained_tokens": targets}

    def optim_step(self, lr: float) -> dict[str, float]:
        """One update with what `forward_backward` left behind."""
        norm = self.optimizer.gradient_norm(self.scale.value if self.scale else 1.0)
        metrics = {"train/grad_norm": norm.item(), "train/lr": lr}
        finite = bool(torch.isfinite(norm))
        if self.scale:
            self.scale.update(overflowed=not finite)
            metrics["train/loss_scale"] = self.scale.value
            if not finite and self.scale.value >= 1:
                # Overflow is how fp16 finds its scale; the update is skipped and counted.
                self.skipped += 1
                self.optimizer.forget()
                return metrics | {"train/grad_norm": 0.0, "train/skipped": float(self.skipped)}
            metrics["train/skipped"] = float(self.skipped)
        if not finite:
            raise Refusal.at(
                self._rows(self._origins),
                f"the gradient norm is {norm.item()} with a finite loss",
                "lower optim.lr, use bf16 or fp32, or look at these rows; the last checkpoint is untouched",
            )
        self.optimizer.step(lr, norm)
        return metrics

    def _refuse_loss(self, losses: list[float], micro_batches: Sequence[MicroBatch]) -> None:
        bad = [o for value, b in zip(losses, micro_batches, strict=True) if not math.isfinite(value) for o in b.origins]
        raise Refusal.at(
            self._rows(bad),
            "the loss of the micro-batch with these rows is not finite",
            "lower optim.lr, use bf16 or fp32, or look at these rows; the last checkpoint is untouched",
        )

    def _rows(self, mine: Sequence[Origin]) -> str:
        """Names of rows, those of the other ranks among them (all ranks stop at the same place)."""
        origins = [origin for share in self.world.gather(list(mine)) for origin in share]
        names = ", ".join(str(origin) for origin in origins[:SHOWN_ROWS])
        rest = len(origins) - SHOWN_ROWS
        return f"rows {names}" + (f" and {rest} more" if rest > 0 else "")
