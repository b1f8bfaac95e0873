"""Rollout correction: the engine that drew the tokens and the trainer that scores them disagree a little.

Truncated importance sampling after IMPALA (arXiv 1802.01561), or leaving out what disagrees too much. Any engine.
Shapes: K tokens of the step, S sequences. With d = log p_trainer - log p_engine, bounded at +-20, the ratio is e^d.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lockstep.algorithms.reduce import EVERYTHING, WholeStep, sequence_mean, sum_by
from lockstep.algorithms.stable import log_ratio
from lockstep.errors import Refusal

LOG_RATIO_BOUND = 20.0
CHOICES = ("none", "token", "sequence")


@dataclass(frozen=True)
class Corrected:
    """Importance weights, what is kept (0/1), and what the step reports. All constants to the loss."""

    weights_K: torch.Tensor
    keep_K: torch.Tensor
    metrics: dict[str, float] = field(default_factory=dict)


def correct(
    trainer_K: torch.Tensor,
    engine_K: torch.Tensor,
    sequence_K: torch.Tensor,
    sequences: int,
    *,
    weight: str,
    cap: float,
    mask: str,
    low: float,
    high: float,
    whole: WholeStep = EVERYTHING,
) -> Corrected:
    """Weights by ratio, at most `cap`, and a mask of the ratios out of [low, high].

    `weight`: `token` takes a token's own ratio, `sequence` the product of its sequence's ratios for all its tokens.
    `mask`: `token` judges a token by its own ratio, `sequence` a whole sequence by the geometric mean of its ratios.
    The mask does not change the weights: a sequence's product is over all its tokens.
    """
    log_ratio_K = _log_ratio(trainer_K, engine_K, whole)
    importance_K = _importance(weight, log_ratio_K, sequence_K, sequences)
    keep_K = _kept(mask, log_ratio_K, sequence_K, sequences, low, high)
    weights_K = importance_K.clamp(max=cap)
    metrics = {
        **_disagreement(log_ratio_K, whole),
        "rollout_corr/weight_mean": whole.mean(weights_K),
        "rollout_corr/effective_share": _effective_share(weights_K, whole),
        "rollout_corr/capped_share": whole.mean(importance_K > cap),
        "rollout_corr/masked_share": whole.mean(keep_K == 0),
        "rollout_corr/masked_sequence_share": _masked_sequences(keep_K, sequence_K, sequences, whole),
    }
    return Corrected(weights_K, keep_K, metrics)


def _log_ratio(trainer_K: torch.Tensor, engine_K: torch.Tensor, whole: WholeStep) -> torch.Tensor:
    difference_K = log_ratio(trainer_K, engine_K).detach()
    unknown, tokens = whole.count(int(difference_K.isnan().sum())), whole.count(len(difference_K))
    if unknown:
        raise Refusal.at(
            "rollout log-probabilities",
            f"{unknown:,} of {tokens:,} tokens have none that can be compared with the trainer's",
            "check that the engine returns the log-probability of every token it drew",
        )
    return difference_K.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _importance(weight: str, log_ratio_K: torch.Tensor, sequence_K: torch.Tensor, sequences: int) -> torch.Tensor:
    if weight == "none":
        return torch.ones_like(log_ratio_K)
    if weight == "token":
        return log_ratio_K.exp()
    if weight == "sequence":
        totals_S = sum_by(log_ratio_K, sequence_K, sequences).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return totals_S.exp()[sequence_K]
    raise _unknown("algorithm.correction.weight", weight)


def _kept(
    mask: str, log_ratio_K: torch.Tensor, sequence_K: torch.Tensor, sequences: int, low: float, high: float
) -> torch.Tensor:
    if mask == "none":
        return torch.ones_like(log_ratio_K)
    if mask == "token":
        judged_K = log_ratio_K.exp()
    elif mask == "sequence":
        judged_K = sequence_mean(log_ratio_K, torch.ones_like(log_ratio_K), sequence_K, sequences).exp()
    else:
        raise _unknown("algorithm.correction.mask", mask)
    return ((judged_K >= low) & (judged_K <= high)).to(log_ratio_K.dtype)


def _disagreement(log_ratio_K: torch.Tensor, whole: WholeStep) -> dict[str, float]:
    """`kl` estimates KL(engine, trainer) by k1, `k3` the same by k3: both are 0 when they agree."""
    ratio_K = log_ratio_K.double().exp()
    return {
        "rollout_corr/ratio_mean": whole.mean(ratio_K),
        "rollout_corr/ratio_max": max(whole.greatest(ratio_K), 0.0),
        "rollout_corr/kl": whole.mean(-log_ratio_K),
        "rollout_corr/k3": whole.mean(ratio_K - log_ratio_K.double() - 1),
    }


def _effective_share(weights_K: torch.Tensor, whole: WholeStep) -> float:
    """Effective sample size over the number of tokens: 1 when all weigh alike."""
    squares, mean = whole.mean(weights_K.double().square()), whole.mean(weights_K)
    return mean**2 / squares if squares > 0 else 0.0


def _masked_sequences(keep_K: torch.Tensor, sequence_K: torch.Tensor, sequences: int, whole: WholeStep) -> float:
    """Of the sequences that have tokens, the share that keeps none."""
    present_S = sum_by(torch.ones_like(keep_K), sequence_K, sequences) > 0
    lost_S = present_S & (sum_by(keep_K, sequence_K, sequences) == 0)
    return whole.count(int(lost_S.sum())) / max(whole.count(int(present_S.sum())), 1)


def _unknown(key: str, name: str) -> Refusal:
    return Refusal.at(key, f"{name!r} is not known", f"one of {', '.join(CHOICES)}")
