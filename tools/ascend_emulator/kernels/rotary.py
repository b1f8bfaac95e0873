"""Rotary embedding. Mode "half" turns the halves of the last dimension, "interleave" its neighbours."""

from __future__ import annotations

import torch

from ascend_emulator.kernels.reference import NotInReference, limit, reference, refuse

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Where batch and heads stand, by the dimensions of the angles that may be 1: BNSD, BSND, SBND.
_BATCH_AND_HEADS = {"BNSD": (0, 1), "BSND": (0, 2), "SBND": (1, 2)}


@reference("npu_rotary_mul")
def rotary_mul(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    refuse("npu_rotary_mul", rotate=rotate)
    check(x, cos, sin)
    return x * cos + turned(x, rotary_mode) * sin


def check(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    name = "npu_rotary_mul"
    limit(name, x.dim() == cos.dim() == sin.dim() == 4, "input and angles have 4 dimensions")
    limit(name, {x.dtype, cos.dtype, sin.dtype} <= set(_DTYPES), f"types {x.dtype}, {cos.dtype}, {sin.dtype}")
    limit(name, x.shape[-1] % 2 == 0 and x.shape[-1] < 896, f"head size {x.shape[-1]}: even and below 896")
    limit(name, cos.shape == sin.shape and cos.shape[-1] == x.shape[-1], f"angles of {tuple(cos.shape)}")
    limit(name, any(_fits(layout, x, cos) for layout in _BATCH_AND_HEADS), f"{tuple(x.shape)} with {tuple(cos.shape)}")
    for angles in (cos, sin):
        limit(name, bool((angles.abs() <= 1).all()), f"angles up to {float(angles.abs().max())}: within [-1, 1]")


def _fits(layout: str, x: torch.Tensor, cos: torch.Tensor) -> bool:
    """Batch and heads below 1000 each; angles as long as the input, one for all heads or for all rows, or for each."""
    batch, heads = _BATCH_AND_HEADS[layout]
    length = layout.index("S")
    few = x.shape[batch] < 1000 and x.shape[heads] < 1000
    rows = cos.shape[batch] in (1, x.shape[batch]) and cos.shape[heads] in (1, x.shape[heads])
    return few and rows and cos.shape[length] == x.shape[length]


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
