"""Attention of images whose tokens attend to each other in both directions (Gemma 3), in plain torch.

The causal kernels compute all tokens first. Then the outputs of the tokens of these images are replaced. An image has
few tokens, so the second pass costs little, and no kernel needs another mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from lockstep.kernels.attention.explicit import masked_attention
from lockstep.kernels.attention.kv_cache import Fp8Plane
from lockstep.vision.spans import ImageBlock


def with_image_blocks(
    out_THD: torch.Tensor,
    query_THD: torch.Tensor,
    keys: torch.Tensor | Fp8Plane,
    values: torch.Tensor | Fp8Plane,
    blocks: Sequence[ImageBlock],
    *,
    scale: float,
    window: int | None,
    dropout: float,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the output of causal attention, with that of each image replaced. `keys` and `values` are those of the
    packed row or of the KV cache."""
    for block in blocks:
        query = query_THD.index_select(0, block.rows_Q).transpose(0, 1)[None]
        k, v = (rows.index_select(0, block.keys_K).transpose(0, 1)[None] for rows in (keys, values))
        mask = seen_by_image(len(block.rows_Q), len(block.keys_K), window, query.device)
        if softcap is None and sinks_H is None:
            out = scaled_dot_product_attention(
                query, k, v, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=True
            )
        else:
            bias = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -float("inf"))[None]
            out = masked_attention(query, k, v, bias, sinks_H, scale=scale, softcap=softcap, dropout=dropout)
        out_THD = out_THD.index_copy(0, block.rows_Q, out[0].transpose(0, 1).to(out_THD.dtype))
    return out_THD


def seen_by_image(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Returns which keys each token of an image sees: the tokens before the image and all tokens of the image, except
    those that are before the window of the token. The image is at the end of the keys."""
    at = torch.arange(keys, device=device)
    seen = at[None, :] >= (at[keys - queries :, None] - window + 1 if window else 0)
    return seen.expand(queries, keys)
