"""Functions that the Triton kernels share."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl


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
