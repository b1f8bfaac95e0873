"""Losses of preference pairs (DPO and its family) as sums over pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from lockstep.algorithms.reduce import LEAST_SUM, floor_logprobs, log_ratio, log_rest
from lockstep.errors import Refusal
from lockstep.types import Sums

# The suffix P of tensor names means the pairs. The score of a response is its log-ratio log p - log p_ref (f-DPO: a
# function of the log-ratio); for losses without a reference it is log p. Scores are sums or means over tokens. h is the
# chosen score minus the rejected score.

# The largest exponent in the exponentials of `discopop` and of f-DPO: e^40 squared is finite in float32. If an exponent
# is larger, it is clamped, and the exponential has no gradient.
EXPONENT_BOUND = 40.0


@dataclass(frozen=True)
class Partners:
    """The scores, detached, with which the ranked losses (AOT) compare each pair."""

    chosen_P: torch.Tensor
    rejected_P: torch.Tensor


def sigmoid(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float, label_smoothing: float) -> torch.Tensor:
    """DPO (arXiv 2305.18290): -log sigmoid(beta h).

    `label_smoothing` e gives Mitchell's conservative DPO: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h).
    """
    return _smoothed(beta * (chosen_P - rejected_P), label_smoothing)


def ipo(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float) -> torch.Tensor:
    """IPO (arXiv 2310.12036): (h - 1 / (2 beta))^2; the paper's tau is `beta`."""
    return (chosen_P - rejected_P - 1 / (2 * beta)).square()


def hinge(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float) -> torch.Tensor:
    """SLiC's rank calibration (arXiv 2305.10425) on the scaled difference: max(0, 1 - beta h)."""
    return torch.relu(1 - beta * (chosen_P - rejected_P))


def robust(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float, label_smoothing: float) -> torch.Tensor:
    """Robust DPO (arXiv 2403.00409): unbiased if the fraction e = `label_smoothing` of the labels is flipped.

    The loss can be negative: (-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e).
    """
    logits_P = beta * (chosen_P - rejected_P)
    kept_P = -(1 - label_smoothing) * logsigmoid(logits_P)
    flipped_P = -label_smoothing * logsigmoid(-logits_P)
    return (kept_P - flipped_P) / (1 - 2 * label_smoothing)


def exo_pair(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float, label_smoothing: float) -> torch.Tensor:
    """EXO for a pair (arXiv 2402.00856, equation 16): KL(q, p), q = sigmoid(+-beta h), p = (1 - e, e).

    The loss is q_w (log q_w - log(1 - e)) + q_l (log q_l - log e); `label_smoothing` e must be above 0.
    """
    logits_P = beta * (chosen_P - rejected_P)
    won_P = logits_P.sigmoid() * (logsigmoid(logits_P) - math.log1p(-label_smoothing))
    lost_P = (-logits_P).sigmoid() * (logsigmoid(-logits_P) - math.log(label_smoothing))
    return won_P + lost_P


def nca_pair(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float) -> torch.Tensor:
    """NCA for a pair (arXiv 2402.05369): compares each reward with zero, so that the chosen likelihood does not fall.

    With the rewards w (chosen) and l (rejected), beta times the scores, the loss is -log sigmoid(w) - (log
    sigmoid(-w) + log sigmoid(-l)) / 2.
    """
    chosen_P, rejected_P = beta * chosen_P, beta * rejected_P
    return -logsigmoid(chosen_P) - 0.5 * (logsigmoid(-chosen_P) + logsigmoid(-rejected_P))


def bco_pair(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float) -> torch.Tensor:
    """BCO (arXiv 2404.04656) for a pair, without its shift: -log sigmoid(beta chosen) - log sigmoid(-beta rejected).

    The paper's shift is a running mean of all rewards; here the shift is 0, as in TRL's `bco_pair`.
    """
    return -logsigmoid(beta * chosen_P) - logsigmoid(-beta * rejected_P)


def sppo_hard(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float) -> torch.Tensor:
    """SPPO (arXiv 2405.00675, equation 4.7) for labels that are certain (win probability 1 for the chosen response).

    The loss is (chosen - 1 / (2 beta))^2 + (rejected + 1 / (2 beta))^2; the paper's eta is 1 / `beta`.
    """
    return (chosen_P - 0.5 / beta).square() + (rejected_P + 0.5 / beta).square()


