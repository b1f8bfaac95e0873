"""Weights of several projections of one input as one: they lie one after the other in memory, each under its own name.

A module's parameter stays the same object; only its memory is a stretch of a larger one. Whoever needs them as one
looks at where they lie (`joined`), so nothing is wrong where somebody gives a parameter other memory: then they are
not one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def lay_side_by_side(parts: Sequence[nn.Parameter]) -> None:
    """Move parameters, alike but for their first dimension, behind one another; nothing where they already are."""
    if joined(parts) is not None:
        return
    # Made for training, whoever asks for it.
    with torch.inference_mode(False), torch.no_grad():
        for part, place in zip(parts, torch.cat(list(parts)).split([len(part) for part in parts]), strict=True):
            part.data = place


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The parts as one tensor on their own memory; None where they do not lie one after the other."""
    first = parts[0]
    storage, place = first.untyped_storage().data_ptr(), first.storage_offset()
    for part in parts:
        alike = part.shape[1:] == first.shape[1:] and part.dtype == first.dtype and part.is_contiguous()
        if not alike or part.untyped_storage().data_ptr() != storage or part.storage_offset() != place:
            return None
        place += part.numel()
    rows = sum(len(part) for part in parts)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
