"""Sums over sequences, the weights that average token losses, and numerically stable log-prob arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lockstep.errors import Refusal

# Arithmetic of log-probabilities that keeps its digits.
#
# The losses see what a model says, and a model may say that a token is impossible: its log-probability is then minus
# infinity, and 0 x inf or inf - inf would make one token's NaN the NaN of the whole update. One rule for all losses:
# a log-probability under -10,000 counts as -10,000 (e^-10000 is 0 in every type), so two impossible ones differ by 0
# and have the ratio 1. Minus infinity has no gradient; a finite one keeps its own, so that a model that has blown up
# is seen by its gradient. A NaN stays one, and the step refuses it with the rows.

LEAST = -1e4
"""Stands for the log-probability of an impossible token."""
LEAST_SUM = -1e6
"""Stands for that of a response with such a token; a sum over real tokens may well be under LEAST."""
CERTAIN = -1e-6
"""Log-probabilities above are taken as this: the sums of float32 do not tell them from 0."""


def floored(logprobs: torch.Tensor, least: float = LEAST) -> torch.Tensor:
    """At least `least`, with the gradient of what was there; minus infinity has none."""
    own = torch.where(logprobs.isinf(), 0.0, logprobs)
    return torch.where(logprobs <= least, own - own.detach() + least, logprobs)


def log_ratio(logprobs: torch.Tensor, others: torch.Tensor, least: float = LEAST) -> torch.Tensor:
    """log p - log q, a number also where one or both are minus infinity."""
    return floored(logprobs, least) - floored(others, least)


def log_rest(logprobs: torch.Tensor) -> torch.Tensor:
    """log(1 - e^x): the log-probability of everything else, with probabilities over 1 - 1e-6 taken as that.

    Near 0 and far from it different forms keep the digits (Maechler, "Accurately computing log(1 - exp(-|a|))", 2012).
    """
    logprobs = logprobs.clamp(max=CERTAIN)
    return torch.where(logprobs > -math.log(2), torch.log(-torch.expm1(logprobs)), torch.log1p(-logprobs.exp()))


# Sums over sequences, and the weights by which the token losses of an update are averaged.
#
# Shapes: K tokens that the model itself produced, sequence after sequence; S sequences. `sequence_K` (int64, non-
# decreasing) is the sequence of a token. Prompt tokens, observations and padding are not in the vectors.

AGGREGATIONS = ("token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm")


def _as_they_are(numbers: torch.Tensor) -> torch.Tensor:
    return numbers


@dataclass(frozen=True)
class WholeStep:
    """From numbers over the tokens that are here to those over all tokens of the step. Where all of them are here there
    is nothing to do; where others are elsewhere, everybody who has some must ask for the same, in the same order.
    """

    total: Callable[[torch.Tensor], torch.Tensor] = _as_they_are
    """Sums; may write over what it is given."""
    largest: Callable[[torch.Tensor], torch.Tensor] = _as_they_are

    def count(self, tokens: int) -> int:
        return int(self.total(torch.tensor(tokens, dtype=torch.float64)))

    def sum(self, values_K: torch.Tensor) -> torch.Tensor:
        """In float64."""
        return self.total(values_K.sum(dtype=torch.float64))

    def mean(self, values_K: torch.Tensor) -> float:
        """0 where there is no token."""
        return float(self.sum(values_K)) / max(self.count(len(values_K)), 1)

    def greatest(self, values_K: torch.Tensor) -> float:
        least = torch.tensor(-float("inf"), dtype=torch.float64)
        return float(self.largest(values_K.double().max() if len(values_K) else least))

    def sum_by(self, values_K: torch.Tensor, key_K: torch.Tensor, count: int) -> torch.Tensor:
        return self.total(sum_by(values_K, key_K, count))


EVERYTHING = WholeStep()


def sum_by(values_K: torch.Tensor, key_K: torch.Tensor, count: int) -> torch.Tensor:
    """The sum of the values of each key 0..count-1; 0 for a key that has none. Carries gradients."""
    return values_K.new_zeros(count).index_add(0, key_K, values_K)


def sequence_mean(values_K: torch.Tensor, keep_K: torch.Tensor, sequence_K: torch.Tensor, count: int) -> torch.Tensor:
    """At each token the mean of its sequence's kept values; 0 where the sequence has no kept token."""
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
    times_S: torch.Tensor | None = None,
    whole: WholeStep = EVERYTHING,
) -> tuple[torch.Tensor, float]:
    """Weights and divisor over a whole update: its loss is `sum(weights_K * loss_K) / divisor`.

    The tokens of a sequence are all here or none of them. A sequence without a kept token (`keep_K` 0 everywhere, or no
    token at all) is not counted. One that counts `times_S` times is as good as so many copies of it. The divisor is at
    least 1, so that an update with nothing kept has loss 0 and not 0/0.

    - `token_mean`: every kept token counts alike (DAPO, arXiv 2503.14476).
    - `token_sum`: the sum over the kept tokens, undivided: the learning rate has to know how many there are.
    - `seq_mean_token_mean`: every sequence counts alike, its tokens share its weight (GRPO, arXiv 2402.03300).
    - `seq_mean_token_sum`: the mean over sequences of the sums of their tokens.
    - `seq_mean_token_sum_norm`: that sum over the constant `max_tokens` (Dr. GRPO, arXiv 2503.20783).
    """
    keep_K = keep_K if keep_K.is_floating_point() else keep_K.to(torch.float32)
    lengths_S = sum_by(keep_K, sequence_K, sequences)
    times_S = torch.ones_like(lengths_S) if times_S is None else times_S.to(lengths_S)
    weights_K = keep_K * times_S[sequence_K]
    counted = max(float(whole.sum(times_S[lengths_S > 0])), 1.0)
    if kind == "token_mean":
        return weights_K, max(float(whole.sum(weights_K)), 1.0)
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
