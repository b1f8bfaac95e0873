"""The experts of a mixture-of-experts layer for many tokens, with a backward pass.

The pairs of a token and one of its experts are sorted once by expert. Each projection is then one grouped matrix
product: torch's `grouped_mm` where the device has it, and otherwise one product per expert. Rows move by gathers in
both passes, so the backward pass adds nothing with atomics. A LoRA adapter of stacked experts is computed as
x W + (x A) B, so the sum W + B A of all experts is never built. Suffixes: T tokens, K experts of a token, P pairs,
E experts, W model width, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

# Name of the attribute of an experts module with the adapters of its parameters: a function that returns them by the
# name of the parameter.
ADAPTERS = "lockstep_expert_adapters"
# Name of the attribute of an experts module whose experts are divided over ranks, during its forward: a function with
# the signature of `grouped_experts`, which sends tokens to the ranks of their experts.
EXCHANGE = "lockstep_expert_exchange"
# torch's grouped product needs rows of a multiple of 16 bytes, which are 8 values of bf16.
ALIGNED = 8


class LowRank(NamedTuple):
    """The adapter of a stack of experts, which adds `scale` x A^T B^T to the outputs x W of each expert."""

    a_ERI: torch.Tensor
    b_EOR: torch.Tensor
    scale: float


Adapters = Mapping[str, Sequence[LowRank]]


class SortedPairs(NamedTuple):
    """The order of pairs by expert. Expert e has the sorted pairs from `ends_E[e - 1]` up to `ends_E[e]`. `order_P` is
    the number of each sorted pair, and `place_P` is its inverse."""

    order_P: torch.Tensor
    place_P: torch.Tensor
    ends_E: torch.Tensor


class Moves(NamedTuple):
    """The functions around the grouped products. `to_experts` and `to_tokens` have the signatures of those below.
    `gate` computes act(gate) * up; None stands for the function of the module. `adapted` computes the product with the
    frozen weights of the experts and an adapter; None stands for two products and their sum."""

    to_experts: Callable[..., torch.Tensor]
    to_tokens: Callable[..., torch.Tensor]
    gate: Callable[[torch.Tensor], torch.Tensor] | None = None
    adapted: Callable[[torch.Tensor, torch.Tensor, LowRank, torch.Tensor], torch.Tensor] | None = None


def stacks_experts(module: nn.Module) -> bool:
    """Returns whether a module is transformers' stack of experts, whose forward has the inputs states, chosen experts
    and their weights, and whose parameters all begin with the expert dimension. Quantised stacks are no such modules:
    they have codings (`stacks`). Of experts that are divided over ranks, those that are shown count."""
    count = vars(module).get("num_experts")
    stacked = "is_transposed" in vars(module) and isinstance(count, int) and not hasattr(module, "stacks")
    parameters = [vars(module).get(name, one) for name, one in module.named_parameters()]
    return stacked and bool(parameters) and all(one.dim() >= 2 and len(one) == count for one in parameters)


def has_experts_elsewhere(module: Any) -> bool:
    """Returns whether other ranks have a part of the experts. transformers before 5.20 has no such attribute."""
    return bool(vars(module).get("_is_expert_parallel", False))


def grouped_experts(
    module: Any,
    states_TW: torch.Tensor,
    chosen_TK: torch.Tensor,
    shares_TK: torch.Tensor,
    moves: Moves | None = None,
) -> torch.Tensor:
    """Computes a module of stacked experts, with its adapters. It replaces the forward of transformers' classes. An
    index of `num_experts` or above stands for an expert of another rank, whose output is 0."""
    moves = moves or PLAIN
    exchange: Callable[..., torch.Tensor] | None = vars(module).get(EXCHANGE)
    if exchange is not None:
        return exchange(module, states_TW, chosen_TK, shares_TK, moves)
    order_P, place_P, ends_E = sort_pairs(chosen_TK, module.num_experts)
    x_PW = moves.to_experts(states_TW, order_P, place_P, chosen_TK.shape[1])
    out_PW = expert_outputs(module, x_PW, ends_E, moves)
    return moves.to_tokens(out_PW, shares_TK, order_P, place_P).to(states_TW.dtype)


def expert_outputs(module: Any, x_PW: torch.Tensor, ends_E: torch.Tensor, moves: Moves) -> torch.Tensor:
    """Computes the outputs of pairs that are sorted by expert. The pairs after the last expert have an expert of
    another rank."""
    given: Callable[[], Adapters] | None = vars(module).get(ADAPTERS)
    adapters = {} if given is None else given()
    numbers_P = torch.arange(len(x_PW), device=x_PW.device)
    elsewhere = (numbers_P >= ends_E[-1])[:, None] if has_experts_elsewhere(module) else None
    ids_P = None
    if module.has_bias:
        ids_P = torch.searchsorted(ends_E, numbers_P, right=True).clamp(max=len(ends_E) - 1)

    def project(name: str, x_PI: torch.Tensor) -> torch.Tensor:
        weight = getattr(module, name) if module.is_transposed else getattr(module, name).transpose(-2, -1)
        each = list(adapters.get(name, ()))
        if each and moves.adapted is not None:
            out_PO = moves.adapted(x_PI, weight, each.pop(0), ends_E)
        else:
            out_PO = grouped_linear(x_PI, weight, ends_E)
        for one in each:
            out_PO = out_PO + low_rank(x_PI, one, ends_E)
        out_PO = out_PO if ids_P is None else out_PO + getattr(module, f"{name}_bias")[ids_P]
        # The grouped product does not write the rows of other ranks' experts.
        return out_PO if elsewhere is None else out_PO.masked_fill(elsewhere, 0)

    # The backward of this masked_fill clears the rows that the grouped product leaves unwritten.
    x_PW = x_PW if elsewhere is None else x_PW.masked_fill(elsewhere, 0)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    inner_PI = project(first, x_PW)
    activate = (moves.gate or module._apply_gate) if module.has_gate else module.act_fn
    inner_PI = activate(inner_PI)
    out_PW = project("down_proj", inner_PI)
    return module.post_expert_norm(out_PW) if vars(module).get("has_post_expert_norm", False) else out_PW


def sort_pairs(chosen_TK: torch.Tensor, count: int) -> SortedPairs:
    """Sorts the pairs of a token and one of its experts by expert. Pairs with an index of `count` or above come
    last."""
    # A device sorts by the bits of the type, so numbers of one byte take an eighth of the time of int64.
    ids_P, order_P = torch.sort(chosen_TK.reshape(-1).clamp(max=count).to(_index_type(count)), stable=True)
    place_P = torch.empty_like(order_P).scatter_(0, order_P, torch.arange(len(order_P), device=order_P.device))
    experts_E = torch.arange(count, device=ids_P.device, dtype=ids_P.dtype)
    return SortedPairs(order_P, place_P, torch.searchsorted(ids_P, experts_E, right=True, out_int32=True))


def merged_pairs(counts_NE: torch.Tensor, pairs: int) -> SortedPairs:
    """Sorts `pairs` rows that N ranks sent one after the other, each with `counts_NE` rows per expert and sorted by
    expert. The order follows from the counts, so the rows are not sorted again, and the device does not wait."""
    counts_EN = counts_NE.t()
    starts_NE, starts_EN = (_starts(one) for one in (counts_NE, counts_EN))
    shift_EN = starts_NE.t() - starts_EN
    numbers_P = torch.arange(pairs, device=counts_NE.device)
    order_P = numbers_P + _repeated(shift_EN, counts_EN, pairs)
    place_P = numbers_P - _repeated(shift_EN.t(), counts_NE, pairs)
    return SortedPairs(order_P, place_P, counts_NE.sum(0).cumsum(0).to(torch.int32))


def _starts(counts: torch.Tensor) -> torch.Tensor:
    """Returns the number of rows before each block, where the blocks lie one after the other."""
    flat = counts.flatten()
    return (flat.cumsum(0) - flat).view(counts.shape)


def _repeated(values: torch.Tensor, counts: torch.Tensor, total: int) -> torch.Tensor:
    return values.flatten().repeat_interleave(counts.flatten(), output_size=total)


def _index_type(count: int) -> torch.dtype:
    """Returns the smallest type of the numbers 0 to `count`; `count` stands for the experts of other ranks."""
    return torch.uint8 if count < 256 else torch.int16 if count < 2**15 else torch.int64


def low_rank(x_PI: torch.Tensor, adapter: LowRank, ends_E: torch.Tensor) -> torch.Tensor:
    """Computes scale (x A) B of each pair with the matrices of its expert."""
    a_EIR, b_ERO = aligned_matrices(x_PI, adapter)
    return grouped_linear(grouped_linear(x_PI, a_EIR, ends_E) * adapter.scale, b_ERO, ends_E)


def aligned_matrices(x_PI: torch.Tensor, adapter: LowRank) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns A and B of an adapter in the dtype of the inputs, with the rank that torch's grouped product needs."""
    a_EIR, b_ERO = adapter.a_ERI.transpose(-2, -1), adapter.b_EOR.transpose(-2, -1)
    missing = -a_EIR.shape[-1] % ALIGNED
    if missing and has_grouped_mm(x_PI, x_PI.dtype):
        a_EIR, b_ERO = functional.pad(a_EIR, (0, missing)), functional.pad(b_ERO, (0, 0, 0, missing))
    return a_EIR.to(x_PI.dtype).contiguous(), b_ERO.to(x_PI.dtype).contiguous()


