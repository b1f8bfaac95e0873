"""One decoding step of Mamba-2 in Triton, which updates the states of sequences in their slots.

With the state S (V x K) of a head, the step is: S = exp(dt A) S + dt x B^T, and the output is S C + D x, where dt is
softplus(dt + bias), rounded to its dtype as in torch. All other arithmetic is in fp32. The plain-torch reference is
`plain_mamba_step_`. Suffixes: B sequences, H heads, G groups of heads that share B and C, V size of a head, K size of a
state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from lockstep.kernels.triton_math import log1p, runs_on

# Rows of a state that one Triton program updates, and its warps.
ROWS, WARPS = 32, 4
LARGEST_STATE = 256


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    x, dt, decay, key, query, skip, bias, states, slots, out, x_row, dt_row, key_row, query_row, state_row,
    HEADS: tl.constexpr, SHARED: tl.constexpr, SIZE: tl.constexpr, STATE: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Each Triton program updates ROWS rows of the state of one head of one sequence."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    v, k = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    values = tl.load(x + row * x_row + head * SIZE + v, mask=v < SIZE, other=0.0).to(tl.float32)
    written = tl.load(key + row * key_row + (head // SHARED) * STATE + k, mask=k < STATE, other=0.0).to(tl.float32)
    read = tl.load(query + row * query_row + (head // SHARED) * STATE + k, mask=k < STATE, other=0.0).to(tl.float32)
    kind: tl.constexpr = dt.dtype.element_ty
    step = tl.load(dt + row * dt_row + head).to(tl.float32) + tl.load(bias + head).to(kind).to(tl.float32)
    step = step.to(kind).to(tl.float32)
    # torch's softplus is the identity above 20.
    step = tl.where(step > 20.0, step, log1p(tl.exp(tl.minimum(step, 20.0)))).to(kind).to(tl.float32)
    places = states + slot * state_row + head * (SIZE * STATE) + v[:, None] * STATE + k[None, :]
    inside = (v < SIZE)[:, None] & (k < STATE)[None, :]
    state = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    state = state * tl.exp(step * tl.load(decay + head).to(tl.float32)) + (step * values)[:, None] * written[None, :]
    tl.store(places, state.to(states.dtype.element_ty), mask=inside)
    result = tl.sum(state * read[None, :], axis=1) + values * tl.load(skip + head).to(tl.float32)
    tl.store(out + (row * HEADS + head) * SIZE + v, result.to(out.dtype.element_ty), mask=v < SIZE)


def mamba_step_(
    x_BHV: torch.Tensor,
    dt_BH: torch.Tensor,
    decay_H: torch.Tensor,
    key_BGK: torch.Tensor,
    query_BGK: torch.Tensor,
    skip_H: torch.Tensor,
    bias_H: torch.Tensor,
    states: torch.Tensor,
    slots_B: torch.Tensor,
) -> torch.Tensor:
    """Updates the states (slots, H, V, K) at `slots_B` in place and returns the output (B, H, V). No two sequences may
    have the same slot, except the spare slot, whose state is meaningless."""
    x_BHV, key_BGK, query_BGK = (
        part if part.stride(-1) == 1 and part.stride(1) == part.shape[2] else part.contiguous()
        for part in (x_BHV, key_BGK, query_BGK)
    )
    dt_BH = dt_BH if dt_BH.stride(1) == 1 else dt_BH.contiguous()
    rows, heads, width = x_BHV.shape
    groups, size = key_BGK.shape[1:]
    out = torch.empty(rows, heads, width, dtype=x_BHV.dtype, device=x_BHV.device)
    _step[(rows, heads, triton.cdiv(width, ROWS))](
        x_BHV, dt_BH, decay_H.contiguous(), key_BGK, query_BGK, skip_H.contiguous(), bias_H.contiguous(), states,
        slots_B, out, x_BHV.stride(0), dt_BH.stride(0), key_BGK.stride(0), query_BGK.stride(0), states.stride(0),
        HEADS=heads, SHARED=heads // groups, SIZE=width, STATE=size, PADDED=triton.next_power_of_2(size), ROWS=ROWS,
        num_warps=WARPS,
    )  # fmt: skip
    return out


def mamba_step_fits(x_BHV: torch.Tensor, key_BGK: torch.Tensor, states: torch.Tensor) -> bool:
    shape = (*x_BHV.shape[1:], key_BGK.shape[-1])
    shaped = x_BHV.dim() == key_BGK.dim() == 3 and states.shape[1:] == shape and states[0].is_contiguous()
    small = key_BGK.shape[-1] <= LARGEST_STATE and x_BHV.shape[1] % key_BGK.shape[1] == 0
    return runs_on(x_BHV) and shaped and small and not torch.is_grad_enabled()


def plain_mamba_step_(
    x_BHV: torch.Tensor,
    dt_BH: torch.Tensor,
    decay_H: torch.Tensor,
    key_BGK: torch.Tensor,
    query_BGK: torch.Tensor,
    skip_H: torch.Tensor,
    bias_H: torch.Tensor,
    states: torch.Tensor,
    slots_B: torch.Tensor,
) -> torch.Tensor:
    """Reference implementation of `mamba_step_`."""
    step = functional.softplus(dt_BH + bias_H.to(dt_BH.dtype)).float()
    x, heads = x_BHV.float(), x_BHV.shape[1]
    written, read = (part.float().repeat_interleave(heads // part.shape[1], 1) for part in (key_BGK, query_BGK))
    state = states[slots_B].float() * (step * decay_H.float()).exp()[..., None, None]
    state = state + (step[..., None] * x)[..., None] * written[:, :, None]
    states[slots_B] = state.to(states.dtype)
    return ((state * read[:, :, None]).sum(-1) + x * skip_H.float()[:, None]).to(x_BHV.dtype)
