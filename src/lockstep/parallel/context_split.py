"""Splits the tokens of a micro-batch over the ranks of a context-parallel group, and refuses unsupported models."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lockstep.errors import Problem, Refusal
from lockstep.kernels.attention.interface import DividedLayout
from lockstep.kernels.attention.masks import CHUNK, HEADS, ROWS, SOFTCAP, WINDOW
from lockstep.parallel.all_gather_attention import GatheredLayout
from lockstep.parallel.context import ContextGroup, contiguous, zigzag
from lockstep.parallel.ring_attention import RingLayout
from lockstep.parallel.ulysses_attention import UlyssesLayout
from lockstep.types import MicroBatch

# Targets are attached to tokens before the split, so no label is lost at a boundary between two ranks. Every rank
# computes the log-probs of the targets that its tokens predict. `together` all-gathers the scores, and all ranks
# compute the same loss. Each rank backpropagates only through its tokens, so the sum over ranks counts every gradient
# once.

# The token assignment (PLACES) and the attention (LAYOUTS) of each value of `parallel.context_layout`.
PLACES = {"zigzag": zigzag, "gather": contiguous, "ulysses": contiguous}
LAYOUTS: dict[str, type[RingLayout | GatheredLayout | UlyssesLayout]] = {
    "zigzag": RingLayout,
    "gather": GatheredLayout,
    "ulysses": UlyssesLayout,
}


class Division:
    """A micro-batch as one packed row, and the assignment of its tokens to the ranks of a context-parallel group."""

    def __init__(self, batch: MicroBatch, group: ContextGroup):
        if batch.packed_index_E is not None:
            raise NotImplementedError("a packed row with shared prefixes cannot be split over context ranks")
        self.batch, self.group = batch, group
        lengths, place = batch.lengths, PLACES[group.layout]
        if min(len(part) for part in place(lengths, group.size)) == 0:
            # Every rank needs at least one token. So a dummy sequence is appended, to which no other token attends.
            lengths = (*lengths, 2 * group.size)
        self.lengths = lengths
        self.places = place(lengths, group.size)

    @property
    def local_T(self) -> torch.Tensor:
        """The indices of this rank's tokens in the packed row."""
        return self.places[self.group.rank]

    def layout(self, device: torch.device, kernel: str) -> DividedLayout:
        return LAYOUTS[self.group.layout](self.lengths, self.group, device, kernel)

    @cached_property
    def real_T(self) -> torch.Tensor:
        """For each token of the packed row, its index in the flattened rows of the micro-batch. Padding is skipped."""
        rows, width = self.batch.input_ids_NT.shape
        if self.batch.packed:
            return torch.arange(rows * width)
        starts = torch.arange(rows) * width
        return torch.cat(
            [start + torch.arange(length) for start, length in zip(starts, self.batch.lengths, strict=True)]
        )

    @cached_property
    def predictors_K(self) -> torch.Tensor:
        """For each target, the index in the packed row of the token that predicts it."""
        place = torch.empty(self.batch.input_ids_NT.numel(), dtype=torch.long)
        place[self.real_T] = torch.arange(len(self.real_T))
        return place[self.batch.predictors_K]

    @cached_property
    def targets_of_ranks(self) -> list[torch.Tensor]:
        """For each rank, the indices of the targets that its tokens predict."""
        owner_T = torch.empty(sum(self.lengths), dtype=torch.long)
        for rank, place in enumerate(self.places):
            owner_T[place] = rank
        owner_K = owner_T[self.predictors_K]
        return [(owner_K == rank).nonzero()[:, 0] for rank in range(self.group.size)]

    def local_part(self, batch: MicroBatch) -> MicroBatch:
        """Returns a micro-batch with only this rank's tokens and the targets that they predict. Other fields, such as
        the teacher, are those of `batch`."""
        own_T, local_K = self.local_T, self.targets_of_ranks[self.group.rank]
        place_T = torch.empty(sum(self.lengths), dtype=torch.long)
        place_T[own_T] = torch.arange(len(own_T))
        more = torch.arange(sum(self.lengths) - len(self.real_T))
        ids_T = torch.cat([batch.input_ids_NT.flatten()[self.real_T], torch.zeros_like(more)])
        positions_T = torch.cat([batch.position_ids_NT.flatten()[self.real_T], more])
        routes_TLK = batch.routes_TLK
        if routes_TLK is not None:
            unknown = routes_TLK.new_full((len(more), *routes_TLK.shape[1:]), -1)
            routes_TLK = torch.cat([routes_TLK[self.real_T], unknown])[own_T]
        return replace(
            batch,
            input_ids_NT=ids_T[own_T][None],
            position_ids_NT=positions_T[own_T][None],
            lengths=self.lengths,
            packed=True,
            predictors_K=place_T[self.predictors_K[local_K]],
            targets_K=batch.targets_K[local_K],
            index_K=batch.index_K[local_K],
            context=self,
            routes_TLK=routes_TLK,
        )

    def of_full(self, local_TLK: torch.Tensor) -> torch.Tensor:
        """Returns values of this rank's tokens at the positions of the micro-batch. Other positions have -1."""
        full = local_TLK.new_full((self.batch.input_ids_NT.numel(), *local_TLK.shape[1:]), -1)
        real = self.local_T < len(self.real_T)  # tokens of the dummy sequence are no tokens of the micro-batch
        full[self.real_T[self.local_T[real]]] = local_TLK[real]
        return full

    def together(self, own_K: torch.Tensor) -> torch.Tensor:
        """All-gathers values per target, so that every rank has them in the order of the micro-batch's targets."""
        return _Together.apply(own_K, self)

    def gather_outputs(self, output: Any) -> Any:
        """All-gathers the outputs of a module, which each rank has computed for its own targets. The output is a
        tensor, or a named tuple of tensors."""
        if isinstance(output, torch.Tensor):
            return self.together(output)
        parts = {name: part for name, part in output._asdict().items() if part is not None}
        gathered = self.together(torch.stack(list(parts.values()), -1)).unbind(-1)
        return output._replace(**dict(zip(parts, gathered, strict=True)))

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        counts = [len(targets) for targets in self.targets_of_ranks]
        most = max(counts)
        if not most:
            return local.clone()
        padded = local.new_zeros(most, *local.shape[1:])
        padded[: len(local)] = local
        gathered = self.group.gather(padded)().unflatten(0, (self.group.size, most))
        merged = local.new_empty(sum(counts), *local.shape[1:])
        for part, targets in zip(gathered, self.targets_of_ranks, strict=True):
            merged[targets.to(local.device)] = part[: len(targets)]
        return merged


