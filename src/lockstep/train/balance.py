"""The load-balancing loss of a mixture of experts, over a whole update.

It is a product of two means over all tokens: how often an expert was chosen, and how probable it was. Who was chosen
must be known before the first gradient, so the micro-batches are run once without one. Then no division into
micro-batches or ranks can change the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from lockstep.algorithms.token_losses import Routed, load_balance, routed
from lockstep.model.decoder import Decoder
from lockstep.model.policy import evaluating
from lockstep.parallel.world import World
from lockstep.types import MicroBatch


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
