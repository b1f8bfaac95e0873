"""Our attention as transformers calls it: packed sequences in training, the paged cache in generation."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.kernels.layout import Layout
from lockstep.kernels.paged import DecodePass, PrefillPass, paged_attention
from lockstep.kernels.varlen import varlen_attention

# The name under which transformers finds our attention (`attn_implementation`).
ATTENTION = "lockstep"


def transformers_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    layout: Layout | PrefillPass | DecodePass | None = None,
    **_ignored: Any,
) -> tuple[torch.Tensor, None]:
    """Our attention in the form transformers calls: (N, heads, T, D) in, (N, T, heads, D) out.

    `layout` travels from the model's forward as a keyword and says where the tokens lie: in a packed line, or in the
    engine's cache. What we cannot do exactly is an error.
    """
    if layout is None:
        raise RuntimeError("the packed attention was called without a layout; generation uses another implementation")
    rows, heads, width, size = query.shape
    # N rows of one width are one line: right-padded batches come through here too.
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    scale = scaling if scaling is not None else size**-0.5
    if isinstance(layout, Layout):
        out = varlen_attention(
            q,
            k,
            v,
            layout,
            scale=scale,
            window=sliding_window,
            dropout=dropout if module.training else 0.0,
            softcap=softcap,
            sinks_H=s_aux,
        )
    else:
        layer: Any = module.layer_idx
        out = paged_attention(
            q, k, v, layout, layer, scale=scale, window=sliding_window, softcap=softcap, sinks_H=s_aux
        )
    return out.reshape(rows, width, heads, -1), None


def register_attention() -> None:
    """Make `attn_implementation="lockstep"` known to transformers. No mask is registered, so none is built."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, transformers_attention)
