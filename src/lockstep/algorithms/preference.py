"""Losses of a pair of responses, the chosen and the rejected, as sums over pairs.

Shapes: P pairs of a micro-batch. A response's score is its log-ratio log p - log p_ref, or log p where the loss has no
reference; summed over its tokens, or their mean. The losses themselves are in `pair_losses`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lockstep.algorithms.pair_losses import (
    ALWAYS_MEANS,
    DIVERGENT,
    LOSSES,
    RANKED,
    REFERENCE_FREE,
    SMOOTHED,
    Partners,
    divergent_scores,
)
from lockstep.algorithms.stable import LEAST_SUM, floored, log_ratio
from lockstep.errors import Refusal
from lockstep.types import Sums


@dataclass(frozen=True)
class Pairs:
    """Log-probabilities summed over each response, the responses' tokens, and the reference's sums if there is one.

    `likelihood_P` is the chosen response's sum for the term `nll`, where the other sums weigh tokens (LD-DPO).
    """

    chosen_P: torch.Tensor
    rejected_P: torch.Tensor
    chosen_length_P: torch.Tensor
    rejected_length_P: torch.Tensor
    reference_chosen_P: torch.Tensor | None
    reference_rejected_P: torch.Tensor | None
    likelihood_P: torch.Tensor | None = None


def preference_loss(
    pairs: Pairs,
    *,
    kind: str,
    beta: float,
    label_smoothing: float = 0.0,
    gamma: float = 0.0,
    discopop_tau: float = 0.05,
    divergence: str = "reverse_kl",
    alpha: float = 0.5,
    average: bool = False,
    nll: float = 0.0,
    partners: Partners | None = None,
) -> Sums:
    """The loss `kind` of each pair, plus `nll` times the chosen response's mean negative log-likelihood (RPO's term).

    `average` divides every score by its response's length; `simpo` and `orpo` always do. `nll` is a mean over each
    response's own tokens (arXiv 2404.19733), not over all the tokens of the batch. `divergence` is f-DPO's choice,
    made of the whole response's ratio before any mean. The losses by rank need their `partners` of the whole update.

    Metrics are sums over pairs: `chosen` and `rejected` implicit rewards (beta times the score that the loss sees),
    `margin` their difference, `accuracy` where it is positive (a tie is 0.5), and `nll`, unweighted, if it is asked.
    """
    settings = _settings(kind, beta, label_smoothing, gamma, discopop_tau, divergence)
    chosen_P, rejected_P = _scores(pairs, kind, average, divergence, alpha)
    if kind in RANKED:
        if partners is None:
            raise Refusal.at("preference.loss", f"{kind} sorts the pairs of a whole update, and has no order of them")
        loss_P = RANKED[kind](chosen_P, rejected_P, partners, **settings)
    else:
        loss_P = LOSSES[kind](chosen_P, rejected_P, **settings)
    margin_P = beta * (chosen_P - rejected_P).detach()
    metrics = {
        "accuracy": ((margin_P > 0).to(margin_P.dtype) + 0.5 * (margin_P == 0)).sum(),
        "chosen": beta * chosen_P.detach().sum(),
        "rejected": beta * rejected_P.detach().sum(),
        "margin": margin_P.sum(),
    }
    if nll > 0:
        likelihood_P = pairs.chosen_P if pairs.likelihood_P is None else pairs.likelihood_P
        nll_P = -floored(likelihood_P, LEAST_SUM) / pairs.chosen_length_P
        loss_P = loss_P + nll * nll_P
        metrics["nll"] = nll_P.detach().sum()
    return Sums(loss=loss_P.sum(), metrics=metrics)


def shared_length_weights(sequence_K: torch.Tensor, lengths_S: torch.Tensor, ld_alpha: float) -> torch.Tensor:
    """LD-DPO (arXiv 2409.06411): `ld_alpha` at the tokens past the shorter response of a pair, 1 at those before.

    Sequences come in pairs, one after the other. The longer response's surplus then pulls the less the smaller
    `ld_alpha` is: at 1 this is DPO, at 0 both responses are cut to the same length.
    """
    shared_S = lengths_S.view(-1, 2).amin(1).repeat_interleave(2)
    starts_S = lengths_S.cumsum(0) - lengths_S
    position_K = torch.arange(len(sequence_K), device=sequence_K.device) - starts_S[sequence_K]
    return torch.where(position_K < shared_S[sequence_K], 1.0, ld_alpha)


def _settings(
    kind: str, beta: float, label_smoothing: float, gamma: float, discopop_tau: float, divergence: str
) -> dict[str, float]:
    """What the loss takes. A setting that it would not look at is refused, not ignored."""
    if kind not in LOSSES and kind not in RANKED:
        raise Refusal.at("preference.loss", f"{kind!r} is not known", f"one of {', '.join([*LOSSES, *RANKED])}")
    settings = {"beta": beta}
    if kind in SMOOTHED:
        settings["label_smoothing"] = label_smoothing
    elif label_smoothing:
        remedy = f"set it to 0, or choose one of {', '.join(SMOOTHED)}"
        raise Refusal.at("preference.label_smoothing", f"the loss {kind} has no label smoothing", remedy)
    if kind == "exo_pair" and not label_smoothing:
        raise Refusal.at("preference.label_smoothing", "exo_pair takes the logarithm of it", "set it, to 0.001 say")
    if kind == "simpo":
        settings["gamma"] = gamma
    elif gamma:
        raise Refusal.at("preference.gamma", f"the loss {kind} has no margin", "set it to 0, or choose simpo")
    if kind == "discopop":
        settings["discopop_tau"] = discopop_tau
    if divergence != "reverse_kl" and kind not in DIVERGENT:
        remedy = f"set it to reverse_kl, or choose one of {', '.join(DIVERGENT)}"
        raise Refusal.at("preference.divergence", f"the loss {kind} is made for the reverse KL", remedy)
    return settings


def _scores(pairs: Pairs, kind: str, average: bool, divergence: str, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    chosen_P, rejected_P = floored(pairs.chosen_P, LEAST_SUM), floored(pairs.rejected_P, LEAST_SUM)
    if kind not in REFERENCE_FREE:
        if pairs.reference_chosen_P is None or pairs.reference_rejected_P is None:
            remedy = f"choose one of {', '.join(REFERENCE_FREE)}, or give the reference's log-probabilities"
            raise Refusal.at("preference.loss", f"{kind} compares with a reference, and there is none", remedy)
        ratios = (
            log_ratio(chosen_P, pairs.reference_chosen_P, LEAST_SUM),
            log_ratio(rejected_P, pairs.reference_rejected_P, LEAST_SUM),
        )
        chosen_P, rejected_P = (divergent_scores(ratio_P, divergence, alpha) for ratio_P in ratios)
    if average or kind in ALWAYS_MEANS:
        chosen_P, rejected_P = chosen_P / pairs.chosen_length_P, rejected_P / pairs.rejected_length_P
    return chosen_P, rejected_P
