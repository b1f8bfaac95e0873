"""Attention in a few lines of plain torch, for tensors of [batch, heads, length, size]; masks say what is open."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F


def attend_plainly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, open_to: torch.Tensor | None
) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=open_to, scale=scale, enable_gqa=True)


def packed_plainly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    bounds: Sequence[tuple[tuple[int, int], tuple[int, int]]],
    open_to: Callable[[int, int], torch.Tensor | None],
) -> torch.Tensor:
    """[tokens, heads, size], one sequence after the other."""
    outs = []
    for (q_start, q_end), (k_start, k_end) in bounds:
        parts = (query[q_start:q_end], key[k_start:k_end], value[k_start:k_end])
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        outs.append(attend_plainly(q, k, v, scale, open_to(q_end - q_start, k_end - k_start))[0].transpose(0, 1))
    return torch.cat(outs)


def band(queries: int, keys: int, before: int, after: int, corner: int) -> torch.Tensor:
    """Open from `before` behind to `after` ahead of the diagonal that starts at key `corner`."""
    return torch.tensor(
        [[row + corner - before <= key <= row + corner + after for key in range(keys)] for row in range(queries)]
    )


def causal_from_the_start(queries: int, keys: int) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril()


def causal_from_the_end(queries: int, keys: int) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
