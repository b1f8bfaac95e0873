"""All-gather context parallelism: every rank has a contiguous part of the packed row and gathers the keys it needs.

Keys and values are gathered a few heads at a time; the next all-gather overlaps with the computation. A rank needs the
keys from the start of the sequence that its first token belongs to. The backward pass gathers keys and values again and
reduce-scatters their gradients. If sequences are long, ranks with later parts of the row have more work than ranks with
earlier parts.

The method is the context parallelism of Llama 3 (Dubey et al., 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from lockstep.device.base import sent
from lockstep.kernels.attention.explicit import sink_gradient, with_sinks
from lockstep.kernels.attention.interface import DividedLayout
from lockstep.kernels.attention.partial import partial_kernel
from lockstep.kernels.attention.partial_attention import sections
from lockstep.parallel.context import ContextGroup, cut

# Keys and values are gathered in this many groups of heads, to bound the extra memory.
PARTS = 4


class GatheredLayout(DividedLayout):
    def __init__(self, lengths: Sequence[int], group: ContextGroup, device: torch.device, kernel: str):
        self.group, self.kernel = group, kernel
        bounds = cut(sum(lengths), group.size)
        first, last = bounds[group.rank], bounds[group.rank + 1]
        self.count, self.most = last - first, max(stop - start for start, stop in pairwise(bounds))
        ends = [0, *accumulate(lengths)]
        local = [(start, stop) for start, stop in pairwise(ends) if start < last and stop > first]
        self.where = sections(
            [min(stop, last) - max(start, first) for start, stop in local],
            [min(stop, last) - start for start, stop in local],
            True,
            device,
        )
        # Indices of the gathered keys that this rank attends to. In the gathered tensor the part of every rank is
        # padded to the largest part.
        slots = [torch.arange(stop - start) + rank * self.most for rank, (start, stop) in enumerate(pairwise(bounds))]
        self.seen = sent(torch.cat(slots)[local[0][0] : last], device)

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
        if dropout or softcap is not None or len(query_THD) != self.count:
            raise NotImplementedError(
                "all-gather attention supports only queries of this rank's tokens, and no soft cap or dropout"
            )
        return _GatheredAttention.apply(query_THD, key_TGD, value_TGD, sinks_H, self, scale, window)

    def gathered(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields groups of key heads, each with the gathered keys and values that this rank attends to."""
        groups = key.shape[1]
        bounds = cut(groups, min(PARTS, groups))
        heads = [slice(start, stop) for start, stop in pairwise(bounds)]
        arriving = self._gather(key, value, heads[0])
        for number, group_heads in enumerate(heads):
            gathered = arriving()
            if number + 1 < len(heads):
                arriving = self._gather(key, value, heads[number + 1])
            yield group_heads, gathered.index_select(0, self.seen)

    def _gather(self, key: torch.Tensor, value: torch.Tensor, heads: slice) -> Any:
        both = torch.cat([key[:, heads], value[:, heads]], -1)
        padding = both.new_zeros(self.most - self.count, *both.shape[1:])
        return self.group.gather(torch.cat([both, padding]))


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks_H: torch.Tensor | None,
        layout: GatheredLayout,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        size = key.shape[-1]
        out = query.new_empty(*query.shape[:2], value.shape[-1], dtype=wide)
        lse_HT = query.new_empty(query.shape[1], len(query), dtype=wide)
        for q_heads, _, seen in _heads(layout, query, key, value):
            q, k, v = (tensor.contiguous() for tensor in (query[:, q_heads], seen[..., :size], seen[..., size:]))
            kernel = partial_kernel(layout.kernel, q, v, layout.where, window)
            out[:, q_heads], lse_HT[q_heads] = kernel.forward(q, k, v, layout.where, scale, window)
        if sinks_H is not None:
            out, lse_HT = with_sinks(out, lse_HT, sinks_H)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks_H, out, lse_HT)
        ctx.layout, ctx.scale, ctx.window = layout, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        upstream = grads[0]
        query, key, value, sinks_H, out, lse_HT = ctx.saved_tensors
        layout: GatheredLayout = ctx.layout
        wide = torch.promote_types(query.dtype, torch.float32)
        size = key.shape[-1]
        dq, dk, dv = (torch.empty_like(tensor) for tensor in (query, key, value))
        for q_heads, heads, seen in _heads(layout, query, key, value):
            q, k, v = (tensor.contiguous() for tensor in (query[:, q_heads], seen[..., :size], seen[..., size:]))
            kernel = partial_kernel(layout.kernel, q, v, layout.where, ctx.window)
            part_q, part_k, part_v = kernel.backward(
                upstream[:, q_heads].contiguous(),
                q,
                k,
                v,
                out[:, q_heads].contiguous(),
                lse_HT[q_heads].contiguous(),
                layout.where,
                ctx.scale,
                ctx.window,
            )
            dq[:, q_heads] = part_q.to(query.dtype)
            dkv = torch.cat([part_k, part_v], -1).to(wide)
            padded = dkv.new_zeros(layout.group.size * layout.most, *dkv.shape[1:])
            local = layout.group.sum_shares(padded.index_copy_(0, layout.seen, dkv))[: layout.count]
            dk[:, heads], dv[:, heads] = local[..., :size].to(key.dtype), local[..., size:].to(value.dtype)
        sinks = None if sinks_H is None else sink_gradient(upstream, out, lse_HT, sinks_H)
        return dq, dk, dv, sinks, None, None, None


def _heads(
    layout: GatheredLayout, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Yields groups of query heads, the key heads they use, and the gathered keys and values that this rank attends
    to."""
    each = query.shape[1] // key.shape[1]
    for heads, seen in layout.gathered(key, value):
        yield slice(heads.start * each, heads.stop * each), heads, seen
