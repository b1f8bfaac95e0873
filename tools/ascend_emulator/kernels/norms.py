"""RMS norm."""

from __future__ import annotations

import torch

from ascend_emulator.kernels.reference import limit, reference

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@reference("npu_rms_norm")
def rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """The normed input, and one over its root mean square, which the gradient uses."""
    limit("npu_rms_norm", x.dtype in _DTYPES and gamma.dtype == x.dtype, f"types {x.dtype} and {gamma.dtype}")
    limit("npu_rms_norm", 2 <= x.dim() <= 8, f"{x.dim()} dimensions: 2 to 8")
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * inverse * gamma.float()).to(x.dtype), inverse


@reference("npu_rms_norm_backward")
def rms_norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, inverse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    normed = x.float() * inverse
    by_normed = gradient.float() * gamma.float()
    by_x = inverse * (by_normed - normed * (by_normed * normed).mean(-1, keepdim=True))
    return by_x.to(x.dtype), (gradient.float() * normed).flatten(0, -2).sum(0)


@reference("npu_add_rms_norm")
def add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The norm of a sum, its inverse root mean square, and the sum."""
    total = x1 + x2
    normed, inverse = rms_norm(total, gamma, epsilon)
    return normed, inverse, total
