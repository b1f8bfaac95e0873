"""Attention of some queries to some of their keys, in parts that can be merged: one interface, whatever the kernel.

A part gives its output and the log of its sum of exponentials (`lse`). Parts over different keys are merged by these
(`merge`), and the backward pass of a part is given the output and the lse of the whole, so that its gradients are
shares of the whole's. A causal sequence is aligned at its end: the last query sees every key.

Shapes: T queries, S keys, H query heads, G key/value heads, D numbers of a key, E of a value.
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
    """Sequences along two lines, one of queries and one of keys."""

    queries: tuple[int, ...]
    """Of each sequence, how many stand on the line of queries."""
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
    """`forward(q, k, v, sections, scale, window) -> out_THE, lse_HT` and
    `backward(dout, q, k, v, out, lse, sections, scale, window) -> dq, dk, dv`, with the whole's `out` and `lse`."""

    forward: Callable[..., Tensors]
    backward: Callable[..., Gradients]


def merge(out_THE: torch.Tensor, lse_HT: torch.Tensor, more_THE: torch.Tensor, more_lse_HT: torch.Tensor) -> Tensors:
    """Two parts over different keys as one, in the precision of the first's output and of the logs."""
    both_HT = torch.logaddexp(lse_HT, more_lse_HT)
    weights = ((lse - both_HT).exp().t()[:, :, None] for lse in (lse_HT, more_lse_HT))
    return out_THE * next(weights) + more_THE.to(out_THE.dtype) * next(weights), both_HT
