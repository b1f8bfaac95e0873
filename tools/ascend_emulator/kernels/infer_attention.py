"""The attention of generation: prompts and single new tokens, over keys that may lie in pages.

npu_fused_infer_attention_score, its second version and npu_incre_flash_attention: no quantisation, no position bias,
no rotary part of its own, no left padding, no shared prefix.
"""

from __future__ import annotations

from typing import Any

import torch

from ascend_emulator.kernels.attention import UNLIMITED, Masking, to_heads_first
from ascend_emulator.kernels.infer_call import Call, attend
from ascend_emulator.kernels.reference import NotInReference, reference, refuse


@reference("npu_fused_infer_attention_score", contiguous=(0, 1, 2))
def fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    block_table: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
    **unknown: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    name = "npu_fused_infer_attention_score"
    refuse(name, **unknown)
    call = Call(
        name=name,
        layout=input_layout,
        heads=num_heads,
        key_heads=num_key_value_heads or num_heads,
        scale=scale,
        query_lengths=actual_seq_lengths,
        key_lengths=actual_seq_lengths_kv,
        masking=Masking(atten_mask, sparse_mode, pre_tokens, next_tokens),
        block_table=block_table,
        block_size=block_size,
    )
    out, log_sums = attend(query, key, value, call)
    return out, log_sums if softmax_lse_flag else torch.empty(0)


@reference("npu_fused_infer_attention_score_v2", contiguous=(0, 1, 2))
def fused_infer_attention_score_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    block_table: torch.Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    inner_precise: int = 0,
    return_softmax_lse: bool = False,
    **unknown: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    name = "npu_fused_infer_attention_score_v2"
    refuse(name, **unknown)
    call = Call(
        name=name,
        layout=input_layout,
        heads=num_query_heads,
        key_heads=num_key_value_heads or num_query_heads,
        scale=softmax_scale,
        query_lengths=actual_seq_qlen,
        key_lengths=actual_seq_kvlen,
        masking=Masking(atten_mask, sparse_mode, pre_tokens, next_tokens),
        block_table=block_table,
        block_size=block_size,
    )
    out, log_sums = attend(query, key, value, call)
    return out, log_sums if return_softmax_lse else torch.empty(0)


@reference("npu_incre_flash_attention")
def incre_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    block_table: torch.Tensor | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    block_size: int = 0,
    inner_precise: int = 1,
    **unknown: Any,
) -> torch.Tensor:
    """One new token a sequence. Its `actual_seq_lengths` are those of the keys."""
    name = "npu_incre_flash_attention"
    refuse(name, **unknown)
    if input_layout not in ("BSH", "BSND", "BNSD"):
        raise NotInReference(f"the emulated {name} has no layout {input_layout!r}")
    call = Call(
        name=name,
        layout=input_layout,
        heads=num_heads,
        key_heads=num_key_value_heads or num_heads,
        scale=scale_value,
        query_lengths=None,
        key_lengths=actual_seq_lengths,
        masking=Masking(atten_mask),
        block_table=block_table,
        block_size=block_size,
    )
    if to_heads_first(query, input_layout, num_heads).shape[2] != 1:
        raise RuntimeError(f"{name}: query must hold one token a sequence, got {tuple(query.shape)}")
    return attend(query, key, value, call)[0]
