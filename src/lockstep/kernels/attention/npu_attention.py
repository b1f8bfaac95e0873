"""Attention with torch_npu's fused operators: packed, paged, and partial (for context parallelism)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch

from lockstep.kernels.attention.layout import Layout
from lockstep.kernels.attention.partial_attention import Gradients, PartialKernel, Sections, Tensors
from lockstep.kernels.fused_modules import KernelTrial
from lockstep.kernels.npu_limits import decode_problem, fusion_problem

# The limits of the operators are in `npu_limits.py`. The plain-torch references are in `varlen.py`, `paged.py` and
# `partial.py`. This code was tested on an emulated CANN. The code has not yet run on Ascend hardware.

# The fused operator takes a causal mask of this fixed size for sequences of any length. True means masked out.
CORNER = 2048
NO_MASK, RIGHT_DOWN_CAUSAL, BAND = 0, 3, 4
UNBOUNDED = 2**31 - 1


@cache
def corner(device: torch.device) -> torch.Tensor:
    """Returns the fixed-size causal mask on a device, of which one copy is used for all sequence lengths."""
    return torch.ones(CORNER, CORNER, dtype=torch.bool).triu(1).to(device)


def wait() -> None:
    """Waits until the device has finished all queued work."""
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
    """Computes causal attention inside each packed sequence. The NPU operator takes the sequence ends (`layout.ends`)
    as host integers."""
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
    """Computes paged decode attention with one query per sequence. The operator reads the KV cache as (block, token,
    head * size)."""
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


# Partial attention. The forward operator returns the row maximum and the sum of exponentials, so lse = max + log(sum).
# The backward operator takes maximum and sum. With max = lse, sum = 1 and the merged output, the backward operator
# returns this part's contribution to the gradients. By default, maximum and sum are ordered by head within each
# sequence. The argument `softmax_layout` orders maximum and sum by query instead. `partial.py` checks this kernel
# against the reference before it is used.

PACKED_LAYOUT = "TND"
# The operator stores this many copies of the maximum and the sum of each query and head.
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
        PACKED_LAYOUT,
        scale=scale,
        actual_seq_qlen=seen.query_ends,
        actual_seq_kvlen=seen.key_ends,
        atten_mask=seen.mask,
        pre_tockens=seen.before,
        next_tockens=seen.after,
        sparse_mode=seen.mode,
        softmax_layout=PACKED_LAYOUT,
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
        PACKED_LAYOUT,
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
        softmax_layout=PACKED_LAYOUT,
    )
    return dq, dk, dv


class _Seen(NamedTuple):
    """The operator arguments that select which keys each query sees, in forward and backward."""

    query_ends: list[int]
    key_ends: list[int]
    mask: torch.Tensor | None = None
    """The causal mask, or None if a query sees all keys of its sequence."""
    before: int = UNBOUNDED
    after: int = UNBOUNDED
    mode: int = NO_MASK


def _seen(where: Sections, window: int | None, device: torch.device) -> _Seen:
    queries, keys = (list(accumulate(lengths)) for lengths in (where.queries, where.keys))
    if not where.causal:
        return _Seen(queries, keys)
    if window is None:
        return _Seen(queries, keys, corner(device), after=0, mode=RIGHT_DOWN_CAUSAL)
    return _Seen(queries, keys, corner(device), window - 1, 0, BAND)


FUSION_PARTS = PartialKernel(fusion_part, fusion_part_backward)
# The lse is fp32 for every dtype. With bf16 and fp16, the attention weights and the gradients of each part are rounded,
# so the tolerances are larger.
TRIAL = KernelTrial(
    {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}, smallest=1.0, gradients=False, wait=wait
)
