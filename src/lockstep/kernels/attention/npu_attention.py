"""Attention through torch_npu's fused operators: packed, paged, and partial for context parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch

from lockstep.kernels.attention.layout import Layout
from lockstep.kernels.attention.parts import Gradients, PartialKernel, Sections, Tensors
from lockstep.kernels.fused_modules import KernelTrial
from lockstep.kernels.npu_limits import decode_problem, fusion_problem

# Attention through torch_npu's fused operators: packed training, and one query a sequence over the paged cache.
#
# What they demand is in `npu_limits.py`. The plain-torch twins are in `varlen.py` and `paged.py`. Contract-tested on
# an emulated CANN, not yet run on Ascend hardware.

# A causal mask of any size is given as this corner of it; True is masked out.
CORNER = 2048
WHOLE, RIGHT_DOWN_CAUSAL, BAND = 0, 3, 4
UNBOUNDED = 2**31 - 1


@cache
def corner(device: torch.device) -> torch.Tensor:
    """Made on the host: one copy for each device, whatever the lengths are."""
    return torch.ones(CORNER, CORNER, dtype=torch.bool).triu(1).to(device)


def wait() -> None:
    """Until the device has done all that was asked of it."""
    import torch_npu

    torch_npu.npu.synchronize()


def fusion_fits(query_THD: torch.Tensor, layout: Layout, dropout: float) -> bool:
    return fusion_problem(query_THD, layout.ends, dropout) is None


def fusion_attention(
    query_THD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    layout: Layout,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Causal attention inside each sequence of a line; `layout.ends` are host numbers, as the operator wants them."""
    import torch_npu

    ends = list(layout.ends)
    return torch_npu.npu_fusion_attention(
        query_THD,
        key_TGD,
        value_TGD,
        query_THD.shape[1],
        "TND",
        atten_mask=corner(query_THD.device),
        scale=scale,
        pre_tockens=window - 1 if window else UNBOUNDED,
        next_tockens=0,
        actual_seq_qlen=ends,
        actual_seq_kvlen=ends,
        sparse_mode=BAND if window else RIGHT_DOWN_CAUSAL,
    )[0]


def infer_fits(query_BHD: torch.Tensor, keys: torch.Tensor, block: int, window: int | None, longest: int) -> bool:
    return decode_problem(query_BHD, keys, block, window, longest) is None


def infer_decode(
    query_BHD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table_BM: torch.Tensor,
    lengths: Sequence[int],
    block: int,
    scale: float,
) -> torch.Tensor:
    """One query a sequence to its blocks of the cache, which lie there as (block, token, head and size)."""
    import torch_npu

    batch, heads, size = query_BHD.shape
    groups = keys.shape[1]
    out, _ = torch_npu.npu_fused_infer_attention_score(
        query_BHD.reshape(batch, 1, heads * size).contiguous(),
        keys.view(-1, block, groups * size),
        values.view(-1, block, groups * size),
        actual_seq_lengths_kv=list(lengths),
        block_table=table_BM.to(torch.int32),
        num_heads=heads,
        num_key_value_heads=groups,
        scale=scale,
        input_layout="BSH",
        block_size=block,
    )
    return out.view(batch, heads, size)


# Some queries to some of their keys (`parts.py`) through torch_npu's fused attention and its gradient.
#
# The operator gives the largest score and the sum of exponentials below it, so lse = max + log(sum). Its gradient
# takes them back, with the output: given a maximum of lse and a sum of 1, and the output of the whole, its gradients
# are shares of the whole's. By default both stand head by head within each sequence, whatever their shape says;
# `softmax_layout` asks for the order of the queries, forward and backward alike.
#
# The plain-torch twin is in `partial.py`, where this is tried against it before it is used. Contract-tested on an
# emulated CANN, not yet run on Ascend hardware.

LINE = "TND"
# The operator keeps each number of a query and head so many times over.
COPIES = 8


def fusion_part(
    query_THD: torch.Tensor,
    key_SGD: torch.Tensor,
    value_SGD: torch.Tensor,
    where: Sections,
    scale: float,
    window: int | None = None,
) -> Tensors:
    import torch_npu

    seen = _seen(where, window, query_THD.device)
    out, largest_TH8, total_TH8, *_ = torch_npu.npu_fusion_attention(
        query_THD,
        key_SGD,
        value_SGD,
        query_THD.shape[1],
        LINE,
        scale=scale,
        actual_seq_qlen=seen.query_ends,
        actual_seq_kvlen=seen.key_ends,
        atten_mask=seen.mask,
        pre_tockens=seen.before,
        next_tockens=seen.after,
        sparse_mode=seen.mode,
        softmax_layout=LINE,
    )
    return out, (largest_TH8[..., 0] + total_TH8[..., 0].log()).t().contiguous()


def fusion_part_backward(
    upstream_THD: torch.Tensor,
    query_THD: torch.Tensor,
    key_SGD: torch.Tensor,
    value_SGD: torch.Tensor,
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor,
    where: Sections,
    scale: float,
    window: int | None = None,
) -> Gradients:
    import torch_npu

    seen = _seen(where, window, query_THD.device)
    largest_TH8 = lse_HT.float().t()[:, :, None].expand(-1, -1, COPIES).contiguous()
    dq, dk, dv, *_ = torch_npu.npu_fusion_attention_grad(
        query_THD,
        key_SGD,
        value_SGD,
        upstream_THD.to(query_THD.dtype).contiguous(),
        query_THD.shape[1],
        LINE,
        softmax_max=largest_TH8,
        softmax_sum=torch.ones_like(largest_TH8),
        attention_in=out_THD.to(query_THD.dtype).contiguous(),
        scale_value=scale,
        actual_seq_qlen=seen.query_ends,
        actual_seq_kvlen=seen.key_ends,
        atten_mask=seen.mask,
        pre_tockens=seen.before,
        next_tockens=seen.after,
        sparse_mode=seen.mode,
        softmax_layout=LINE,
    )
    return dq, dk, dv


class _Seen(NamedTuple):
    """Which keys each query sees, in the operator's words: the same in both directions."""

    query_ends: list[int]
    key_ends: list[int]
    mask: torch.Tensor | None = None
    """Without one, a query sees its whole sequence."""
    before: int = UNBOUNDED
    after: int = UNBOUNDED
    mode: int = WHOLE


def _seen(where: Sections, window: int | None, device: torch.device) -> _Seen:
    queries, keys = (list(accumulate(lengths)) for lengths in (where.queries, where.keys))
    if not where.causal:
        return _Seen(queries, keys)
    if window is None:
        return _Seen(queries, keys, corner(device), after=0, mode=RIGHT_DOWN_CAUSAL)
    return _Seen(queries, keys, corner(device), window - 1, 0, BAND)


FUSION_PARTS = PartialKernel(fusion_part, fusion_part_backward)
# The lse is fp32 in every type. Half types round the weights, and each part's gradients.
TRIAL = KernelTrial(
    {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}, smallest=1.0, gradients=False, wait=wait
)
