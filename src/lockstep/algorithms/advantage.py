"""Advantage estimators, with discounted returns and generalized advantages.

The suffixes of tensor names mean K tokens, S sequences of a step, P sequences that have a token, G groups, T positions,
U turns of the model in all trajectories of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lockstep.algorithms.reduce import SINGLE_PROCESS, StepReduce, sum_by
from lockstep.errors import Refusal


@dataclass(frozen=True)
class TrajectoryTurns:
    """The turns of the model in the trajectories of a step, in the order of the sequences."""

    turn_K: torch.Tensor
    """The index of the turn of each token among all turns of the step."""
    sequence_U: torch.Tensor
    state_U: torch.Tensor
    """The number of the state in which a turn starts. Turns with the same number start in the same state, in
    trajectories of the same prompt."""
    discount: float = 1.0
    """The discount factor between turns: a turn has the return R_t = r_t + discount R_{t+1} (`turn_discount` in
    AReaL)."""
    weight: float = 1.0
    """The weight of the advantages of turns in `gigpo`."""
    rewards_U: torch.Tensor | None = None
    """The exact rewards of the turns, if the token rewards have nothing else. Sums of token rewards are rounded."""

    @property
    def discount_K(self) -> torch.Tensor:
        """The discount of the rewards at each token, from the start of the trajectory: discount^t in turn t."""
        return (self.discount ** positions(self.sequence_U).double())[self.turn_K]

    def decay(self, gamma: float) -> torch.Tensor:
        """The discount factor from each token to the next: gamma, times `discount` at the last token of a turn."""
        last_K = torch.ones_like(self.turn_K, dtype=torch.bool)
        last_K[:-1] = self.turn_K[1:] != self.turn_K[:-1]
        return gamma * torch.where(last_K, self.discount, 1.0).double()


def return_to_go(
    rewards_K: torch.Tensor, sequence_K: torch.Tensor, gamma: float, turns: TrajectoryTurns | None = None
) -> torch.Tensor:
    """The discounted sum of the rewards of a token and all later tokens: G_t = r_t + gamma G_{t+1}, in float64. Between
    two turns, the discount factor is also multiplied by `turns.discount`."""
    return _accumulated(_Layout(sequence_K), rewards_K.double(), gamma if turns is None else turns.decay(gamma))


def generalized_advantages(
    rewards_K: torch.Tensor,
    values_K: torch.Tensor,
    sequence_K: torch.Tensor,
    gamma: float,
    lam: float,
    turns: TrajectoryTurns | None = None,
) -> torch.Tensor:
    """Generalised advantages (Schulman et al. 2015, arXiv 1506.02438), in float64, not whitened.

    The value after the last token is 0. The vectors have no environment tokens (tool output), so such tokens add no
    discount and no TD residual.
    """
    layout, decay = _Layout(sequence_K), gamma if turns is None else turns.decay(gamma)
    values_K = values_K.double()
    values_TS = layout.padded(values_K)
    next_TS = torch.cat([values_TS[1:], torch.zeros_like(values_TS[:1])])
    residuals_K = rewards_K.double() + decay * layout.flat(next_TS) - values_K
    return _accumulated(layout, residuals_K, decay * lam)


def positions(sequence_K: torch.Tensor) -> torch.Tensor:
    """The position of each token in its sequence."""
    return _Layout(sequence_K).position_K


def running_sum(values_K: torch.Tensor, sequence_K: torch.Tensor) -> torch.Tensor:
    """The cumulative sum of the values within each sequence, in float64."""
    layout = _Layout(sequence_K)
    return layout.flat(layout.padded(values_K.double()).cumsum(0))


class _Layout:
    """Converts between flat token vectors and zero-padded matrices (position by sequence)."""

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


def _accumulated(layout: _Layout, values_K: torch.Tensor, decay: float | torch.Tensor) -> torch.Tensor:
    """x_t + decay x_{t+1} + decay^2 x_{t+2} + ... within each sequence. Padding zeros add nothing. If `decay` is a
    tensor, it has the decay from each token to the next."""
    sums_TS = layout.padded(values_K)
    later = range(layout.positions - 2, -1, -1)
    if isinstance(decay, torch.Tensor):
        decay_TS = layout.padded(decay)
        for position in later:
            sums_TS[position].addcmul_(sums_TS[position + 1], decay_TS[position])
    else:
        for position in later:
            sums_TS[position].add_(sums_TS[position + 1], alpha=decay)
    return layout.flat(sums_TS)


# Rules for all estimators. All tokens of a sequence are on one rank. Means and standard deviations are computed in
# float64 over the full training step, reduced over all ranks (`Signals.reduce`).
# - A sequence without a generated token has no score, and no baseline includes it.
# - In a group with a single sequence, every group-based estimator returns advantage 0 before whitening. (For such a
#   group, `grpo` and other estimators of verl return the score as the advantage, as here with `lone_score`.)
# - If all scores of a group are equal, the advantages are exactly 0: the smallest score of the group is subtracted
#   before averaging.
# - `returns_K` is the critic's target for `gae`, the return to go for estimators on token rewards, and the score of the
#   sequence for group-based estimators. (In verl, the returns of group-based estimators equal the advantages.)

STD_FLOOR = 1e-6
VARIANCE_FLOOR = 1e-8
ENERGY_FLOOR = 1e-8


@dataclass(frozen=True)
class Whitening:
    """Whitening of advantages to mean 0 and standard deviation 1 over the tokens of the step.

    `over` = `own` whitens only if the estimator's paper does, `none` never whitens, and `step` always whitens. With
    `biased`, the variance has the divisor n (as in OpenRLHF) instead of n - 1 (as in verl). If `divide` is False, only
    the mean is subtracted.
    """

    over: str = "own"
    biased: bool = False
    divide: bool = True


@dataclass(frozen=True)
class Signals:
    """The inputs of an estimator; `rewards_K` has the score at the last token of a sequence, plus any KL penalties."""

    rewards_K: torch.Tensor
    sequence_K: torch.Tensor
    group_S: torch.Tensor
    values_K: torch.Tensor | None = None
    baseline_S: torch.Tensor | None = None
    whitening: Whitening = Whitening()
    energy_K: torch.Tensor | None = None
    """Squared norm of the gradient of log p with respect to the logits: 1 - 2 p + sum of squared vocabulary
    probabilities."""
    rewards: tuple[tuple[float, torch.Tensor], ...] = ()
    """The separate rewards of `gdpo`: for each reward its weight and one score per sequence."""
    kl_penalty_K: torch.Tensor | None = None
    """A KL penalty that is not in the scores of the groups: its return to go is subtracted from the advantages."""
    reduce: StepReduce = SINGLE_PROCESS
    turns: TrajectoryTurns | None = None
    """The turns of trajectories, if the estimator or `turn_discount` needs them."""
    totals_S: torch.Tensor | None = None
    """The exact scores of the sequences, discounted with `turn_discount`, if `rewards_K` has nothing but these scores.
    Sums of token rewards are rounded, and an estimator would take the difference of two equal scores for a signal."""
    present_S: torch.Tensor | None = None
    """The sequences that have a token, if the vectors over K lack masked tokens (default: those in `sequence_K`)."""
    divide_by_std: bool = True
    """Whether `grpo_passk` divides by the standard deviation of the group."""
    gpg_nonzero: bool = False
    """Whether M of `gpg` is the number of sequences with a score other than 0 (verl)."""
    lone_score: bool = False
    """Whether the only response of a group has its score as advantage (verl) instead of 0."""

    @property
    def scores_S(self) -> torch.Tensor:
        """The sum of the rewards of each sequence. With `turn_discount`, the return of its first turn: the reward of
        turn t is multiplied by turn_discount^t."""
        if self.totals_S is not None:
            return self.totals_S.to(self.rewards_K)
        rewards_K = self.rewards_K if self.turns is None else self.rewards_K * self.turns.discount_K
        return self.reduce.sum_by(rewards_K.to(self.rewards_K), self.sequence_K, len(self.group_S))


@dataclass(frozen=True)
class Estimate:
    """Advantages for the policy and returns for the critic, in the dtype of the rewards."""

    advantages_K: torch.Tensor
    returns_K: torch.Tensor


def gae(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """Generalised advantages A (arXiv 1506.02438), whitened over the step; returns are A + V with the unwhitened A."""
    values_K = _needed(signals.values_K, "gae", "the critic's values")
    advantages_K = generalized_advantages(signals.rewards_K, values_K, signals.sequence_K, gamma, lam, signals.turns)
    return _estimate(signals, advantages_K, advantages_K + values_K.double(), whitens=True)


def reinforce(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """The discounted return to go, without a baseline (Williams 1992)."""
    returns_K = return_to_go(signals.rewards_K, signals.sequence_K, gamma, signals.turns)
    return _estimate(signals, returns_K, returns_K)


def flash_reinforce(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """FlashREINFORCE (OpenRLHF 0.11): the score s minus the mean score of the step, without groups and whitening."""
    scores_S = signals.scores_S.double()
    present_S = signals.reduce.sum_by(torch.ones_like(signals.rewards_K), signals.sequence_K, len(scores_S)) > 0
    least = scores_S[present_S].min() if bool(present_S.any()) else scores_S.new_zeros(())
    above_S = scores_S - least  # if all scores are equal, the differences are exactly 0
    baseline = above_S[present_S].sum() / present_S.sum().clamp(min=1)
    return _estimate(signals, (above_S - baseline)[signals.sequence_K], scores_S[signals.sequence_K])


def reinforce_pp(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """REINFORCE++ (arXiv 2501.03262): the return to go, whitened over the tokens of the step."""
    returns_K = return_to_go(signals.rewards_K, signals.sequence_K, gamma, signals.turns)
    return _estimate(signals, returns_K, returns_K, whitens=True)


def remax(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """ReMax (arXiv 2310.10505): the return to go minus the score of the greedy response to the same prompt."""
    baseline_S = _needed(signals.baseline_S, "remax", "the scores of the greedy responses")
    returns_K = return_to_go(signals.rewards_K, signals.sequence_K, gamma, signals.turns)
    return _estimate(signals, returns_K - baseline_S.double()[signals.sequence_K], returns_K)


def grpo(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """GRPO (arXiv 2402.03300): (score - group mean) / (group standard deviation + 1e-6). The deviation has the divisor
    n - 1."""
    groups = _Groups(signals)
    return groups.estimate(groups.centred_P / (groups.deviation_P + STD_FLOOR))


def dr_grpo(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """Dr. GRPO (arXiv 2503.20783): score minus group mean, not divided by the standard deviation."""
    groups = _Groups(signals)
    return groups.estimate(groups.centred_P)


def rloo(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """RLOO (arXiv 2402.14740): score minus mean score of the group's other responses = (s - group mean) n / (n - 1)."""
    groups = _Groups(signals)
    return groups.estimate(groups.centred_P * groups.size_P / (groups.size_P - 1).clamp(min=1))


