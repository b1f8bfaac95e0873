"""The attention function that transformers calls, for packed sequences (training) and the paged KV cache (rollout)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from lockstep.kernels.attention.image_blocks import with_image_blocks
from lockstep.kernels.attention.keywords import carried_layout
from lockstep.kernels.attention.latent import latent_attention
from lockstep.kernels.attention.layout import DecodePass, Layout
from lockstep.kernels.attention.masks import CHUNK, SELECTIONS, WINDOW, BeyondCausal
from lockstep.kernels.attention.paged import PrefillPass, cached_call, paged_attention
from lockstep.kernels.attention.rows import RowPass, row_attention
from lockstep.kernels.attention.varlen import varlen_attention


class DividedLayout(ABC):
    """Base class of context-parallel layouts (see `parallel/`), where each rank has a part of the tokens of a packed
    row."""

    @abstractmethod
    def attend(
        self,
        query_THD: torch.Tensor,
        key_TGD: torch.Tensor,
        value_TGD: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        dropout: float,
        softcap: float | None,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """Computes `varlen_attention` over the complete packed row, but takes and returns only this rank's tokens."""


# The value of `attn_implementation` that selects lockstep's attention in transformers.
ATTENTION = "lockstep"
# Keyword arguments that models pass to attention and that can be ignored. Positions are already applied to queries and
# keys, and the window is read from the mask (`masks.py`).
SAYS_NOTHING = frozenset(
    {
        "position_ids",
        "token_positions",
        "input_ids",
        "position_embeddings",
        "cache_position",
        "sliding_window",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)


def transformers_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    layout: Layout | DividedLayout | PrefillPass | DecodePass | RowPass | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention with the signature that transformers requires. Inputs are (N, heads, T, D), and the output is
    (N, T, heads, D).

    The caller passes `layout` as a keyword through the model's forward. `layout` says where the tokens are: in a packed
    row, on several ranks, or in the engine's KV cache. Unsupported attention raises an error.
    """
    layout = carried_layout(module) if layout is None else layout
    if isinstance(layout, RowPass):
        return _in_rows(module, query, key, value, attention_mask, scaling, dropout, softcap, s_aux, extra), None
    _refuse_more(module, attention_mask, is_causal, extra)
    if layout is None:
        raise RuntimeError(
            "lockstep's attention was called without a layout; transformers' `generate` does not pass one and is not "
            "supported"
        )
    rows, heads, width, size = query.shape
    scale = scaling if scaling is not None else size**-0.5
    # N rows of equal width are flattened to one packed row. Right-padded batches are flattened too.
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    window: int | None = getattr(module, WINDOW)
    chunk: int | None = getattr(module, CHUNK, None)
    dropout = dropout if module.training else 0.0
    blocks = () if isinstance(layout, DividedLayout | DecodePass) else layout.blocks
    blocks = tuple(block for block in blocks if window or not block.only_windows)
    if blocks and chunk is not None:
        raise BeyondCausal(f"images cannot be seen in both directions in chunked attention ({type(module).__name__})")
    if isinstance(layout, Layout):
        layout = layout.chunked(chunk) if chunk else layout
        out = varlen_attention(
            q, k, v, layout, scale=scale, window=window, dropout=dropout, softcap=softcap, sinks_H=s_aux
        )
    elif isinstance(layout, DividedLayout):
        if chunk is not None:
            raise BeyondCausal(f"context parallelism does not support chunked attention ({type(module).__name__})")
        out = layout.attend(q, k, v, scale=scale, window=window, dropout=dropout, softcap=softcap, sinks_H=s_aux)
    else:
        call = cached_call(module, layout)
        limits: dict[str, Any] = {
            "scale": scale,
            "window": window,
            "softcap": softcap,
            "sinks_H": s_aux,
            "chunk": chunk,
        }
        if layout.cache.layout.calls[call].latent is None:
            out = paged_attention(q, k, v, layout, call, **limits)
        else:
            out = latent_attention(module, q, k[:, 0], v[:, 0], layout, call, **limits)
    if blocks:
        keys: Any = k
        values: Any = v
        if isinstance(layout, PrefillPass):
            keys, values = layout.cache.fp8_layer(call) if layout.cache.fp8 else layout.cache.layer(call)
        out = with_image_blocks(
            out, q, keys, values, blocks, scale=scale, window=window, dropout=dropout, softcap=softcap, sinks_H=s_aux
        )
    return out.reshape(rows, width, heads, -1), None


def _in_rows(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
    extra: dict[str, Any],
) -> torch.Tensor:
    """Computes attention over right-padded rows with the mask that the module has built."""
    if mask is None:
        raise BeyondCausal(f"{type(module).__name__} passes no mask to its attention")
    selected = {name: extra.pop(name, None) for name in (*SELECTIONS, "position_ids")}
    _refuse_more(module, None, None, extra)
    return row_attention(
        module,
        query,
        key,
        value,
        mask,
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        dropout=dropout if module.training else 0.0,
        softcap=softcap,
        sinks_H=sinks_H,
        selected=selected,
    )


def _refuse_more(
    module: torch.nn.Module, mask: torch.Tensor | None, is_causal: bool | None, extra: dict[str, Any]
) -> None:
    """Raises `BeyondCausal` for masks and unknown arguments, because they may change what this model's attention
    computes."""
    name = type(module).__name__
    if mask is not None:
        raise BeyondCausal(f"{name} builds its own mask")
    if (module.is_causal if is_causal is None and hasattr(module, "is_causal") else is_causal) is False:
        raise BeyondCausal(f"{name} attends in both directions")
    unknown = sorted(key for key, value in extra.items() if value is not None and key not in SAYS_NOTHING)
    if unknown:
        raise BeyondCausal(f"{name} passes unsupported arguments to its attention: {', '.join(unknown)}")
    if not hasattr(module, WINDOW):
        raise BeyondCausal(f"{name} was not called in the probe pass that reads the model's masks")


def register_attention() -> None:
    """Registers `attn_implementation="lockstep"` with transformers, but no mask function, so that transformers builds
    no masks."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, transformers_attention)
