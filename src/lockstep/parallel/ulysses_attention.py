"""Ulysses attention: an all-to-all gives each rank all tokens of some heads; an all-to-all after attention reverts
this.

Outside of attention each rank has a contiguous part of the packed row. Inside attention, a rank has the complete row
for some heads. So the usual attention kernels work, with windows, sinks and soft caps. The number of query heads must
be divisible by the number of ranks. If the number of key heads is not divisible by the number of ranks, each key head
is sent to every rank whose query heads use it.

The method is that of Jacobs et al., "DeepSpeed Ulysses" (2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from lockstep.kernels.attention.interface import DividedLayout
from lockstep.kernels.attention.layout import make_layout
from lockstep.kernels.attention.varlen import varlen_attention
from lockstep.parallel.context import ContextGroup, cut


class UlyssesLayout(DividedLayout):
    def __init__(self, lengths: Sequence[int], group: ContextGroup, device: torch.device, kernel: str):
        self.group, self.full_layout = group, make_layout(lengths, device, kernel)
        self.counts = [stop - start for start, stop in pairwise(cut(sum(lengths), group.size))]

    def attend(
        self,
        query_THD: torch.Tensor,
        key_TGD: torch.Tensor,
        value_TGD: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        dropout: float,
        softcap: float | None,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        ranks, rank = self.group.size, self.group.rank
        heads, groups, size = query_THD.shape[1], key_TGD.shape[1], key_TGD.shape[-1]
        if heads % ranks or len(query_THD) != self.counts[rank]:
            raise NotImplementedError(
                f"Ulysses attention needs this rank's tokens; {heads} heads must be divisible by the number of ranks"
            )
        both = torch.cat([key_TGD, value_TGD], -1).repeat_interleave(math.lcm(groups, ranks) // groups, 1)
        key, value = _ToHeads.apply(both, self).split([size, value_TGD.shape[-1]], -1)
        local_heads = slice(rank * heads // ranks, (rank + 1) * heads // ranks)
        out = varlen_attention(
            _ToHeads.apply(query_THD, self),
            key.contiguous(),
            value.contiguous(),
            self.full_layout,
            scale=scale,
            window=window,
            dropout=dropout,
            softcap=softcap,
            sinks_H=None if sinks_H is None else sinks_H[local_heads],
        )
        return _ToTokens.apply(out, self)

    def to_heads(self, tokens_THD: torch.Tensor) -> torch.Tensor:
        """All-to-all: this rank sends the heads of its tokens to the ranks of these heads, and receives its own heads
        of all tokens."""
        local, ranks = len(tokens_THD), self.group.size
        by_rank = tokens_THD.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1)
        return self.group.exchange(by_rank, [local] * ranks, self.counts)

    def to_tokens(self, heads_THD: torch.Tensor) -> torch.Tensor:
        local, ranks = self.counts[self.group.rank], self.group.size
        by_rank = self.group.exchange(heads_THD, self.counts, [local] * ranks)
        return by_rank.unflatten(0, (ranks, local)).transpose(0, 1).flatten(1, 2)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, layout: UlyssesLayout) -> torch.Tensor:
        ctx.layout = layout
        return layout.to_heads(tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.layout.to_tokens(grads[0]), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, layout: UlyssesLayout) -> torch.Tensor:
        ctx.layout = layout
        return layout.to_tokens(heads)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.layout.to_heads(grads[0]), None
