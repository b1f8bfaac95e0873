"""Sampling: top-k, top-p and min-p truncation, and reproducible random numbers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from hashlib import sha256

import torch

# Logit of a truncated token, used instead of minus infinity. The exponentials of LEFT_OUT and of -inf are both 0. But 0
# * LEFT_OUT is 0, while 0 * -inf is NaN.
LEFT_OUT = -1e30


def left_out_below(dtype: torch.dtype) -> float:
    """Returns a threshold: logits of this dtype at or below it belong to truncated tokens. fp16 cannot represent
    LEFT_OUT, so its lowest value is used instead."""
    return max(LEFT_OUT / 2, torch.finfo(dtype).min)


@dataclass(frozen=True)
class Truncation:
    """Says which tokens may be sampled. A token must be among the `top_k` likeliest tokens. A token must be in the
    smallest set of likeliest tokens whose probability reaches `top_p`. The probability of a token must be at least
    `min_p` times that of the likeliest token.

    The likeliest token is always kept. Tokens with the same logit as the last one of the `top_k` tokens are kept too.
    The rollout engine and the trainer use this same code.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def active(self) -> bool:
        return bool(self.top_k) or self.top_p < 1 or self.min_p > 0


def truncate_(logits_RV: torch.Tensor, how: Truncation, keep_R: torch.Tensor | None = None) -> torch.Tensor:
    """Sets the logits of truncated tokens to LEFT_OUT, in place. In each row the token `keep_R` is never truncated.

    The logits must already be divided by the temperature.
    """
    if not how.active:
        return logits_RV
    rows = logits_RV.float()
    stay = torch.ones_like(rows, dtype=torch.bool)
    if how.top_k and how.top_k < rows.shape[-1]:
        stay &= rows >= rows.topk(how.top_k, dim=-1).values[..., -1:]
    if how.min_p:
        stay &= rows >= rows.amax(-1, keepdim=True) + math.log(how.min_p)
    if how.top_p < 1:
        # The sort is stable, so ties are ordered by index on every device.
        ordered, order = rows.masked_fill(~stay, LEFT_OUT).sort(dim=-1, descending=True, stable=True)
        p = ordered.softmax(-1)
        before = p.cumsum(-1) - p
        kept = before < how.top_p
        kept[..., 0] = True  # keep the likeliest token even if top_p rounds to 0
        stay &= torch.empty_like(stay).scatter_(-1, order, kept)
    if keep_R is not None:
        stay.scatter_(-1, keep_R[:, None], True)
    return logits_RV.masked_fill_(~stay, LEFT_OUT)


# Reproducible noise: the noise of a vocabulary entry depends only on (run seed, prompt, sample, position, entry). The
# random bits of the noise come from 32-bit integer hashing, which gives the same bits on every device. Only the
# rounding of the two logarithms of the Gumbel transform depends on the device. So a sampled token does not depend on
# the batch, the scheduling of requests or the number of processes.

_MASK = 0xFFFFFFFF
# Multipliers of the 32-bit finaliser of MurmurHash3, and an odd constant near 2^32 / golden ratio.
FIRST, SECOND, STRIDE = 0x85EBCA6B, 0xC2B2AE35, 0x9E3779B9
# Device types on which int32 overflow is known to wrap around. On other devices `wraps` tests whether overflow wraps
# around.
WRAP = ("cpu", "cuda")


def sequence_keys(seed: int, prompt: int, sample: int) -> tuple[int, int]:
    """Returns the two 32-bit keys from which the sampling noise of a sequence is derived, as signed integers that fit
    an int32 tensor."""
    parts = (seed, seed >> 32, prompt, prompt >> 32, sample)
    # A sequence has two independent hashes. If two sequences have the same first hash (one pair in 2^32), their second
    # hashes differ.
    return _signed(_chain(parts, FIRST)), _signed(_chain(parts, SECOND))


def turn_key(key: int, turn: int) -> int:
    """Returns the noise key of a turn in a conversation. The first turn uses the key of the prompt, as a response of a
    single turn does."""
    if not turn:
        return key
    return int.from_bytes(sha256(f"{key}:{turn}".encode()).digest()[:7], "big")


def gumbel_noise(keys_B2: torch.Tensor, positions_B: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Returns standard Gumbel noise (B, V) in fp32 for the token at `positions_B` of each sequence.

    `argmax(logits + noise)` is then a sample from softmax(logits).
    """
    bits = device_bits(keys_B2, positions_B, vocabulary)
    # 31 random bits become a number in (0, 1). Numbers near 0, which give the largest noise, have the finest
    # resolution.
    share = bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return share.neg_().log1p_().neg_().log_().neg_()


def device_bits(keys_B2: torch.Tensor, positions_B: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Returns the noise bits on the device of the keys. If int32 overflow does not wrap around on that device, the host
    computes the bits."""
    if wraps(keys_B2.device):
        return noise_bits(keys_B2, positions_B, vocabulary)
    return noise_bits(keys_B2.cpu(), positions_B.cpu(), vocabulary).to(keys_B2.device)


@cache
def wraps(device: torch.device) -> bool:
    """Returns whether int32 overflow wraps around on the device, as the hash requires. The device is tested once per
    process."""
    if device.type in WRAP:
        return True
    keys, positions = torch.tensor([[-(2**31), 2**31 - 1], [FIRST >> 1, -1]], dtype=torch.int32), torch.tensor([0, 9])
    expected = noise_bits(keys, positions, 64)
    try:
        same = torch.equal(noise_bits(keys.to(device), positions.to(device), 64).cpu(), expected)
    except RuntimeError:
        same = False
    if not same:
        warnings.warn(
            f"int32 arithmetic on {device} does not wrap around: sampling noise is generated on the host", stacklevel=4
        )
    return same


def noise_bits(keys_B2: torch.Tensor, positions_B: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Returns 32 random bits for each sequence and each entry of the vocabulary, as an int32 tensor (B, V)."""
    step = positions_B.to(torch.int32)
    first = _mix(keys_B2[:, 0] + step * _signed(STRIDE))
    second = _mix(keys_B2[:, 1] ^ step * _signed(FIRST))
    entries = _mix(torch.arange(1, vocabulary + 1, dtype=torch.int32, device=keys_B2.device))
    bits = _mix(entries[None, :] ^ first[:, None])
    return _mix(bits.add_(second[:, None]))


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x ^ _shift(x, 16)
    x = x.mul_(_signed(FIRST))
    x ^= _shift(x, 13)
    x = x.mul_(_signed(SECOND))
    x ^= _shift(x, 16)
    return x


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Computes a logical right shift, because `>>` of an int32 tensor in torch is an arithmetic shift."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _chain(parts: Iterable[int], state: int) -> int:
    for part in parts:
        state = _mix_int(state + (part & _MASK) * STRIDE)
    return state


def _mix_int(x: int) -> int:
    x &= _MASK
    x = ((x ^ x >> 16) * FIRST) & _MASK
    x = ((x ^ x >> 13) * SECOND) & _MASK
    return x ^ x >> 16


def _signed(x: int) -> int:
    x &= _MASK
    return x - 2**32 if x >= 2**31 else x
