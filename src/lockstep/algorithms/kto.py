"""KTO (arXiv 2402.01306): single responses with binary labels, and a KL estimate from mismatched pairs.

The suffix N of tensor names means the rows of a micro-batch. The log-ratio of a row is log p - log p_ref, summed over
its response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.algorithms.reduce import LEAST_SUM, floor_logprobs, log_ratio
from lockstep.types import Sums

MOST_DESIRABLE = 4 / 3
"""KTO paper, equation 8: the total weight of desirable rows should be 1 to 4/3 times that of undesirable rows."""


def kto_loss(
    logratios_N: torch.Tensor,
    desirable_N: torch.Tensor,
    *,
    kl: float,
    beta: float,
    desirable: float,
    undesirable: float,
) -> Sums:
    """KTO's loss. A desirable row has the loss `desirable` (1 - sigmoid(beta (log-ratio - kl))).

    An undesirable row has the loss `undesirable` (1 - sigmoid(beta (kl - log-ratio))). Log-ratios come from
    `row_logratios` or `row_means`, and `kl` is `kl_estimate` of the update. Metrics are sums over rows: the numbers of
    desirable and undesirable rows, their rewards (beta x log-ratio), and `accuracy`. A desirable row is accurate if its
    log-ratio is above `kl`, an undesirable row if it is below; an equal log-ratio adds 0.5.
    """
    above_N = logratios_N - kl
    toward_N = torch.where(desirable_N, above_N, -above_N)
    weights_N = torch.full_like(logratios_N, undesirable).masked_fill(desirable_N, desirable)
    # sigmoid(-x) is more precise than 1 - sigmoid(x) for large x.
    loss_N = weights_N * torch.sigmoid(-beta * toward_N)
    rewards_N, toward_N = beta * logratios_N.detach(), toward_N.detach()
    good_N = desirable_N.to(rewards_N.dtype)
    metrics = {
        "desirable": good_N.sum(),
        "undesirable": (1 - good_N).sum(),
        "reward_desirable": rewards_N[desirable_N].sum(),
        "reward_undesirable": rewards_N[~desirable_N].sum(),
        "accuracy": ((toward_N > 0).to(rewards_N.dtype) + 0.5 * (toward_N == 0)).sum(),
    }
    return Sums(loss=loss_N.sum(), metrics=metrics)


def row_logratios(policy_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """log p - log p_ref of each row; 0 if the response is impossible for policy and reference (`floor_logprobs`)."""
    return log_ratio(policy_N, reference_N, LEAST_SUM)


def row_means(policy_N: torch.Tensor, lengths_N: torch.Tensor) -> torch.Tensor:
    """The mean log-prob of the tokens of each row, used instead of the log-ratio if there is no reference model."""
    return floor_logprobs(policy_N, LEAST_SUM) / lengths_N


def kl_estimate(logratios: torch.Tensor) -> float:
    """KTO's KL estimate: the mean log-ratio of mismatched pairs, at least 0 and detached."""
    if not len(logratios):
        raise ValueError("the KL estimate of KTO is a mean over mismatched pairs, and there are none")
    return max(float(logratios.detach().double().mean()), 0.0)


def mismatched_rows(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[int]:
    """Returns for each row the row that provides the mismatched completion.

    The partner is the next row (cyclic, never the row itself) whose prompt and completion both differ. If no row
    differs in both prompt and completion, the partner is the next row whose completion differs. Always using the
    neighbour would give a matched pair if neighbours share a prompt.
    """
    prompt, completion = _runs(prompts), _runs(completions)
    return [_partner(row, prompt, completion) for row in range(len(completions))]


def recommended_weights(desirable: int, undesirable: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """The ranges that KTO recommends for the desirable weight if the undesirable weight is 1, and vice versa."""
    if not desirable or not undesirable:
        raise ValueError("weights balance two kinds of rows, desirable and undesirable, and one kind has no rows")
    scarce = undesirable / desirable
    return (scarce, MOST_DESIRABLE * scarce), (1 / (MOST_DESIRABLE * scarce), 1 / scarce)


def imbalance_note(desirable: int, undesirable: int, w_d: float, w_u: float) -> str | None:
    """A warning if the weights of desirable and undesirable rows are outside the paper's range; else None."""
    if not desirable or not undesirable:
        kind = "desirable" if desirable else "undesirable"
        return f"All {desirable + undesirable:,} rows are {kind}; KTO learns from rows of both kinds."
    ratio = w_d * desirable / (w_u * undesirable)
    if 1 - 1e-9 <= ratio <= MOST_DESIRABLE + 1e-9:
        return None
    for_desirable, for_undesirable = recommended_weights(desirable, undesirable)
    raised, fixed, (low, high) = ("desirable", "undesirable", for_desirable)
    if desirable > undesirable:
        raised, fixed, (low, high) = ("undesirable", "desirable", for_undesirable)
    return (
        f"In total, {desirable:,} desirable and {undesirable:,} undesirable rows weigh {ratio:.3g} to 1; the KTO paper "
        f"recommends 1 to 1.33: set preference.{fixed} to 1 and preference.{raised} between {_up(max(low, 1))} and "
        f"{_down(high)}."
    )


@dataclass(frozen=True)
class _Runs:
    """Runs (neighbouring equal rows) in a cyclic list of rows. Equal rows have the same number in `numbers`. `ends[i]`
    is the index after the run of row i, in the list repeated twice."""

    numbers: list[int]
    ends: list[int]


def _runs(rows: Sequence[Sequence[int]]) -> _Runs:
    seen: dict[tuple[int, ...], int] = {}
    numbers = [seen.setdefault(tuple(tokens), len(seen)) for tokens in rows]
    twice = numbers + numbers
    ends = [len(twice)] * len(twice)
    for index in range(len(twice) - 2, -1, -1):
        ends[index] = ends[index + 1] if twice[index] == twice[index + 1] else index + 1
    return _Runs(numbers, ends)


def _partner(row: int, prompt: _Runs, completion: _Runs) -> int:
    found = _next_other(row, [prompt, completion])
    if found is None:
        found = _next_other(row, [completion])
    if found is None:
        raise ValueError(f"row {row} has no mismatched completion: all rows of the batch have the same completion")
    return found


def _next_other(row: int, differing: Sequence[_Runs]) -> int | None:
    """The next row that differs from `row` in every list of `differing`. A run of equal rows is skipped in one step."""
    count = len(differing[0].numbers)
    index = row + 1
    while index < row + count:
        ends = [runs.ends[index] for runs in differing if runs.numbers[index % count] == runs.numbers[row]]
        if not ends:
            return index % count
        index = max(ends)
    return None


def _up(weight: float) -> str:
    """The weight, rounded up to two decimals."""
    return f"{math.ceil(weight * 100 - 1e-6) / 100:g}"


def _down(weight: float) -> str:
    return f"{math.floor(weight * 100 + 1e-6) / 100:g}"
