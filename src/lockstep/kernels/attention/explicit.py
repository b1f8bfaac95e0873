"""Attention in plain torch with soft-capped scores and attention sinks, which torch's attention does not have."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

# Attention sinks only rescale the output of attention without sinks: the keys keep the fraction sigmoid(lse - sink) of
# the probability. The value vector of a sink is 0, so the gradient of a sink is -probability * (upstream . output).
# Tensor names end with their dimensions, which are T tokens, H heads.


def with_sinks(out_THD: torch.Tensor, lse_HT: torch.Tensor, sinks_H: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns attention output and log-sum-exp (lse) with the sinks included."""
    sinks_H1 = sinks_H.to(lse_HT.dtype)[:, None]
    return out_THD * (lse_HT - sinks_H1).sigmoid().t()[:, :, None], torch.logaddexp(lse_HT, sinks_H1)


def sink_gradient(
    upstream_THD: torch.Tensor, out_THD: torch.Tensor, lse_HT: torch.Tensor, sinks_H: torch.Tensor
) -> torch.Tensor:
    """Returns the gradient of the sinks. `out_THD` and `lse_HT` must include the sinks."""
    p_sink_HT = (sinks_H.to(lse_HT.dtype)[:, None] - lse_HT).exp()
    delta_HT = (upstream_THD.to(lse_HT.dtype) * out_THD.to(lse_HT.dtype)).sum(-1).t()
    return -(p_sink_HT * delta_HT).sum(1).to(sinks_H.dtype)


# Tensor names end with their dimensions, which are N sequences, H query heads, G key/value heads, Q queries, K keys, D
# head size. A soft cap c replaces a score s by c * tanh(s / c). A sink is one extra logit per head whose value vector
# is 0.

# Maximum memory of one block of fp32 scores. Queries are processed in blocks, so that no (heads, T, T) tensor is
# allocated.
SCORE_BYTES = 64 * 2**20


def masked_attention(
    query_NHQD: torch.Tensor,
    key_NGKD: torch.Tensor,
    value_NGKD: torch.Tensor,
    mask: torch.Tensor,
    sinks_H: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Computes softmax attention in fp32 or a wider dtype. `mask` is added to the capped scores. The shape of `mask` is
    (N, Q, K) or, if heads have different masks, (N, H, Q, K)."""
    heads, queries, groups = query_NHQD.shape[1], query_NHQD.shape[2], key_NGKD.shape[1]
    wide = torch.promote_types(query_NHQD.dtype, torch.float32)
    # The query heads of one key/value head are stacked as rows of one matrix, so keys are not repeated in memory.
    query = query_NHQD.to(wide).unflatten(1, (groups, heads // groups)).flatten(2, 3)
    scores = (query @ key_NGKD.to(wide).transpose(-1, -2) * scale).view(len(query), heads, queries, -1)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores + (mask if mask.dim() == 4 else mask[:, None])
    if sinks_H is None:
        p = scores.softmax(-1)
    else:
        sinks = sinks_H.to(wide)[:, None, None]
        p = (scores - torch.logaddexp(scores.logsumexp(-1, keepdim=True), sinks)).exp()
    p = torch.nn.functional.dropout(p, dropout)
    out = p.unflatten(1, (groups, heads // groups)).flatten(2, 3) @ value_NGKD.to(wide)
    return out.view(len(query), heads, queries, -1).to(query_NHQD.dtype)


def causal_attention(
    query_NHQD: torch.Tensor,
    key_NGKD: torch.Tensor,
    value_NGKD: torch.Tensor,
    sinks_H: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
    dropout: float = 0.0,
    first: int = 0,
) -> torch.Tensor:
    """Computes causal attention, over the last `window` keys if `window` is set. The first query is at position
    `first`.

    The computation runs in blocks of queries, and the backward pass recomputes the scores of each block.
    """
    batch, heads, queries, _ = query_NHQD.shape
    rows = max(1, SCORE_BYTES // (4 * batch * heads * key_NGKD.shape[2]))
    blocks = []
    for start in range(first, first + queries, rows):
        stop = min(start + rows, first + queries)
        low = max(0, start + 1 - window) if window else 0
        blocks.append(
            checkpoint(
                _block,
                query_NHQD[:, :, start - first : stop - first],
                key_NGKD[:, :, low:stop],
                value_NGKD[:, :, low:stop],
                sinks_H,
                start - low,
                scale,
                softcap,
                window,
                dropout,
                use_reentrant=False,
                preserve_rng_state=bool(dropout),
            )
        )
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)


def _block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks_H: torch.Tensor | None,
    offset: int,
    scale: float,
    softcap: float | None,
    window: int | None,
    dropout: float,
) -> torch.Tensor:
    positions = torch.arange(key.shape[2], device=query.device)
    distance = torch.arange(offset, offset + query.shape[2], device=query.device)[:, None] - positions[None, :]
    hidden = distance < 0
    if window:
        hidden |= distance >= window
    mask = torch.zeros(hidden.shape, device=query.device).masked_fill_(hidden, -float("inf"))
    return masked_attention(query, key, value, mask[None], sinks_H, scale=scale, softcap=softcap, dropout=dropout)
