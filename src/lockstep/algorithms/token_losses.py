"""Losses per token or position: next-token prediction, process reward labels, critic values, MoE router balance."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lockstep.algorithms.reduce import floor_logprobs
from lockstep.types import Sums


def nll(logprobs_K: torch.Tensor) -> Sums:
    """Negative log-likelihood of the K target tokens of a micro-batch: the cross entropy of next-token prediction.

    The result is a sum, not a mean: the training step divides it once by the number of target tokens of the update. The
    final loss is thus the per-token mean over the update, as in transformers with `num_items_in_batch`. A token with
    the log-prob -inf costs 10,000 nats; see `floor_logprobs`.
    """
    return Sums(loss=-floor_logprobs(logprobs_K).sum())


# Process reward models. Tensor names end with their dimensions, which are L labelled positions, W label tokens. The
# first label token means that the step is good.


def step_loss(logprobs_LW: torch.Tensor, labels_LW: torch.Tensor) -> Sums:
    """Cross entropy to the labels, with the model's distribution restricted to the label tokens.

    A label is a distribution over the label tokens, one-hot for hard labels. Metrics are sums over positions:
    `positive` is the probability of the good token in the model, `label_positive` is its probability in the label, and
    `accuracy` is 1 if model and label have the same most likely token. Ties give a fraction: with two label tokens, a
    label of 0.5 or equal log-probs give accuracy 0.5. If all label tokens are impossible, they are treated as equally
    likely; see `floor_logprobs`.
    """
    restricted_LW = torch.log_softmax(floor_logprobs(logprobs_LW), dim=-1)
    loss = -(labels_LW * restricted_LW).sum()
    agreement_LW = _likeliest(restricted_LW.detach()) * _likeliest(labels_LW)
    metrics = {
        "accuracy": agreement_LW.sum(),
        "positive": good_probability(logprobs_LW.detach()).sum(),
        "label_positive": labels_LW[:, 0].sum(),
    }
    return Sums(loss=loss, metrics=metrics)


def good_probability(logprobs_LW: torch.Tensor) -> torch.Tensor:
    """The probability of the good (first) label token at each position, among the label tokens."""
    return torch.softmax(floor_logprobs(logprobs_LW), dim=-1)[:, 0]


def _likeliest(values_LW: torch.Tensor) -> torch.Tensor:
    """1 at the largest value of each position, 0 elsewhere; equal largest values share the 1."""
    largest_LW = (values_LW == values_LW.amax(dim=-1, keepdim=True)).to(values_LW.dtype)
    return largest_LW / largest_LW.sum(dim=-1, keepdim=True)


def value_loss(
    values_K: torch.Tensor,
    old_values_K: torch.Tensor,
    returns_K: torch.Tensor,
    weights_K: torch.Tensor,
    *,
    clip: float | None,
) -> Sums:
    """The critic's loss: half the squared error to the return, with the value clipped around the old value.

    PPO's clipped value loss, as in the code of the paper (arXiv 1707.06347): 0.5 max((v - R)^2, (clip(v, old +- clip) -
    R)^2). Without `clip` the loss is 0.5 (v - R)^2. Tokens of weight 0 have no effect. Metrics are sums over the tokens
    of non-zero weight: `vf_clipfrac` counts the tokens where the clip is active, `vpred` is the sum of the values.
    """
    counted_K = weights_K > 0
    values_K = torch.where(counted_K, values_K, 0.0)
    old_values_K = torch.where(counted_K, old_values_K, 0.0)
    returns_K = torch.where(counted_K, returns_K, 0.0)
    square_K = (values_K - returns_K).square()
    clipped_K = torch.zeros_like(counted_K)
    if clip is not None:
        near_K = torch.clamp(values_K, old_values_K - clip, old_values_K + clip)
        near_square_K = (near_K - returns_K).square()
        clipped_K = near_square_K > square_K
        square_K = torch.maximum(square_K, near_square_K)
    metrics = {
        "vf_clipfrac": (clipped_K & counted_K).sum().to(square_K.dtype),
        "vpred": values_K.detach().sum(),
    }
    return Sums(loss=0.5 * (weights_K * square_K).sum(), metrics=metrics)


# The load-balancing loss of MoE routers (Switch Transformer, Fedus et al. 2021, equations 4 to 6).


class Routed(NamedTuple):
    """Sums over tokens and layers: how often each expert was chosen, the router probability of each expert.

    `rows` is the number of routing decisions (tokens x layers).
    """

    chosen_E: torch.Tensor
    probs_E: torch.Tensor
    rows: torch.Tensor


def count_routed(logits: tuple[torch.Tensor, ...], experts: int, weights_T: torch.Tensor) -> Routed:
    """Computes `Routed` from the router logits, one tensor [tokens, experts] per layer.

    Each token is routed to `experts` experts; `weights_T` is the number of sequences that contain the token (0 for
    padding).
    """
    weights_T = weights_T.float()
    chosen_E = torch.zeros(logits[0].shape[-1], device=logits[0].device)
    probs_E = torch.zeros_like(chosen_E)
    for layer_TE in logits:
        probs_TE = layer_TE.float().softmax(-1)
        chosen_TK = probs_TE.topk(experts, dim=-1).indices
        chosen_E = chosen_E.index_add(0, chosen_TK.flatten(), weights_T.repeat_interleave(experts))
        probs_E = probs_E + weights_T @ probs_TE
    return Routed(chosen_E, probs_E, weights_T.sum() * len(logits))


def load_balance(chosen_E: torch.Tensor, probs_E: torch.Tensor, rows: float) -> torch.Tensor:
    """E * sum_e f_e * P_e: f_e is the fraction of tokens routed to expert e, P_e its mean router probability.

    f_e and P_e are means over `rows` routing decisions. With the `probs_E` of a micro-batch the result is the
    micro-batch's summand of the loss. P_e has a gradient, and f_e has none.
    """
    return len(probs_E) * (chosen_E / rows * (probs_E / rows)).sum()
