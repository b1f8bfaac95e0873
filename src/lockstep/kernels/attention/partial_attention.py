"""Partial attention: attention of queries to a subset of their keys, with results that can be merged.

The attention over one subset of keys (a part) returns its output and its log-sum-exp (`lse`). `merge` combines parts
over different keys by their lse. The backward pass of a part takes the merged output and lse, so that the gradients of
the parts add up. Queries and keys of a causal sequence are aligned at their end, so the last query sees every key.

Tensor names end with their dimensions, which are T queries, S keys, H query heads, G key/value heads, D key size, E
value size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from lockstep.device.base import sent


@dataclass(frozen=True)
class Sections:
    """Lengths and cumulative bounds of the sequences of packed queries and packed keys."""

    queries: tuple[int, ...]
    """Number of queries of each sequence."""
    keys: tuple[int, ...]
    causal: bool
    query_bounds: torch.Tensor
    key_bounds: torch.Tensor

    @cached_property
    def longest_query(self) -> int:
        return max(self.queries)

    @cached_property
    def longest_key(self) -> int:
        return max(self.keys)

    @property
    def spans(self) -> Iterator[tuple[slice, slice]]:
        query = key = 0
        for queries, keys in zip(self.queries, self.keys, strict=True):
            yield slice(query, query + queries), slice(key, key + keys)
            query, key = query + queries, key + keys


def sections(queries: Sequence[int], keys: Sequence[int], causal: bool, device: torch.device) -> Sections:
    bounds = (sent(torch.tensor([0, *accumulate(side)], dtype=torch.int32), device) for side in (queries, keys))
    return Sections(tuple(queries), tuple(keys), causal, *bounds)


Tensors = tuple[torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class PartialKernel(NamedTuple):
    """A kernel for partial attention, with the functions `forward(q, k, v, sections, scale, window) -> out_THE, lse_HT`
    and `backward(dout, q, k, v, out, lse, sections, scale, window) -> dq, dk, dv`. `backward` takes the merged `out`
    and `lse`."""

    forward: Callable[..., Tensors]
    backward: Callable[..., Gradients]


def merge(out_THE: torch.Tensor, lse_HT: torch.Tensor, more_THE: torch.Tensor, more_lse_HT: torch.Tensor) -> Tensors:
    """Merges the attention over two sets of keys. The merged output has the dtype of the first output."""
    merged_lse_HT = torch.logaddexp(lse_HT, more_lse_HT)
    weights = ((lse - merged_lse_HT).exp().t()[:, :, None] for lse in (lse_HT, more_lse_HT))
    return out_THE * next(weights) + more_THE.to(out_THE.dtype) * next(weights), merged_lse_HT
