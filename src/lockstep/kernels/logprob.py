"""Computes log-probs of target tokens from hidden states (fused linear + log-softmax), in chunks to save memory.

Tensor names end with their dimensions, which are K positions, R positions of one chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from lockstep.kernels.sampling import LEFT_OUT, Truncation, left_out_below, truncate_

# The maximum size of one chunk of logits is CHUNK_BYTES for the plain-torch reference and FUSED_CHUNK_BYTES for the
# fused kernels. With a vocabulary of 151,936 a chunk of the reference has 440 positions and needs about 1 GiB at the
# peak, because of its fp32 copies. With the same vocabulary, a chunk of the fused kernels has 3,500 positions in bf16
# and is computed in place. The fp32 accumulator of the weight gradient needs additional memory: 0.5 GiB for a hidden
# size of 896. The chunk size is the same with and without gradients, so that a token gets the same log-prob in every
# forward pass.
CHUNK_BYTES = 256 * 2**20
FUSED_CHUNK_BYTES = 2**30
# Largest accepted difference between `token_grads` and the actual loss gradients, relative to the largest gradient.
# Correct `token_grads` differ from the loss gradients only by rounding.
TOKEN_GRADS_TOLERANCE = 1e-4


class Head(NamedTuple):
    """The output head: a projection, a scale and a soft cap (c * tanh(logit / c))."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits in fp32, or in the dtype of the states if the head is only a projection."""
        return self.shaped(self.projected(hidden))

    def projected(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self.rounded(hidden), self.weight_VH, self.bias_V)

    def rounded(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rounds fp32 states to the dtype of the projection, as transformers does. A bf16 model returns fp32 states if
        it adds up its residuals in fp32 (Mamba)."""
        return hidden.to(self.weight_VH.dtype) if hidden.dtype == torch.float32 else hidden

    def shaped(self, logits: torch.Tensor) -> torch.Tensor:
        """Applies the scale and the soft cap of the output head to projected logits."""
        if self.scale != 1.0:
            logits = logits.float() * self.scale
        return logits if self.softcap is None else (logits.float() / self.softcap).tanh() * self.softcap


class Scores(NamedTuple):
    """For each target token: its log-prob, the entropy of the distribution, the divergence from a teacher, and the sum
    of squared probabilities. Values that were not requested are None."""

    logprobs_K: torch.Tensor
    entropies_K: torch.Tensor | None
    divergences_K: torch.Tensor | None = None
    squares_K: torch.Tensor | None = None


TokenGrads = Callable[[torch.Tensor, torch.Tensor | None, slice], tuple[torch.Tensor, torch.Tensor | None]]
"""A function that takes the log-probs and entropies of a slice of the positions. The function returns the gradients of
the loss with respect to log-probs and entropies, up to one factor common to all positions. Only a loss whose tokens are
independent of each other has a `TokenGrads` function."""


def uniform_token_grads(
    logprobs_R: torch.Tensor, entropies_R: torch.Tensor | None, part: slice
) -> tuple[torch.Tensor, None]:
    """Returns the token gradients of a loss in which all log-probs have the same weight, as in SFT."""
    return torch.ones_like(logprobs_R), None


def token_scores(
    hidden_KH: torch.Tensor,
    head: Head,
    targets_K: torch.Tensor,
    *,
    temperature: float = 1.0,
    truncation: Truncation | None = None,
    entropy: bool = False,
    token_grads: TokenGrads | None = None,
    chunk_bytes: int | None = None,
) -> Scores:
    """Returns log softmax(logits / temperature)[target] in fp32, with entropies if requested; both are differentiable.

    Forward and backward run in chunks of positions. With a `truncation` (top-k, top-p), truncated tokens have
    probability 0. The target token is never truncated. If `token_grads` is given and the device has fused kernels, the
    forward pass computes the gradients too (see `token_scores_with_grads`).
    """
    hidden_KH = head.rounded(hidden_KH)
    fused = _fused(hidden_KH) is not None
    needs_grad = torch.is_grad_enabled() and (hidden_KH.requires_grad or head.weight_VH.requires_grad)
    # fp16 is excluded, because fp16 gradients must be multiplied by the loss scale before they are rounded.
    if token_grads is not None and fused and needs_grad and hidden_KH.dtype != torch.float16:
        return token_scores_with_grads(
            hidden_KH, head, targets_K, token_grads, temperature=temperature, truncation=truncation, entropy=entropy
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
    """Returns bitwise the same log-probs as `token_scores`, for logits that `head` has already projected. The logits
    are overwritten."""
    temperature, softcap = _folded(head, temperature)
    logits = _truncated(projected_RV, targets_R, temperature, softcap, truncation)
    return _rows(logits)[0](logits, targets_R, temperature, False, softcap)[1]


def token_scores_with_grads(
    hidden_KH: torch.Tensor,
    head: Head,
    targets_K: torch.Tensor,
    token_grads: TokenGrads,
    *,
    temperature: float = 1.0,
    truncation: Truncation | None = None,
    entropy: bool = False,
    chunk_bytes: int = FUSED_CHUNK_BYTES,
) -> Scores:
    """Like `token_scores`, for a loss whose gradient per token (`token_grads`) is known before the loss is computed.

    Gradients are computed in the forward pass, so logits are neither kept nor recomputed. The backward pass only
    multiplies the computed gradients by a factor that is common to all tokens. If the gradients that the backward pass
    receives do not match `token_grads`, all gradients are NaN.
    """
    positions = _positions(len(targets_K), chunk_bytes // (hidden_KH.element_size() * head.weight_VH.shape[0]))
    logprobs, entropies = _LogprobsWithGrads.apply(
        hidden_KH,
        head.weight_VH,
        head.bias_V,
        targets_K,
        *_folded(head, temperature),
        positions,
        truncation,
        entropy,
        token_grads,
    )
    return Scores(logprobs, entropies)


def _positions(count: int, most: int) -> int:
    """Returns the number of positions per chunk, at most `most`. All chunks have about the same size. The backward pass
    does not recompute the last chunk, so a small last chunk would save little."""
    chunks = max(1, -(-count // max(1, most)))
    return max(1, -(-count // chunks))


def _folded(head: Head, temperature: float) -> tuple[float, float | None]:
    """Folds a scale s into cap and temperature: c tanh(s x / c) / T = c' tanh(x / c') / T', c' = c / s, T' = T / s."""
    return temperature / head.scale, None if head.softcap is None else head.softcap / head.scale


