"""Causal attention inside each packed sequence, with one kernel per device and a plain-torch reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from lockstep.kernels.attention.explicit import causal_attention
from lockstep.kernels.attention.flash import flash_fits, flash_shared, flash_varlen, flash_with_sinks
from lockstep.kernels.attention.layout import Bucket, Layout, Sharing
from lockstep.kernels.attention.npu_attention import fusion_attention, fusion_fits
from lockstep.kernels.invariant import invariant_fits, invariant_varlen


def varlen_attention(
    query_THD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    layout: Layout,
    *,
    scale: float,
    window: int | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes causal attention of every token inside its sequence, over the last `window` tokens if `window` is set.

    `softcap` c replaces a score s by c * tanh(s / c). `sinks_H` are attention sinks: one logit per head that takes a
    part of the probability mass.
    """
    value_size = value_TGD.shape[-1]
    size = max(query_THD.shape[-1], value_size)
    # In latent attention (MLA) and some other models, keys and values have different sizes, but the kernels support
    # only equal sizes. Further columns of zeros change neither the scores nor the output.
    query = _widened(query_THD, size)
    run = _fused(query, layout, dropout, softcap, sinks_H)
    if run is None:
        return _buckets(query_THD, key_TGD, value_TGD, layout, scale, window, dropout, softcap, sinks_H)
    key, value = _widened(key_TGD, size), _widened(value_TGD, size)
    unbounded = window is None or layout.longest <= window
    shared = _shared(layout) if unbounded and sinks_H is None else None
    if shared is not None:
        return shared(query, key, value, layout.cascade, scale)[..., :value_size]
    sharing = layout.sharing
    qkv = (_expand(rows, sharing) for rows in (query, key, value))
    out = run(*qkv, layout, scale, window, *(() if sinks_H is None else (sinks_H,)))
    out = out if sharing is None else _Take.apply(out, sharing.first_T, sharing.packed_index_E)
    return out[..., :value_size]


def _widened(rows_THD: torch.Tensor, size: int) -> torch.Tensor:
    missing = size - rows_THD.shape[-1]
    return pad(rows_THD, (0, missing)) if missing else rows_THD


