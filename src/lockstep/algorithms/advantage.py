"""Recursions along sequences: discounted returns and generalised advantages.

Shapes: K tokens, S sequences, T positions. The recursions run over positions, all sequences at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lockstep.algorithms.reduce import EVERYTHING, WholeStep, sum_by
from lockstep.errors import Refusal


def return_to_go(rewards_K: torch.Tensor, sequence_K: torch.Tensor, gamma: float) -> torch.Tensor:
    """The discounted sum of a token's own and later rewards: G_t = r_t + gamma G_{t+1}, in float64."""
    return _accumulated(_Layout(sequence_K), rewards_K.double(), gamma)


def generalized_advantages(
    rewards_K: torch.Tensor, values_K: torch.Tensor, sequence_K: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    """Generalised advantages (Schulman et al. 2015, arXiv 1506.02438), in float64, not whitened.

    The value after a sequence's last token is 0. Tokens that the model did not produce are not in the vectors, so the
    next value and the running advantage pass over them: an observation costs neither a discount nor a residual.
    """
    layout = _Layout(sequence_K)
    values_K = values_K.double()
    values_TS = layout.padded(values_K)
    next_TS = torch.cat([values_TS[1:], torch.zeros_like(values_TS[:1])])
    residuals_K = rewards_K.double() + gamma * layout.flat(next_TS) - values_K
    return _accumulated(layout, residuals_K, gamma * lam)


def positions(sequence_K: torch.Tensor) -> torch.Tensor:
    """Of each token, how many of its sequence stand before it."""
    return _Layout(sequence_K).position_K


def running_sum(values_K: torch.Tensor, sequence_K: torch.Tensor) -> torch.Tensor:
    """Of each token, the sum of its own and of its sequence's earlier values, in float64."""
    layout = _Layout(sequence_K)
    return layout.flat(layout.padded(values_K.double()).cumsum(0))


class _Layout:
    """Between the flat line of tokens and columns (position by sequence) that end in zeros."""

    def __init__(self, sequence_K: torch.Tensor):
        self.present_S, self.column_K, lengths_S = torch.unique_consecutive(
            sequence_K, return_inverse=True, return_counts=True
        )
        starts_S = lengths_S.cumsum(0) - lengths_S
        self.position_K = torch.arange(len(sequence_K), device=sequence_K.device) - starts_S[self.column_K]
        self.positions = int(lengths_S.max()) if len(lengths_S) else 0

    def padded(self, values_K: torch.Tensor) -> torch.Tensor:
        values_TS = values_K.new_zeros(self.positions, len(self.present_S))
        values_TS[self.position_K, self.column_K] = values_K
        return values_TS

    def flat(self, values_TS: torch.Tensor) -> torch.Tensor:
        return values_TS[self.position_K, self.column_K]


def _accumulated(layout: _Layout, values_K: torch.Tensor, decay: float) -> torch.Tensor:
    """x_t + decay x_{t+1} + decay^2 x_{t+2} + ... within each sequence. The zeros behind a sequence add nothing."""
    sums_TS = layout.padded(values_K)
    for position in range(layout.positions - 2, -1, -1):
        sums_TS[position].add_(sums_TS[position + 1], alpha=decay)
    return layout.flat(sums_TS)


# Advantages: how the rewards of a step become the sign and size of each token's update.
#
# Shapes: K tokens, S sequences of a step, P sequences that have a token, G groups. A sequence's tokens are all here
# or none of them; means and deviations are over the whole step, from sums (`Signals.whole`), in float64.
#
# Rules that hold for all estimators: - A sequence without a token has no score (there is no token to carry it) and is
# no part of any baseline. - A group of one has nothing to compare with: every group method gives 0, before any
# whitening. (verl gives the   score itself in `grpo` and others.) - Equal scores in a group give exactly 0: scores
# are taken relative to the group's least before they are averaged. - `returns_K` is what the advantage judges: the
# critic's target for `gae`, the return to go for methods that work on   token rewards, the sequence's score for group
# methods. (verl repeats the advantage there.)

STD_FLOOR = 1e-6
VARIANCE_FLOOR = 1e-8
ENERGY_FLOOR = 1e-8


@dataclass(frozen=True)
class Whitening:
    """How advantages are brought to mean 0 and deviation 1 over the tokens of the step.

    `over`: `own` as the estimator's paper has it, `none`, or `step` for every estimator. `biased` takes the variance
    with n (OpenRLHF) instead of n - 1 (verl); without `divide` only the mean is taken off.
    """

    over: str = "own"
    biased: bool = False
    divide: bool = True


@dataclass(frozen=True)
class Signals:
    """What a step earned. `rewards_K` holds the score on a sequence's last token and a divergence penalty on any."""

    rewards_K: torch.Tensor
    sequence_K: torch.Tensor
    group_S: torch.Tensor
    values_K: torch.Tensor | None = None
    baseline_S: torch.Tensor | None = None
    whitening: Whitening = Whitening()
    energy_K: torch.Tensor | None = None
    """1 - 2 p + sum of all words' squared probabilities: the squared gradient of log p by the logits."""
    rewards: tuple[tuple[float, torch.Tensor], ...] = ()
    """The rewards that `gdpo` compares one by one: weight, and the scores of the sequences."""
    taken_off_K: torch.Tensor | None = None
    """A penalty that a group does not compare: taken off the advantages, at each token with all that follow."""
    whole: WholeStep = EVERYTHING

    @property
    def scores_S(self) -> torch.Tensor:
        """What each sequence earned over all its tokens."""
        return self.whole.sum_by(self.rewards_K, self.sequence_K, len(self.group_S))


@dataclass(frozen=True)
class Estimate:
    """Advantages for the policy and returns for the critic, in the type of the rewards."""

    advantages_K: torch.Tensor
    returns_K: torch.Tensor


def gae(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """Generalised advantages (arXiv 1506.02438), whitened over the step; returns are A + V before the whitening."""
    values_K = _needed(signals.values_K, "gae", "the critic's values")
    advantages_K = generalized_advantages(signals.rewards_K, values_K, signals.sequence_K, gamma, lam)
    return _estimate(signals, advantages_K, advantages_K + values_K.double(), whitens=True)


def reinforce(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """The discounted return to go, without a baseline (Williams 1992)."""
    returns_K = return_to_go(signals.rewards_K, signals.sequence_K, gamma)
    return _estimate(signals, returns_K, returns_K)


def flash_reinforce(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """FlashREINFORCE (OpenRLHF 0.11): s minus the mean score of the whole step; no groups, nothing is whitened."""
    scores_S = signals.scores_S.double()
    present_S = signals.whole.sum_by(torch.ones_like(signals.rewards_K), signals.sequence_K, len(scores_S)) > 0
    least = scores_S[present_S].min() if bool(present_S.any()) else scores_S.new_zeros(())
    above_S = scores_S - least  # equal scores become exact zeros
    baseline = above_S[present_S].sum() / present_S.sum().clamp(min=1)
    return _estimate(signals, (above_S - baseline)[signals.sequence_K], scores_S[signals.sequence_K])


def reinforce_pp(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """REINFORCE++ (arXiv 2501.03262): the return to go, whitened over the tokens of the step."""
    returns_K = return_to_go(signals.rewards_K, signals.sequence_K, gamma)
    return _estimate(signals, returns_K, returns_K, whitens=True)


def remax(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """ReMax (arXiv 2310.10505): the return to go minus the score of the greedy response to the same prompt."""
    baseline_S = _needed(signals.baseline_S, "remax", "the scores of the greedy responses")
    returns_K = return_to_go(signals.rewards_K, signals.sequence_K, gamma)
    return _estimate(signals, returns_K - baseline_S.double()[signals.sequence_K], returns_K)


def grpo(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """GRPO (arXiv 2402.03300): (s - group mean) / (group deviation + 1e-6), the deviation with n - 1."""
    groups = _Groups(signals)
    return groups.estimate(groups.centred_P / (groups.deviation_P + STD_FLOOR))


def dr_grpo(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """Dr. GRPO (arXiv 2503.20783): s - group mean, not divided by the deviation."""
    groups = _Groups(signals)
    return groups.estimate(groups.centred_P)


def rloo(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """RLOO (arXiv 2402.14740): s minus the mean of the others, which is (s - group mean) n / (n - 1)."""
    groups = _Groups(signals)
    return groups.estimate(groups.centred_P * groups.size_P / (groups.size_P - 1).clamp(min=1))


def opo(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """OPO (arXiv 2505.23585): s minus the group's mean weighted by length, in tokens that the model produced."""
    groups = _Groups(signals)
    baseline_P = groups.total(groups.lengths_P * groups.above_least_P) / groups.total(groups.lengths_P)
    return groups.estimate(groups.above_least_P - baseline_P)


def gpg(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """GPG (arXiv 2504.02546): s - group mean, times all sequences over those in groups whose scores differ.

    The factor makes up for the groups without a gradient. verl counts the sequences of non-zero score instead, which
    with rewards 0 and 1 are the right answers, and which changes when a constant is added to the rewards.
    """
    groups = _Groups(signals)
    differing = int((groups.greatest_P > 0).sum())
    return groups.estimate(groups.centred_P * (len(groups.centred_P) / max(differing, 1)))


def grpo_passk(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """Pass@k (arXiv 2503.19595): only the best of a group, with (best - second best) / (deviation + 1e-6).

    Where several share the best score the second best is as good, so all of the group get 0.
    """
    groups = _Groups(signals)
    best_P = groups.above_least_P == groups.greatest_P
    only_P = best_P & (groups.total(best_P.double()) == 1)
    second_P = groups.greatest(torch.where(best_P, 0.0, groups.above_least_P))
    lead_P = (groups.above_least_P - second_P) / (groups.deviation_P + STD_FLOOR)
    return groups.estimate(torch.where(only_P, lead_P, 0.0))


def reinforce_pp_baseline(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """REINFORCE++ with a group baseline (arXiv 2501.03262): s - group mean, whitened over the tokens of the step."""
    groups = _Groups(signals)
    return _estimate(signals, groups.at_tokens(groups.centred_P), groups.at_tokens(groups.scores_P), whitens=True)


def gdpo(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """GDPO (arXiv 2601.05242): each reward normalised in its group as by `grpo`, then summed by weight, then whitened.

    A reward of small spread is so not drowned by one of large spread. What is no reward of the list (a divergence in
    the reward, say) has no part in it.
    """
    if not signals.rewards:
        raise Refusal.at(
            "algorithm.advantage", "gdpo needs the rewards one by one, and the step has none", code="missing-input"
        )
    groups = _Groups(signals)
    total_P = torch.zeros_like(groups.scores_P)
    for weight, scores_S in signals.rewards:
        alone = _Groups(signals, scores_S)
        total_P = total_P + weight * alone.centred_P / (alone.deviation_P + STD_FLOOR)
    return _estimate(signals, groups.at_tokens(total_P), groups.at_tokens(groups.scores_P), whitens=True)


def optimal_token_baseline(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """The optimal token baseline (arXiv 2602.07078): return to go minus a baseline of the group for each position.

    B_t = sum_i G_t W_t / sum_i W_t over the group's sequences that reach position t; W_t is the energy of a sequence up
    to t, whose tokens have the squared gradient 1 - 2 p + sum of squares (times the squared importance weight, where
    there is one). Positions count the policy's own tokens. Where one sequence alone is left of a group there is
    nothing to compare with: its baseline is 0 (verl's `handle_zero_tail`).
    """
    energy_K = _needed(signals.energy_K, "optimal_token_baseline", "the squared probabilities of all words").double()
    sequence_K, whole = signals.sequence_K, signals.whole
    returns_K = return_to_go(signals.rewards_K, sequence_K, gamma)
    group_S, groups = _numbered(signals.group_S)
    place_K = positions(sequence_K)
    energy_K = running_sum(energy_K, sequence_K)
    width = int(max(whole.greatest(place_K), -1.0)) + 1
    key_K = group_S[sequence_K] * width + place_K

    def over_group(values_K: torch.Tensor) -> torch.Tensor:
        return whole.sum_by(values_K, key_K, groups * width)[key_K]

    baseline_K = over_group(returns_K * energy_K) / (over_group(energy_K) + ENERGY_FLOOR)
    alone_K = over_group(torch.ones_like(energy_K)) == 1
    advantages_K = returns_K - torch.where(alone_K, 0.0, baseline_K)
    single_K = _Groups(signals).single_K
    return _estimate(signals, torch.where(single_K, 0.0, advantages_K), returns_K)


ESTIMATORS: dict[str, Callable[..., Estimate]] = {
    "gae": gae,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "flash_reinforce": flash_reinforce,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "remax": remax,
    "opo": opo,
    "grpo_passk": grpo_passk,
    "gpg": gpg,
    "gdpo": gdpo,
    "optimal_token_baseline": optimal_token_baseline,
}


def whitened(
    values_K: torch.Tensor, *, biased: bool = False, divide: bool = True, whole: WholeStep = EVERYTHING
) -> torch.Tensor:
    """(x - mean) / sqrt(variance + 1e-8), the variance with n - 1, as verl has it. One or equal values give 0.

    `biased` takes the variance with n, as OpenRLHF has it; without `divide` x - mean is all.
    """
    count = whole.count(len(values_K))
    # Equal values become exact zeros, which no rounding of their mean can undo.
    shifted_K = values_K - whole.greatest(values_K) if count else values_K
    centred_K = shifted_K - whole.total(shifted_K.sum()) / max(count, 1)
    if not divide:
        return centred_K
    variance = whole.total(centred_K.square().sum()) / (count if biased else max(count - 1, 1))
    return centred_K * torch.rsqrt(variance + VARIANCE_FLOOR)


def informative(scores_S: torch.Tensor, group_S: torch.Tensor) -> torch.Tensor:
    """True where the scores of a sequence's group are not all equal: what dynamic sampling (arXiv 2503.14476) keeps."""
    group_S, groups = _numbered(group_S)
    return _extreme(scores_S, group_S, groups, "amax") > _extreme(scores_S, group_S, groups, "amin")


class _Groups:
    """The scores of the sequences that have a token, as seen from each of them in its group."""

    def __init__(self, signals: Signals, scores_S: torch.Tensor | None = None):
        """`scores_S` in place of what the sequences earned in all."""
        self._signals = signals
        whole, sequence_K, sequences = signals.whole, signals.sequence_K, len(signals.group_S)
        lengths_S = whole.sum_by(torch.ones_like(signals.rewards_K, dtype=torch.float64), sequence_K, sequences)
        if scores_S is None:
            scores_S = whole.sum_by(signals.rewards_K.double(), sequence_K, sequences)
        present_S = lengths_S > 0
        # The place of a sequence among those that have a token.
        self._index_K = (present_S.cumsum(0) - 1)[sequence_K]
        self._group_P, self._groups = _numbered(signals.group_S[present_S])
        self.scores_P, self.lengths_P = scores_S.double()[present_S], lengths_S[present_S]
        self.size_P = self.total(torch.ones_like(self.scores_P))
        self.above_least_P = self.scores_P - _extreme(self.scores_P, self._group_P, self._groups, "amin")
        self.greatest_P = self.greatest(self.above_least_P)
        self.centred_P = self.above_least_P - self.total(self.above_least_P) / self.size_P
        self.deviation_P = (self.total(self.centred_P.square()) / (self.size_P - 1).clamp(min=1)).sqrt()

    @property
    def single_K(self) -> torch.Tensor:
        """True at the tokens of a group of one."""
        return self.at_tokens(self.size_P == 1)

    def total(self, values_P: torch.Tensor) -> torch.Tensor:
        return sum_by(values_P, self._group_P, self._groups)[self._group_P]

    def greatest(self, values_P: torch.Tensor) -> torch.Tensor:
        return _extreme(values_P, self._group_P, self._groups, "amax")

    def at_tokens(self, values_P: torch.Tensor) -> torch.Tensor:
        return values_P[self._index_K]

    def estimate(self, advantages_P: torch.Tensor) -> Estimate:
        return _estimate(self._signals, self.at_tokens(advantages_P), self.at_tokens(self.scores_P))


def _numbered(group_S: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Group numbers without gaps, and how many there are."""
    names_G, number_S = torch.unique(group_S, return_inverse=True)
    return number_S, len(names_G)


def _extreme(values_S: torch.Tensor, group_S: torch.Tensor, groups: int, which: str) -> torch.Tensor:
    """The greatest (`amax`) or least (`amin`) value of each sequence's group."""
    extreme_G = values_S.new_zeros(groups).scatter_reduce(0, group_S, values_S, which, include_self=False)
    return extreme_G[group_S]


def _estimate(
    signals: Signals, advantages_K: torch.Tensor, returns_K: torch.Tensor, *, whitens: bool = False
) -> Estimate:
    """`whitens`: the estimator's paper whitens over the step."""
    dtype, wanted = signals.rewards_K.dtype, signals.whitening
    if signals.taken_off_K is not None:
        advantages_K = advantages_K - return_to_go(signals.taken_off_K, signals.sequence_K, 1.0)
    if wanted.over == "step" or (wanted.over == "own" and whitens):
        advantages_K = whitened(advantages_K, biased=wanted.biased, divide=wanted.divide, whole=signals.whole)
    return Estimate(advantages_K.to(dtype), returns_K.to(dtype))


def _needed(values: torch.Tensor | None, estimator: str, what: str) -> torch.Tensor:
    if values is None:
        raise Refusal.at(
            "algorithm.advantage", f"{estimator} needs {what}, and the step has none", code="missing-input"
        )
    return values