def opo(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """OPO (arXiv 2505.23585): score minus group mean. The mean weights each score by its number of generated tokens."""
    groups = _Groups(signals)
    baseline_P = groups.total(groups.lengths_P * groups.above_least_P) / groups.total(groups.lengths_P)
    return groups.estimate(groups.above_least_P - torch.where(groups.lone_P, 0.0, baseline_P))


def gpg(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """GPG (arXiv 2504.02546): (score - group mean) x N / M, if M of N sequences are in groups with unequal scores.

    The factor N / M compensates for groups without a gradient. In verl, M is the number of sequences with non-zero
    score (`gpg_nonzero`), which changes if a constant is added to all rewards.
    """
    groups = _Groups(signals)
    differing = int((groups.greatest_P > 0).sum())
    differing = int((signals.scores_S != 0).sum()) if signals.gpg_nonzero else differing
    return groups.estimate(groups.centred_P * (len(groups.centred_P) / max(differing, 1)))


def grpo_passk(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """Pass@k (arXiv 2503.19595): only the best response of a group gets (best - second best) / (deviation + 1e-6).

    If several responses share the best score, all advantages of the group are 0. `divide_by_std` sets the division.
    """
    groups = _Groups(signals)
    best_P = groups.above_least_P == groups.greatest_P
    only_P = best_P & (groups.total(best_P.double()) == 1)
    second_P = groups.greatest(torch.where(best_P, 0.0, groups.above_least_P))
    lead_P = groups.above_least_P - second_P
    lead_P = lead_P / (groups.deviation_P + STD_FLOOR) if signals.divide_by_std else lead_P
    return groups.estimate(torch.where(only_P, lead_P, 0.0))


def reinforce_pp_baseline(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """REINFORCE++ with a group baseline (arXiv 2501.03262): s - group mean, whitened over the tokens of the step."""
    groups = _Groups(signals)
    return _estimate(signals, groups.at_tokens(groups.centred_P), groups.at_tokens(groups.scores_P), whitens=True)


def gdpo(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """GDPO (arXiv 2601.05242): normalises each reward per group as in `grpo`, and whitens their weighted sum.

    So a reward with a small spread has as much influence as a reward with a large spread. The normalised rewards
    include no KL penalty.
    """
    if not signals.rewards:
        raise Refusal.at(
            "algorithm.advantage", "gdpo needs the separate rewards, and the step has none", code="missing-input"
        )
    groups = _Groups(signals)
    total_P = torch.zeros_like(groups.scores_P)
    for weight, scores_S in signals.rewards:
        alone = _Groups(signals, scores_S)
        total_P = total_P + weight * alone.centred_P / (alone.deviation_P + STD_FLOOR)
    return _estimate(signals, groups.at_tokens(total_P), groups.at_tokens(groups.scores_P), whitens=True)


def optimal_token_baseline(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """The optimal token baseline (arXiv 2602.07078): return to go minus a group baseline per position.

    The baseline is B_t = sum_i G_t W_t / sum_i W_t over the sequences i of the group that reach position t, with the
    return to go G_t. W_t is the energy of a sequence up to t: the sum of the squared gradient norms of log p (1 - 2
    p + the sum of squared vocabulary probabilities), times the squared importance weight. If only one sequence of a
    group reaches position t, its baseline is 0 (verl's `handle_zero_tail`). A position counts only tokens that the
    policy generated.
    """
    energy_K = _needed(
        signals.energy_K, "optimal_token_baseline", "the squared probabilities of the vocabulary"
    ).double()
    sequence_K, reduce = signals.sequence_K, signals.reduce
    returns_K = return_to_go(signals.rewards_K, sequence_K, gamma, signals.turns)
    group_S, groups = _numbered(signals.group_S)
    place_K = positions(sequence_K)
    energy_K = running_sum(energy_K, sequence_K)
    width = int(max(reduce.max(place_K), -1.0)) + 1
    key_K = group_S[sequence_K] * width + place_K

    def over_group(values_K: torch.Tensor) -> torch.Tensor:
        return reduce.sum_by(values_K, key_K, groups * width)[key_K]

    baseline_K = over_group(returns_K * energy_K) / (over_group(energy_K) + ENERGY_FLOOR)
    alone_K = over_group(torch.ones_like(energy_K)) == 1
    advantages_K = returns_K - torch.where(alone_K, 0.0, baseline_K)
    sized = _Groups(signals)
    single_K = sized.at_tokens((sized.size_P == 1) & ~sized.lone_P)
    return _estimate(signals, torch.where(single_K, 0.0, advantages_K), returns_K)


def gigpo(signals: Signals, *, gamma: float, lam: float) -> Estimate:
    """GiGPO (arXiv 2505.10978): the advantage of the trajectory as in `grpo`, plus the weighted advantage of the turn.

    The advantage of a turn is (R_t - mean) / (standard deviation + 1e-6) over the turns of the group that start in the
    same state, with the return R_t = r_t + turn_discount R_{t+1}. It is 0 if no other turn starts in this state. As in
    the paper, the score of a trajectory is the sum of its rewards without discount. The deviations have the divisor
    n - 1 (`mean_std_norm` in verl-agent).
    """
    turns = signals.turns
    if turns is None:
        raise Refusal.at(
            "algorithm.advantage", "gigpo needs the turns of trajectories, and the step has none", code="missing-input"
        )
    groups = _Groups(replace(signals, turns=None))
    rewards_U = turns.rewards_U
    if rewards_U is None:
        rewards_U = signals.reduce.sum_by(signals.rewards_K.double(), turns.turn_K, len(turns.sequence_U))
    # In the precision of the rewards, equal returns that are sums of different rewards are equal.
    returns_U = return_to_go(rewards_U, turns.sequence_U, turns.discount).to(signals.rewards_K).double()
    turn_K = (turns.weight * _normalized(returns_U, turns.state_U))[turns.turn_K]
    trajectory_K = groups.at_tokens(groups.centred_P / (groups.deviation_P + STD_FLOOR))
    return _estimate(signals, trajectory_K + turn_K, returns_U[turns.turn_K])


def _normalized(values_U: torch.Tensor, group_U: torch.Tensor) -> torch.Tensor:
    """(value - group mean) / (standard deviation of the group + 1e-6); 0 in a group with one value or equal values."""
    number_U, groups = _numbered(group_U)
    size_U = sum_by(torch.ones_like(values_U), number_U, groups)[number_U]
    above_U = values_U - _extreme(values_U, number_U, groups, "amin")
    centred_U = above_U - sum_by(above_U, number_U, groups)[number_U] / size_U
    variance_U = sum_by(centred_U.square(), number_U, groups)[number_U] / (size_U - 1).clamp(min=1)
    return centred_U / (variance_U.sqrt() + STD_FLOOR)


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
    "gigpo": gigpo,
}


def whiten(
    values_K: torch.Tensor, *, biased: bool = False, divide: bool = True, reduce: StepReduce = SINGLE_PROCESS
) -> torch.Tensor:
    """(x - mean) / sqrt(variance + 1e-8). A single value or equal values become 0.

    The variance has the divisor n - 1, as in verl, or with `biased` n, as in OpenRLHF. If `divide` is False, the result
    is x - mean.
    """
    count = reduce.count(len(values_K))
    # Subtract the maximum first: if all values are equal they become exactly 0, whatever the rounding of the mean.
    shifted_K = values_K - reduce.max(values_K) if count else values_K
    centred_K = shifted_K - reduce.sum_tensor(shifted_K.sum()) / max(count, 1)
    if not divide:
        return centred_K
    variance = reduce.sum_tensor(centred_K.square().sum()) / (count if biased else max(count - 1, 1))
    return centred_K * torch.rsqrt(variance + VARIANCE_FLOOR)


def informative(scores_S: torch.Tensor, group_S: torch.Tensor) -> torch.Tensor:
    """True for the sequences that DAPO's dynamic sampling (arXiv 2503.14476) keeps: those in groups with unequal
    scores."""
    group_S, groups = _numbered(group_S)
    return _extreme(scores_S, group_S, groups, "amax") > _extreme(scores_S, group_S, groups, "amin")


class _Groups:
    """Statistics of the scores per group, over the sequences that have a token."""

    def __init__(self, signals: Signals, scores_S: torch.Tensor | None = None):
        """`scores_S`, if given, is used instead of the sums of the token rewards."""
        self._signals = signals
        reduce, sequence_K, sequences = signals.reduce, signals.sequence_K, len(signals.group_S)
        lengths_S = reduce.sum_by(torch.ones_like(signals.rewards_K, dtype=torch.float64), sequence_K, sequences)
        if scores_S is None:
            scores_S = signals.totals_S
        if scores_S is None:
            rewards_K = signals.rewards_K.double()
            rewards_K = rewards_K if signals.turns is None else rewards_K * signals.turns.discount_K
            scores_S = reduce.sum_by(rewards_K, sequence_K, sequences)
        present_S = lengths_S > 0 if signals.present_S is None else signals.present_S
        # For each token, the index of its sequence among the sequences that have a token.
        self._index_K = (present_S.cumsum(0) - 1)[sequence_K]
        self._group_P, self._groups = _numbered(signals.group_S[present_S])
        self.scores_P, self.lengths_P = scores_S.double()[present_S], lengths_S[present_S]
        self.size_P = self.total(torch.ones_like(self.scores_P))
        # A lone response has the baseline 0 and the deviation 1, if `lone_score` is set.
        self.lone_P = (self.size_P == 1) & signals.lone_score
        least_P = _extreme(self.scores_P, self._group_P, self._groups, "amin")
        self.above_least_P = self.scores_P - torch.where(self.lone_P, 0.0, least_P)
        self.greatest_P = self.greatest(self.above_least_P)
        mean_P = self.total(self.above_least_P) / self.size_P
        self.centred_P = self.above_least_P - torch.where(self.lone_P, 0.0, mean_P)
        deviation_P = (self.total(self.centred_P.square()) / (self.size_P - 1).clamp(min=1)).sqrt()
        self.deviation_P = torch.where(self.lone_P, 1.0, deviation_P)

    def total(self, values_P: torch.Tensor) -> torch.Tensor:
        return sum_by(values_P, self._group_P, self._groups)[self._group_P]

    def greatest(self, values_P: torch.Tensor) -> torch.Tensor:
        return _extreme(values_P, self._group_P, self._groups, "amax")

    def at_tokens(self, values_P: torch.Tensor) -> torch.Tensor:
        return values_P[self._index_K]

    def estimate(self, advantages_P: torch.Tensor) -> Estimate:
        return _estimate(self._signals, self.at_tokens(advantages_P), self.at_tokens(self.scores_P))


def _numbered(group_S: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The group of each sequence, with the groups renumbered 0, 1, 2, ..., and the number of groups."""
    names_G, number_S = torch.unique(group_S, return_inverse=True)
    return number_S, len(names_G)


def _extreme(values_S: torch.Tensor, group_S: torch.Tensor, groups: int, which: str) -> torch.Tensor:
    """The greatest (`amax`) or least (`amin`) value of each sequence's group."""
    extreme_G = values_S.new_zeros(groups).scatter_reduce(0, group_S, values_S, which, include_self=False)
    return extreme_G[group_S]


def _estimate(
    signals: Signals, advantages_K: torch.Tensor, returns_K: torch.Tensor, *, whitens: bool = False
) -> Estimate:
    """Builds the estimate. `whitens` says whether the estimator's paper whitens advantages over the step."""
    dtype, wanted = signals.rewards_K.dtype, signals.whitening
    if signals.kl_penalty_K is not None:
        advantages_K = advantages_K - return_to_go(signals.kl_penalty_K, signals.sequence_K, 1.0)
    if wanted.over == "step" or (wanted.over == "own" and whitens):
        advantages_K = whiten(advantages_K, biased=wanted.biased, divide=wanted.divide, reduce=signals.reduce)
    return Estimate(advantages_K.to(dtype), returns_K.to(dtype))


def _needed(values: torch.Tensor | None, estimator: str, what: str) -> torch.Tensor:
    if values is None:
        raise Refusal.at(
            "algorithm.advantage",
            f"the estimator {estimator} needs {what}, and the step has none",
            code="missing-input",
        )
    return values
