"""Torch's flash attention over packed sequences on an NVIDIA device, also with attention sinks.

Shapes: T tokens of the line, H query heads, G key/value heads, D head size. The plain-torch twin is in `varlen.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from lockstep.kernels.cascade import PartKernel, cascade_attention
from lockstep.kernels.layout import Cascade, Layout, LinePart

# What torch's kernel takes.
LARGEST_HEAD = 256


def flash_fits(query_THD: torch.Tensor, layout: Layout, dropout: float) -> bool:
    half = query_THD.dtype in (torch.float16, torch.bfloat16)
    return half and not dropout and query_THD.shape[-1] % 8 == 0 and query_THD.shape[-1] <= LARGEST_HEAD


def flash_varlen(
    query_THD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    layout: Layout,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    return torch.ops.aten._flash_attention_forward(
        query_THD, key_TGD, value_TGD, *_sequences(layout), False, scale=scale, **_window(window)
    )[0]


def flash_shared(
    query_THD: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, cascade: Cascade, scale: float
) -> torch.Tensor:
    """On a line whose sequences share beginnings."""
    return cascade_attention(query_THD, key_TGD, value_TGD, cascade, scale, PartKernel(_part, _part_backward))


def _part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: LinePart, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    out, lse_HT, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, *_bounds(part), 0.0, causal, False, scale=scale
    )
    return out, lse_HT, (rng_state, unused)


def _part_backward(
    upstream: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse_HT: torch.Tensor,
    kept: tuple[torch.Tensor, ...],
    part: LinePart,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ops.aten._flash_attention_backward(
        upstream, query, key, value, out, lse_HT, *_bounds(part), 0.0, causal, *kept, scale=scale
    )


def _bounds(part: LinePart) -> tuple[Any, ...]:
    return part.query_bounds, part.key_bounds, part.longest_query, part.longest_key


def flash_with_sinks(
    query_THD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    layout: Layout,
    scale: float,
    window: int | None,
    sinks_H: torch.Tensor,
) -> torch.Tensor:
    return _FlashWithSinks.apply(query_THD, key_TGD, value_TGD, sinks_H, layout, scale, window)


class _FlashWithSinks(torch.autograd.Function):
    """Attention without sinks, corrected by the share of probability that they take.

    With L the log of the sum of exponentials over the keys, sinks leave the share sigmoid(L - sink) to the keys. The
    kernel's backward needs only the output and L: given those that include the sinks, its gradients do too. A sink's
    value is 0, so its own gradient is minus its probability times (upstream . output).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks_H: torch.Tensor,
        layout: Layout,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        bare, bare_lse_HT, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, *_sequences(layout), False, scale=scale, **_window(window)
        )
        sinks_H1 = sinks_H.float()[:, None]
        out = (bare * (bare_lse_HT - sinks_H1).sigmoid().t()[:, :, None]).to(bare.dtype)
        lse_HT = torch.logaddexp(bare_lse_HT, sinks_H1)
        ctx.save_for_backward(query, key, value, sinks_H, out, lse_HT, rng_state, unused)
        ctx.layout, ctx.scale, ctx.window = layout, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        upstream = grads[0].contiguous()
        query, key, value, sinks_H, out, lse_HT, rng_state, unused = ctx.saved_tensors
        back = torch.ops.aten._flash_attention_backward(
            upstream,
            query,
            key,
            value,
            out,
            lse_HT,
            *_sequences(ctx.layout),
            rng_state,
            unused,
            scale=ctx.scale,
            **_window(ctx.window),
        )
        taken_HT = (sinks_H.float()[:, None] - lse_HT).exp()
        along_HT = (upstream.float() * out.float()).sum(-1).t()
        return *back, -(taken_HT * along_HT).sum(1).to(sinks_H.dtype), None, None, None


def _sequences(layout: Layout) -> tuple[Any, ...]:
    """Where queries and keys begin, how long they are at most, no dropout, causal."""
    return layout.bounds, layout.bounds, layout.longest, layout.longest, 0.0, True


def _window(window: int | None) -> dict[str, int]:
    return {"window_size_left": window - 1 if window else -1, "window_size_right": 0 if window else -1}
