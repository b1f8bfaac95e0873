"""Log-probabilities of chosen tokens straight from hidden states, never holding all logits.

Shapes: K positions, R positions of one chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from lockstep.kernels.sampling import LEFT_OUT, Truncation, left_out_below, truncate_

# Memory of one chunk of logits. With a vocabulary of 151,936 the twin works on fp32 copies of it (440 positions, about
# 1 GiB at its peak), the fused kernels in place (3,500 positions in bf16). Beside a chunk stand the fp32 sums of the
# weight's gradient, which every chunk reads and writes once: 0.5 GiB for a hidden size of 896. One size whether
# gradients are taken or not: the same products then give a token the same log-probability in every pass.
CHUNK_BYTES = 256 * 2**20
FUSED_CHUNK_BYTES = 2**30
# How far a gradient may be from the foreseen one, as a share of the largest: both are computed alike, up to rounding.
FORESEEN_WITHIN = 1e-4


class Head(NamedTuple):
    """What makes logits of hidden states: a projection, a scale, a soft cap (c * tanh(logit / c))."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """In the dtype of the states where the projection is all there is, else in fp32."""
        return self.shaped(self.projected(hidden))

    def projected(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, self.weight_VH, self.bias_V)

    def shaped(self, logits: torch.Tensor) -> torch.Tensor:
        """What the projection gives, scaled and capped."""
        if self.scale != 1.0:
            logits = logits.float() * self.scale
        return logits if self.softcap is None else (logits.float() / self.softcap).tanh() * self.softcap


class Scores(NamedTuple):
    """Of each chosen token: its log-probability, the entropy of the distribution it was chosen from, how far that is
    from a teacher's, and the sum of its squared probabilities. None for what nobody asked for."""

    logprobs_K: torch.Tensor
    entropies_K: torch.Tensor | None
    divergences_K: torch.Tensor | None = None
    squares_K: torch.Tensor | None = None


Foresight = Callable[[torch.Tensor, torch.Tensor | None, slice], tuple[torch.Tensor, torch.Tensor | None]]
"""From the log-probabilities and entropies of a part of the positions to the gradients of the loss by them, up to one
factor for all positions. Only a loss whose parts do not depend on each other can be foreseen."""


def alike(logprobs_R: torch.Tensor, entropies_R: torch.Tensor | None, part: slice) -> tuple[torch.Tensor, None]:
    """The foresight of a loss that all log-probabilities enter with the same factor, as in supervised training."""
    return torch.ones_like(logprobs_R), None


