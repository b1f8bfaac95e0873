"""Causal depthwise convolutions of a few tokens in Triton: forward, backward, and one decoding step.

An output is act(bias + sum_i w_i x_(t - L + 1 + i)) with L weights per channel, where act is silu or nothing. Tokens
before the first are zeros. The kernels work on (N, T, D) memory, in which the channels of a token are adjacent. Like
torch, they round the sum to its dtype before act. The plain-torch reference is `plain_convolve`. Suffixes: N rows, T
tokens, D channels, L weights of a channel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional

from lockstep.kernels.triton_math import runs_on

# Tokens and channels of one Triton program.
TOKENS, CHANNELS = 32, 128
LONGEST = 8


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    x, weight, bias, tokens, token, channel, inside, stride_token, stride_channel, CHANNELS_IN: tl.constexpr,
    LENGTH: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Returns the convolution at these tokens and channels in fp32. `x` points to the row."""
    acc = tl.zeros(inside.shape, tl.float32)
    if BIASED:
        acc += tl.load(bias + channel, mask=channel < CHANNELS_IN, other=0.0).to(tl.float32)[None, :]
    for i in tl.static_range(LENGTH):
        place = token - (LENGTH - 1) + i
        seen = inside & (place >= 0)[:, None]
        offsets = place[:, None].to(tl.int64) * stride_token + channel[None, :].to(tl.int64) * stride_channel
        values = tl.load(x + offsets, mask=seen, other=0.0).to(tl.float32)
        weights = tl.load(weight + channel * LENGTH + i, mask=channel < CHANNELS_IN, other=0.0).to(tl.float32)
        acc += values * weights[None, :]
    return acc


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x, weight, bias, out, tokens, stride_row, stride_token, stride_channel, CHANNELS_IN: tl.constexpr,
    LENGTH: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (token < tokens)[:, None] & (channel < CHANNELS_IN)[None, :]
    acc = _sum(
        x + row * stride_row, weight, bias, tokens, token, channel, inside, stride_token, stride_channel, CHANNELS_IN,
        LENGTH, BIASED,
    )  # fmt: skip
    acc = acc.to(out.dtype.element_ty).to(tl.float32)
    if SILU:
        acc = acc / (1.0 + tl.exp(-acc))
    places = (row * tokens + token[:, None]) * CHANNELS_IN + channel[None, :]
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_sum(  # type: ignore[no-untyped-def]
    x, weight, bias, upstream, grad_sum, parts, tokens, stride_row, stride_token, stride_channel, up_row, up_token,
    up_channel, CHANNELS_IN: tl.constexpr, LENGTH: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of the sum before act, and partial sums of the gradients of weights and bias."""
    row = tl.program_id(2).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (token < tokens)[:, None] & (channel < CHANNELS_IN)[None, :]
    line = x + row * stride_row
    places = row * up_row + token[:, None].to(tl.int64) * up_token + channel[None, :].to(tl.int64) * up_channel
    grad = tl.load(upstream + places, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        acc = _sum(
            line, weight, bias, tokens, token, channel, inside, stride_token, stride_channel, CHANNELS_IN, LENGTH,
            BIASED,
        )  # fmt: skip
        acc = acc.to(x.dtype.element_ty).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-acc))
        grad = (grad * sigmoid * (1.0 + acc * (1.0 - sigmoid))).to(x.dtype.element_ty).to(tl.float32)
    own = (row * tokens + token[:, None]) * CHANNELS_IN + channel[None, :]
    tl.store(grad_sum + own, grad.to(x.dtype.element_ty), mask=inside)
    part = parts + (row * tl.num_programs(1) + tl.program_id(1)) * ((LENGTH + 1) * CHANNELS_IN) + channel
    for i in tl.static_range(LENGTH):
        place = token - (LENGTH - 1) + i
        offsets = place[:, None].to(tl.int64) * stride_token + channel[None, :].to(tl.int64) * stride_channel
        values = tl.load(line + offsets, mask=inside & (place >= 0)[:, None], other=0.0).to(tl.float32)
        tl.store(part + i * CHANNELS_IN, tl.sum(values * grad, axis=0), mask=channel < CHANNELS_IN)
    tl.store(part + LENGTH * CHANNELS_IN, tl.sum(grad, axis=0), mask=channel < CHANNELS_IN)


@triton.jit
def _backward_input(  # type: ignore[no-untyped-def]
    grad_sum, weight, grad_x, tokens, CHANNELS_IN: tl.constexpr, LENGTH: tl.constexpr, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (token < tokens)[:, None] & (channel < CHANNELS_IN)[None, :]
    acc = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for i in tl.static_range(LENGTH):
        place = token + (LENGTH - 1) - i
        offsets = (row * tokens + place[:, None]) * CHANNELS_IN + channel[None, :]
        values = tl.load(grad_sum + offsets, mask=inside & (place < tokens)[:, None], other=0.0).to(tl.float32)
        weights = tl.load(weight + channel * LENGTH + i, mask=channel < CHANNELS_IN, other=0.0).to(tl.float32)
        acc += values * weights[None, :]
    places = (row * tokens + token[:, None]) * CHANNELS_IN + channel[None, :]
    tl.store(grad_x + places, acc.to(grad_x.dtype.element_ty), mask=inside)


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    x, state, slots, weight, bias, out, x_row, x_channel, state_row, state_channel, state_place,
    CHANNELS_IN: tl.constexpr, LENGTH: tl.constexpr, KEPT: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr,
    CHANNELS: tl.constexpr, SLOTTED: tl.constexpr,
):  # fmt: skip
    """Convolves the new input of one row with the last inputs, which `state` (N, D, KEPT) keeps, and moves them on."""
    row = tl.program_id(1).to(tl.int64)
    if SLOTTED:
        slot = tl.load(slots + row).to(tl.int64)
    else:
        slot = row
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < CHANNELS_IN
    new = tl.load(x + row * x_row + channel.to(tl.int64) * x_channel, mask=inside, other=0.0)
    kept = state + slot * state_row + channel.to(tl.int64) * state_channel
    acc = tl.zeros([CHANNELS], tl.float32)
    if BIASED:
        acc += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    # A kept input is read before the place of an earlier one is overwritten with it.
    for i in tl.static_range(KEPT):
        if i + 1 < KEPT:
            value = tl.load(kept + (i + 1) * state_place, mask=inside, other=0.0)
        else:
            value = new.to(state.dtype.element_ty)
        if i >= KEPT - LENGTH:
            weights = tl.load(weight + channel * LENGTH + (i - KEPT + LENGTH), mask=inside, other=0.0).to(tl.float32)
            acc += value.to(tl.float32) * weights
        tl.store(kept + i * state_place, value, mask=inside)
    acc = acc.to(weight.dtype.element_ty).to(tl.float32)
    if SILU:
        acc = acc / (1.0 + tl.exp(-acc))
    tl.store(out + row * CHANNELS_IN + channel, acc.to(out.dtype.element_ty), mask=inside)


def convolve(x_NDT: torch.Tensor, weight_DL: torch.Tensor, bias_D: torch.Tensor | None, silu: bool) -> torch.Tensor:
    """Returns the convolution (N, D, T) as a view of (N, T, D) memory."""
    out: torch.Tensor = _Convolution.apply(x_NDT, weight_DL, bias_D, silu)
    return out


def convolve_step_(
    x_ND1: torch.Tensor,
    state_NDL: torch.Tensor,
    weight_DL: torch.Tensor,
    bias_D: torch.Tensor | None,
    silu: bool,
    slots_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the convolution (N, D, 1) of one new token, and adds the token to the kept inputs in place. With
    `slots_N` the kept inputs are at these slots of the state."""
    rows, channels, _ = x_ND1.shape
    out = torch.empty(rows, channels, 1, dtype=x_ND1.dtype, device=x_ND1.device)
    _step[(triton.cdiv(channels, 256), rows)](
        x_ND1,
        state_NDL,
        state_NDL if slots_N is None else slots_N,
        weight_DL.contiguous(),
        weight_DL if bias_D is None else bias_D,
        out,
        *x_ND1.stride()[:2],
        *state_NDL.stride(),
        CHANNELS_IN=channels,
        LENGTH=weight_DL.shape[1],
        KEPT=state_NDL.shape[2],
        BIASED=bias_D is not None,
        SILU=silu,
        SLOTTED=slots_N is not None,
        CHANNELS=256,
        num_warps=4,
    )
    return out


def convolution_fits(x_NDT: torch.Tensor, weight_DL: torch.Tensor, bias_D: torch.Tensor | None) -> bool:
    same = x_NDT.dtype == weight_DL.dtype and (bias_D is None or bias_D.dtype == x_NDT.dtype)
    shaped = x_NDT.dim() == 3 and weight_DL.dim() == 2 and x_NDT.shape[1] == len(weight_DL)
    plain = type(weight_DL.data) is torch.Tensor
    return runs_on(x_NDT) and same and shaped and plain and weight_DL.shape[1] <= LONGEST and x_NDT.numel() > 0


def plain_convolve(
    x_NDT: torch.Tensor, weight_DL: torch.Tensor, bias_D: torch.Tensor | None, silu: bool
) -> torch.Tensor:
    """Reference implementation of `convolve`."""
    channels, length = weight_DL.shape
    out = functional.conv1d(x_NDT, weight_DL[:, None], bias_D, padding=length - 1, groups=channels)
    out = out[..., : x_NDT.shape[2]]
    return functional.silu(out) if silu else out


def plain_convolve_step_(
    x_ND1: torch.Tensor,
    state_NDL: torch.Tensor,
    weight_DL: torch.Tensor,
    bias_D: torch.Tensor | None,
    silu: bool,
    slots_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference implementation of `convolve_step_`."""
    slots_N = torch.arange(len(x_ND1), device=x_ND1.device) if slots_N is None else slots_N
    whole = torch.cat((state_NDL[slots_N], x_ND1.to(state_NDL.dtype)), -1)
    state_NDL[slots_N] = whole[..., 1:]
    out = functional.conv1d(whole.to(weight_DL.dtype), weight_DL[:, None], bias_D, groups=len(weight_DL))[..., -1:]
    return (functional.silu(out) if silu else out).to(x_ND1.dtype)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool) -> torch.Tensor:
        weight = weight.contiguous()
        rows, channels, tokens = x.shape
        out = torch.empty(rows, tokens, channels, dtype=x.dtype, device=x.device)
        strides = x.stride(0), x.stride(2), x.stride(1)
        _forward[_grid(x)](
            x, weight, weight if bias is None else bias, out, tokens, *strides, **_sizes(weight, bias), SILU=silu
        )
        ctx.save_for_backward(x, weight, bias)
        ctx.silu = silu
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        rows, channels, tokens = x.shape
        grad_sum, grad_x = (torch.empty(rows, tokens, channels, dtype=x.dtype, device=x.device) for _ in range(2))
        grid, length = _grid(x), weight.shape[1]
        parts = torch.empty(rows * grid[1], length + 1, channels, dtype=torch.float32, device=x.device)
        strides = [(each.stride(0), each.stride(2), each.stride(1)) for each in (x, grads[0])]
        given = (x, weight, weight if bias is None else bias, grads[0], grad_sum, parts, tokens, *strides[0])
        sizes = _sizes(weight, bias)
        _backward_sum[grid](*given, *strides[1], **sizes, SILU=ctx.silu)
        del sizes["BIASED"]
        _backward_input[grid](grad_sum, weight, grad_x, tokens, **sizes)
        sums = parts.sum(0)
        grad_bias = None if bias is None else sums[length].to(bias.dtype)
        return grad_x.transpose(1, 2), sums[:length].t().to(weight.dtype), grad_bias, None


def _grid(x: torch.Tensor) -> tuple[int, int, int]:
    rows, channels, tokens = x.shape
    return triton.cdiv(channels, CHANNELS), triton.cdiv(tokens, TOKENS), rows


def _sizes(weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
    channels, length = weight.shape
    sizes = {"CHANNELS_IN": channels, "LENGTH": length, "TOKENS": TOKENS, "CHANNELS": CHANNELS}
    return {**sizes, "BIASED": bias is not None, "num_warps": 4}