def grouped_linear(x_PI: torch.Tensor, weight_EIO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Multiplies the rows of each expert with the matrix of the expert. Expert e has the rows from `ends_E[e - 1]` up
    to `ends_E[e]`."""
    aligned = not any(size % ALIGNED for size in weight_EIO.shape[1:])
    if aligned and has_grouped_mm(x_PI, weight_EIO.dtype):
        return functional.grouped_mm(x_PI, weight_EIO, offs=ends_E)
    out: torch.Tensor = _OneByOne.apply(x_PI.to(weight_EIO.dtype), weight_EIO, ends_E.tolist())
    return out


def has_grouped_mm(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Returns whether torch computes the grouped product of the device in one kernel: bf16 on NVIDIA devices."""
    return (
        x.is_cuda
        and x.dtype == dtype == torch.bfloat16
        and hasattr(functional, "grouped_mm")
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )


class _OneByOne(torch.autograd.Function):
    """One matrix product per expert that has rows."""

    @staticmethod
    def forward(ctx: Any, x_PI: torch.Tensor, weight_EIO: torch.Tensor, ends: list[int]) -> torch.Tensor:
        ctx.save_for_backward(x_PI, weight_EIO)
        ctx.ends = ends
        out = x_PI.new_zeros(len(x_PI), weight_EIO.shape[-1])
        for expert, rows in _rows(ends):
            torch.mm(x_PI[rows], weight_EIO[expert], out=out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x_PI, weight_EIO = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = torch.zeros_like(x_PI) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight_EIO) if ctx.needs_input_grad[1] else None
        for expert, rows in _rows(ctx.ends):
            if grad_x is not None:
                torch.mm(grad[rows], weight_EIO[expert].T, out=grad_x[rows])
            if grad_weight is not None:
                torch.mm(x_PI[rows].T, grad[rows], out=grad_weight[expert])
        return grad_x, grad_weight, None


def _rows(ends: list[int]) -> list[tuple[int, slice]]:
    starts = [0, *ends[:-1]]
    return [(expert, slice(*pair)) for expert, pair in enumerate(zip(starts, ends, strict=True)) if pair[0] < pair[1]]


def to_experts(states_TW: torch.Tensor, order_P: torch.Tensor, place_P: torch.Tensor, chosen: int) -> torch.Tensor:
    """Copies each token to its `chosen` pairs, in the order of the experts. `place_P` is the inverse of `order_P`. If
    `order_P` is shorter than `place_P`, the last pairs are left out."""
    rows: torch.Tensor = TokensToPairs.apply(states_TW, order_P, place_P, chosen)
    return rows


def to_tokens(
    rows_PW: torch.Tensor, shares_TK: torch.Tensor, order_P: torch.Tensor, place_P: torch.Tensor
) -> torch.Tensor:
    """Sums the outputs of a token's experts, weighted by the router's shares. Pairs that were left out count as 0."""
    out: torch.Tensor = _PairsToTokens.apply(rows_PW, shares_TK, order_P, place_P)
    return out


def _with_left_out(rows: torch.Tensor, pairs: int) -> torch.Tensor:
    """Appends a row of zeros for each pair that was left out."""
    return rows if len(rows) == pairs else functional.pad(rows, (0, 0, 0, pairs - len(rows)))


class TokensToPairs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states_TW: torch.Tensor, order_P: torch.Tensor, place_P: torch.Tensor, chosen: int
    ) -> torch.Tensor:
        ctx.save_for_backward(place_P)
        ctx.chosen = chosen
        return states_TW[order_P // chosen]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (place_P,) = ctx.saved_tensors
        rows = _with_left_out(grads[0], len(place_P))
        return rows[place_P].unflatten(0, (-1, ctx.chosen)).sum(1), None, None, None


class _PairsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_PW: torch.Tensor, shares_TK: torch.Tensor, order_P: torch.Tensor, place_P: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows_PW, shares_TK, order_P, place_P)
        rows = _with_left_out(rows_PW, len(place_P))[place_P].unflatten(0, shares_TK.shape)
        return (rows * shares_TK[..., None]).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        rows_PW, shares_TK, order_P, place_P = ctx.saved_tensors
        (grad_TW,), grad_rows, grad_shares = grads, None, None
        if ctx.needs_input_grad[0]:
            shares = shares_TK.reshape(-1)[order_P, None]
            grad_rows = (grad_TW[order_P // shares_TK.shape[1]] * shares).to(rows_PW.dtype)
        if ctx.needs_input_grad[1]:
            rows = _with_left_out(rows_PW, len(place_P))[place_P].unflatten(0, shares_TK.shape)
            grad_shares = (rows * grad_TW[:, None]).sum(-1).to(shares_TK.dtype)
        return grad_rows, grad_shares, None, None


PLAIN = Moves(to_experts, to_tokens)
