"""Some queries to some of their keys (`parts.py`) through torch_npu's fused attention and its gradient.

The operator gives the largest score and the sum of exponentials below it, so lse = max + log(sum). Its gradient takes
them back, with the output: given a maximum of lse and a sum of 1, and the output of the whole, its gradients are shares
of the whole's. By default both stand head by head within each sequence, whatever their shape says; `softmax_layout`
asks for the order of the queries, forward and backward alike.

The plain-torch twin is in `partial.py`, where this is tried against it before it is used.
Contract-tested on an emulated CANN, not yet run on Ascend hardware.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from lockstep.kernels.npu_attention import BAND, RIGHT_DOWN_CAUSAL, UNBOUNDED, corner, wait
from lockstep.kernels.parts import Gradients, PartialKernel, Sections, Tensors
from lockstep.kernels.trial import KernelTrial

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

    out, largest_TH8, total_TH8, *_ = torch_npu.npu_fusion_attention(
        query_THD,
        key_SGD,
        value_SGD,
        query_THD.shape[1],
        LINE,
        scale=scale,
        **_seen(where, window, query_THD.device),
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
        **_seen(where, window, query_THD.device),
    )
    return dq, dk, dv


def _seen(where: Sections, window: int | None, device: torch.device) -> dict[str, Any]:
    """Which keys each query sees, the same in both directions. Without a mask, all of its sequence."""
    sequences = {
        "actual_seq_qlen": list(accumulate(where.queries)),
        "actual_seq_kvlen": list(accumulate(where.keys)),
        "softmax_layout": LINE,
    }
    if not where.causal:
        return sequences
    return {
        **sequences,
        "atten_mask": corner(device),
        "pre_tockens": window - 1 if window else UNBOUNDED,
        "next_tockens": 0,
        "sparse_mode": BAND if window else RIGHT_DOWN_CAUSAL,
    }


FUSION_PARTS = PartialKernel(fusion_part, fusion_part_backward)
# The lse is fp32 in every type. Half types round the weights, and each part's gradients.
TRIAL = KernelTrial(
    {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}, smallest=1.0, gradients=False, wait=wait
)