def plain_token_scores(
    hidden_KH: torch.Tensor,
    head: Head,
    targets_K: torch.Tensor,
    *,
    temperature: float = 1.0,
) -> Scores:
    """Reference implementation of `token_scores` with all logits in memory; autograd computes the backward."""
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
    """Returns log-sum-exp, log-prob of the target, and entropy, in fp32."""
    logits = _capped(logits_RV, softcap)
    logits = logits if temperature == 1.0 else logits / temperature
    normalisers = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets_R[:, None])[:, 0] - normalisers
    if not entropy:
        return normalisers, logprobs, None
    # The entropy is computed from log-probs, because differences of large logits would lose precision. The clamp of
    # log-probs avoids NaN from 0 * -inf.
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
    """Returns the gradient of upstream . logprobs + entropy_upstream . entropies with respect to the logits.

    The gradient of a log-prob is onehot - p, and that of an entropy is -p (log p + entropy). Both gradients are divided
    by the temperature and, with a soft cap, multiplied by 1 - tanh^2. The result has the dtype of `logits_RV`, which
    may be overwritten.
    """
    gradient = _capped(logits_RV, softcap)
    # Truncated tokens get a zero gradient, like logits whose absolute value reaches the soft cap.
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
    """Returns soft-capped logits in fp32. The logits of truncated tokens stay LEFT_OUT, because a soft-capped value
    would give these tokens a probability."""
    if softcap is None:
        return logits_RV.float()
    capped = (logits_RV.float() / softcap).tanh_().mul_(softcap)
    return capped.masked_fill_(logits_RV <= left_out_below(logits_RV.dtype), LEFT_OUT)


def _rows(tensor: torch.Tensor) -> tuple[Any, Any]:
    """Returns the implementations of `row_logprobs` and `row_gradients_` for the device of `tensor`."""
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
            logits = None  # free the memory for the next chunk
            logits = _logits(hidden[part], weight, bias, targets[part], temperature, softcap, truncation)
            normalisers[part], logprobs[part], spread = score(logits, targets[part], temperature, entropy, softcap)
            if entropies is not None:
                entropies[part] = spread
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers, entropies)
        ctx.temperature, ctx.softcap, ctx.positions, ctx.truncation = temperature, softcap, positions, truncation
        ctx.set_materialize_grads(False)
        # The backward pass starts with the last chunk, whose logits are still in memory, and recomputes the other
        # chunks.
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


