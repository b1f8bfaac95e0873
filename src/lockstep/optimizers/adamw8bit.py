"""AdamW whose moments are stored in 8 bits (Dettmers et al. 2021, arXiv 2110.02861), in plain torch for every device.

A moment is stored as one code per element and one fp32 scale per block. A code is an index of the dynamic map of
bitsandbytes and torchao: 256 numbers up to 1, denser near 0. The scale is the largest magnitude of the block. Blocks
have 256 elements of one row, and the last block of a row may be shorter. So a row never shares a block with another
row, and the number of ranks over which the rows are divided does not change the results. If the rows are multiples of
256 elements, these are the blocks of bitsandbytes and torchao, which divide the flattened parameter.

As in bitsandbytes, parameters with fewer than 4,096 elements keep their moments in full precision, and so do
embeddings (as in the trainer of transformers). Here, parameters with one dimension do so too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import torch

from lockstep.errors import Refusal
from lockstep.optimizers.elementwise_rules import AdamwRule
from lockstep.optimizers.update_rule import ParameterStep, Roles, StateTensor
from lockstep.recipe.keys_optim import Optim

BLOCK = 256
LEAST_QUANTISED = 4096


@cache
def dynamic_map(signed: bool, device: torch.device) -> torch.Tensor:
    """Returns the 256 numbers that codes stand for, in increasing order. Each decade from 1e-7 to 1 has twice as many
    numbers as the decade below it; `signed` maps have these numbers with both signs."""
    numbers = [0.0, 1.0]
    for decade in range(7):
        bounds = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        centres = (10.0 ** (decade - 6) * ((bounds[:-1] + bounds[1:]) / 2)).tolist()
        numbers += centres + [-centre for centre in centres] * signed
    return torch.tensor(sorted(numbers), dtype=torch.float32, device=device)


def quantize_blocks(values: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes and scales of fp32 values. Each value gets the code of the nearest number of the map."""
    blocks = _blocks(values)
    scales = blocks.abs().amax(-1).clamp_(min=1e-12)
    scaled, numbers = blocks / scales[..., None], dynamic_map(signed, values.device)
    lower = (torch.bucketize(scaled, numbers, out_int32=True, right=True) - 1).clamp_(min=0)
    upper = (lower + 1).clamp_(max=255)
    floor = numbers[lower]
    codes = torch.where(scaled - floor >= (numbers[upper] - floor) * 0.5, upper, lower).to(torch.uint8)
    return codes.flatten(-2)[..., : values.shape[-1]], scales


def dequantize_blocks(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    values = _blocks(dynamic_map(signed, codes.device)[codes.int()]) * scales[..., None]
    return values.flatten(-2)[..., : codes.shape[-1]].contiguous()


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """Divides the rows into blocks. The last block of a row is filled up with zeros."""
    missing = -values.shape[-1] % BLOCK
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return padded.unflatten(-1, (-1, BLOCK))


class Adamw8bitRule(AdamwRule):
    keys: ClassVar[tuple[str, ...]] = (*AdamwRule.keys, "exp_avg_scales", "exp_avg_sq_scales")

    def __init__(self, settings: Optim, roles: Roles, moments: torch.dtype):
        super().__init__(settings, roles, moments)
        self.embeddings = roles.embeddings

    def state(self, name: str, shape: Sequence[int], part: Sequence[int]) -> dict[str, StateTensor]:
        small = len(shape) < 2 or torch.Size(shape).numel() < LEAST_QUANTISED
        if small or name in self.embeddings:
            return super().state(name, shape, part)
        if part[-1] != shape[-1] and part[-1] % BLOCK:
            raise Refusal.at(
                "optim.name",
                f"adamw8bit stores {BLOCK} elements of a row with one scale, but tensor parallelism gives a rank "
                f"{part[-1]} elements of each row of {name}",
                "use another optim.name, or set parallel.tensor_parallel=1",
                code="wrong-shape",
            )
        codes = StateTensor(tuple(part), torch.uint8)
        scales = StateTensor((*part[:-1], -(-part[-1] // BLOCK)), torch.float32)
        moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), codes)
        return {**moments, **{f"{key}_scales": scales for key in moments}}

    def update(self, one: ParameterStep) -> None:
        if "exp_avg_scales" not in one.state:
            super().update(one)
            return
        corrections = [1 - beta**one.count for beta in self.betas]
        factors = (1 - one.lr * one.decay, one.lr / corrections[0], corrections[1] ** 0.5)
        betas = (self.betas[0], self.betas[1])
        if importlib.util.find_spec("triton") is not None:
            from lockstep.kernels import adamw8bit_triton

            numbers = adamw8bit_triton.Numbers(*factors, self.eps, betas)
            if adamw8bit_triton.fits(one.weight, one.state) and adamw8bit_triton.works(
                one.weight.device, plain_step, _fused_step
            ):
                _fused_step(one.weight, one.gradient, one.state, numbers)
                return
        _change(one.weight, one.gradient, one.state, factors, self.eps, betas)


def _change(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    factors: tuple[float, float, float],
    eps: float,
    betas: tuple[float, float],
) -> None:
    """Changes the weight and the state in plain torch. `factors` are those of `Numbers` in `adamw8bit_triton.py`."""
    moments = []
    for key, new, beta in zip(AdamwRule.keys, (gradient, gradient.square()), betas, strict=True):
        codes, scales, signed = state[key], state[f"{key}_scales"], key == "exp_avg"
        moment = dequantize_blocks(codes, scales, signed).lerp_(new, 1 - beta)
        for home, value in zip((codes, scales), quantize_blocks(moment, signed), strict=True):
            home.copy_(value)
        moments.append(moment)
    keep, rate, spread = factors
    # The weights change by the moments of this update before they are rounded to 8 bits.
    weight.mul_(keep).addcdiv_(moments[0], moments[1].sqrt_().div_(spread).add_(eps), value=-rate)


def plain_step(weight: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], numbers: Any) -> None:
    """The step in plain torch with the arguments of the kernel, for its trial."""
    _change(weight, gradient, state, numbers[:3], numbers.eps, numbers.betas)


def _fused_step(weight: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], numbers: Any) -> None:
    from lockstep.kernels import adamw8bit_triton

    adamw8bit_triton.step(weight, gradient, state, numbers, dynamic_map, BLOCK)
