"""Both parts of an attention over shared beginnings in plain torch, sequence by sequence (see `kernels/cascade.py`)."""

from __future__ import annotations

import itertools

import torch

from lockstep.kernels.cascade import PartKernel
from lockstep.kernels.layout import LinePart


def spans(part: LinePart):
    pairs = list(zip(part.query_bounds.tolist(), part.key_bounds.tolist(), strict=True))
    return [(slice(q, p), slice(k, n)) for (q, k), (p, n) in itertools.pairwise(pairs)]


def heads_first(rows: torch.Tensor, repeat: int = 1) -> torch.Tensor:
    return rows.repeat_interleave(repeat, 1).transpose(0, 1)


def scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    found = q @ k.transpose(1, 2) * scale
    seen = torch.ones(found.shape[1:], dtype=torch.bool)
    return found.masked_fill(~(seen.tril() if causal else seen), float("-inf"))


def forward(query, key, value, part, causal, scale):
    out, lse = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
    repeat = query.shape[1] // key.shape[1]
    for mine, theirs in spans(part):
        q, k, v = heads_first(query[mine]), heads_first(key[theirs], repeat), heads_first(value[theirs], repeat)
        found = scores(q, k, causal, scale)
        out[mine], lse[:, mine] = (found.softmax(-1) @ v).transpose(0, 1), found.logsumexp(-1)
    return out, lse, (torch.tensor(len(query)),)


def backward(upstream, query, key, value, out, lse, kept, part, causal, scale):
    """As a flash kernel does it: probabilities from L, and what they lose from output and upstream."""
    assert int(kept[0]) == len(query)
    repeat = query.shape[1] // key.shape[1]
    grads = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    for mine, theirs in spans(part):
        q, k, v = heads_first(query[mine]), heads_first(key[theirs], repeat), heads_first(value[theirs], repeat)
        above, made = heads_first(upstream[mine]), heads_first(out[mine])
        weights = (scores(q, k, causal, scale) - lse[:, mine, None]).exp()
        slope = weights * (above @ v.transpose(1, 2) - (above * made).sum(-1, keepdim=True)) * scale
        grads[0][mine] = (slope @ k).transpose(0, 1)
        for grad, each in ((grads[1], slope.transpose(1, 2) @ q), (grads[2], weights.transpose(1, 2) @ above)):
            grad[theirs] = each.unflatten(0, (-1, repeat)).sum(1).transpose(0, 1)
    return tuple(grads)


PLAIN = PartKernel(forward, backward)