def apo_zero(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float) -> torch.Tensor:
    """APO-zero (arXiv 2408.06266, equation 7): 1 - sigmoid(beta chosen) + sigmoid(beta rejected).

    APO-zero increases the chosen and decreases the rejected likelihood. Use APO-zero if the chosen responses are better
    than the model's own responses.
    """
    return (-beta * chosen_P).sigmoid() + (beta * rejected_P).sigmoid()


def apo_down(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float) -> torch.Tensor:
    """APO-down (arXiv 2408.06266, equation 8): sigmoid(beta chosen) + 1 - sigmoid(beta h).

    APO-down decreases the chosen likelihood, and the rejected one more. Use APO-down if the chosen responses are worse
    than the model's own responses.
    """
    return (beta * chosen_P).sigmoid() + (-beta * (chosen_P - rejected_P)).sigmoid()


def discopop(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float, discopop_tau: float) -> torch.Tensor:
    """DiscoPOP's log-ratio modulated loss (arXiv 2406.08414, equation 5), with x = beta h and m = sigmoid(x / tau).

    The loss is -(1 - m) log sigmoid(x) + m e^-x.
    """
    logits_P = beta * (chosen_P - rejected_P)
    modulation_P = (logits_P / discopop_tau).sigmoid()
    return -(1 - modulation_P) * logsigmoid(logits_P) + modulation_P * (-logits_P).clamp(max=EXPONENT_BOUND).exp()


def simpo(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float, label_smoothing: float, gamma: float
) -> torch.Tensor:
    """SimPO (arXiv 2405.14734): -log sigmoid(beta h - gamma) on mean log-probs; label smoothing as in `sigmoid`."""
    return _smoothed(beta * (chosen_P - rejected_P) - gamma, label_smoothing)


def orpo(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float) -> torch.Tensor:
    """The odds-ratio term of ORPO (arXiv 2403.07691) on mean log-probs m; for ORPO's likelihood term set `nll` to 1.

    The term is -beta log sigmoid(log odds chosen - log odds rejected), with log odds = m - log(1 - e^m). `log_rest`
    limits e^m to about 1 - 1e-6.
    """
    log_odds_P = (chosen_P - log_rest(chosen_P)) - (rejected_P - log_rest(rejected_P))
    return -beta * logsigmoid(log_odds_P)


def aot(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor, partners: Partners, *, beta: float, label_smoothing: float
) -> torch.Tensor:
    """AOT on pairs (arXiv 2406.05882): DPO's loss of the i-th smallest policy margin and the i-th smallest reference
    margin.

    A pair's policy margin is compared with the reference margin of the same rank, not with that of the same pair.
    """
    return _smoothed(beta * (chosen_P - rejected_P - partners.chosen_P + partners.rejected_P), label_smoothing)


