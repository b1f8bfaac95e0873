"""Log-probabilities of chosen tokens straight from hidden states, never holding all logits.

Shapes: K positions, R positions of one chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import torch

# Memory of one chunk of logits. The twin works on fp32 copies of it (440 positions of 151,936 words), the fused kernels
# in place (3,500 positions in bf16): both take about 1 GiB at their peak.
CHUNK_BYTES = 256 * 2**20
FUSED_CHUNK_BYTES = 2**30


def token_logprobs(
    hidden_KH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_K: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    temperature: float = 1.0,
    chunk_bytes: int | None = None,
) -> torch.Tensor:
    """log softmax(hidden @ weight.T / temperature)[target] in fp32, in chunks of positions, forward and backward."""
    fused = _fused(hidden_KH) is not None
    logit_bytes = hidden_KH.element_size() if fused else 4
    room = chunk_bytes or (FUSED_CHUNK_BYTES if fused else CHUNK_BYTES)
    most = max(1, room // (logit_bytes * weight_VH.shape[0]))
    # Even chunks: the last one, which is not computed twice, is then as large as the others.
    chunks = max(1, -(-len(targets_K) // most))
    positions = max(1, -(-len(targets_K) // chunks))
    return _ChunkedLogprobs.apply(hidden_KH, weight_VH, bias_V, targets_K, temperature, positions)


def plain_token_logprobs(
    hidden_KH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_K: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """The twin of `token_logprobs` that holds all logits; autograd does the backward."""
    logits = torch.nn.functional.linear(hidden_KH, weight_VH, bias_V).float() / temperature
    return logits.log_softmax(-1).gather(-1, targets_K[:, None])[:, 0]


def row_logprobs(
    logits_RV: torch.Tensor, targets_R: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normaliser (log of the sum of exponentials) and log-probability of the target, in fp32."""
    logits = logits_RV.float() if temperature == 1.0 else logits_RV.float() / temperature
    normalisers = logits.logsumexp(-1)
    return normalisers, logits.gather(-1, targets_R[:, None])[:, 0] - normalisers


def row_gradients_(
    logits_RV: torch.Tensor,
    targets_R: torch.Tensor,
    normalisers_R: torch.Tensor,
    upstream_R: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """d(upstream . logprobs) / d logits = upstream (onehot - softmax) / temperature, in the dtype of the logits.

    The logits are used up: their memory may be overwritten.
    """
    gradient = logits_RV.float() if temperature == 1.0 else logits_RV.float().div_(temperature)
    gradient.sub_(normalisers_R[:, None]).exp_().mul_(-upstream_R[:, None])
    gradient.scatter_add_(-1, targets_R[:, None], upstream_R[:, None].to(gradient.dtype))
    if temperature != 1.0:
        gradient.div_(temperature)
    return gradient.to(logits_RV.dtype)


def _rows(tensor: torch.Tensor) -> tuple[Any, Any]:
    """`row_logprobs` and `row_gradients_` for the device of `tensor`."""
    fused = _fused(tensor)
    return (fused.row_logprobs, fused.row_gradients_) if fused else (row_logprobs, row_gradients_)


def _fused(tensor: torch.Tensor) -> ModuleType | None:
    if not tensor.is_cuda or importlib.util.find_spec("triton") is None:
        return None
    from lockstep.kernels import triton_logprob

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
        positions: int,
    ) -> torch.Tensor:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        normalisers = torch.empty_like(logprobs)
        score, _ = _rows(hidden)
        logits = None
        for start in range(0, len(targets), positions):
            part = slice(start, start + positions)
            logits = None  # before the next chunk takes its memory
            logits = torch.nn.functional.linear(hidden[part], weight, bias)
            normalisers[part], logprobs[part] = score(logits, targets[part], temperature)
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers)
        ctx.temperature, ctx.positions = temperature, positions
        # The backward begins with the chunk that stands in memory anyway; only the others are computed twice.
        ctx.last_logits = logits
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (upstream,) = grads
        hidden, weight, bias, targets, normalisers = ctx.saved_tensors
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        # fp32 sums: a bf16 running sum over many chunks would lose the small ones.
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if want_weight else None
        grad_bias = torch.zeros(bias.shape, dtype=torch.float32, device=weight.device) if want_bias else None
        _, differentiate = _rows(hidden)
        for start in reversed(range(0, len(targets), ctx.positions)):
            part = slice(start, start + ctx.positions)
            logits, ctx.last_logits = ctx.last_logits, None
            if logits is None:
                logits = torch.nn.functional.linear(hidden[part], weight, bias)
            grad_logits = differentiate(logits, targets[part], normalisers[part], upstream[part], ctx.temperature)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=torch.float32)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                if grad_weight.dtype == grad_logits.dtype:
                    grad_weight.addmm_(grad_logits.t(), hidden[part])
                else:
                    grad_weight += grad_logits.t() @ hidden[part]
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )
