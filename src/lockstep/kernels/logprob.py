"""Log-probabilities of chosen tokens straight from hidden states, never holding all logits.

Shapes: K positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

# Memory of one chunk of fp32 logits. With 151,936 words this is some 440 positions a chunk.
CHUNK_BYTES = 256 * 2**20


def token_logprobs(
    hidden_KH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_K: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    temperature: float = 1.0,
    chunk_bytes: int = CHUNK_BYTES,
) -> torch.Tensor:
    """log softmax(hidden @ weight.T / temperature)[target] in fp32, in chunks of positions, forward and backward."""
    positions = max(1, chunk_bytes // (4 * weight_VH.shape[0]))
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


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


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
        for start in range(0, len(targets), positions):
            part = slice(start, start + positions)
            logits = _logits(hidden[part], weight, bias, temperature)
            normalisers[part] = logits.logsumexp(-1)
            logprobs[part] = logits.gather(-1, targets[part, None])[:, 0] - normalisers[part]
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers)
        ctx.temperature, ctx.positions = temperature, positions
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_K,) = grads
        hidden, weight, bias, targets, normalisers = ctx.saved_tensors
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        # fp32 sums: a bf16 running sum over many chunks would lose the small ones.
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if want_weight else None
        grad_bias = torch.zeros(bias.shape, dtype=torch.float32, device=weight.device) if want_bias else None
        for start in range(0, len(targets), ctx.positions):
            part = slice(start, start + ctx.positions)
            # d logprob[target] / d logits = onehot(target) - softmax, scaled by the incoming gradient.
            grad_logits = _logits(hidden[part], weight, bias, ctx.temperature)
            grad_logits.sub_(normalisers[part, None]).exp_().mul_(-grad_K[part, None])
            grad_logits.scatter_add_(-1, targets[part, None], grad_K[part, None].to(grad_logits.dtype))
            if ctx.temperature != 1.0:
                grad_logits.div_(ctx.temperature)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden.dtype)
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
