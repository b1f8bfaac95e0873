"""npu_fusion_attention and its gradient, the attention of training: no dropout, no position bias, no sink."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ascend_emulator.kernels.attention import (
    UNLIMITED,
    Masking,
    for_every_query_head,
    from_heads_first,
    masked_scores,
    packed_slices,
    softmax_statistics,
    softmax_weights,
    to_heads_first,
)
from ascend_emulator.kernels.reference import NotInReference, limit, reference, refuse

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_COPIES = 8  # the device keeps each softmax statistic eight times over


@dataclass(frozen=True)
class Call:
    """What forward and gradient have in common."""

    heads: int
    layout: str
    scale: float
    masking: Masking
    query_ends: list[int] | None
    key_ends: list[int] | None

    def packed(self) -> list[tuple[slice, slice]]:
        if self.query_ends is None or self.key_ends is None:
            raise RuntimeError("layout TND needs actual_seq_qlen and actual_seq_kvlen")
        return list(zip(packed_slices(self.query_ends), packed_slices(self.key_ends), strict=True))


@reference("npu_fusion_attention")
def fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = UNLIMITED,
    next_tockens: int = UNLIMITED,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
    dropout_mask: torch.Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Any, ...]:
    refuse(
        "npu_fusion_attention",
        pse=pse,
        padding_mask=padding_mask,
        prefix=prefix,
        sink=sink,
        dropout_mask=dropout_mask,
        dropout=keep_prob != 1.0,
    )
    masking = Masking(atten_mask, sparse_mode, pre_tockens, next_tockens)
    call = Call(head_num, input_layout, scale, masking, actual_seq_qlen, actual_seq_kvlen)
    check_arguments(query, key, value, call)
    forward = _forward_packed if input_layout == "TND" else _forward
    out, largest, total = forward(query, key, value, call)
    if by_sequence(call, softmax_layout):
        largest, total = (_heads_in_front(statistic, call) for statistic in (largest, total))
    # What follows is the unused softmax, and the seed, offset and length of the dropout mask.
    return out, _copies(largest), _copies(total), torch.empty(0, dtype=query.dtype), 0, 0, 0


@reference("npu_fusion_attention_grad")
def fusion_attention_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dy: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    softmax_max: torch.Tensor,
    softmax_sum: torch.Tensor,
    softmax_in: torch.Tensor | None = None,
    attention_in: torch.Tensor,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = UNLIMITED,
    next_tockens: int = UNLIMITED,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    masking = Masking(atten_mask, sparse_mode, pre_tockens, next_tockens)
    call = Call(head_num, input_layout, scale_value, masking, actual_seq_qlen, actual_seq_kvlen)
    check_arguments(query, key, value, call)
    check_forward(query, softmax_max, softmax_sum, attention_in)
    largest, total = softmax_max[..., :1], softmax_sum[..., :1]
    if by_sequence(call, softmax_layout):
        largest, total = (_heads_behind(statistic, call) for statistic in (largest, total))
    gradients = _gradients_packed if input_layout == "TND" else _gradients
    nothing = torch.empty(0)  # gradients of position bias and sink
    return *gradients(query, key, value, dy, attention_in, largest, total, call), nothing, nothing.clone()


def check_arguments(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> None:
    """The documented conditions."""
    dtypes = {query.dtype, key.dtype, value.dtype}
    if len(dtypes) > 1 or query.dtype not in _DTYPES:
        raise RuntimeError(f"npu_fusion_attention: query, key and value need one floating type, got {dtypes}")
    if call.masking.mask is not None and call.masking.mask.dtype not in (torch.bool, torch.uint8):
        raise RuntimeError(f"npu_fusion_attention: atten_mask must be bool or uint8, got {call.masking.mask.dtype}")
    heads_at = {"BNSD": 1, "BSND": 2, "TND": 1}.get(call.layout)
    if heads_at is None and call.layout not in ("BSH", "SBH"):
        raise NotInReference(f"the emulated attention has no layout {call.layout!r}")
    if heads_at is not None and query.shape[heads_at] != call.heads:
        raise RuntimeError(f"npu_fusion_attention: head_num {call.heads}, but query is {tuple(query.shape)}")
    _check_sizes(query, key, value, call)


def check_forward(
    query: torch.Tensor, softmax_max: torch.Tensor, softmax_sum: torch.Tensor, attention_in: torch.Tensor
) -> None:
    """What the gradient gets from the forward pass."""
    for statistic in (softmax_max, softmax_sum):
        if statistic.dtype != torch.float32 or statistic.shape[-1] != _COPIES:
            found = f"{statistic.dtype} of {tuple(statistic.shape)}"
            raise RuntimeError(f"npu_fusion_attention_grad: softmax statistics are {_COPIES} float32 each, got {found}")
    if attention_in.dtype != query.dtype:
        raise RuntimeError(f"npu_fusion_attention_grad: attention_in of {attention_in.dtype} for {query.dtype}")


def by_sequence(call: Call, softmax_layout: str) -> bool:
    """Whether the statistics stand head by head within each sequence: so they do by default in TND, in its shape."""
    if softmax_layout not in ("", "TND") or (softmax_layout and call.layout != "TND"):
        raise RuntimeError(f"softmax_layout is for TND, and 'TND' or nothing: got {softmax_layout!r}, {call.layout}")
    return call.layout == "TND" and not softmax_layout


def _heads_in_front(statistic: torch.Tensor, call: Call) -> torch.Tensor:
    heads, found = statistic.shape[1], torch.zeros_like(statistic).flatten()
    for queries, _ in call.packed():
        found[queries.start * heads : queries.stop * heads] = statistic[queries].transpose(0, 1).flatten()
    return found.view_as(statistic)


def _heads_behind(statistic: torch.Tensor, call: Call) -> torch.Tensor:
    heads, flat, found = statistic.shape[1], statistic.flatten(), torch.zeros_like(statistic)
    for queries, _ in call.packed():
        found[queries] = flat[queries.start * heads : queries.stop * heads].view(heads, -1, 1).transpose(0, 1)
    return found


def _check_sizes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> None:
    name = "npu_fusion_attention"
    limit(name, 1 <= call.heads <= 256, f"{call.heads} heads: 1 to 256")
    size = query.shape[-1] // (call.heads if call.layout in ("BSH", "SBH") else 1)
    limit(name, 1 <= size <= 768, f"head size {size}: 1 to 768")
    if call.layout in ("BSH", "SBH"):
        limit(name, key.shape[-1] % size == 0, f"keys {key.shape[-1]} wide for heads of {size}")
        groups = key.shape[-1] // size
    else:
        limit(name, key.shape[-1] == size >= value.shape[-1], "queries and keys of one head size, values of no larger")
        groups = key.shape[{"BNSD": 1, "BSND": 2, "TND": 1}[call.layout]]
    limit(name, groups > 0 and call.heads % groups == 0, f"{call.heads} query heads to {groups} key heads")
    if call.layout == "TND":
        limit(name, len(call.query_ends or []) <= 1024, f"{len(call.query_ends or [])} sequences: at most 1024")
        limit(name, max(query.shape[0], key.shape[0]) <= 2**20, f"{query.shape[0]} tokens: at most 1M")
    if call.masking.mask is not None and call.masking.sparse_mode in (0, 1):
        spans = _spans(query, key, call)
        rows, columns = (max(span[side].stop - span[side].start for span in spans) for side in (0, 1))
        call.masking.require_whole(name, rows, columns)


def _spans(query: torch.Tensor, key: torch.Tensor, call: Call) -> list[tuple[slice, slice]]:
    """Queries and keys of each sequence; of all sequences at once where they are not packed."""
    if call.layout == "TND":
        return call.packed()
    length_at = {"BNSD": 2, "BSND": 1, "BSH": 1, "SBH": 0}[call.layout]
    return [(slice(0, query.shape[length_at]), slice(0, key.shape[length_at]))]


def _heads_first(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = to_heads_first(query, call.layout, call.heads)
    key_heads = key.shape[-1] // q.shape[-1]  # looked at only by the layouts that fold the heads into one dimension
    return q, to_heads_first(key, call.layout, key_heads), to_heads_first(value, call.layout, key_heads)


def _forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> tuple[torch.Tensor, ...]:
    q, k, v = _heads_first(query, key, value, call)
    scores = masked_scores(q, k, call.scale, call.masking)
    largest, total = softmax_statistics(scores)
    weights = softmax_weights(scores, largest, total).to(value.dtype).float()
    out = (weights @ for_every_query_head(v, q.shape[1])).to(query.dtype)
    return from_heads_first(out, call.layout), largest, total


def _gradients(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    by_out: torch.Tensor,
    out: torch.Tensor,
    largest: torch.Tensor,
    total: torch.Tensor,
    call: Call,
) -> tuple[torch.Tensor, ...]:
    q, k, v = _heads_first(query, key, value, call)
    upstream = to_heads_first(by_out, call.layout, call.heads).float()
    weights = softmax_weights(masked_scores(q, k, call.scale, call.masking), largest, total)
    by_weights = upstream @ for_every_query_head(v, q.shape[1]).mT
    # What the gradient of a softmax subtracts comes from the output it is given, not from these weights: they are the
    # same only where the statistics are of these keys alone.
    along = (upstream * to_heads_first(out, call.layout, call.heads).float()).sum(-1, keepdim=True)
    by_scores = weights * (by_weights - along) * call.scale
    by_query = by_scores @ for_every_query_head(k, q.shape[1])
    by_key = _sum_of_groups(by_scores.mT @ q.float(), k.shape[1])
    by_value = _sum_of_groups(weights.mT @ upstream, k.shape[1])
    return tuple(from_heads_first(x.to(query.dtype), call.layout) for x in (by_query, by_key, by_value))


def _forward_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
) -> tuple[torch.Tensor, ...]:
    out = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=query.dtype)
    largest = torch.zeros(*query.shape[:2], 1)
    total = torch.zeros(*query.shape[:2], 1)
    for queries, keys in call.packed():
        part = _of_one_sequence(call, queries, keys)
        o, m, s = _forward(query[queries][None], key[keys][None], value[keys][None], part)
        out[queries], largest[queries], total[queries] = o[0], m[0].transpose(0, 1), s[0].transpose(0, 1)
    return out, largest, total


def _gradients_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    by_out: torch.Tensor,
    out: torch.Tensor,
    largest: torch.Tensor,
    total: torch.Tensor,
    call: Call,
) -> tuple[torch.Tensor, ...]:
    by_query, by_key, by_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for queries, keys in call.packed():
        dq, dk, dv = _gradients(
            query[queries][None],
            key[keys][None],
            value[keys][None],
            by_out[queries][None],
            out[queries][None],
            largest[queries].transpose(0, 1)[None],
            total[queries].transpose(0, 1)[None],
            _of_one_sequence(call, queries, keys),
        )
        by_query[queries], by_key[keys], by_value[keys] = dq[0], dk[0], dv[0]
    return by_query, by_key, by_value


def _of_one_sequence(call: Call, queries: slice, keys: slice) -> Call:
    masking = call.masking.part(queries.stop - queries.start, keys.stop - keys.start)
    return Call(call.heads, "BSND", call.scale, masking, None, None)


def _sum_of_groups(x: torch.Tensor, key_heads: int) -> torch.Tensor:
    return x.unflatten(1, (key_heads, -1)).sum(2)


def _copies(x: torch.Tensor) -> torch.Tensor:
    return x.expand(*x.shape[:-1], _COPIES).contiguous()
