"""The router of a mixture-of-experts layer after its matrix product: softmax, top k and normalised gates in one kernel.

`plain_gates` is the plain-torch reference. Of experts with equal probabilities the first is chosen; torch.topk does not
define which one it chooses. Suffixes: T tokens, K experts of a token, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# Logits of a program. Larger tiles do not fit in its registers.
TILE = 4096
MOST_CHOSEN = 32


@triton.jit
def _probabilities(logits, row_R, inside_R, EXPERTS: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads the logits of some tokens and returns their softmax in fp32."""
    column_E = tl.arange(0, PADDED)
    inside_RE = inside_R[:, None] & (column_E < EXPERTS)[None, :]
    x_RE = tl.load(logits + row_R[:, None] * EXPERTS + column_E[None, :], mask=inside_RE, other=float("-inf"))
    x_RE = tl.where(inside_R[:, None], x_RE.to(tl.float32), 0.0)
    exp_RE = tl.exp(x_RE - tl.max(x_RE, 1)[:, None])
    return exp_RE / tl.sum(exp_RE, 1)[:, None]


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    logits,
    gates,
    chosen,
    tokens,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    NORMALISED: tl.constexpr,
    ROWS: tl.constexpr,
):
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside_R = row_R < tokens
    prob_RE = _probabilities(logits, row_R, inside_R, EXPERTS, PADDED)
    column_E, choice_K = tl.arange(0, PADDED), tl.arange(0, PADDED_K)
    left_RE = tl.where((column_E < EXPERTS)[None, :], prob_RE, -1.0)
    gate_RK = tl.zeros([ROWS, PADDED_K], tl.float32)
    for choice in tl.static_range(TOP_K):
        best_R = tl.max(left_RE, 1)
        index_R = tl.min(tl.where(left_RE == best_R[:, None], column_E[None, :], PADDED), 1)
        # No expert has the largest value if the probabilities are NaN.
        index_R = tl.minimum(index_R, EXPERTS - 1)
        gate_RK = tl.where((choice_K == choice)[None, :], best_R[:, None], gate_RK)
        tl.store(chosen + row_R * TOP_K + choice, index_R.to(tl.int64), mask=inside_R)
        left_RE = tl.where(column_E[None, :] == index_R[:, None], -1.0, left_RE)
    if NORMALISED:
        gate_RK = gate_RK / tl.sum(gate_RK, 1)[:, None]
    # The maximum ignores NaN, but the sum does not.
    gate_RK = tl.where((tl.sum(prob_RE, 1) > 0)[:, None], gate_RK, float("nan"))
    place_RK = row_R[:, None] * TOP_K + choice_K[None, :]
    inside_RK = inside_R[:, None] & (choice_K < TOP_K)[None, :]
    tl.store(gates + place_RK, gate_RK.to(gates.dtype.element_ty), mask=inside_RK)


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    logits,
    chosen,
    upstream,
    grad,
    tokens,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALISED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Computes the gradient of the logits. With normalised gates v / S, dv = (g - sum of g v / S) / S."""
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside_R = row_R < tokens
    prob_RE = _probabilities(logits, row_R, inside_R, EXPERTS, PADDED)
    column_E = tl.arange(0, PADDED)
    grad_RE = tl.zeros([ROWS, PADDED], tl.float32)
    is_chosen_RE = tl.zeros([ROWS, PADDED], tl.int1)
    for choice in tl.static_range(TOP_K):
        index_R = tl.load(chosen + row_R * TOP_K + choice, mask=inside_R, other=0)
        g_R = tl.load(upstream + row_R * TOP_K + choice, mask=inside_R, other=0.0).to(tl.float32)
        here_RE = column_E[None, :] == index_R[:, None]
        grad_RE = tl.where(here_RE, g_R[:, None], grad_RE)
        is_chosen_RE = is_chosen_RE | here_RE
    if NORMALISED:
        total_R = tl.sum(tl.where(is_chosen_RE, prob_RE, 0.0), 1)
        mean_R = tl.sum(grad_RE * prob_RE, 1) / total_R
        grad_RE = tl.where(is_chosen_RE, (grad_RE - mean_R[:, None]) / total_R[:, None], 0.0)
    grad_RE = prob_RE * (grad_RE - tl.sum(grad_RE * prob_RE, 1)[:, None])
    inside_RE = inside_R[:, None] & (column_E < EXPERTS)[None, :]
    place_RE = row_R[:, None] * EXPERTS + column_E[None, :]
    tl.store(grad + place_RE, grad_RE.to(grad.dtype.element_ty), mask=inside_RE)


def _sizes(logits_TE: torch.Tensor) -> tuple[tuple[int], dict[str, int]]:
    tokens, experts = logits_TE.shape
    padded = triton.next_power_of_2(experts)
    rows = max(1, TILE // padded)
    return (triton.cdiv(tokens, rows),), {"EXPERTS": experts, "PADDED": padded, "ROWS": rows, "num_warps": 4}


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: torch.Tensor, top_k: int, normalised: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_TE = logits_TE.contiguous()
        gates_TK = logits_TE.new_empty(len(logits_TE), top_k, dtype=dtype)
        chosen_TK = torch.empty_like(gates_TK, dtype=torch.int64)
        grid, sizes = _sizes(logits_TE)
        if len(logits_TE):
            _choose[grid](
                logits_TE,
                gates_TK,
                chosen_TK,
                len(logits_TE),
                TOP_K=top_k,
                PADDED_K=triton.next_power_of_2(top_k),
                NORMALISED=normalised,
                **sizes,
            )
        ctx.save_for_backward(logits_TE, chosen_TK)
        ctx.normalised = normalised
        ctx.mark_non_differentiable(chosen_TK)
        return gates_TK, chosen_TK

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits_TE, chosen_TK = ctx.saved_tensors
        grad_TE = torch.empty_like(logits_TE)
        grid, sizes = _sizes(logits_TE)
        if len(logits_TE):
            _gradient[grid](
                logits_TE,
                chosen_TK,
                grads[0].contiguous(),
                grad_TE,
                len(logits_TE),
                TOP_K=chosen_TK.shape[1],
                NORMALISED=ctx.normalised,
                **sizes,
            )
        return grad_TE, None, None, None


def router_fits(router: Any) -> bool:
    """Returns whether the kernel supports the number of experts, and of experts per token."""
    return router.num_experts <= TILE and 0 < router.top_k <= min(MOST_CHOSEN, router.num_experts)


def gates(
    logits_TE: torch.Tensor, top_k: int, normalised: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gates of the `top_k` most probable experts of each token, and the numbers of these experts."""
    found: tuple[torch.Tensor, torch.Tensor] = _Gates.apply(logits_TE, top_k, normalised, dtype)
    return found


def plain_gates(
    logits_TE: torch.Tensor, top_k: int, normalised: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference implementation of `gates`."""
    gates_TK, chosen_TK = torch.topk(torch.softmax(logits_TE, -1, dtype=torch.float), top_k, dim=-1)
    gates_TK = gates_TK / gates_TK.sum(-1, keepdim=True) if normalised else gates_TK
    return gates_TK.to(dtype), chosen_TK
