"""The loss that keeps the experts of a mixture busy alike (Switch Transformer, Fedus et al. 2021, equations 4 to 6)."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Routed(NamedTuple):
    """Of some tokens, added up over layers: how often each expert was chosen, the routers' probabilities, and how many
    choices there were (tokens x layers)."""

    chosen_E: torch.Tensor
    probs_E: torch.Tensor
    rows: torch.Tensor


def routed(logits: tuple[torch.Tensor, ...], experts: int, weights_T: torch.Tensor) -> Routed:
    """Sums of the routers' logits, one tensor of [tokens, experts] a layer. `experts` are chosen of a token, and
    `weights_T` says how many sequences have it: 0 of padding."""
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
    """E * sum_e f_e * P_e: f_e is the part of the tokens that expert e was chosen for, P_e its mean probability.

    Both are means over the same `rows`; with `probs_E` of a part of them this is that part of the sum. The gradient
    goes through the probabilities alone.
    """
    return len(probs_E) * (chosen_E / rows * (probs_E / rows)).sum()
