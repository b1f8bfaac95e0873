"""Attention through torch_npu's fused operators: packed training, and one query a sequence over the paged cache.

What they demand is in `npu_limits.py`. The plain-torch twins are in `varlen.py` and `paged.py`.
Contract-tested on an emulated CANN, not yet run on Ascend hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from lockstep.kernels.layout import Layout
from lockstep.kernels.npu_limits import decode_problem, fusion_problem

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
