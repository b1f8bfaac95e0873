"""Mathematical functions that several Triton kernels use."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

# The Triton interpreter (TRITON_INTERPRET=1) has no libdevice. In the interpreter `log` is numpy's, and `log1p` is
# computed from `log`.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def log(x):  # type: ignore[no-untyped-def]
    """Computes the logarithm, bitwise equal to torch's on the device."""
    if INTERPRETED:
        result = tl.log(x)
    else:
        result = libdevice.log(x)
    return result


@triton.jit
def log1p(x):  # type: ignore[no-untyped-def]
    """Computes log(1 + x), bitwise equal to torch's on the device. In the Triton interpreter the last bits may
    differ."""
    if INTERPRETED:
        more = 1.0 + x
        result = tl.where(more == 1.0, x, tl.log(more) * (x / tl.where(more == 1.0, 1.0, more - 1.0)))
    else:
        result = libdevice.log1p(x)
    return result


@triton.jit
def torch_tanh(x):  # type: ignore[no-untyped-def]
    """Computes tanh, bitwise equal to torch's on the device. In the Triton interpreter the last bits may differ."""
    if INTERPRETED:
        result = tanh(x)
    else:
        result = libdevice.tanh(x)
    return result


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """Computes tanh from exponentials that cannot overflow. Near 0 the difference of the exponentials would lose
    precision, so a series is used for small x."""
    size = tl.abs(x)
    small = tl.exp(-2.0 * size)
    far = (1.0 - small) / (1.0 + small)
    square = x * x
    near = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))
    return tl.where(size < 0.1, near, tl.where(x < 0, -far, far))


def runs_on(tensor: torch.Tensor) -> bool:
    """Returns whether Triton kernels can run on this tensor: it is on an NVIDIA device, or the Triton interpreter is
    on."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