class _LogprobsWithGrads(torch.autograd.Function):
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
        token_grads: TokenGrads,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs) if entropy else None
        # Row 0 has the gradients with respect to the log-probs, row 1 those with respect to the entropies.
        predicted = torch.zeros(2, len(targets), dtype=torch.float32, device=hidden.device)
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        sums = _WeightSums(weight, len(targets) <= positions) if want_weight else None
        grad_bias = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device) if want_bias else None
        score, differentiate = _rows(hidden)
        for start in range(0, len(targets), positions):
            part = slice(start, start + positions)
            logits = _logits(hidden[part], weight, bias, targets[part], temperature, softcap, truncation)
            normalisers, logprobs[part], spread = score(logits, targets[part], temperature, entropy, softcap)
            upstream, entropy_upstream = token_grads(logprobs[part], spread, part)
            predicted[0, part] = upstream
            if entropies is not None:
                entropies[part] = spread
            if entropy_upstream is not None:
                predicted[1, part] = entropy_upstream
            extra = (None, None) if entropy_upstream is None else (spread, entropy_upstream)
            grad_logits = differentiate(logits, targets[part], normalisers, upstream, temperature, *extra, softcap)
            states = None if grad_hidden is None else grad_hidden[part]
            _add_gradients(grad_logits, hidden[part], weight, states, sums, grad_bias)
            del logits, grad_logits  # free the memory for the next chunk
        ctx.save_for_backward(predicted, grad_hidden, None if sums is None else sums.sums, grad_bias)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        ctx.shape = weight.shape
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        predicted, grad_hidden, sums, grad_bias = ctx.saved_tensors
        actual = torch.stack([torch.zeros_like(predicted[0]) if grad is None else grad for grad in grads])
        factor = _factor(predicted.flatten(), actual.flatten())
        weight, bias = ctx.dtypes
        if sums is None and ctx.needs_input_grad[1]:  # there were no targets
            sums = predicted.new_zeros(ctx.shape)
        return (
            None if grad_hidden is None else (grad_hidden * factor).to(grad_hidden.dtype),
            # The weight gradient is written in the weight's dtype directly, so that no other fp32 tensor is allocated.
            None if sums is None else torch.mul(sums, factor, out=torch.empty_like(sums, dtype=weight)),
            None if grad_bias is None else (grad_bias * factor).to(bias),
            *[None] * 7,
        )


def _factor(predicted: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Returns the factor between the loss gradients of the backward pass and those that the forward pass assumed, or
    NaN if the factor differs between tokens. Does not sync with the device."""
    if not len(predicted):
        return predicted.new_zeros(())
    argmax = predicted.abs().argmax(0, keepdim=True)
    largest = predicted.gather(0, argmax)
    factor = torch.where(largest == 0, 0.0, actual.gather(0, argmax) / largest)
    close = (actual - factor * predicted).abs() <= TOKEN_GRADS_TOLERANCE * (factor * largest).abs()
    return torch.where(close.all(), factor, torch.nan)[0]


def _add_gradients(
    grad_logits_RV: torch.Tensor,
    hidden_RH: torch.Tensor,
    weight_VH: torch.Tensor,
    grad_hidden_RH: torch.Tensor | None,
    sums: _WeightSums | None,
    grad_bias_V: torch.Tensor | None,
) -> None:
    """Adds the gradients of one chunk for hidden states, weight and bias to their accumulators. An accumulator that is
    None is skipped."""
    if grad_bias_V is not None:
        grad_bias_V += grad_logits_RV.sum(0, dtype=torch.float32)
    if grad_hidden_RH is not None:
        torch.mm(grad_logits_RV, weight_VH, out=grad_hidden_RH)
    if sums is not None:
        sums.add(grad_logits_RV, hidden_RH)


class _WeightSums:
    """Accumulator of the weight gradient over chunks in fp32; a bf16 sum would lose small terms."""

    def __init__(self, weight: torch.Tensor, single: bool):
        self.weight = weight
        # With a single chunk no accumulator is needed: the matmul result is already the weight gradient.
        self.sums = None if single else torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)

    def add(self, grad_logits_RV: torch.Tensor, hidden_RH: torch.Tensor) -> None:
        if self.sums is None:
            self.sums = grad_logits_RV.t() @ hidden_RH
        elif self.sums.dtype == grad_logits_RV.dtype:
            self.sums.addmm_(grad_logits_RV.t(), hidden_RH)
        elif _adds_wide(self.sums.device, grad_logits_RV.dtype):
            # The matmul accumulates in place, without a temporary tensor and its rounding.
            torch.addmm(self.sums, grad_logits_RV.t(), hidden_RH, out_dtype=torch.float32, out=self.sums)
        else:
            self.sums += grad_logits_RV.t() @ hidden_RH

    def total(self) -> torch.Tensor:
        if self.sums is None:  # there were no targets
            return torch.zeros_like(self.weight)
        return self.sums.to(self.weight.dtype)


@cache
def _adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether torch can add a product of `dtype` to fp32 sums in place on this device (NVIDIA devices can)."""
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
    """Returns the projected logits of a chunk, in which truncated tokens get no probability and no gradient.

    The soft cap and temperature are applied only to find the truncated tokens (top-p). The returned logits are neither
    capped nor divided by the temperature.
    """
    return _truncated(torch.nn.functional.linear(hidden, weight, bias), targets, temperature, softcap, truncation)


def _truncated(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    softcap: float | None,
    truncation: Truncation | None,
) -> torch.Tensor:
    """Applies a truncation (top-k, top-p) to the logits in place."""
    if truncation is None or not truncation.active:
        return logits
    left_out = truncate_(_capped(logits, softcap) / temperature, truncation, targets) == LEFT_OUT
    return logits.masked_fill_(left_out, max(LEFT_OUT, torch.finfo(logits.dtype).min))
