"""The two training verbs, `forward_backward(batch, loss)` and `optim_step()`; the balance loss of MoE routers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.algorithms.token_losses import Routed, load_balance, routed
from lockstep.data.batching import run_on
from lockstep.device.base import fetched
from lockstep.errors import Refusal
from lockstep.model.decoder import Decoder
from lockstep.model.policy import evaluating
from lockstep.parallel.world import World
from lockstep.tape.update_observer import Observer
from lockstep.train.optim import LossScale, Optimizer
from lockstep.types import Loss, MicroBatch, Origin, Sums

# The load-balancing loss of a mixture of experts, over a whole update.
#
# It is a product of two means over all tokens: how often an expert was chosen, and how probable it was. Who was
# chosen must be known before the first gradient, so the micro-batches are run once without one. Then no division into
# micro-batches or ranks can change the loss.


class Balance:
    """Of a module that trains; `coefficient` times the loss is added to the method's own."""

    def __init__(self, module: nn.Module, decoder: Decoder, coefficient: float, experts: int, world: World) -> None:
        self.coefficient = coefficient
        self.value = 0.0
        """The loss of the last update, without the coefficient."""
        self._module, self._decoder, self._experts, self._world = module, decoder, experts, world
        self._chosen_E = torch.zeros(0)
        self._rows = 0.0
        decoder.tells_routers = True

    @torch.no_grad()
    def count(self, micro_batches: Sequence[MicroBatch], run: Callable[[MicroBatch], object]) -> None:
        """Who is chosen in the whole update: `run` takes a micro-batch through the module."""
        sums = []
        with evaluating(self._module):
            for batch in micro_batches:
                run(batch)
                found = self._routed(batch)
                sums.append(torch.cat([found.chosen_E, found.probs_E, found.rows[None]]).cpu())
        # Added up in double precision, on the host.
        whole = self._world.sum_tensor(torch.stack(sums).double().sum(0))
        self._chosen_E, probs_E = whole[:-1].chunk(2)
        self._rows = float(whole[-1])
        self.value = float(load_balance(self._chosen_E, probs_E, self._rows))

    def part(self, batch: MicroBatch) -> torch.Tensor:
        """What the micro-batch that was run last has of the weighted loss."""
        probs_E = self._routed(batch).probs_E
        return self.coefficient * load_balance(self._chosen_E.to(probs_E), probs_E, self._rows)

    def _routed(self, batch: MicroBatch) -> Routed:
        logits = self._decoder.router_logits
        return routed(logits, self._experts, token_weights(batch).to(logits[0].device))


def token_weights(batch: MicroBatch) -> torch.Tensor:
    """How many sequences of a micro-batch have each token of its line or rows: a shared beginning stands there once,
    padding belongs to none, and the one token of an empty share neither."""
    rows, width = batch.input_ids_NT.shape
    if not batch.tokens:
        return torch.zeros(rows * width)
    if batch.line_E is not None:
        return torch.bincount(batch.line_E.cpu(), minlength=rows * width).float()
    if batch.packed:
        return (torch.arange(rows * width) < sum(batch.lengths)).float()
    return (torch.arange(width) < torch.tensor(batch.lengths)[:, None]).float().flatten()


# The two verbs of training: `forward_backward(batch, loss)` and `optim_step()`.
#
# Micro-batches, loss scaling, sharding and master weights live below them. Losses are sums; what they are divided by
# is counted over the whole update and all ranks first, so none of those can change a gradient.

SHOWN_ROWS = 8


@dataclass(frozen=True)
class Outcome:
    """What an update's forward passes gave: the mean loss, and companions as sums and maxima over all ranks."""

    loss: float
    sums: dict[str, float]
    maxima: dict[str, float]
    targets: int
    tokens: int

    def means(self) -> dict[str, float]:
        """Companions per target."""
        return {name: value / self.targets for name, value in self.sums.items()}


