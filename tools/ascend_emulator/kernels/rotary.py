"""Rotary embedding. Mode "half" turns the halves of the last dimension, "interleave" its neighbours."""

from __future__ import annotations

import torch

from ascend_emulator.kernels.reference import NotInReference, reference, refuse


@reference("npu_rotary_mul")
def rotary_mul(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    refuse("npu_rotary_mul", rotate=rotate)
    return x * cos + turned(x, rotary_mode) * sin


@reference("npu_rotary_mul_backward")
def rotary_mul_backward(
    gradient: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_mode: str = "half"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # A quarter turn is undone by three more of them, and two of them change the sign.
    by_x = gradient * cos - turned(gradient * sin, rotary_mode)
    by_cos = (gradient * x).sum_to_size(cos.shape)
    by_sin = (gradient * turned(x, rotary_mode)).sum_to_size(sin.shape)
    return by_x, by_cos, by_sin


def turned(x: torch.Tensor, mode: str) -> torch.Tensor:
    """Every pair (a, b) as (-b, a)."""
    if mode == "half":
        a, b = x.chunk(2, -1)
        return torch.cat([-b, a], -1)
    if mode == "interleave":
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    raise NotInReference(f"the emulated npu_rotary_mul has no rotary_mode {mode!r}")
