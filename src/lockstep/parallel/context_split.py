"""Which tokens of a micro-batch each rank of a context group holds, and what a layout cannot do."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lockstep.errors import Problem, Refusal
from lockstep.kernels.attention.interface import DividedLayout
from lockstep.kernels.attention.masks import HEADS, SOFTCAP, WINDOW
from lockstep.parallel.all_gather_attention import GatheredLayout
from lockstep.parallel.context import ContextGroup, contiguous, zigzag
from lockstep.parallel.ring_attention import RingLayout
from lockstep.parallel.ulysses_attention import UlyssesLayout
from lockstep.types import MicroBatch

# Who has which tokens of a micro-batch that the ranks of a context group divide.
#
# What a token is asked for (its target) was written beside it before, when the line was whole, so a boundary between
# two ranks costs no label. Every rank scores the targets of its own tokens; then all of them have all scores
# (`together`) and compute the same loss. Each sends its own tokens' gradient back: summed over the ranks it is
# counted once.

# How each layout places tokens, and how they attend there.
PLACES = {"zigzag": zigzag, "gather": contiguous, "ulysses": contiguous}
LAYOUTS: dict[str, type[RingLayout | GatheredLayout | UlyssesLayout]] = {
    "zigzag": RingLayout,
    "gather": GatheredLayout,
    "ulysses": UlyssesLayout,
}


class Division:
    """A micro-batch as one line, and the part of it that each rank of the group has."""

    def __init__(self, batch: MicroBatch, group: ContextGroup):
        if batch.line_E is not None:
            raise NotImplementedError("a line whose sequences share beginnings is not divided over ranks")
        self.batch, self.group = batch, group
        lengths, place = batch.lengths, PLACES[group.layout]
        if min(len(part) for part in place(lengths, group.size)) == 0:
            # No rank is without a token: a sequence of nothing, which nobody else sees, is put at the end.
            lengths = (*lengths, 2 * group.size)
        self.lengths = lengths
        self.places = place(lengths, group.size)

    @property
    def own_T(self) -> torch.Tensor:
        """Where this rank's tokens stand on the whole line."""
        return self.places[self.group.rank]

    def layout(self, device: torch.device, kernel: str) -> DividedLayout:
        return LAYOUTS[self.group.layout](self.lengths, self.group, device, kernel)

    @cached_property
    def real_T(self) -> torch.Tensor:
        """Where the tokens of the line stand in the micro-batch: rows are put one behind another, without padding."""
        rows, width = self.batch.input_ids_NT.shape
        if self.batch.packed:
            return torch.arange(rows * width)
        starts = torch.arange(rows) * width
        return torch.cat(
            [start + torch.arange(length) for start, length in zip(starts, self.batch.lengths, strict=True)]
        )

    @cached_property
    def predictors_K(self) -> torch.Tensor:
        """Where on the line the micro-batch's targets are predicted."""
        place = torch.empty(self.batch.input_ids_NT.numel(), dtype=torch.long)
        place[self.real_T] = torch.arange(len(self.real_T))
        return place[self.batch.predictors_K]

    @cached_property
    def asked(self) -> list[torch.Tensor]:
        """For each rank, which of the micro-batch's targets its tokens predict."""
        owner_T = torch.empty(sum(self.lengths), dtype=torch.long)
        for rank, place in enumerate(self.places):
            owner_T[place] = rank
        owner_K = owner_T[self.predictors_K]
        return [(owner_K == rank).nonzero()[:, 0] for rank in range(self.group.size)]

    def own(self, batch: MicroBatch) -> MicroBatch:
        """This rank's tokens of the micro-batch, which may have got a teacher since, and the targets they predict."""
        own_T, asked = self.own_T, self.asked[self.group.rank]
        place_T = torch.empty(sum(self.lengths), dtype=torch.long)
        place_T[own_T] = torch.arange(len(own_T))
        more = torch.arange(sum(self.lengths) - len(self.real_T))
        ids_T = torch.cat([batch.input_ids_NT.flatten()[self.real_T], torch.zeros_like(more)])
        positions_T = torch.cat([batch.position_ids_NT.flatten()[self.real_T], more])
        return replace(
            batch,
            input_ids_NT=ids_T[own_T][None],
            position_ids_NT=positions_T[own_T][None],
            lengths=self.lengths,
            packed=True,
            predictors_K=place_T[self.predictors_K[asked]],
            targets_K=batch.targets_K[asked],
            index_K=batch.index_K[asked],
            context=self,
        )

    def together(self, own_K: torch.Tensor) -> torch.Tensor:
        """Numbers for this rank's targets as those for all targets of the micro-batch, in their order."""
        return _Together.apply(own_K, self)

    def answers(self, said: Any) -> Any:
        """What a module says of this rank's targets, as what it says of all: a tensor, or a tuple of tensors."""
        if isinstance(said, torch.Tensor):
            return self.together(said)
        known = {name: part for name, part in said._asdict().items() if part is not None}
        every = self.together(torch.stack(list(known.values()), -1)).unbind(-1)
        return said._replace(**dict(zip(known, every, strict=True)))

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        counts = [len(asked) for asked in self.asked]
        most = max(counts)
        if not most:
            return own.clone()
        padded = own.new_zeros(most, *own.shape[1:])
        padded[: len(own)] = own
        everyone = self.group.gather(padded)().unflatten(0, (self.group.size, most))
        whole = own.new_empty(sum(counts), *own.shape[1:])
        for found, asked in zip(everyone, self.asked, strict=True):
            whole[asked.to(own.device)] = found[: len(asked)]
        return whole


class _Together(torch.autograd.Function):
    """All ranks compute the same loss from all numbers, so each takes its own numbers' gradient and nobody adds any."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, division: Division) -> torch.Tensor:
        ctx.division = division
        return division.gather(own)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        asked = ctx.division.asked[ctx.division.group.rank]
        return grads[0][asked.to(grads[0].device)], None


# What of a model's attention a layout of context parallelism cannot do, said before anything is trained.


def refuse_undivided(root: nn.Module, group: ContextGroup | None, path: str) -> None:
    """Look at the attention modules of a loaded model, which were told their windows and heads (`masks.py`)."""
    if group is None:
        return
    problem = _problem([module for module in root.modules() if hasattr(module, WINDOW)], group, path)
    if problem is not None:
        raise Refusal([problem])


def _problem(attentions: list[Any], group: ContextGroup, path: str) -> Problem | None:
    key, layout = "parallel.context_layout", group.layout
    if layout == "ulysses":
        for module in attentions:
            heads = getattr(module, HEADS)
            if heads % group.size:
                return Problem(
                    "parallel.context",
                    f"{path} has {heads} heads in a layer, which {group.size} processes cannot divide with {layout}",
                    f"choose a divisor of {heads}, or parallel.context_layout=zigzag or gather",
                )
        return None
    for module in attentions:
        if layout == "zigzag" and (window := getattr(module, WINDOW)) is not None:
            why = f"a layer of {path} sees the last {window} tokens alone, and {layout} has no windows"
            return Problem(key, why, "use gather or ulysses")
        if (cap := getattr(module, SOFTCAP)) is not None:
            return Problem(key, f"{path} caps its attention scores at {cap:g}, and {layout} does not", "use ulysses")
        if dropout := getattr(module, "attention_dropout", 0.0):
            why = f"{path} trains with an attention dropout of {dropout:g}, and {layout} has none"
            return Problem(key, why, "use ulysses, or set attention_dropout to 0 in its config.json")
    return None
