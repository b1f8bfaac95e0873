"""One decoding step of the gated delta rule in Triton, which updates the states of sequences in their slots.

With the state S (K x V) of a head, the step is: S = exp(g) S, then S = S + k (beta (v - S^T k))^T, and the output is
S^T q. Queries and keys are normalised to length 1 first, and queries divided by the root of their size. All arithmetic
is in fp32, as in transformers. The plain-torch reference is `plain_delta_step_`. Suffixes: B sequences, H heads, K size
of a key, V size of a value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lockstep.kernels.triton_math import runs_on

# Columns of a state that one Triton program updates, and its warps.
COLUMNS, WARPS = 32, 4
LARGEST_KEY = 256
# The epsilon of transformers under the root of a vector's length.
LENGTH_EPSILON = 1e-6


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    decay,
    beta,
    states,
    slots,
    out,
    scale,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    decay_row,
    beta_row,
    state_row,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    PADDED_KEY: tl.constexpr,
    VALUE: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """Each Triton program updates COLUMNS columns of the state of one head of one sequence."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    k_columns = tl.arange(0, PADDED_KEY)
    v_columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    k_inside, v_inside = k_columns < KEY, v_columns < VALUE
    q = tl.load(query + row * query_row + head * query_head + k_columns, mask=k_inside, other=0.0).to(tl.float32)
    k = tl.load(key + row * key_row + head * key_head + k_columns, mask=k_inside, other=0.0).to(tl.float32)
    v = tl.load(value + row * value_row + head * value_head + v_columns, mask=v_inside, other=0.0).to(tl.float32)
    g = tl.load(decay + row * decay_row + head).to(tl.float32)
    b = tl.load(beta + row * beta_row + head).to(tl.float32)
    if UNIT:
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + EPSILON)
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + EPSILON)
    q *= scale
    places = states + slot * state_row + head * (KEY * VALUE) + k_columns[:, None] * VALUE + v_columns[None, :]
    inside = k_inside[:, None] & v_inside[None, :]
    state = tl.load(places, mask=inside, other=0.0).to(tl.float32) * tl.exp(g)
    delta = (v - tl.sum(state * k[:, None], axis=0)) * b
    state += k[:, None] * delta[None, :]
    tl.store(places, state.to(states.dtype.element_ty), mask=inside)
    result = tl.sum(state * q[:, None], axis=0)
    tl.store(out + (row * HEADS + head) * VALUE + v_columns, result.to(out.dtype.element_ty), mask=v_inside)


def delta_step_(
    query_BHK: torch.Tensor,
    key_BHK: torch.Tensor,
    value_BHV: torch.Tensor,
    decay_BH: torch.Tensor,
    beta_BH: torch.Tensor,
    states: torch.Tensor,
    slots_B: torch.Tensor,
    unit: bool,
) -> torch.Tensor:
    """Updates the states (slots, H, K, V) at `slots_B` in place and returns the output (B, H, V). No two sequences may
    have the same slot, except the spare slot, whose state is meaningless. If `unit`, queries and keys are
    normalised."""
    rows, heads, size = key_BHK.shape
    width = value_BHV.shape[2]
    parts = [part if part.stride(-1) == 1 else part.contiguous() for part in (query_BHK, key_BHK, value_BHV)]
    decay_BH, beta_BH = (part if part.stride(-1) == 1 else part.contiguous() for part in (decay_BH, beta_BH))
    out = torch.empty(rows, heads, width, dtype=query_BHK.dtype, device=query_BHK.device)
    _step[(rows, heads, triton.cdiv(width, COLUMNS))](
        *parts,
        decay_BH,
        beta_BH,
        states,
        slots_B,
        out,
        size**-0.5,
        *(stride for part in parts for stride in part.stride()[:2]),
        decay_BH.stride(0),
        beta_BH.stride(0),
        states.stride(0),
        HEADS=heads,
        KEY=size,
        PADDED_KEY=triton.next_power_of_2(size),
        VALUE=width,
        COLUMNS=COLUMNS,
        UNIT=unit,
        EPSILON=LENGTH_EPSILON,
        num_warps=WARPS,
    )
    return out


def delta_step_fits(key_BHK: torch.Tensor, states: torch.Tensor) -> bool:
    shaped = states.dim() == 4 and states.shape[1:3] == key_BHK.shape[1:] and states[0].is_contiguous()
    return runs_on(key_BHK) and shaped and key_BHK.shape[2] <= LARGEST_KEY and not torch.is_grad_enabled()


def plain_delta_step_(
    query_BHK: torch.Tensor,
    key_BHK: torch.Tensor,
    value_BHV: torch.Tensor,
    decay_BH: torch.Tensor,
    beta_BH: torch.Tensor,
    states: torch.Tensor,
    slots_B: torch.Tensor,
    unit: bool,
) -> torch.Tensor:
    """Reference implementation of `delta_step_`."""
    q, k, v = query_BHK.float(), key_BHK.float(), value_BHV.float()
    if unit:
        q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + LENGTH_EPSILON) for part in (q, k))
    q = q * key_BHK.shape[-1] ** -0.5
    state = states[slots_B].float() * decay_BH.float().exp()[..., None, None]
    delta = (v - (state * k[..., None]).sum(-2)) * beta_BH.float()[..., None]
    state = state + k[..., None] * delta[..., None, :]
    states[slots_B] = state.to(states.dtype)
    return (state * q[..., None]).sum(-2).to(query_BHK.dtype)
