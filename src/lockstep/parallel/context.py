"""Context parallelism: ranks that share the tokens of the same micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from lockstep.device.base import Device
from lockstep.errors import Refusal
from lockstep.parallel.world import HOST_COLLECTIVE, TIMEOUT, World

# Lines of packed sequences cut into the tokens of each rank.


def cut(length: int, parts: int) -> list[int]:
    """Bounds of `parts` stretches that differ by a token at most; a short sequence leaves some of them empty."""
    return [length * part // parts for part in range(parts + 1)]


def zigzag(lengths: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """Of every sequence, cut into twice as many chunks as there are ranks, rank r has chunk r and the r-th last: as
    much work for each, since a late chunk sees more than an early one."""
    parts: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for first, length in zip(_starts(lengths), lengths, strict=True):
        chunks = [torch.arange(first + start, first + stop) for start, stop in pairwise(cut(length, 2 * ranks))]
        for rank, part in enumerate(parts):
            part += [chunks[rank], chunks[-1 - rank]]
    return [torch.cat(part) for part in parts]


def contiguous(lengths: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """A stretch of the line for each rank, wherever its sequences begin and end."""
    return [torch.arange(start, stop) for start, stop in pairwise(cut(sum(lengths), ranks))]


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)][:-1]


# Context parallelism: neighbouring ranks that share the tokens of the same micro-batches.
#
# With N of them, ranks 0 to N-1 are the first group, N to 2N-1 the second, and so on. A group has one share of the
# rows between them, and its ranks divide every line of it. `division.py` says who has which tokens, and `ring.py`,
# `gathered.py` and `ulysses.py` how they attend to each other. Collectives go through `ContextGroup` alone.

# torch 2.13 gave them new names and warns of the old ones.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share lines with this one, in order. `layout` names how lines are divided (`division.py`)."""

    rank: int
    size: int
    layout: str
    ranks: tuple[int, ...]
    """Their ranks in the world."""
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)

    def pass_on(self, tensor: torch.Tensor, shape: Sequence[int]) -> Callable[[], torch.Tensor]:
        """Send a tensor to the next rank and get one of `shape` from the rank before; the result waits for it.

        One send and one receive a batch: not every backend takes several to one peer.
        """
        arriving = tensor.new_empty(shape)
        after, before = self.ranks[(self.rank + 1) % self.size], self.ranks[self.rank - 1]
        sending = tensor.contiguous()
        pair = [
            dist.P2POp(dist.isend, sending, after, self.group),
            dist.P2POp(dist.irecv, arriving, before, self.group),
        ]
        under_way = dist.batch_isend_irecv(pair)

        def arrived(_: torch.Tensor = sending) -> torch.Tensor:  # which must live until it is sent
            for work in under_way:
                work.wait()
            return arriving

        return arrived

    def gather(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Tensors of one shape of all ranks, joined along the first dimension; the result waits for them."""
        everyone = tensor.new_empty(self.size * len(tensor), *tensor.shape[1:])
        sending = tensor.contiguous()
        work = _ALL_GATHER(everyone, sending, group=self.group, async_op=True)

        def gathered(_: torch.Tensor = sending) -> torch.Tensor:
            work.wait()
            return everyone

        return gathered

    def sum_shares(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of a tensor, of which each rank gets its part along the first dimension."""
        own = tensor.new_empty(len(tensor) // self.size, *tensor.shape[1:])
        _REDUCE_SCATTER(own, tensor.contiguous(), group=self.group)
        return own

    def exchange(self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """`sent[i]` rows along the first dimension go to rank i, `received[i]` come from it."""
        arriving = tensor.new_empty(sum(received), *tensor.shape[1:])
        dist.all_to_all_single(arriving, tensor.contiguous(), list(received), list(sent), group=self.group)
        return arriving


def refuse_ranks(context: int, processes: int) -> None:
    """Groups of one size for all."""
    if processes % context:
        raise Refusal.at(
            "parallel.context",
            f"{processes} process(es) cannot be divided into groups of {context}",
            f"start {context} or a multiple of it (torchrun --nproc-per-node {context}), or set parallel.context=1",
        )


def with_context(world: World, device: Device, context: int, layout: str) -> World:
    """The world with its ranks in groups of `context` (a collective: every rank must call it)."""
    refuse_ranks(context, world.size)
    if context == 1:
        return world
    ranks = range(world.size)
    groups = [tuple(ranks[first : first + context]) for first in range(0, world.size, context)]
    # Those with the same part of a line in every group: what they say of their shares of the rows is added up.
    columns = [tuple(ranks[first::context]) for first in range(context)]
    # Everybody takes part in making every group.
    beside = [dist.new_group(members, backend=device.collective, timeout=TIMEOUT) for members in groups]
    across = [dist.new_group(members, backend=HOST_COLLECTIVE, timeout=TIMEOUT) for members in columns]
    share, index = divmod(world.rank, context)
    group = ContextGroup(index, context, layout, groups[share], beside[share])
    return replace(world, context=group, column=across[index])
