"""The two training operations, `forward_backward` and `optim_step`, and the load-balancing loss of MoE routers.

The loss of a micro-batch is a sum over tokens. The divisor of the loss is computed over all micro-batches and ranks of
the update, so micro-batches, loss scaling and sharding do not change the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.algorithms.token_losses import Routed, count_routed, load_balance
from lockstep.data.batching import run_on
from lockstep.device.base import fetched
from lockstep.errors import Refusal
from lockstep.model.decoder import Decoder
from lockstep.model.policy import evaluating
from lockstep.model.routing import Routing
from lockstep.parallel.world import World
from lockstep.tape.tape_recorder import Observer
from lockstep.train.optim import LossScale, Optimizer
from lockstep.train.routing_replay import flip_metrics
from lockstep.types import Loss, MicroBatch, Origin, Sums


class Balance:
    """The load-balancing loss of MoE routers over an update. The product of `coefficient` and this loss is added to the
    loss of the method. For each expert, the loss multiplies two means over all tokens: how often the expert was chosen,
    and the router probability of the expert. The choices are counted in an extra forward pass before the first
    gradient, so the loss does not depend on micro-batches or ranks."""

    def __init__(self, module: nn.Module, decoder: Decoder, coefficient: float, experts: int, world: World) -> None:
        self.coefficient = coefficient
        self.value = 0.0
        """The loss of the last update, without the coefficient."""
        self._module, self._decoder, self._experts, self._world = module, decoder, experts, world
        self._chosen_E = torch.zeros(0)
        self._rows = 0.0
        decoder.records_router_logits = True

    @torch.no_grad()
    def count(self, micro_batches: Sequence[MicroBatch], run: Callable[[MicroBatch], object]) -> None:
        """Counts how often each expert is chosen in the update. `run` runs the forward pass of a micro-batch."""
        sums = []
        with evaluating(self._module):
            for batch in micro_batches:
                run(batch)
                found = self._routed(batch)
                sums.append(torch.cat([found.chosen_E, found.probs_E, found.rows[None]]).cpu())
        # The sums are computed in double precision on the CPU.
        totals = self._world.sum_tensor(torch.stack(sums).double().sum(0))
        self._chosen_E, probs_E = totals[:-1].chunk(2)
        self._rows = float(totals[-1])
        self.value = float(load_balance(self._chosen_E, probs_E, self._rows))

    def part(self, batch: MicroBatch) -> torch.Tensor:
        """Returns the part of the weighted load-balancing loss that belongs to the last micro-batch."""
        probs_E = self._routed(batch).probs_E
        return self.coefficient * load_balance(self._chosen_E.to(probs_E), probs_E, self._rows)

    def _routed(self, batch: MicroBatch) -> Routed:
        logits = self._decoder.router_logits
        return count_routed(logits, self._experts, token_weights(batch).to(logits[0].device))


def token_weights(batch: MicroBatch) -> torch.Tensor:
    """Returns for each token of a micro-batch the number of sequences that contain it. A token of a shared prefix is in
    several sequences. For padding and for the dummy token of an empty micro-batch, the number is 0."""
    rows, width = batch.input_ids_NT.shape
    if not batch.tokens:
        return torch.zeros(rows * width)
    if batch.packed_index_E is not None:
        return torch.bincount(batch.packed_index_E.cpu(), minlength=rows * width).float()
    if batch.packed:
        return (torch.arange(rows * width) < sum(batch.lengths)).float()
    return (torch.arange(width) < torch.tensor(batch.lengths)[:, None]).float().flatten()


SHOWN_ROWS = 8


@dataclass(frozen=True)
class Outcome:
    """The result of an update: the mean loss, and metrics as sums and maxima over all ranks."""

    loss: float
    sums: dict[str, float]
    maxima: dict[str, float]
    targets: int
    tokens: int

    def means(self) -> dict[str, float]:
        """Metrics per target."""
        return {name: value / self.targets for name, value in self.sums.items()}


class Learner:
    """A trained module and its optimizer on one device. `name` is the prefix of the metrics of this learner."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        world: World,
        scale: LossScale | None = None,
        name: str = "train",
        balance: Balance | None = None,
    ):
        self.module = module
        self.optimizer = optimizer
        self.device = device
        self.world = world
        self.scale = scale
        self.name = name
        self.balance = balance
        self.routing: Routing | None = None
        """The routers of the module, if the run replays their choices."""
        self.observer = Observer()
        self.skipped = 0
        self.num_effective_updates = 0
        """The number of updates with a non-zero gradient, including updates that were skipped after an fp16
        overflow."""
        self._origins: list[Origin] = []

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss: Loss, divisor: float | None = None
    ) -> Outcome:
        """Computes the gradients of the loss divided by `divisor`. The default divisor is the number of target
        tokens."""
        counts = [sum(len(b.targets_K) for b in micro_batches), sum(b.tokens for b in micro_batches)]
        targets, tokens = self.world.sum(counts)
        self._origins = [origin for batch in micro_batches for origin in batch.origins]
        if not targets:
            raise Refusal.at(
                self._rows(self._origins),
                "no token of the update is trained",
                "check the loss mask of these rows (run `lockstep data show`)",
                code="no-trained-token",
            )
        divisor = divisor or targets
        scale = self.scale.value if self.scale else 1.0
        if self.balance:
            self.balance.count(micro_batches, lambda batch: run_on(self.module, batch, self.device))
        every: list[_Arriving] = []
        for batch in micro_batches:
            output = run_on(self.module, batch, self.device)
            self.observer.on_forward(batch, output)
            sums = loss(output, batch)
            # The sums are copied to the CPU while the device runs the backward pass.
            every.append(_Arriving(sums))
            total = sums.loss * (scale / divisor)
            if self.balance:
                # The load-balancing loss is already a mean over the update, so it is not divided.
                total = total + self.balance.part(batch) * scale
            total.backward()
            self.optimizer.collect()
        # The losses are summed on the CPU in double precision, which not every device supports.
        values = [float(sums.loss()) for sums in every]
        mean = self.world.sum([sum(values)])[0] / divisor
        if not math.isfinite(mean):
            self._refuse_loss(values, micro_batches)
        self.observer.on_loss(mean, divisor, int(targets), scale)
        return Outcome(mean, *self._metrics(every), targets=int(targets), tokens=int(tokens))

    def optim_step(self, lr: float, divisor: float = 1.0) -> dict[str, float]:
        """Performs one optimizer step with the gradients of `forward_backward`, divided by `divisor`. Returns
        metrics."""
        norm = self.optimizer.gradient_norm((self.scale.value if self.scale else 1.0) * divisor)
        size = norm.item()
        self.num_effective_updates += size != 0
        metrics = {f"{self.name}/grad_norm": size, f"{self.name}/lr": lr}
        metrics |= {f"{self.name}/lr/{name}": lr * ratio for name, ratio in self.optimizer.group_ratios.items()}
        if self.balance:
            metrics[f"{self.name}/aux_loss"] = self.balance.value
        if self.routing is not None:
            metrics |= flip_metrics(self.routing, self.world)
        finite = math.isfinite(size)
        if self.scale:
            self.scale.update(overflowed=not finite)
            metrics[f"{self.name}/loss_scale"] = self.scale.value
            if not finite and self.scale.value >= 1:
                # With fp16, an overflow means that the loss scale is too large. The overflowed update is skipped.
                self.skipped += 1
                self.optimizer.forget()
                return metrics | {f"{self.name}/grad_norm": 0.0, f"{self.name}/skipped": float(self.skipped)}
            metrics[f"{self.name}/skipped"] = float(self.skipped)
        if not finite:
            raise Refusal.at(
                self._rows(self._origins),
                f"the gradient norm is {size}, although the loss is finite",
                "lower optim.lr, use bf16 or fp32, or look at these rows; the last checkpoint is untouched",
                code="not-finite",
            )
        self.observer.on_gradients(norm, lr)
        self.optimizer.step(lr, norm)
        self.observer.on_step()
        return metrics

    def _metrics(self, every: list[_Arriving]) -> tuple[dict[str, float], dict[str, float]]:
        names, largest = every[0].names, every[0].largest
        sums: dict[str, float] = {}
        if names:
            table = torch.stack([each.metrics() for each in every])
            sums = dict(zip(names, self.world.sum(table.double().sum(0).tolist()), strict=True))
        maxima: dict[str, float] = {}
        if largest:
            table = torch.stack([each.maxima() for each in every])
            shares = self.world.gather(table.amax(0).tolist())
            maxima = {name: max(share[i] for share in shares) for i, name in enumerate(largest)}
        return sums, maxima

    def _refuse_loss(self, losses: list[float], micro_batches: Sequence[MicroBatch]) -> None:
        bad = [o for value, b in zip(losses, micro_batches, strict=True) if not math.isfinite(value) for o in b.origins]
        raise Refusal.at(
            self._rows(bad),
            "the loss of the micro-batch with these rows is not finite",
            "lower optim.lr, use bf16 or fp32, or look at these rows; the last checkpoint is untouched",
            code="not-finite",
        )

    def _rows(self, mine: Sequence[Origin]) -> str:
        """Returns the names of the rows of all ranks. All ranks must call this function."""
        # Ranks of the same tensor-parallel or context-parallel group have the same rows.
        origins = list(dict.fromkeys(origin for share in self.world.gather(list(mine)) for origin in share))
        names = ", ".join(str(origin) for origin in origins[:SHOWN_ROWS])
        rest = len(origins) - SHOWN_ROWS
        return f"rows {names}" + (f" and {rest} more" if rest > 0 else "")


class _Arriving:
    """The sums of a micro-batch, which are being copied to the CPU. `loss`, `metrics` and `maxima` are functions that
    wait until the copy is complete and return the copied values."""

    def __init__(self, sums: Sums):
        self.names, self.largest = sorted(sums.metrics), sorted(sums.maxima)
        self.loss = fetched(sums.loss.detach())
        self.metrics = _stack_on_host([sums.metrics[name] for name in self.names])
        self.maxima = _stack_on_host([sums.maxima[name] for name in self.largest])


def _stack_on_host(numbers: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    return fetched(torch.stack([number.detach() for number in numbers])) if numbers else lambda: torch.empty(0)
