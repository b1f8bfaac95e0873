"""Attention over gathered keys: every rank has a stretch of the line, and sees all keys up to its end.

Keys and values are gathered, a few heads at a time and the next ones while these are computed; a rank takes those from
the start of its first token's sequence on. In the backward pass they are gathered again, and each rank gets the sum of
what all of them have for its own. Ranks with late stretches have more to do than early ones, where sequences are long.

After the context parallelism of Llama 3 (Dubey et al., 2024).
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
from lockstep.kernels.attention.parts import sections
from lockstep.parallel.context import ContextGroup, cut

# In so many parts, of whole heads, keys and values are gathered: so much of them is there twice at most.
PARTS = 4


class GatheredLayout(DividedLayout):
    def __init__(self, lengths: Sequence[int], group: ContextGroup, device: torch.device, kernel: str):
        self.group, self.kernel = group, kernel
        bounds = cut(sum(lengths), group.size)
        first, last = bounds[group.rank], bounds[group.rank + 1]
        self.count, self.most = last - first, max(stop - start for start, stop in pairwise(bounds))
        ends = [0, *accumulate(lengths)]
        here = [(start, stop) for start, stop in pairwise(ends) if start < last and stop > first]
        self.where = sections(
            [min(stop, last) - max(start, first) for start, stop in here],
            [min(stop, last) - start for start, stop in here],
            True,
            device,
        )
        # Where the keys that this rank sees are among those gathered: every rank's part has the size of the largest.
        slots = [torch.arange(stop - start) + rank * self.most for rank, (start, stop) in enumerate(pairwise(bounds))]
        self.seen = sent(torch.cat(slots)[here[0][0] : last], device)

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
            raise NotImplementedError("gathered attention is of this rank's tokens, without a soft cap or dropout")
        return _GatheredAttention.apply(query_THD, key_TGD, value_TGD, sinks_H, self, scale, window)

    def gathered(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Heads of keys, and the keys and values of them that this rank sees."""
        groups = key.shape[1]
        bounds = cut(groups, min(PARTS, groups))
        heads = [slice(start, stop) for start, stop in pairwise(bounds)]
        arriving = self._gather(key, value, heads[0])
        for number, some in enumerate(heads):
            here = arriving()
            if number + 1 < len(heads):
                arriving = self._gather(key, value, heads[number + 1])
            yield some, here.index_select(0, self.seen)

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
        for asking, _, seen in _heads(layout, query, key, value):
            q, k, v = (tensor.contiguous() for tensor in (query[:, asking], seen[..., :size], seen[..., size:]))
            kernel = partial_kernel(layout.kernel, q, v, layout.where, window)
            out[:, asking], lse_HT[asking] = kernel.forward(q, k, v, layout.where, scale, window)
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
        for asking, heads, seen in _heads(layout, query, key, value):
            q, k, v = (tensor.contiguous() for tensor in (query[:, asking], seen[..., :size], seen[..., size:]))
            kernel = partial_kernel(layout.kernel, q, v, layout.where, ctx.window)
            part_q, part_k, part_v = kernel.backward(
                upstream[:, asking].contiguous(),
                q,
                k,
                v,
                out[:, asking].contiguous(),
                lse_HT[asking].contiguous(),
                layout.where,
                ctx.scale,
                ctx.window,
            )
            dq[:, asking] = part_q.to(query.dtype)
            found = torch.cat([part_k, part_v], -1).to(wide)
            everyone = found.new_zeros(layout.group.size * layout.most, *found.shape[1:])
            own = layout.group.sum_shares(everyone.index_copy_(0, layout.seen, found))[: layout.count]
            dk[:, heads], dv[:, heads] = own[..., :size].to(key.dtype), own[..., size:].to(value.dtype)
        sinks = None if sinks_H is None else sink_gradient(upstream, out, lse_HT, sinks_H)
        return dq, dk, dv, sinks, None, None, None


def _heads(
    layout: GatheredLayout, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Query heads, the key heads that they use, and the keys and values of these that this rank sees."""
    each = query.shape[1] // key.shape[1]
    for heads, seen in layout.gathered(key, value):
        yield slice(heads.start * each, heads.stop * each), heads, seen
