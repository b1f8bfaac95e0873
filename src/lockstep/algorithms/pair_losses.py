"""The loss of a pair, by name, from the scores of its two responses.

Shapes: P pairs. A score is a response's log-ratio log p - log p_ref (or what a divergence makes of it), or log p where
the loss has no reference. h is the chosen score less the rejected one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from lockstep.algorithms.stable import log_rest

# Largest exponent of a ratio: e^40 squared is still a number of float32. Beyond it a response has no gradient.
EXPONENT_BOUND = 40.0


@dataclass(frozen=True)
class Partners:
    """Of each pair, the scores that the losses by rank hold against its own: constants, see `transport`."""

    chosen_P: torch.Tensor
    rejected_P: torch.Tensor


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


def exo_pair(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float, label_smoothing: float) -> torch.Tensor:
    """EXO for a pair (arXiv 2402.00856, equation 16): KL(q, p), q = sigmoid(+-beta h), p = (1 - e, e).

    q_w (log q_w - log(1 - e)) + q_l (log q_l - log e); `label_smoothing` e is over 0, or p would forbid the rejected.
    """
    logits_P = beta * (chosen_P - rejected_P)
    won_P = logits_P.sigmoid() * (logsigmoid(logits_P) - math.log1p(-label_smoothing))
    lost_P = (-logits_P).sigmoid() * (logsigmoid(-logits_P) - math.log(label_smoothing))
    return won_P + lost_P


def nca_pair(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float) -> torch.Tensor:
    """NCA for a pair (arXiv 2402.05369): each reward against zero, so that the chosen one's likelihood does not fall.

    With the rewards w, l = beta times the scores: -log sigmoid(w) - (log sigmoid(-w) + log sigmoid(-l)) / 2.
    """
    chosen_P, rejected_P = beta * chosen_P, beta * rejected_P
    return -logsigmoid(chosen_P) - 0.5 * (logsigmoid(-chosen_P) + logsigmoid(-rejected_P))


def bco_pair(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float) -> torch.Tensor:
    """BCO (arXiv 2404.04656) for a pair, without its shift: -log sigmoid(beta chosen) - log sigmoid(-beta rejected).

    The paper's shift is a running mean of all rewards; it is 0 here, as in TRL's pair form.
    """
    return -logsigmoid(beta * chosen_P) - logsigmoid(-beta * rejected_P)


def sppo_hard(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float) -> torch.Tensor:
    """SPPO (arXiv 2405.00675, equation 4.7) with the verdict taken as certain, P = 1 for the chosen, 0 for the other.

    (chosen - 1 / (2 beta))^2 + (rejected + 1 / (2 beta))^2; the paper's eta is 1 / `beta`.
    """
    return (chosen_P - 0.5 / beta).square() + (rejected_P + 0.5 / beta).square()


def apo_zero(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float) -> torch.Tensor:
    """APO-zero (arXiv 2408.06266, equation 7): 1 - sigmoid(beta chosen) + sigmoid(beta rejected).

    The chosen response becomes likelier, the rejected less likely: for chosen ones better than the model's own.
    """
    return (-beta * chosen_P).sigmoid() + (beta * rejected_P).sigmoid()


def apo_down(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float) -> torch.Tensor:
    """APO-down (arXiv 2408.06266, equation 8): sigmoid(beta chosen) + 1 - sigmoid(beta h).

    Both become less likely, the rejected one more so: for chosen ones worse than the model's own.
    """
    return (beta * chosen_P).sigmoid() + (-beta * (chosen_P - rejected_P)).sigmoid()


def discopop(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float, discopop_tau: float) -> torch.Tensor:
    """DiscoPOP's log-ratio modulated loss (arXiv 2406.08414, equation 5), with x = beta h and m = sigmoid(x / tau).

    -(1 - m) log sigmoid(x) + m e^-x.
    """
    logits_P = beta * (chosen_P - rejected_P)
    modulation_P = (logits_P / discopop_tau).sigmoid()
    return -(1 - modulation_P) * logsigmoid(logits_P) + modulation_P * (-logits_P).clamp(max=EXPONENT_BOUND).exp()


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


def aot(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor, partners: Partners, *, beta: float, label_smoothing: float
) -> torch.Tensor:
    """AOT on pairs (arXiv 2406.05882): DPO's loss of sorted margins, the policy's i-th against the reference's i-th.

    A pair's own margin is compared with the reference's margin of the same rank, in place of its own.
    """
    return _smoothed(beta * (chosen_P - rejected_P - partners.chosen_P + partners.rejected_P), label_smoothing)


def aot_unpaired(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor, partners: Partners, *, beta: float, label_smoothing: float
) -> torch.Tensor:
    """AOT without pairs (arXiv 2406.05882): the i-th smallest chosen score against the i-th smallest rejected one.

    The two may stand in different micro-batches, so each is seen with the other as a constant: where the chosen one
    stands the loss has its value and its slope, where the rejected one stands its slope alone.
    """
    loss_P = _smoothed(beta * (chosen_P - partners.rejected_P), label_smoothing)
    opposite_P = _smoothed(beta * (partners.chosen_P - rejected_P), label_smoothing)
    return loss_P + opposite_P - opposite_P.detach()


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "sigmoid": sigmoid,
    "ipo": ipo,
    "hinge": hinge,
    "robust": robust,
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": discopop,
    "simpo": simpo,
    "orpo": orpo,
    # CPO (arXiv 2401.08417) is DPO's loss without the reference; its likelihood term is `nll` = 1.
    "cpo": sigmoid,
}
# These compare a pair with others of its update.
RANKED: dict[str, Callable[..., torch.Tensor]] = {"aot": aot, "aot_unpaired": aot_unpaired}
REFERENCE_FREE = ("simpo", "orpo", "cpo")
ALWAYS_MEANS = ("simpo", "orpo")
SMOOTHED = ("sigmoid", "robust", "exo_pair", "simpo", "cpo", "aot", "aot_unpaired")
# Losses of h alone, in which a divergence other than the reverse KL has its meaning.
DIVERGENT = ("sigmoid", "ipo", "hinge", "robust", "exo_pair", "discopop")
DIVERGENCES = ("reverse_kl", "forward_kl", "js", "alpha")


def divergent_scores(ratios_P: torch.Tensor, divergence: str, alpha: float) -> torch.Tensor:
    """f-DPO (arXiv 2309.16240): f'(e^u) of the log-ratio u takes its place, f being the divergence from the reference.

    `reverse_kl` u (DPO itself), `forward_kl` 1 - e^-u, `js` log 2 + log sigmoid(u), `alpha` (1 - e^(-alpha u)) / alpha,
    which is forward KL at alpha = 1 and tends to reverse KL at 0. Constants that cancel in h are as in TRL.
    """
    if divergence == "reverse_kl":
        return ratios_P
    if divergence == "js":
        return math.log(2) + logsigmoid(ratios_P)
    rate = 1.0 if divergence == "forward_kl" else alpha
    return -torch.expm1((-rate * ratios_P).clamp(max=EXPONENT_BOUND)) / rate


def _smoothed(logits_P: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    return -(1 - label_smoothing) * logsigmoid(logits_P) - label_smoothing * logsigmoid(-logits_P)
