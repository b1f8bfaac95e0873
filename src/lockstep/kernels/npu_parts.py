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
from typing import NamedTuple

import torch

from lockstep.kernels.npu_attention import BAND, RIGHT_DOWN_CAUSAL, UNBOUNDED, WHOLE, corner, wait
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