class _Together(torch.autograd.Function):
    """All-gathers values per target. All ranks compute the same loss from the gathered values. So the backward returns
    this rank's part of the gradient without a reduction."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, division: Division) -> torch.Tensor:
        ctx.division = division
        return division.gather(local)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        targets = ctx.division.targets_of_ranks[ctx.division.group.rank]
        return grads[0][targets.to(grads[0].device)], None


def refuse_undivided(root: nn.Module, group: ContextGroup | None, path: str) -> None:
    """Raises `Refusal` if `parallel.context_layout` does not support the sliding windows, heads, soft cap or dropout of
    a loaded model."""
    if group is None:
        return
    problem = _problem([module for module in root.modules() if hasattr(module, WINDOW)], group, path)
    if problem is not None:
        raise Refusal([problem])


def _problem(attentions: list[Any], group: ContextGroup, path: str) -> Problem | None:
    key, layout = "parallel.context_layout", group.layout
    for module in attentions:
        chunk = getattr(module, CHUNK, None)
        if chunk is not None or getattr(module, ROWS, False):
            kind = "selects tokens with an indexer" if chunk is None else f"attends within chunks of {chunk} tokens"
            return Problem(
                "parallel.context_parallel",
                f"a layer of {path} {kind}, which context parallelism does not support",
                "set parallel.context_parallel=1",
                code="unsupported-combination",
            )
    if layout == "ulysses":
        for module in attentions:
            heads = getattr(module, HEADS)
            if heads % group.size:
                return Problem(
                    "parallel.context_parallel",
                    f"{path} has {heads} heads in a layer, which {layout} cannot split over {group.size} processes",
                    f"choose a divisor of {heads}, or parallel.context_layout=zigzag or gather",
                    code="indivisible",
                )
        return None
    for module in attentions:
        if layout == "zigzag" and (window := getattr(module, WINDOW)) is not None:
            why = f"a layer of {path} has a sliding window of {window} tokens, which {layout} does not support"
            return Problem(key, why, "use gather or ulysses", code="unsupported-combination")
        if (cap := getattr(module, SOFTCAP)) is not None:
            return Problem(
                key,
                f"{path} has a soft cap of {cap:g}, which {layout} does not support",
                "use ulysses",
                code="unsupported-combination",
            )
        if dropout := getattr(module, "attention_dropout", 0.0):
            why = f"{path} has an attention dropout of {dropout:g}, which {layout} does not support"
            return Problem(
                key,
                why,
                "use ulysses, or set attention_dropout to 0 in its config.json",
                code="unsupported-combination",
            )
    return None
