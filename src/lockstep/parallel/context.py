"""Context parallelism: neighbouring ranks split the tokens of the same micro-batches.

With a group size of N, ranks 0 to N-1 are the first group, N to 2N-1 the second, and so on. A context-parallel group is
one data-parallel replica. `context_split.py` assigns tokens to ranks. `ring_attention.py`, `all_gather_attention.py`
and `ulysses_attention.py` compute attention across the ranks of a group, with the collective operations of
`ContextGroup`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

# Functions that assign the tokens of a packed row to ranks.


def cut(length: int, parts: int) -> list[int]:
    """Splits `length` tokens into `parts` ranges whose lengths differ by one token at most. Returns the bounds. Ranges
    may be empty."""
    return [length * part // parts for part in range(parts + 1)]


def zigzag(lengths: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """Returns the token indices of each rank in zigzag order. Every sequence is cut into 2 * ranks chunks, and rank r
    gets chunk r from the start and chunk r from the end. Zigzag order balances the work, because later chunks attend to
    more keys."""
    parts: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for first, length in zip(_starts(lengths), lengths, strict=True):
        chunks = [torch.arange(first + start, first + stop) for start, stop in pairwise(cut(length, 2 * ranks))]
        for rank, part in enumerate(parts):
            part += [chunks[rank], chunks[-1 - rank]]
    return [torch.cat(part) for part in parts]


def contiguous(lengths: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """Returns the token indices of each rank: one contiguous range of the packed row, regardless of sequence bounds."""
    return [torch.arange(start, stop) for start, stop in pairwise(cut(sum(lengths), ranks))]


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)][:-1]


# torch 2.13 renamed the two collective functions below and warns about the old names.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class ContextGroup:
    """The context-parallel group of this rank. `layout` is the name of the split of tokens, a key of `LAYOUTS` in
    `context_split.py`."""

    rank: int
    size: int
    layout: str
    ranks: tuple[int, ...]
    """The global ranks of the group."""
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)

    def pass_on(self, tensor: torch.Tensor, shape: Sequence[int]) -> Callable[[], torch.Tensor]:
        """Starts a ring exchange: sends `tensor` to the next rank, and receives a tensor of `shape` from the previous
        rank. Call the returned function to wait for the received tensor.

        Each exchange has one send and one receive, because some backends do not support several sends to one peer.
        """
        arriving = tensor.new_empty(shape)
        after, before = self.ranks[(self.rank + 1) % self.size], self.ranks[self.rank - 1]
        sending = tensor.contiguous()
        pair = [
            dist.P2POp(dist.isend, sending, after, self.group),
            dist.P2POp(dist.irecv, arriving, before, self.group),
        ]
        works = dist.batch_isend_irecv(pair)

        def arrived(
            _: torch.Tensor = sending,
        ) -> torch.Tensor:  # this argument keeps `sending` in memory until it is sent
            for work in works:
                work.wait()
            return arriving

        return arrived

    def gather(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts an all-gather of equally shaped tensors. Call the returned function to wait for the result, which is
        concatenated along dim 0."""
        gathered_tensor = tensor.new_empty(self.size * len(tensor), *tensor.shape[1:])
        sending = tensor.contiguous()
        work = _ALL_GATHER(gathered_tensor, sending, group=self.group, async_op=True)

        def gathered(_: torch.Tensor = sending) -> torch.Tensor:
            work.wait()
            return gathered_tensor

        return gathered

    def sum_shares(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums the tensor over ranks and returns this rank's part of the sum along dim 0 (reduce-scatter)."""
        local = tensor.new_empty(len(tensor) // self.size, *tensor.shape[1:])
        _REDUCE_SCATTER(local, tensor.contiguous(), group=self.group)
        return local

    def exchange(self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Sends `sent[i]` rows along dim 0 to rank i, and receives `received[i]` rows from rank i (all-to-all)."""
        arriving = tensor.new_empty(sum(received), *tensor.shape[1:])
        dist.all_to_all_single(arriving, tensor.contiguous(), list(received), list(sent), group=self.group)
        return arriving
