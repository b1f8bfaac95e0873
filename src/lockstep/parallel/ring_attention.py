"""Ring attention: ranks pass keys and values around a ring, and every rank attends to the keys of one rank at a time.

In zigzag order every sequence has 2N chunks, and rank r has chunk r from the start and chunk r from the end. Rank r
attends to these keys of rank j:

    j = r: all queries attend to all keys, with a causal mask
    j < r: all queries attend to the first chunk of rank j
    j > r: the queries of the second chunk attend to all keys of rank j

A mask is needed only for the keys of the rank itself (j = r). Partial attention results are merged in fp32 by their
log-sum-exp. In the backward pass keys and values are passed around again. The gradients of keys and values follow one
hop behind, until they reach the rank that has these keys. Keys and values are sent as one tensor.

The method is that of Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers" (2023), in the zigzag order
of Megatron and ring-flash-attention. Unlike in Megatron and ring-flash-attention, chunks may differ in size, so there
is no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from lockstep.device.base import sent
from lockstep.kernels.attention.explicit import sink_gradient, with_sinks
from lockstep.kernels.attention.interface import DividedLayout
from lockstep.kernels.attention.partial import partial_kernel
from lockstep.kernels.attention.partial_attention import Sections, merge, sections
from lockstep.parallel.context import ContextGroup, cut


@dataclass(frozen=True)
class Hop:
    """One step of the ring: which queries of this rank attend to which keys of one rank (`queries` and `keys` are
    indices). If `queries` or `keys` is None, all queries or all keys are used."""

    where: Sections
    queries: torch.Tensor | None
    keys: torch.Tensor | None


class RingLayout(DividedLayout):
    def __init__(self, lengths: Sequence[int], group: ContextGroup, device: torch.device, kernel: str):
        self.group, self.kernel = group, kernel
        # `chunks[rank]` has the sizes of the rank's two chunks of every sequence.
        bounds = [cut(length, 2 * group.size) for length in lengths]
        sizes = [[stop - start for start, stop in pairwise(b)] for b in bounds]
        self.chunks = [[(size[rank], size[-1 - rank]) for size in sizes] for rank in range(group.size)]
        self.counts = [sum(map(sum, chunks)) for chunks in self.chunks]
        self.hops = [self._hop((group.rank - hop) % group.size, device) for hop in range(group.size)]

    def _hop(self, source: int, device: torch.device) -> Hop | None:
        """Returns the step of the ring for the keys of rank `source`. Returns None if no query of this rank attends to
        these keys, which happens if sequences are too short to fill all chunks."""
        rank, local, theirs = self.group.rank, self.chunks[self.group.rank], self.chunks[source]
        # For queries and for keys: whether the first chunk is used, and whether the second chunk is used.
        query_chunks, key_chunks = (True, True), (True, True)
        if source < rank:
            key_chunks = (True, False)
        elif source > rank:
            query_chunks = (False, True)
        queries = [sum(size for size, used in zip(sizes, query_chunks, strict=True) if used) for sizes in local]
        keys = [sum(size for size, used in zip(sizes, key_chunks, strict=True) if used) for sizes in theirs]
        met = [bool(query and key) for query, key in zip(queries, keys, strict=True)]
        if not any(met):
            return None
        return Hop(
            sections(
                [query for query, both in zip(queries, met, strict=True) if both],
                [key for key, both in zip(keys, met, strict=True) if both],
                source == rank,
                device,
            ),
            _chosen(local, query_chunks, met, device),
            _chosen(theirs, key_chunks, met, device),
        )

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
        if window is not None or dropout or softcap is not None or len(query_THD) != self.counts[self.group.rank]:
            raise NotImplementedError(
                "ring attention supports only queries of this rank's tokens, and no window, soft cap or dropout"
            )
        return _RingAttention.apply(query_THD, key_TGD, value_TGD, sinks_H, self, scale)


def _chosen(
    chunks: Sequence[tuple[int, int]], used: tuple[bool, bool], met: Sequence[bool], device: torch.device
) -> torch.Tensor | None:
    """Returns the indices of the tokens in the chunks (first or second) that `used` selects, for sequences with at
    least one query and one key (`met`). Returns None if these are all tokens."""
    flags = [part and both for both in met for part in used]
    sizes = [size for pair in chunks for size in pair]
    flag_T = torch.repeat_interleave(torch.tensor(flags), torch.tensor(sizes))
    return None if bool(flag_T.all()) else sent(flag_T.nonzero()[:, 0], device)


def _rows(tensor: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    return tensor if index is None else tensor.index_select(0, index)


def _put(target: torch.Tensor, index: torch.Tensor | None, rows: torch.Tensor) -> None:
    if index is None:
        target.copy_(rows)
    else:
        target.index_copy_(0, index, rows)


def _add(target: torch.Tensor, index: torch.Tensor | None, rows: torch.Tensor) -> None:
    if index is None:
        target.add_(rows)
    else:
        target.index_add_(0, index, rows.to(target.dtype))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks_H: torch.Tensor | None,
        layout: RingLayout,
        scale: float,
    ) -> torch.Tensor:
        group, size = layout.group, key.shape[-1]
        wide = torch.promote_types(query.dtype, torch.float32)
        passing = torch.cat([key, value], -1)
        out = lse_HT = None
        for number, hop in enumerate(layout.hops):
            arriving = None
            if number + 1 < group.size:
                count = layout.counts[(group.rank - number - 1) % group.size]
                arriving = group.pass_on(passing, (count, *passing.shape[1:]))
            if hop is not None:
                kernel = partial_kernel(layout.kernel, query, value, hop.where)
                seen = _rows(passing, hop.keys)
                k, v = seen[..., :size].contiguous(), seen[..., size:].contiguous()
                part, part_lse_HT = kernel.forward(_rows(query, hop.queries).contiguous(), k, v, hop.where, scale)
                if out is None or lse_HT is None:  # the first step has the keys of this rank
                    out, lse_HT = part.to(wide), part_lse_HT.to(wide)
                else:
                    before_HT = _rows(lse_HT.t(), hop.queries).t()
                    both, both_HT = merge(_rows(out, hop.queries), before_HT, part, part_lse_HT)
                    _put(out, hop.queries, both)
                    _put(lse_HT.t(), hop.queries, both_HT.t())
            if arriving is not None:
                passing = arriving()
        assert out is not None
        assert lse_HT is not None
        if sinks_H is not None:
            out, lse_HT = with_sinks(out, lse_HT, sinks_H)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks_H, out, lse_HT)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        upstream = grads[0].contiguous()
        query, key, value, sinks_H, out, lse_HT = ctx.saved_tensors
        layout: RingLayout = ctx.layout
        group, size = layout.group, key.shape[-1]
        wide = torch.promote_types(query.dtype, torch.float32)
        passing = torch.cat([key, value], -1)
        dq = torch.zeros_like(query, dtype=wide)
        travelling = None
        for number, hop in enumerate(layout.hops):
            source = (group.rank - number) % group.size
            before = (source - 1) % group.size
            arriving = None
            if number + 1 < group.size:
                arriving = group.pass_on(passing, (layout.counts[before], *passing.shape[1:]))
            dkv = torch.zeros_like(passing, dtype=wide)
            if hop is not None:
                kernel = partial_kernel(layout.kernel, query, value, hop.where)
                seen = _rows(passing, hop.keys)
                queries, gradients, outputs = (_rows(one, hop.queries).contiguous() for one in (query, upstream, out))
                part_q, part_k, part_v = kernel.backward(
                    gradients,
                    queries,
                    seen[..., :size].contiguous(),
                    seen[..., size:].contiguous(),
                    outputs,
                    _rows(lse_HT.t(), hop.queries).t(),
                    hop.where,
                    ctx.scale,
                )
                _add(dq, hop.queries, part_q)
                _add(dkv, hop.keys, torch.cat([part_k, part_v], -1))
            # Adds the gradients that the previous ranks have computed for the same keys.
            dkv = dkv if travelling is None else dkv.add_(travelling())
            travelling = group.pass_on(dkv, (layout.counts[before], *dkv.shape[1:]))
            if arriving is not None:
                passing = arriving()
        assert travelling is not None
        dk, dv = travelling().to(key.dtype).split([size, value.shape[-1]], -1)
        sinks = None if sinks_H is None else sink_gradient(upstream, out, lse_HT, sinks_H)
        return dq.to(query.dtype), dk, dv, sinks, None, None
