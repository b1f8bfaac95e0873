"""Rollout correction for the difference between the log-probs of engine and trainer.

The correction is truncated importance sampling (IMPALA, arXiv 1802.01561), or rejection of tokens and sequences whose
log-probs differ too much. The suffixes of tensor names mean K tokens of the step and S sequences. The ratio of a token
is e^d, where d = log p_trainer - log p_engine is clamped to +-20.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lockstep.algorithms.reduce import SINGLE_PROCESS, StepReduce, log_ratio, sequence_mean, sum_by
from lockstep.errors import Refusal

LOG_RATIO_BOUND = 20.0
CHOICES = ("none", "token", "sequence")
WEIGHTS = (*CHOICES, "geometric_mean")
REJECTED = ("left_out", "counted", "zero")
# The weight of a token outside [floor, cap] with `outside` = `zero`. A weight of exactly 0 would also remove the token
# from the mean ratio of its sequence in the losses `gspo` and `geo_mean`, and verl keeps it there.
NO_WEIGHT = 1e-30
# verl adds this number to a weight before it takes the logarithm for the geometric mean.
GEOMETRIC_FLOOR = 1e-10
# The `over` of the `Band` that each value of the recipe key `mask` uses: one token, or the mean over a sequence.
MASKS = {"token": "token", "sequence": "mean"}
# For `binary_kl` and `tv`, probabilities are clamped to [COIN_FLOOR, 1 - COIN_FLOOR].
COIN_FLOOR = 1e-6


@dataclass(frozen=True)
class Band:
    """Accepts tokens whose statistic `by` is in [low, high].

    `over` is `token`, or `sum`, `mean` or `max` for a statistic over the tokens of a sequence. The statistics, with
    d = log q - log p, p the engine's probability and q the trainer's: `ratio` is e^d (over a sequence: e to the sum,
    mean or maximum of its d), `k2` is d^2 / 2, `k3` is e^d - d - 1, `binary_kl` is the KL divergence of the Bernoulli
    distributions KL((p, 1 - p), (q, 1 - q)), and `tv` is |p - q|.
    """

    over: str
    by: str
    high: float
    low: float | None = None


@dataclass(frozen=True)
class Corrected:
    """Importance weights, the mask of kept tokens (0/1), and metrics, all detached from the gradient."""

    weights_K: torch.Tensor
    keep_K: torch.Tensor
    metrics: dict[str, float] = field(default_factory=dict)
    counts_masked: bool = False
    """Whether the divisors of the loss count masked tokens (`rejected` = `counted`)."""


def correct(
    trainer_K: torch.Tensor,
    rollout_logprobs_K: torch.Tensor,
    sequence_K: torch.Tensor,
    sequences: int,
    *,
    weight: str,
    cap: float | None,
    mask: str,
    low: float,
    high: float,
    floor: float = 0.0,
    outside: str = "clip",
    normalize: bool = False,
    reject: Sequence[Band] = (),
    rejected: str = "left_out",
    reduce: StepReduce = SINGLE_PROCESS,
) -> Corrected:
    """Importance weights, clamped to [floor, cap], and a mask of tokens outside the accepted ranges.

    `weight` = `token` uses the ratio p_trainer / p_engine of the token, and `weight` = `sequence` uses the product of
    the ratios of its sequence. `weight` = `geometric_mean` uses the geometric mean of the weights that `token` gives to
    the kept tokens of the sequence. `outside` = `zero` sets a weight outside [floor, cap] to 0 instead of clamping it
    (IcePop). `normalize` divides the weights by their mean over the tokens or sequences of the step.
    `mask` = `token` keeps a token whose ratio is in [low, high], and `mask` = `sequence` keeps a sequence whose
    geometric mean of ratios is in [low, high]. `reject` lists further ranges; a kept token must be inside every range.
    Masking a token does not change the weights `token` and `sequence` of other tokens. `rejected` = `zero` gives masked
    tokens weight 0 instead of masking them (`aggregation_weights` has the meaning of `left_out` and `counted`).
    """
    if rejected not in REJECTED:
        raise Refusal.at(
            "algorithm.rollout_correction.rejected",
            f"{rejected!r} is not known",
            f"use one of {', '.join(REJECTED)}",
            code="unknown-name",
        )
    log_ratio_K = _log_ratio(trainer_K, rollout_logprobs_K, reduce)
    is_weights_K = _importance(weight, log_ratio_K, sequence_K, sequences)
    most = math.inf if cap is None or weight == "none" else cap
    weights_K = is_weights_K
    if weight != "none":
        weights_K = is_weights_K.clamp(floor, most)
        if outside == "zero":
            weights_K = torch.where(weights_K == is_weights_K, weights_K, NO_WEIGHT)
        if normalize:
            weights_K = weights_K / _mean_weight(weight, weights_K, sequence_K, sequences, reduce)
    bands = [*reject, *([Band(MASKS[mask], "ratio", high, low)] if mask in MASKS else [])]
    if mask not in CHOICES:
        raise _unknown("algorithm.rollout_correction.mask", mask)
    keep_K = torch.ones_like(log_ratio_K)
    for band in bands:
        keep_K = keep_K * _inside(band, log_ratio_K, trainer_K, rollout_logprobs_K, sequence_K, sequences)
    if weight == "geometric_mean":
        weights_K = sequence_mean((weights_K + GEOMETRIC_FLOOR).log(), keep_K, sequence_K, sequences).exp()
    metrics = {
        **_disagreement(log_ratio_K, reduce),
        "rollout_corr/weight_mean": reduce.mean(weights_K),
        **_effective_share(weights_K, reduce),
        "rollout_corr/capped_share": reduce.mean(is_weights_K > most),
        "rollout_corr/masked_share": reduce.mean(keep_K == 0),
        "rollout_corr/masked_sequence_share": _masked_sequences(keep_K, sequence_K, sequences, reduce),
    }
    if rejected == "zero":
        return Corrected(weights_K * keep_K, torch.ones_like(keep_K), metrics)
    return Corrected(weights_K, keep_K, metrics, rejected == "counted")


def logprob_difference(
    trainer_K: torch.Tensor, rollout_logprobs_K: torch.Tensor, reduce: StepReduce
) -> tuple[float, float]:
    """The step's mean |log-prob difference|, and k3, an estimate of KL(engine, trainer). If a log-prob is NaN, the mean
    and k3 are NaN."""
    log_ratio_K = log_ratio(trainer_K, rollout_logprobs_K).detach().double().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return reduce.mean(log_ratio_K.abs()), reduce.mean(log_ratio_K.exp() - log_ratio_K - 1)


def _log_ratio(trainer_K: torch.Tensor, rollout_logprobs_K: torch.Tensor, reduce: StepReduce) -> torch.Tensor:
    difference_K = log_ratio(trainer_K, rollout_logprobs_K).detach()
    unknown, tokens = reduce.count(int(difference_K.isnan().sum())), reduce.count(len(difference_K))
    if unknown:
        raise Refusal.at(
            "rollout log-probabilities",
            f"{unknown:,} of {tokens:,} tokens have no log-probability that can be compared with the trainer's",
            "check that the rollout engine returns the log-probability of every token that it samples",
            code="missing-logprobs",
        )
    return difference_K.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _importance(weight: str, log_ratio_K: torch.Tensor, sequence_K: torch.Tensor, sequences: int) -> torch.Tensor:
    if weight == "none":
        return torch.ones_like(log_ratio_K)
    if weight in ("token", "geometric_mean"):
        return log_ratio_K.exp()
    if weight == "sequence":
        totals_S = sum_by(log_ratio_K, sequence_K, sequences).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return totals_S.exp()[sequence_K]
    raise _unknown("algorithm.rollout_correction.weight", weight, WEIGHTS)


def _mean_weight(
    weight: str, weights_K: torch.Tensor, sequence_K: torch.Tensor, sequences: int, reduce: StepReduce
) -> float:
    """The mean weight over tokens, or over sequences that have a token; 1 if all weights are 0."""
    if weight != "sequence":
        mean = reduce.mean(weights_K)
    else:
        ones_K = torch.ones_like(weights_K)
        lengths_S = sum_by(ones_K, sequence_K, sequences)
        weights_S = sum_by(weights_K, sequence_K, sequences)[lengths_S > 0] / lengths_S[lengths_S > 0]
        mean = reduce.mean(weights_S)
    return mean if mean > 1e-8 else 1.0


def _inside(
    band: Band,
    log_ratio_K: torch.Tensor,
    trainer_K: torch.Tensor,
    rollout_logprobs_K: torch.Tensor,
    sequence_K: torch.Tensor,
    sequences: int,
) -> torch.Tensor:
    """1 where the statistic is in the range; ratios are compared as logarithms, because products of ratios overflow."""
    statistic_K = _statistic(band.by, log_ratio_K, trainer_K, rollout_logprobs_K)
    if band.over != "token":
        statistic_K = _over(band.over, statistic_K, sequence_K, sequences)
    low, high = band.low, band.high
    if band.by == "ratio":
        low, high = None if not low else math.log(low), math.log(high)
    inside_K = statistic_K <= high
    if low is not None:
        inside_K &= statistic_K >= low
    return inside_K.to(log_ratio_K.dtype)


def _statistic(
    by: str, log_ratio_K: torch.Tensor, trainer_K: torch.Tensor, rollout_logprobs_K: torch.Tensor
) -> torch.Tensor:
    if by == "ratio":
        return log_ratio_K
    if by == "k2":
        return 0.5 * log_ratio_K.square()
    if by == "k3":
        return log_ratio_K.exp() - log_ratio_K - 1
    p_K, q_K = (logprobs_K.exp().clamp(COIN_FLOOR, 1 - COIN_FLOOR) for logprobs_K in (rollout_logprobs_K, trainer_K))
    if by == "binary_kl":
        return p_K * (p_K / q_K).log() + (1 - p_K) * ((1 - p_K) / (1 - q_K)).log()
    if by == "tv":
        return (p_K - q_K).abs()
    raise Refusal.at(
        "algorithm.rollout_correction.reject",
        f"the statistic {by!r} of a reject range is not known",
        "use ratio, k2, k3, binary_kl or tv",
        code="unknown-name",
    )


def _over(over: str, statistic_K: torch.Tensor, sequence_K: torch.Tensor, sequences: int) -> torch.Tensor:
    if over == "mean":
        return sequence_mean(statistic_K, torch.ones_like(statistic_K), sequence_K, sequences)
    if over == "sum":
        return sum_by(statistic_K, sequence_K, sequences)[sequence_K]
    if over == "max":
        largest_S = statistic_K.new_zeros(sequences).scatter_reduce(
            0, sequence_K, statistic_K, "amax", include_self=False
        )
        return largest_S[sequence_K]
    raise Refusal.at(
        "algorithm.rollout_correction.reject",
        f"{over!r} is not a known value of `over` in a reject range",
        "set `over` to token, sum, mean or max",
        code="unknown-name",
    )


def _disagreement(log_ratio_K: torch.Tensor, reduce: StepReduce) -> dict[str, float]:
    """The metrics `kl` (estimator k1) and `k3` estimate KL(engine, trainer); they are 0 if engine and trainer agree."""
    ratio_K = log_ratio_K.double().exp()
    return {
        "rollout_corr/ratio_mean": reduce.mean(ratio_K),
        "rollout_corr/ratio_max": max(reduce.max(ratio_K), 0.0),
        "rollout_corr/kl": reduce.mean(-log_ratio_K),
        "rollout_corr/k3": reduce.mean(ratio_K - log_ratio_K.double() - 1),
    }


def _effective_share(weights_K: torch.Tensor, reduce: StepReduce) -> dict[str, float]:
    """Effective sample size / number of tokens (1 if all weights are equal); no metric if all weights are 0."""
    squares, mean = reduce.mean(weights_K.double().square()), reduce.mean(weights_K)
    return {"rollout_corr/effective_share": mean**2 / squares} if squares > 0 else {}


def _masked_sequences(keep_K: torch.Tensor, sequence_K: torch.Tensor, sequences: int, reduce: StepReduce) -> float:
    """The fraction of sequences of which every token is masked, among the sequences that have a token."""
    present_S = sum_by(torch.ones_like(keep_K), sequence_K, sequences) > 0
    lost_S = present_S & (sum_by(keep_K, sequence_K, sequences) == 0)
    return reduce.count(int(lost_S.sum())) / max(reduce.count(int(present_S.sum())), 1)


def _unknown(key: str, name: str, known: Sequence[str] = CHOICES) -> Refusal:
    return Refusal.at(key, f"{name!r} is not known", f"one of {', '.join(known)}", code="unknown-name")