class Learner:
    """A module and its optimizer on one device of the world. `name` heads its metrics."""

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
        self.observer = Observer()
        self.skipped = 0
        self.effective = 0
        """Updates whose gradient was not zero, skipped ones included."""
        self._origins: list[Origin] = []

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss: Loss, divisor: float | None = None
    ) -> Outcome:
        """Gradients of the loss over `divisor`, by default the update's targets: then it is a mean over tokens."""
        counts = [sum(len(b.targets_K) for b in micro_batches), sum(b.tokens for b in micro_batches)]
        targets, tokens = self.world.sum(counts)
        self._origins = [origin for batch in micro_batches for origin in batch.origins]
        if not targets:
            raise Refusal.at(
                self._rows(self._origins),
                "no token of the whole update is trained",
                "check the loss mask of these rows (lockstep data show)",
                code="no-trained-token",
            )
        whole = divisor or targets
        scale = self.scale.value if self.scale else 1.0
        if self.balance:
            self.balance.count(micro_batches, lambda batch: run_on(self.module, batch, self.device))
        every: list[_Arriving] = []
        for batch in micro_batches:
            output = run_on(self.module, batch, self.device)
            self.observer.passed(batch, output)
            sums = loss(output, batch)
            # On their way to the host while the device goes backward.
            every.append(_Arriving(sums))
            total = sums.loss * (scale / whole)
            if self.balance:
                # A mean over the update already, and no part of what the method minimises.
                total = total + self.balance.part(batch) * scale
            total.backward()
            self.optimizer.collect()
        # Added up in double precision, on the host: not every device has it.
        values = [float(sums.loss()) for sums in every]
        mean = self.world.sum([sum(values)])[0] / whole
        if not math.isfinite(mean):
            self._refuse_loss(values, micro_batches)
        self.observer.summed(mean, whole, int(targets), scale)
        return Outcome(mean, *self._companions(every), targets=int(targets), tokens=int(tokens))

    def optim_step(self, lr: float, divisor: float = 1.0) -> dict[str, float]:
        """One update with what `forward_backward` left behind, over `divisor` where that was not divided yet."""
        norm = self.optimizer.gradient_norm((self.scale.value if self.scale else 1.0) * divisor)
        size = norm.item()
        self.effective += size != 0
        metrics = {f"{self.name}/grad_norm": size, f"{self.name}/lr": lr}
        if self.balance:
            metrics[f"{self.name}/aux_loss"] = self.balance.value
        finite = math.isfinite(size)
        if self.scale:
            self.scale.update(overflowed=not finite)
            metrics[f"{self.name}/loss_scale"] = self.scale.value
            if not finite and self.scale.value >= 1:
                # Overflow is how fp16 finds its scale; the update is skipped and counted.
                self.skipped += 1
                self.optimizer.forget()
                return metrics | {f"{self.name}/grad_norm": 0.0, f"{self.name}/skipped": float(self.skipped)}
            metrics[f"{self.name}/skipped"] = float(self.skipped)
        if not finite:
            raise Refusal.at(
                self._rows(self._origins),
                f"the gradient norm is {size} with a finite loss",
                "lower optim.lr, use bf16 or fp32, or look at these rows; the last checkpoint is untouched",
                code="not-finite",
            )
        self.observer.measured(norm, lr)
        self.optimizer.step(lr, norm)
        self.observer.stepped()
        return metrics

    def _companions(self, every: list[_Arriving]) -> tuple[dict[str, float], dict[str, float]]:
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
        """Names of rows, those of the other ranks among them (all ranks stop at the same place)."""
        # Ranks that divide their micro-batches have the same rows.
        origins = list(dict.fromkeys(origin for share in self.world.gather(list(mine)) for origin in share))
        names = ", ".join(str(origin) for origin in origins[:SHOWN_ROWS])
        rest = len(origins) - SHOWN_ROWS
        return f"rows {names}" + (f" and {rest} more" if rest > 0 else "")


class _Arriving:
    """The sums of a micro-batch on their way to the host: each part is a call that waits for it."""

    def __init__(self, sums: Sums):
        self.names, self.largest = sorted(sums.metrics), sorted(sums.maxima)
        self.loss = fetched(sums.loss.detach())
        self.metrics = _together([sums.metrics[name] for name in self.names])
        self.maxima = _together([sums.maxima[name] for name in self.largest])


def _together(numbers: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    return fetched(torch.stack([number.detach() for number in numbers])) if numbers else lambda: torch.empty(0)
