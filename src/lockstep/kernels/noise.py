"""Random numbers for sampling that are a pure function of what they are for.

The noise of a vocabulary entry depends on (run seed, prompt, sample, position, entry) alone. Its bits come from integer
hashing in 32 bits, the same on every device; only the two logarithms that shape them into Gumbel noise are rounded by
the device. So a sample does not change with the batch it was drawn in, with scheduling or the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_MASK = 0xFFFFFFFF
# Multipliers of the 32-bit finaliser of MurmurHash3, and an odd constant near 2^32 / golden ratio.
_FIRST, _SECOND, _STRIDE = 0x85EBCA6B, 0xC2B2AE35, 0x9E3779B9


def sequence_keys(seed: int, prompt: int, sample: int) -> tuple[int, int]:
    """Two 32-bit keys of a sequence, as signed numbers that fit an int32 tensor."""
    parts = (seed, seed >> 32, prompt, prompt >> 32, sample)
    # Two chains, so that sequences that meet in one of them (one pair in 2^32) still differ in the other.
    return _signed(_chain(parts, _FIRST)), _signed(_chain(parts, _SECOND))


def gumbel_noise(keys_B2: torch.Tensor, positions_B: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Standard Gumbel noise (B, V) in fp32 for the token at `positions_B` of each sequence.

    `argmax(logits + noise)` is then a sample from softmax(logits).
    """
    step = positions_B.to(torch.int32)
    first = _mix(keys_B2[:, 0] + step * _signed(_STRIDE))
    second = _mix(keys_B2[:, 1] ^ step * _signed(_FIRST))
    entries = _mix(torch.arange(1, vocabulary + 1, dtype=torch.int32, device=keys_B2.device))
    bits = _mix(entries[None, :] ^ first[:, None])
    bits = _mix(bits.add_(second[:, None]))
    # 31 bits as a number in (0, 1) that is finest near 0, where the largest noise comes from.
    share = bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return share.neg_().log1p_().neg_().log_().neg_()


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x ^ _shift(x, 16)
    x = x.mul_(_signed(_FIRST))
    x ^= _shift(x, 13)
    x = x.mul_(_signed(_SECOND))
    x ^= _shift(x, 16)
    return x


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right: int32 shifts bring the sign along."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _chain(parts: Iterable[int], state: int) -> int:
    for part in parts:
        state = _mix_int(state + (part & _MASK) * _STRIDE)
    return state


def _mix_int(x: int) -> int:
    x &= _MASK
    x = ((x ^ x >> 16) * _FIRST) & _MASK
    x = ((x ^ x >> 13) * _SECOND) & _MASK
    return x ^ x >> 16


def _signed(x: int) -> int:
    x &= _MASK
    return x - 2**32 if x >= 2**31 else x
