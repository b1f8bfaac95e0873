"""Stochastic rounding of fp32 values to bf16, with random numbers that do not depend on the number of ranks.

A value between two bf16 numbers is rounded to the upper one with a probability equal to its position between them, so
the rounding error is zero on average. The random number of an element is a hash of a key and of the element's index in
the full parameter.
"""

from __future__ import annotations

import hashlib

import torch

from lockstep.optimizers.update_rule import ShardLayout


def rounding_key(*parts: object) -> int:
    """Returns a 32-bit key of a seed, a parameter's name and its number of updates."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest(), "little")


def round_to_bf16(values: torch.Tensor, key: int, index: torch.Tensor) -> torch.Tensor:
    """Returns fp32 values rounded to bf16. `index` has the index of each element in the full parameter. The lower 16
    bits of an fp32 number are its position between two bf16 numbers; a random number of 16 bits is added to them."""
    bits = values.view(torch.int32)
    rounded = (bits + _hashed(index, key)) & -0x10000
    return torch.where(values.isfinite(), rounded.view(torch.float32), values).bfloat16()


def element_index(layout: ShardLayout, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Returns the indices in the full parameter of rows `start` to `stop` of this rank's shard."""
    stride, index = 1, torch.zeros((), dtype=torch.int64, device=device)
    for dimension in reversed(range(len(layout.shape))):
        first, last = (start, stop) if dimension == 0 else (0, layout.part[dimension])
        offset = layout.offsets[dimension]
        along = torch.arange(offset + first, offset + last, device=device) * stride
        index = index + along.view(-1, *[1] * (len(layout.shape) - 1 - dimension))
        stride *= layout.shape[dimension]
    return index


def _hashed(index: torch.Tensor, key: int) -> torch.Tensor:
    """Returns 16 pseudo-random bits for each index: two rounds of the integer hash `lowbias32` (Wellons 2018). The
    upper half of the index enters between the rounds."""
    low, high = index & 0xFFFFFFFF, index >> 32
    return (_mixed(_mixed(low ^ key) ^ high ^ (key >> 7)) & 0xFFFF).to(torch.int32)


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """Mixes 32-bit numbers, which are held in int64. The second factor is 0x846CA68B - 2^32, with which no product
    exceeds the range of int64."""
    for shift, factor in ((16, 0x7FEB352D), (15, -0x7B935975)):
        bits = ((bits ^ (bits >> shift)) * factor) & 0xFFFFFFFF
    return bits ^ (bits >> 16)
