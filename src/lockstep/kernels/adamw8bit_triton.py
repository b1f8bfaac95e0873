"""Fused AdamW step with 8-bit moments in Triton. The reference is `Adamw8bitRule` in `optimizers/adamw8bit.py`.

A program updates one block of a row: it reads the codes of both moments, the gradient and the weight once, and writes
codes, scales and the weight. The plain rule makes a dozen passes over fp32 tensors. Rounding differs from the plain
rule in the last bit, because a compiler may fuse a multiplication and an addition.
"""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from lockstep.device.base import first_sentence
from lockstep.kernels.triton_math import runs_on


class Numbers(NamedTuple):
    """The factors of one update: of the weight, of the first moment in the step, and the divisor of the second moment's
    root."""

    keep: float
    rate: float
    spread: float
    eps: float
    betas: tuple[float, float]


@triton.jit
def _nearest(scaled, numbers):  # type: ignore[no-untyped-def]
    """The index of the nearest of 256 increasing numbers; halfway between two, the upper one."""
    lower = (scaled * 0).to(tl.int32)
    for bit in tl.static_range(8):
        probe = lower + (128 >> bit)
        lower = tl.where(tl.load(numbers + probe) <= scaled, probe, lower)
    upper = tl.minimum(lower + 1, 255)
    floor = tl.load(numbers + lower)
    return tl.where(scaled - floor >= (tl.load(numbers + upper) - floor) * 0.5, upper, lower)


@triton.jit
def _moment(codes, scales, numbers, new, take, places, block, inside):  # type: ignore[no-untyped-def]
    """Updates one block of a moment. Returns it before it is rounded to codes."""
    code = tl.load(codes + places, mask=inside, other=0).to(tl.int32)
    old = tl.load(numbers + code) * tl.load(scales + block)
    # torch's lerp
    value = tl.where(take < 0.5, old + take * (new - old), new - (new - old) * (1 - take))
    value = tl.where(inside, value, 0.0)
    scale = tl.maximum(tl.max(tl.abs(value), axis=0), 1e-12)
    tl.store(scales + block, scale)
    tl.store(
        codes + places, _nearest(tl.div_rn(value, tl.zeros_like(value) + scale), numbers).to(tl.uint8), mask=inside
    )
    return value


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    weight,
    gradient,
    mean_codes,
    mean_scales,
    square_codes,
    square_scales,
    signed,
    unsigned,
    columns,
    blocks,
    keep,
    rate,
    spread,
    eps,
    take_mean,
    take_square,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    column = block % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    places = (block // blocks).to(tl.int64) * columns + column
    g = tl.load(gradient + places, mask=inside, other=0.0)
    m = _moment(mean_codes, mean_scales, signed, g, take_mean, places, block, inside)
    v = _moment(square_codes, square_scales, unsigned, g * g, take_square, places, block, inside)
    p = tl.load(weight + places, mask=inside, other=0.0) * keep
    p -= rate * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), tl.zeros_like(v) + spread) + eps)
    tl.store(weight + places, p, mask=inside)


Maps = Callable[[bool, torch.device], torch.Tensor]
StepFunction = Callable[[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor], Numbers], None]


def step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    numbers: Numbers,
    maps: Maps,
    block: int,
) -> None:
    """Updates the weight and the state. `maps` returns the 256 numbers of signed and of unsigned codes."""
    blocks = state["exp_avg_scales"].shape[-1]
    # The kernel writes into these tensors, so they must not be copies.
    assert all(one.is_contiguous() for one in (weight, *state.values()))
    _step[(state["exp_avg_scales"].numel(),)](
        weight,
        gradient.contiguous(),
        state["exp_avg"],
        state["exp_avg_scales"],
        state["exp_avg_sq"],
        state["exp_avg_sq_scales"],
        maps(True, weight.device),
        maps(False, weight.device),
        weight.shape[-1],
        blocks,
        numbers.keep,
        numbers.rate,
        numbers.spread,
        numbers.eps,
        1 - numbers.betas[0],
        1 - numbers.betas[1],
        BLOCK=block,
        num_warps=2,
    )


def fits(weight: torch.Tensor, state: Mapping[str, torch.Tensor]) -> bool:
    return runs_on(weight) and weight.numel() > 0 and all(one.is_contiguous() for one in (weight, *state.values()))


@cache
def works(device: torch.device, plain: StepFunction, fused: StepFunction) -> bool:
    """Returns whether kernel and plain rule agree on a random parameter (the trial). If they differ, warns that the
    plain rule is used."""

    def tensors() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        draw = torch.Generator().manual_seed(0)
        weight, gradient = (torch.randn(3, 300, generator=draw).to(device) for _ in range(2))
        codes = [torch.randint(256, (3, 300), generator=draw, dtype=torch.uint8).to(device) for _ in range(2)]
        scales = [torch.rand(3, 2, generator=draw).to(device) for _ in range(2)]
        names = ("exp_avg", "exp_avg_sq", "exp_avg_scales", "exp_avg_sq_scales")
        return weight, gradient, dict(zip(names, (*codes, *scales), strict=True))

    numbers = Numbers(0.999, 0.01, 0.9, 1e-8, (0.9, 0.99))
    one, other = tensors(), tensors()
    try:
        fused(*one, numbers)
        plain(*other, numbers)
        close = torch.allclose(one[0], other[0], rtol=1e-5, atol=1e-6)
        # A value that is halfway between two numbers may get either code.
        same = all((one[2][key] == other[2][key]).float().mean() > 0.99 for key in ("exp_avg", "exp_avg_sq"))
    except (TypeError, RuntimeError, ValueError, OSError, subprocess.SubprocessError, TritonError) as error:
        why = f"the plain 8-bit AdamW is used, because its Triton kernel failed on a trial: {first_sentence(error)}"
        warnings.warn(why, stacklevel=2)
        return False
    if not (close and same):
        warnings.warn("the plain 8-bit AdamW is used, because its Triton kernel gives other results", stacklevel=2)
    return close and same
