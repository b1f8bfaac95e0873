"""Functions that the Triton kernels share."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

# The interpreter has no device library. Its own logarithm is numpy's; `log1p` is made of it there.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def log(x):  # type: ignore[no-untyped-def]
    """As torch computes it on the device, to the last bit."""
    if INTERPRETED:
        found = tl.log(x)
    else:
        found = libdevice.log(x)
    return found


@triton.jit
def log1p(x):  # type: ignore[no-untyped-def]
    """As torch computes it on the device, to the last bit; under the interpreter to a rounding or two."""
    if INTERPRETED:
        more = 1.0 + x
        found = tl.where(more == 1.0, x, tl.log(more) * (x / tl.where(more == 1.0, 1.0, more - 1.0)))
    else:
        found = libdevice.log1p(x)
    return found


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """From exponentials that cannot overflow; near 0, where their difference would cancel, from the series."""
    size = tl.abs(x)
    small = tl.exp(-2.0 * size)
    far = (1.0 - small) / (1.0 + small)
    square = x * x
    near = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))
    return tl.where(size < 0.1, near, tl.where(x < 0, -far, far))


def runs_on(tensor: torch.Tensor) -> bool:
    """Whether the kernels can take this tensor: on the device, or anywhere by Triton's interpreter."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
