"""Sums over sequences, the weights that average token losses, and numerically stable log-prob arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lockstep.errors import Refusal

# An impossible token has the log-prob -inf, and 0 x inf or inf - inf would make the loss of the update NaN. All losses
# therefore replace log-probs below -10,000 by -10,000 (e^-10000 is 0 in every dtype). If a token is impossible for
# policy and reference, its log-ratio is then 0. A log-prob of -inf gets no gradient. A finite log-prob below -10,000
# keeps its gradient, so that a diverged model shows in the gradient norm. A NaN log-prob stays NaN, and the training
# step reports its rows.

LEAST = -1e4
"""The log-prob that is used instead of -inf for an impossible token."""
LEAST_SUM = -1e6
"""Replaces the log-prob -inf of a response. This value is below LEAST, because sums over tokens can be below LEAST."""
CERTAIN = -1e-6
"""`log_rest` lowers log-probs above this limit to the limit, because float32 sums cannot distinguish them from 0."""


def floor_logprobs(logprobs: torch.Tensor, least: float = LEAST) -> torch.Tensor:
    """The log-probs, raised to at least `least`. Finite values keep their gradient; -inf gets no gradient."""
    finite = torch.where(logprobs.isinf(), 0.0, logprobs)
    return torch.where(logprobs <= least, finite - finite.detach() + least, logprobs)


def log_ratio(logprobs: torch.Tensor, others: torch.Tensor, least: float = LEAST) -> torch.Tensor:
    """log p - log q, finite even if log p or log q is -inf."""
    return floor_logprobs(logprobs, least) - floor_logprobs(others, least)


def log_rest(logprobs: torch.Tensor) -> torch.Tensor:
    """log(1 - e^x): if x is the log-prob of a token, the log-prob of all other tokens together.

    Probabilities above 1 - 1e-6 are replaced by 1 - 1e-6. The formula for x > -log 2 and the formula for smaller x are
    each precise in their range (Maechler, "Accurately computing log(1 - exp(-|a|))", 2012).
    """
    logprobs = logprobs.clamp(max=CERTAIN)
    return torch.where(logprobs > -math.log(2), torch.log(-torch.expm1(logprobs)), torch.log1p(-logprobs.exp()))


# Tensor names end with their dimensions, which are S sequences, and K tokens that the policy generated in all of them.
# `sequence_K` (int64, non-decreasing) is the sequence index of each token. Vectors over K exclude prompt tokens,
# environment tokens and padding.

AGGREGATIONS = ("token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm")


def _identity(numbers: torch.Tensor) -> torch.Tensor:
    return numbers


@dataclass(frozen=True)
class StepReduce:
    """Reduces the values of a rank's tokens over all ranks.

    The methods are collectives: every rank must call them in the same order. With a single process, the methods return
    the local result.
    """

    sum_tensor: Callable[[torch.Tensor], torch.Tensor] = _identity
    """All-reduce sum; it may change its argument in place."""
    max_tensor: Callable[[torch.Tensor], torch.Tensor] = _identity

    def count(self, tokens: int) -> int:
        return int(self.sum_tensor(torch.tensor(tokens, dtype=torch.float64)))

    def sum(self, values_K: torch.Tensor) -> torch.Tensor:
        """The sum over all tokens, in float64."""
        return self.sum_tensor(values_K.sum(dtype=torch.float64))

    def mean(self, values_K: torch.Tensor) -> float:
        """The mean over all tokens; 0 if there are no tokens."""
        return float(self.sum(values_K)) / max(self.count(len(values_K)), 1)

    def max(self, values_K: torch.Tensor) -> float:
        least = torch.tensor(-float("inf"), dtype=torch.float64)
        return float(self.max_tensor(values_K.double().max() if len(values_K) else least))

    def sum_by(self, values_K: torch.Tensor, key_K: torch.Tensor, count: int) -> torch.Tensor:
        return self.sum_tensor(sum_by(values_K, key_K, count))


SINGLE_PROCESS = StepReduce()


def sum_by(values_K: torch.Tensor, key_K: torch.Tensor, count: int) -> torch.Tensor:
    """The sum of the values per key, where `key_K` has the key (0 to count - 1) of each value. Differentiable."""
    return values_K.new_zeros(count).index_add(0, key_K, values_K)


def sequence_mean(values_K: torch.Tensor, keep_K: torch.Tensor, sequence_K: torch.Tensor, count: int) -> torch.Tensor:
    """For each token, the mean of `values_K` over the kept tokens of its sequence (0 if no token is kept)."""
    keep_K = keep_K.to(values_K.dtype)
    totals_S = sum_by(torch.where(keep_K > 0, values_K * keep_K, 0.0), sequence_K, count)
    lengths_S = sum_by(keep_K, sequence_K, count)
    return (totals_S / lengths_S.clamp(min=1))[sequence_K]


def aggregation_weights(
    kind: str,
    sequence_K: torch.Tensor,
    keep_K: torch.Tensor,
    sequences: int,
    max_tokens: int,
    repeats_S: torch.Tensor | None = None,
    reduce: StepReduce = SINGLE_PROCESS,
    counts_masked: bool = False,
) -> tuple[torch.Tensor, float]:
    """Returns token weights and divisor of an update. The loss of the update is `sum(weights_K * loss_K) / divisor`.

    All tokens of a sequence are on one rank. `keep_K` is non-zero for the tokens that the loss uses (the kept tokens).
    A sequence without a kept token is not counted; every other sequence is counted `repeats_S` times. With
    `counts_masked`, means over tokens or sequences of the update also count those that are not kept, as verl does; the
    mean over the tokens of one sequence does not. The divisor is at least 1, so an update without kept tokens has loss
    0 instead of 0/0.

    - `token_mean`: the mean over kept tokens (DAPO, arXiv 2503.14476).
    - `token_sum`: the sum over kept tokens.
    - `seq_mean_token_mean`: the mean over sequences of their token means (GRPO, arXiv 2402.03300).
    - `seq_mean_token_sum`: the mean over sequences of their token sums.
    - `seq_mean_token_sum_norm`: the value of `seq_mean_token_sum` divided by the constant `max_tokens` (arXiv
      2503.20783, Dr.GRPO).
    """
    keep_K = keep_K if keep_K.is_floating_point() else keep_K.to(torch.float32)
    lengths_S = sum_by(keep_K, sequence_K, sequences)
    repeats_S = torch.ones_like(lengths_S) if repeats_S is None else repeats_S.to(lengths_S)
    weights_K = keep_K * repeats_S[sequence_K]
    every_K = torch.ones_like(keep_K) if counts_masked else keep_K
    counted = max(float(reduce.sum(repeats_S[sum_by(every_K, sequence_K, sequences) > 0])), 1.0)
    if kind == "token_mean":
        return weights_K, max(float(reduce.sum(every_K * repeats_S[sequence_K])), 1.0)
    if kind == "token_sum":
        return weights_K, 1.0
    if kind == "seq_mean_token_sum":
        return weights_K, counted
    if kind == "seq_mean_token_mean":
        return weights_K / lengths_S.clamp(min=1)[sequence_K], counted
    if kind == "seq_mean_token_sum_norm":
        return weights_K, counted * max_tokens
    raise Refusal.at(
        "algorithm.aggregation", f"{kind!r} is not known", f"one of {', '.join(AGGREGATIONS)}", code="unknown-name"
    )