def aot_unpaired(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor, partners: Partners, *, beta: float, label_smoothing: float
) -> torch.Tensor:
    """AOT without pairs (arXiv 2406.05882): compares the i-th smallest chosen and the i-th smallest rejected score.

    The two scores may be in different micro-batches, so each is compared with the detached value of the other. The term
    of the chosen score adds value and gradient to the loss, the term of the rejected score only the gradient.
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
    # CPO (arXiv 2401.08417) is DPO's loss without the reference; CPO's likelihood term is the setting `nll` = 1.
    "cpo": sigmoid,
}
# The ranked losses compare a pair with other pairs of its update.
RANKED: dict[str, Callable[..., torch.Tensor]] = {"aot": aot, "aot_unpaired": aot_unpaired}
REFERENCE_FREE = ("simpo", "orpo", "cpo")
ALWAYS_MEANS = ("simpo", "orpo")
SMOOTHED = ("sigmoid", "robust", "exo_pair", "simpo", "cpo", "aot", "aot_unpaired")
# Losses that depend only on h = chosen score - rejected score; these losses support f-DPO's divergences other than
# reverse KL.
DIVERGENT = ("sigmoid", "ipo", "hinge", "robust", "exo_pair", "discopop")
DIVERGENCES = ("reverse_kl", "forward_kl", "js", "alpha")


def divergent_scores(ratios_P: torch.Tensor, divergence: str, alpha: float) -> torch.Tensor:
    """f-DPO (arXiv 2309.16240): f'(e^u) replaces the log-ratio u; f defines the divergence from the reference.

    The replacements: `reverse_kl` is u (DPO itself), `forward_kl` is 1 - e^-u, `js` is log 2 + log sigmoid(u), and
    `alpha` is (1 - e^(-alpha u)) / alpha, which is forward KL at alpha = 1 and tends to reverse KL at alpha = 0.
    Additive constants, which cancel in chosen minus rejected, are as in TRL.
    """
    if divergence == "reverse_kl":
        return ratios_P
    if divergence == "js":
        return math.log(2) + logsigmoid(ratios_P)
    rate = 1.0 if divergence == "forward_kl" else alpha
    return -torch.expm1((-rate * ratios_P).clamp(max=EXPONENT_BOUND)) / rate


def _smoothed(logits_P: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    return -(1 - label_smoothing) * logsigmoid(logits_P) - label_smoothing * logsigmoid(-logits_P)


# Ranked losses (AOT, arXiv 2406.05882). All P pairs of an update are ranked by the log-probs before the update, so
# ranks do not depend on micro-batches or devices. (TRL ranks the pairs within the micro-batch of a device.)


def paired_partners(
    chosen_P: torch.Tensor,
    rejected_P: torch.Tensor,
    reference_chosen_P: torch.Tensor,
    reference_rejected_P: torch.Tensor,
) -> Partners:
    """The scores with which the loss `aot` compares each pair: the reference log-probs of the pair that has the same
    rank among the reference margins, minus the pair's own reference log-probs.

    If d is the policy's log-prob and r the reference's, a score is d - r. Subtracting r_partner - r from the score
    gives d - r_partner.
    """
    partner_P = _of_same_rank(chosen_P - rejected_P, reference_chosen_P - reference_rejected_P)
    return Partners(
        reference_chosen_P[partner_P] - reference_chosen_P, reference_rejected_P[partner_P] - reference_rejected_P
    )


def unpaired_partners(chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> Partners:
    """The scores with which the loss `aot_unpaired` compares each pair: for a chosen score, the rejected score of the
    same rank, and vice versa."""
    return Partners(chosen_P[_of_same_rank(rejected_P, chosen_P)], rejected_P[_of_same_rank(chosen_P, rejected_P)])


def _of_same_rank(values_P: torch.Tensor, others_P: torch.Tensor) -> torch.Tensor:
    """For each value, the index of the value of equal rank in `others_P`. Of equal values, the first ranks lower."""
    order_P, other_order_P = values_P.argsort(stable=True), others_P.argsort(stable=True)
    partner_P = torch.empty_like(order_P)
    partner_P[order_P] = other_order_P
    return partner_P


@dataclass(frozen=True)
class Pairs:
    """Summed log-probs and lengths of the responses, and the reference's summed log-probs if there is a reference.

    In LD-DPO the sums weight each token. `likelihood_P` is then the unweighted log-prob of the chosen response, which
    the term `nll` uses.
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

    `average` divides every score by the length of its response; `simpo` and `orpo` always divide by the length. `nll`
    is a mean over the tokens of each response (arXiv 2404.19733), not over all tokens of the batch. `divergence` is the
    divergence of f-DPO; it is applied to the log-ratio of the full response before any mean. The ranked losses (AOT)
    need `partners`, computed over all pairs of the update.

    Metrics are sums over pairs: `chosen` and `rejected` are the implicit rewards (beta times the score), `margin` is
    chosen minus rejected, `accuracy` is 1 for a positive margin (0.5 for a tie), and `nll`, if used, is the loss term
    before its weight.
    """
    settings = _settings(kind, beta, label_smoothing, gamma, discopop_tau, divergence)
    chosen_P, rejected_P = _scores(pairs, kind, average, divergence, alpha)
    if kind in RANKED:
        if partners is None:
            raise Refusal.at(
                "preference.loss",
                f"the loss {kind} ranks the pairs of an update and needs `partners`",
                code="missing-input",
            )
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
        nll_P = -floor_logprobs(likelihood_P, LEAST_SUM) / pairs.chosen_length_P
        loss_P = loss_P + nll * nll_P
        metrics["nll"] = nll_P.detach().sum()
    return Sums(loss=loss_P.sum(), metrics=metrics)


def shared_length_weights(sequence_K: torch.Tensor, lengths_S: torch.Tensor, ld_alpha: float) -> torch.Tensor:
    """LD-DPO (arXiv 2409.06411): tokens beyond the length of the pair's shorter response get weight `ld_alpha`, others
    1.

    Every two successive sequences are a pair. A smaller `ld_alpha` reduces the effect of the extra tokens of the longer
    response. `ld_alpha` 1 is plain DPO; 0 has the effect of truncating both responses to the same length.
    """
    shared_S = lengths_S.view(-1, 2).amin(1).repeat_interleave(2)
    starts_S = lengths_S.cumsum(0) - lengths_S
    position_K = torch.arange(len(sequence_K), device=sequence_K.device) - starts_S[sequence_K]
    return torch.where(position_K < shared_S[sequence_K], 1.0, ld_alpha)


def _settings(
    kind: str, beta: float, label_smoothing: float, gamma: float, discopop_tau: float, divergence: str
) -> dict[str, float]:
    """The settings that the loss `kind` uses; raises an error if another setting is set."""
    if kind not in LOSSES and kind not in RANKED:
        raise Refusal.at(
            "preference.loss", f"{kind!r} is not known", f"one of {', '.join([*LOSSES, *RANKED])}", code="unknown-name"
        )
    settings = {"beta": beta}
    if kind in SMOOTHED:
        settings["label_smoothing"] = label_smoothing
    elif label_smoothing:
        remedy = f"set preference.label_smoothing to 0, or choose one of {', '.join(SMOOTHED)}"
        raise Refusal.at(
            "preference.label_smoothing", f"the loss {kind} has no label smoothing", remedy, code="unused-key"
        )
    if kind == "exo_pair" and not label_smoothing:
        raise Refusal.at(
            "preference.label_smoothing",
            "the loss exo_pair uses the logarithm of the label smoothing, which must not be 0",
            "set preference.label_smoothing, for example to 0.001",
            code="out-of-range",
        )
    if kind == "simpo":
        settings["gamma"] = gamma
    elif gamma:
        raise Refusal.at(
            "preference.gamma",
            f"the loss {kind} has no target margin gamma",
            "set preference.gamma to 0, or use the loss simpo",
            code="unused-key",
        )
    if kind == "discopop":
        settings["discopop_tau"] = discopop_tau
    if divergence != "reverse_kl" and kind not in DIVERGENT:
        remedy = f"set preference.divergence to reverse_kl, or use the loss {', '.join(DIVERGENT)}"
        raise Refusal.at(
            "preference.divergence", f"the loss {kind} supports only the reverse KL", remedy, code="unused-key"
        )
    return settings


def _scores(pairs: Pairs, kind: str, average: bool, divergence: str, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    chosen_P, rejected_P = floor_logprobs(pairs.chosen_P, LEAST_SUM), floor_logprobs(pairs.rejected_P, LEAST_SUM)
    if kind not in REFERENCE_FREE:
        if pairs.reference_chosen_P is None or pairs.reference_rejected_P is None:
            remedy = f"choose one of {', '.join(REFERENCE_FREE)}, or give the reference's log-probabilities"
            raise Refusal.at(
                "preference.loss",
                f"the loss {kind} compares with a reference model, and there is none",
                remedy,
                code="missing-input",
            )
        ratios = (
            log_ratio(chosen_P, pairs.reference_chosen_P, LEAST_SUM),
            log_ratio(rejected_P, pairs.reference_rejected_P, LEAST_SUM),
        )
        chosen_P, rejected_P = (divergent_scores(ratio_P, divergence, alpha) for ratio_P in ratios)
    if average or kind in ALWAYS_MEANS:
        chosen_P, rejected_P = chosen_P / pairs.chosen_length_P, rejected_P / pairs.rejected_length_P
    return chosen_P, rejected_P
