"""Lines of packed sequences cut into the tokens of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch


def cut(length: int, parts: int) -> list[int]:
    """Bounds of `parts` stretches that differ by a token at most; a short sequence leaves some of them empty."""
    return [length * part // parts for part in range(parts + 1)]


def zigzag(lengths: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """Of every sequence, cut into twice as many chunks as there are ranks, rank r has chunk r and the r-th last: as
    much work for each, since a late chunk sees more than an early one."""
    parts: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for first, length in zip(_starts(lengths), lengths, strict=True):
        chunks = [torch.arange(first + start, first + stop) for start, stop in pairwise(cut(length, 2 * ranks))]
        for rank, part in enumerate(parts):
            part += [chunks[rank], chunks[-1 - rank]]
    return [torch.cat(part) for part in parts]


def contiguous(lengths: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """A stretch of the line for each rank, wherever its sequences begin and end."""
    return [torch.arange(start, stop) for start, stop in pairwise(cut(sum(lengths), ranks))]


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)][:-1]