def token_scores(
    hidden_KH: torch.Tensor,
    head: Head,
    targets_K: torch.Tensor,
    *,
    temperature: float = 1.0,
    truncation: Truncation | None = None,
    entropy: bool = False,
    foresee: Foresight | None = None,
    chunk_bytes: int | None = None,
) -> Scores:
    """log softmax(logits / temperature)[target] in fp32, with entropies where asked; both can be differentiated.

    Positions are taken in chunks, forward and backward. With a truncation the distribution is what it leaves (the
    chosen token always stays). With `foresee` the gradient is taken while the logits are there, on devices with fused
    kernels (see `foreseen_token_scores`).
    """
    fused = _fused(hidden_KH) is not None
    wanted = torch.is_grad_enabled() and (hidden_KH.requires_grad or head.weight_VH.requires_grad)
    # fp16 needs the loss scale before its small numbers are rounded.
    if foresee is not None and fused and wanted and hidden_KH.dtype != torch.float16:
        return foreseen_token_scores(
            hidden_KH, head, targets_K, foresee, temperature=temperature, truncation=truncation, entropy=entropy
        )
    logit_bytes = hidden_KH.element_size() if fused else 4
    room = chunk_bytes or (FUSED_CHUNK_BYTES if fused else CHUNK_BYTES)
    positions = _positions(len(targets_K), room // (logit_bytes * head.weight_VH.shape[0]))
    logprobs, entropies = _ChunkedLogprobs.apply(
        hidden_KH,
        head.weight_VH,
        head.bias_V,
        targets_K,
        *_folded(head, temperature),
        positions,
        truncation,
        entropy,
    )
    return Scores(logprobs, entropies)


def projected_logprobs_(
    projected_RV: torch.Tensor,
    head: Head,
    targets_R: torch.Tensor,
    *,
    temperature: float = 1.0,
    truncation: Truncation | None = None,
) -> torch.Tensor:
    """What `token_scores` gives for rows that `head` has projected already, to the last bit; they are used up."""
    temperature, softcap = _folded(head, temperature)
    logits = _left_of(projected_RV, targets_R, temperature, softcap, truncation)
    return _rows(logits)[0](logits, targets_R, temperature, False, softcap)[1]


def foreseen_token_scores(
    hidden_KH: torch.Tensor,
    head: Head,
    targets_K: torch.Tensor,
    foresee: Foresight,
    *,
    temperature: float = 1.0,
    truncation: Truncation | None = None,
    entropy: bool = False,
    chunk_bytes: int = FUSED_CHUNK_BYTES,
) -> Scores:
    """`token_scores` for a loss whose gradients can be told before the whole loss is there.

    They are taken in the forward pass, so no logits are kept or computed twice; the backward pass multiplies them by
    the factor that they are off by. Where it finds other gradients than were foreseen, all are NaN.
    """
    positions = _positions(len(targets_K), chunk_bytes // (hidden_KH.element_size() * head.weight_VH.shape[0]))
    logprobs, entropies = _ForeseenLogprobs.apply(
        hidden_KH,
        head.weight_VH,
        head.bias_V,
        targets_K,
        *_folded(head, temperature),
        positions,
        truncation,
        entropy,
        foresee,
    )
    return Scores(logprobs, entropies)


def _positions(count: int, most: int) -> int:
    """Positions of a chunk. Even chunks: the last one, which is not computed twice, is then as large as the others."""
    chunks = max(1, -(-count // max(1, most)))
    return max(1, -(-count // chunks))


def _folded(head: Head, temperature: float) -> tuple[float, float | None]:
    """A scale s goes into the others: c tanh(s x / c) / T = c' tanh(x / c') / T' with c' = c / s and T' = T / s."""
    return temperature / head.scale, None if head.softcap is None else head.softcap / head.scale


def plain_token_scores(
    hidden_KH: torch.Tensor,
    head: Head,
    targets_K: torch.Tensor,
    *,
    temperature: float = 1.0,
) -> Scores:
    """The twin of `token_scores` that holds all logits; autograd does the backward."""
    logits = head.logits(hidden_KH).float() / temperature
    every = logits.log_softmax(-1)
    return Scores(every.gather(-1, targets_K[:, None])[:, 0], -(every.exp() * every).sum(-1))


def row_logprobs(
    logits_RV: torch.Tensor,
    targets_R: torch.Tensor,
    temperature: float,
    entropy: bool = False,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Normaliser (log of the sum of exponentials), log-probability of the target and entropy, in fp32."""
    logits = _capped(logits_RV, softcap)
    logits = logits if temperature == 1.0 else logits / temperature
    normalisers = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets_R[:, None])[:, 0] - normalisers
    if not entropy:
        return normalisers, logprobs, None
    # Of log-probabilities, not of logits: large logits would cancel in the difference. A word of logit -inf has
    # probability 0 and a log-probability that this product can bear.
    every = (logits - normalisers[:, None]).clamp_(min=LEFT_OUT)
    return normalisers, logprobs, -(every.exp() * every).sum(-1)


def row_gradients_(
    logits_RV: torch.Tensor,
    targets_R: torch.Tensor,
    normalisers_R: torch.Tensor,
    upstream_R: torch.Tensor,
    temperature: float,
    entropies_R: torch.Tensor | None = None,
    entropy_upstream_R: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Gradient of upstream . logprobs + entropy_upstream . entropies by the logits, in the dtype of the logits.

    d logprob = onehot - p and d entropy = -p (log p + entropy), both over the temperature, and times 1 - tanh^2 where
    there is a soft cap. The logits are used up: their memory may be overwritten.
    """
    gradient = _capped(logits_RV, softcap)
    # What was left out has no slope, as if it were at the cap.
    slope = None if softcap is None else 1 - (gradient / softcap).clamp_(min=-1).square_()
    if temperature != 1.0:
        gradient.div_(temperature)
    gradient.sub_(normalisers_R[:, None])
    if entropy_upstream_R is None or entropies_R is None:
        gradient.exp_().mul_(-upstream_R[:, None])
    else:
        gradient.clamp_(min=LEFT_OUT)
        spread = (gradient + entropies_R[:, None]).mul_(entropy_upstream_R[:, None]).add_(upstream_R[:, None])
        gradient.exp_().mul_(spread).neg_()
    gradient.scatter_add_(-1, targets_R[:, None], upstream_R[:, None].to(gradient.dtype))
    if temperature != 1.0:
        gradient.div_(temperature)
    if slope is not None:
        gradient.mul_(slope)
    return gradient.to(logits_RV.dtype)


def _capped(logits_RV: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """In fp32. What a truncation left out stays far below: capped, it would come back."""
    if softcap is None:
        return logits_RV.float()
    capped = (logits_RV.float() / softcap).tanh_().mul_(softcap)
    return capped.masked_fill_(logits_RV <= left_out_below(logits_RV.dtype), LEFT_OUT)


def _rows(tensor: torch.Tensor) -> tuple[Any, Any]:
    """`row_logprobs` and `row_gradients_` for the device of `tensor`."""
    fused = _fused(tensor)
    return (fused.row_logprobs, fused.row_gradients_) if fused else (row_logprobs, row_gradients_)


def _fused(tensor: torch.Tensor) -> ModuleType | None:
    if not tensor.is_cuda or importlib.util.find_spec("triton") is None:
        return None
    from lockstep.kernels import logprob_triton as triton_logprob

    return triton_logprob


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        softcap: float | None,
        positions: int,
        truncation: Truncation | None,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        normalisers = torch.empty_like(logprobs)
        entropies = torch.empty_like(logprobs) if entropy else None
        score, _ = _rows(hidden)
        logits = None
        for start in range(0, len(targets), positions):
            part = slice(start, start + positions)
            logits = None  # before the next chunk takes its memory
            logits = _logits(hidden[part], weight, bias, targets[part], temperature, softcap, truncation)
            normalisers[part], logprobs[part], spread = score(logits, targets[part], temperature, entropy, softcap)
            if entropies is not None:
                entropies[part] = spread
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers, entropies)
        ctx.temperature, ctx.softcap, ctx.positions, ctx.truncation = temperature, softcap, positions, truncation
        ctx.set_materialize_grads(False)
        # The backward begins with the chunk that stands in memory anyway; only the others are computed twice.
        ctx.last_logits = logits
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        upstream, entropy_upstream = grads
        hidden, weight, bias, targets, normalisers, entropies = ctx.saved_tensors
        if upstream is None:
            upstream = torch.zeros_like(normalisers)
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        single = _fused(hidden) is not None and len(targets) <= ctx.positions
        sums = _WeightSums(weight, single) if want_weight else None
        grad_bias = torch.zeros(bias.shape, dtype=torch.float32, device=weight.device) if want_bias else None
        _, differentiate = _rows(hidden)
        for start in reversed(range(0, len(targets), ctx.positions)):
            part = slice(start, start + ctx.positions)
            logits, ctx.last_logits = ctx.last_logits, None
            if logits is None:
                logits = _logits(
                    hidden[part], weight, bias, targets[part], ctx.temperature, ctx.softcap, ctx.truncation
                )
            extra = (None, None) if entropy_upstream is None else (entropies[part], entropy_upstream[part])
            grad_logits = differentiate(
                logits, targets[part], normalisers[part], upstream[part], ctx.temperature, *extra, ctx.softcap
            )
            states = None if grad_hidden is None else grad_hidden[part]
            _add_gradients(grad_logits, hidden[part], weight, states, sums, grad_bias)
        return (
            grad_hidden,
            None if sums is None else sums.total(),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 6,
        )


class _ForeseenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        softcap: float | None,
        positions: int,
        truncation: Truncation | None,
        entropy: bool,
        foresee: Foresight,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs) if entropy else None
        # One row for log-probabilities, one for entropies.
        foreseen = torch.zeros(2, len(targets), dtype=torch.float32, device=hidden.device)
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        sums = _WeightSums(weight, len(targets) <= positions) if want_weight else None
        grad_bias = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device) if want_bias else None
        score, differentiate = _rows(hidden)
        for start in range(0, len(targets), positions):
            part = slice(start, start + positions)
            logits = _logits(hidden[part], weight, bias, targets[part], temperature, softcap, truncation)
            normalisers, logprobs[part], spread = score(logits, targets[part], temperature, entropy, softcap)
            upstream, entropy_upstream = foresee(logprobs[part], spread, part)
            foreseen[0, part] = upstream
            if entropies is not None:
                entropies[part] = spread
            if entropy_upstream is not None:
                foreseen[1, part] = entropy_upstream
            extra = (None, None) if entropy_upstream is None else (spread, entropy_upstream)
            grad_logits = differentiate(logits, targets[part], normalisers, upstream, temperature, *extra, softcap)
            states = None if grad_hidden is None else grad_hidden[part]
            _add_gradients(grad_logits, hidden[part], weight, states, sums, grad_bias)
            del logits, grad_logits  # before the next chunk takes its memory
        ctx.save_for_backward(foreseen, grad_hidden, None if sums is None else sums.sums, grad_bias)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        ctx.shape = weight.shape
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        foreseen, grad_hidden, sums, grad_bias = ctx.saved_tensors
        found = torch.stack([torch.zeros_like(foreseen[0]) if grad is None else grad for grad in grads])
        factor = _factor(foreseen.flatten(), found.flatten())
        weight, bias = ctx.dtypes
        if sums is None and ctx.needs_input_grad[1]:  # no target at all
            sums = foreseen.new_zeros(ctx.shape)
        return (
            None if grad_hidden is None else (grad_hidden * factor).to(grad_hidden.dtype),
            # Into the weight's dtype in one pass, without another fp32 tensor.
            None if sums is None else torch.mul(sums, factor, out=torch.empty_like(sums, dtype=weight)),
            None if grad_bias is None else (grad_bias * factor).to(bias),
            *[None] * 7,
        )


def _factor(foreseen: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """What the found gradients are of the foreseen ones; NaN where that is not one number. Nobody waits for it."""
    if not len(foreseen):
        return foreseen.new_zeros(())
    largest = foreseen.abs().argmax(0, keepdim=True)
    top = foreseen.gather(0, largest)
    factor = torch.where(top == 0, 0.0, found.gather(0, largest) / top)
    near = (found - factor * foreseen).abs() <= FORESEEN_WITHIN * (factor * top).abs()
    return torch.where(near.all(), factor, torch.nan)[0]


def _add_gradients(
    grad_logits_RV: torch.Tensor,
    hidden_RH: torch.Tensor,
    weight_VH: torch.Tensor,
    grad_hidden_RH: torch.Tensor | None,
    sums: _WeightSums | None,
    grad_bias_V: torch.Tensor | None,
) -> None:
    """What a chunk's logits pull at: its own states, and the projection, whose gradients add up. None is not wanted."""
    if grad_bias_V is not None:
        grad_bias_V += grad_logits_RV.sum(0, dtype=torch.float32)
    if grad_hidden_RH is not None:
        torch.mm(grad_logits_RV, weight_VH, out=grad_hidden_RH)
    if sums is not None:
        sums.add(grad_logits_RV, hidden_RH)


class _WeightSums:
    """The weight's gradient, added up over chunks in fp32: a bf16 running sum would lose the small ones."""

    def __init__(self, weight: torch.Tensor, single: bool):
        self.weight = weight
        # Of one chunk nothing is to be added up: its product is the gradient.
        self.sums = None if single else torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)

    def add(self, grad_logits_RV: torch.Tensor, hidden_RH: torch.Tensor) -> None:
        if self.sums is None:
            self.sums = grad_logits_RV.t() @ hidden_RH
        elif self.sums.dtype == grad_logits_RV.dtype:
            self.sums.addmm_(grad_logits_RV.t(), hidden_RH)
        elif _adds_wide(self.sums.device, grad_logits_RV.dtype):
            # Inside the product, without a tensor and a rounding in between.
            torch.addmm(self.sums, grad_logits_RV.t(), hidden_RH, out_dtype=torch.float32, out=self.sums)
        else:
            self.sums += grad_logits_RV.t() @ hidden_RH

    def total(self) -> torch.Tensor:
        if self.sums is None:  # no target at all
            return torch.zeros_like(self.weight)
        return self.sums.to(self.weight.dtype)


@cache
def _adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch adds a product of `dtype` to fp32 sums in place here, as it does on NVIDIA devices."""
    if device.type != "cuda":
        return False
    one = torch.ones(16, 16, dtype=dtype, device=device)
    sums = torch.full((16, 16), 1 / 3, device=device)
    try:
        torch.addmm(sums, one.t(), one, out_dtype=torch.float32, out=sums)
    except (RuntimeError, TypeError):
        return False
    return bool(torch.equal(sums, torch.full_like(sums, 16 + 1 / 3)))


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    softcap: float | None,
    truncation: Truncation | None,
) -> torch.Tensor:
    """Logits of a chunk as they are projected; what a truncation leaves out gets no probability and no gradient.

    The soft cap and the temperature do not change their order, but they do change shares of probability.
    """
    return _left_of(torch.nn.functional.linear(hidden, weight, bias), targets, temperature, softcap, truncation)


def _left_of(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    softcap: float | None,
    truncation: Truncation | None,
) -> torch.Tensor:
    """In place."""
    if truncation is None or not truncation.active:
        return logits
    left_out = truncate_(_capped(logits, softcap) / temperature, truncation, targets) == LEFT_OUT
    return logits.masked_fill_(left_out, max(LEFT_OUT, torch.finfo(logits.dtype).min))