def _buckets(
    query_THD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    layout: Layout,
    scale: float,
    window: int | None,
    dropout: float,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Reference implementation: right-pads sequences of similar length to a grid. Padding on the right does not change
    causal attention."""
    query, key, value = (to_slots(tensor, layout) for tensor in (query_THD, key_TGD, value_TGD))
    # The backward of `split` concatenates the gradients of the buckets. The backward of slicing would zero-fill and add
    # a full row for each bucket.
    sizes = [bucket.count * bucket.width for bucket in layout.buckets]
    outputs = []
    for bucket, *parts in zip(layout.buckets, *(rows.split(sizes) for rows in (query, key, value)), strict=True):
        q, k, v = (_grid(part, bucket) for part in parts)
        if softcap is not None or sinks_H is not None:
            out = causal_attention(q, k, v, sinks_H, scale=scale, softcap=softcap, window=window, dropout=dropout)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
            continue
        mask = _window_mask(bucket.width, window, query.device) if window and bucket.width > window else None
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=dropout,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return to_tokens(outputs[0] if len(outputs) == 1 else torch.cat(outputs), layout)


def _grid(rows: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """Reshapes (count * width, heads, D) to (count, heads, width, D)."""
    return rows.unflatten(0, (bucket.count, bucket.width)).transpose(1, 2)


class Fused(NamedTuple):
    """A varlen kernel, and a function that says which inputs it supports. The reference implementation handles the
    inputs that the kernel does not support."""

    run: Callable[..., torch.Tensor]
    fits: Callable[[torch.Tensor, Layout, float], bool]
    with_sinks: Callable[..., torch.Tensor] | None = None
    """The kernel that takes attention sinks as an additional argument. No kernel with sinks supports a soft cap."""
    shared: Callable[..., torch.Tensor] | None = None
    """The kernel for shared prefixes (a `Cascade`). If `shared` is None, every sequence gets a copy of its prefix
    before `run` is called."""


# The varlen kernels by name. `Device.attention` holds the name of the kernel.
KERNELS: dict[str, Fused | None] = {
    "sdpa": None,
    "flash_varlen": Fused(flash_varlen, flash_fits, flash_with_sinks, flash_shared),
    "invariant": Fused(invariant_varlen, invariant_fits),
    "npu_fusion": Fused(fusion_attention, fusion_fits),
}


def _fused(
    query_THD: torch.Tensor,
    layout: Layout,
    dropout: float,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> Callable[..., torch.Tensor] | None:
    """Returns the device's kernel if it supports these inputs with keys and values of equal size, else None."""
    fused = KERNELS[layout.kernel]
    if fused is None:
        return None
    if softcap is not None or not fused.fits(query_THD, layout, dropout):
        return None
    if sinks_H is None:
        return fused.run
    # If all sequences have one token, flash attention returns the lse in a different order, so sinks are not supported.
    return fused.with_sinks if layout.longest > 1 else None


def _shared(layout: Layout) -> Callable[..., torch.Tensor] | None:
    """Returns the device's kernel for shared prefixes if it supports this layout, else None."""
    fused = KERNELS[layout.kernel]
    if fused is None or fused.shared is None or layout.cascade is None:
        return None
    # A longest query of 1 is excluded, because flash attention then returns the lse, which merging needs, in a
    # different order.
    return fused.shared if layout.cascade.shared.longest_query > 1 else None


def _window_mask(width: int, window: int, device: torch.device) -> torch.Tensor:
    back = torch.arange(width, device=device)[:, None] - torch.arange(width, device=device)[None, :]
    return (back >= 0) & (back < window)


class _Take(torch.autograd.Function):
    """Gathers rows by index, each row once. The backward pass of this gather is a gather too.

    Every token has exactly one slot, and the output of padding slots is never read. Therefore the gradient of this
    gather is the inverse gather, with zeros for padding slots, and needs no scatter-add.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index, inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad,) = grads
        index, inverse = ctx.saved_tensors
        if len(inverse) <= len(index):
            return grad.index_select(0, inverse), None, None
        # When slots are gathered to tokens, padding slots get no gradient.
        back = grad.new_zeros(len(inverse), *grad.shape[1:])
        return back.index_copy_(0, index, grad), None, None


class _Spread(torch.autograd.Function):
    """Gathers rows by index, where rows of shared prefixes may repeat. The backward pass sums the gradients of a
    repeated row.

    `slots_E` are the slots that are not padding, and `packed_index_E` is the source row of each of these slots.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, index: torch.Tensor, slots_E: torch.Tensor | None, packed_index_E: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(slots_E, packed_index_E)
        ctx.count = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (grad,) = grads
        slots_E, packed_index_E = ctx.saved_tensors
        back = grad.new_zeros(ctx.count, *grad.shape[1:])
        back.index_add_(0, packed_index_E, grad if slots_E is None else grad.index_select(0, slots_E))
        return back, None, None, None


def _expand(rows_T: torch.Tensor, sharing: Sharing | None) -> torch.Tensor:
    """Expands shared prefixes, so that every sequence gets its own copy."""
    return rows_T if sharing is None else _Spread.apply(rows_T, sharing.packed_index_E, None, sharing.packed_index_E)


def to_slots(rows_T: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Regroups the tokens of a packed row by sequence length (see `Layout`). The backward pass sums the gradients of
    all copies of a prefix."""
    if layout.tokens_of_slots is None or layout.slots_of_tokens is None:
        return rows_T
    if layout.sharing is not None:
        return _Spread.apply(rows_T, layout.tokens_of_slots, layout.slots_E, layout.sharing.packed_index_E)
    return _Take.apply(rows_T, layout.tokens_of_slots, layout.slots_of_tokens)


def to_tokens(rows_S: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Restores the order of the packed row after `to_slots`."""
    if layout.tokens_of_slots is None or layout.slots_of_tokens is None:
        return rows_S
    return _Take.apply(rows_S, layout.slots_of_tokens, layout.tokens_of_slots)
