"""Losses of a pair of responses, the chosen and the rejected, as sums over pairs.

Shapes: P pairs of a micro-batch. A response's score is its log-ratio log p - log p_ref, or log p where the loss has no
reference; summed over its tokens, or their mean. h is the chosen score less the rejected one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from lockstep.algorithms.stable import LEAST_SUM, floored, log_ratio, log_rest
from lockstep.errors import Refusal
from lockstep.types import Sums


@dataclass(frozen=True)
class Pairs:
    """Log-probabilities summed over each response, the responses' tokens, and the reference's sums if there is one."""

    chosen_P: torch.Tensor
    rejected_P: torch.Tensor
    chosen_length_P: torch.Tensor
    rejected_length_P: torch.Tensor
    reference_chosen_P: torch.Tensor | None
    reference_rejected_P: torch.Tensor | None


def sigmoid(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float, label_smoothing: float) -> torch.Tensor:
    """DPO (arXiv 2305.18290): -log sigmoid(beta h).

    With `label_smoothing` e it is Mitchell's conservative DPO: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h).
    """
    return _smoothed(beta * (chosen_P - rejected_P), label_smoothing)


def ipo(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float) -> torch.Tensor:
    """IPO (arXiv 2310.12036): (h - 1 / (2 beta))^2; the paper's tau is `beta`."""
    return (chosen_P - rejected_P - 1 / (2 * beta)).square()


def hinge(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float) -> torch.Tensor:
    """SLiC's rank calibration (arXiv 2305.10425) on the scaled difference: max(0, 1 - beta h)."""
    return torch.relu(1 - beta * (chosen_P - rejected_P))


def robust(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float, label_smoothing: float) -> torch.Tensor:
    """Robust DPO (arXiv 2403.00409): unbiased when the share e = `label_smoothing` of the labels is flipped.

    (-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e); it can be negative.
    """
    logits_P = beta * (chosen_P - rejected_P)
    kept_P = -(1 - label_smoothing) * logsigmoid(logits_P)
    flipped_P = -label_smoothing * logsigmoid(-logits_P)
    return (kept_P - flipped_P) / (1 - 2 * label_smoothing)


def simpo(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float, label_smoothing: float, gamma: float
) -> torch.Tensor:
    """SimPO (arXiv 2405.14734): -log sigmoid(beta h - gamma) on mean log-probabilities; smoothed as `sigmoid`."""
    return _smoothed(beta * (chosen_P - rejected_P) - gamma, label_smoothing)


def orpo(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float) -> torch.Tensor:
    """The odds-ratio term of ORPO (arXiv 2403.07691) on mean log-probabilities m; its likelihood term is `nll` = 1.

    -beta log sigmoid(log odds chosen - log odds rejected), log odds = m - log(1 - e^m). A response is taken to be at
    most so certain as `log_rest` can tell apart from certainty.
    """
    log_odds_P = (chosen_P - log_rest(chosen_P)) - (rejected_P - log_rest(rejected_P))
    return -beta * logsigmoid(log_odds_P)


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "sigmoid": sigmoid,
    "ipo": ipo,
    "hinge": hinge,
    "robust": robust,
    "simpo": simpo,
    "orpo": orpo,
    # CPO (arXiv 2401.08417) is DPO's loss without the reference; its likelihood term is `nll` = 1.
    "cpo": sigmoid,
}
REFERENCE_FREE = ("simpo", "orpo", "cpo")
ALWAYS_MEANS = ("simpo", "orpo")
SMOOTHED = ("sigmoid", "robust", "simpo", "cpo")


def preference_loss(
    pairs: Pairs,
    *,
    kind: str,
    beta: float,
    label_smoothing: float = 0.0,
    gamma: float = 0.0,
    average: bool = False,
    nll: float = 0.0,
) -> Sums:
    """The loss `kind` of each pair, plus `nll` times the chosen response's mean negative log-likelihood (RPO's term).

    `average` divides every log-probability by its response's length; `simpo` and `orpo` always do. `nll` is a mean
    over each response's own tokens (arXiv 2404.19733), not over all the tokens of the batch.

    Metrics are sums over pairs: `chosen` and `rejected` implicit rewards (beta times the score that the loss sees),
    `margin` their difference, `accuracy` where it is positive (a tie is 0.5), and `nll`, unweighted, if it is asked.
    """
    settings = _settings(kind, beta, label_smoothing, gamma)
    chosen_P, rejected_P = _scores(pairs, kind, average)
    loss_P = LOSSES[kind](chosen_P, rejected_P, **settings)
    margin_P = beta * (chosen_P - rejected_P).detach()
    metrics = {
        "accuracy": ((margin_P > 0).to(margin_P.dtype) + 0.5 * (margin_P == 0)).sum(),
        "chosen": beta * chosen_P.detach().sum(),
        "rejected": beta * rejected_P.detach().sum(),
        "margin": margin_P.sum(),
    }
    if nll > 0:
        nll_P = -floored(pairs.chosen_P, LEAST_SUM) / pairs.chosen_length_P
        loss_P = loss_P + nll * nll_P
        metrics["nll"] = nll_P.detach().sum()
    return Sums(loss=loss_P.sum(), metrics=metrics)


def _smoothed(logits_P: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    return -(1 - label_smoothing) * logsigmoid(logits_P) - label_smoothing * logsigmoid(-logits_P)


def _settings(kind: str, beta: float, label_smoothing: float, gamma: float) -> dict[str, float]:
    """What the loss takes. A setting that it would not look at is refused, not ignored."""
    if kind not in LOSSES:
        raise Refusal.at("preference.loss", f"{kind!r} is not known", f"one of {', '.join(LOSSES)}")
    settings = {"beta": beta}
    if kind in SMOOTHED:
        settings["label_smoothing"] = label_smoothing
    elif label_smoothing:
        remedy = f"set it to 0, or choose one of {', '.join(SMOOTHED)}"
        raise Refusal.at("preference.label_smoothing", f"the loss {kind} has no label smoothing", remedy)
    if kind == "simpo":
        settings["gamma"] = gamma
    elif gamma:
        raise Refusal.at("preference.gamma", f"the loss {kind} has no margin", "set it to 0, or choose simpo")
    return settings


def _scores(pairs: Pairs, kind: str, average: bool) -> tuple[torch.Tensor, torch.Tensor]:
    chosen_P, rejected_P = floored(pairs.chosen_P, LEAST_SUM), floored(pairs.rejected_P, LEAST_SUM)
    if kind not in REFERENCE_FREE:
        if pairs.reference_chosen_P is None or pairs.reference_rejected_P is None:
            remedy = f"choose one of {', '.join(REFERENCE_FREE)}, or give the reference's log-probabilities"
            raise Refusal.at("preference.loss", f"{kind} compares with a reference, and there is none", remedy)
        chosen_P = log_ratio(chosen_P, pairs.reference_chosen_P, LEAST_SUM)
        rejected_P = log_ratio(rejected_P, pairs.reference_rejected_P, LEAST_SUM)
    if average or kind in ALWAYS_MEANS:
        chosen_P, rejected_P = chosen_P / pairs.chosen_length_P, rejected_P / pairs.rejected_length_P
    return chosen_P, rejected_P
