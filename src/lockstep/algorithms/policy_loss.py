"""Policy losses of online RL as weighted sums over tokens.

Suffix K: tokens of a micro-batch of complete sequences. Each function computes one loss per token from the advantage A
and the ratio r = e^d, where d = log p - log p_old is clamped to +-20. Clamped tokens have no gradient. `weights_K` is
the product of loss mask, aggregation weight and importance weight; the training step divides the sum once.

Tokens of weight 0 have no effect, not even on the means of their sequence. An impossible token (log p = -inf) has no
gradient; its ratio is 1 if log p_old is also -inf (`floor_logprobs`). Metrics are sums over tokens of non-zero weight:
`ppo_kl` sums -d, and `pg_clipfrac` counts the tokens whose gradient a clip bound changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lockstep.algorithms.reduce import floor_logprobs, log_rest, sequence_mean, sum_by
from lockstep.errors import Refusal
from lockstep.types import Sums

LOG_RATIO_BOUND = 20.0
SEQUENCE_LOG_RATIO_BOUND = 10.0


@dataclass(frozen=True)
class PolicyTokens:
    """The inputs of a policy loss. `selected_K` (0/1) marks the tokens selected for the loss `clip_cov` or `kl_cov`."""

    logprobs_K: torch.Tensor
    old_K: torch.Tensor
    advantages_K: torch.Tensor
    weights_K: torch.Tensor
    sequence_K: torch.Tensor
    selected_K: torch.Tensor | None = None

    @property
    def counted_K(self) -> torch.Tensor:
        return self.weights_K > 0


def clip(tokens: PolicyTokens, *, low: float, high: float, dual: float | None) -> Sums:
    """PPO (arXiv 1707.06347): max(-A r, -A clip(r, 1 - low, 1 + high)), with separate bounds as in DAPO.

    `dual` bounds the loss of a negative advantage at -A dual (dual clip, arXiv 1912.09729). None: no bound.
    """
    tokens = _counted(tokens)
    ratio_K = _log_ratio(tokens).exp()
    loss_K, clipped_K = _clipped(ratio_K, tokens.advantages_K, low, high)
    over_K = torch.zeros_like(clipped_K)
    if dual is not None:
        bound_K = -tokens.advantages_K * dual
        over_K = (tokens.advantages_K < 0) & (loss_K > bound_K)
        loss_K = torch.where(over_K, bound_K, loss_K)
    return _sums(tokens, loss_K, pg_clipfrac=clipped_K, pg_clipfrac_lower=over_K)


def gspo(tokens: PolicyTokens, *, low: float, high: float) -> Sums:
    """GSPO in its token form (arXiv 2507.18071): clipped as in PPO, with one ratio per sequence.

    The log ratio is the mean of d over the sequence's tokens of non-zero weight, at most 10. The gradient of the ratio
    is that of the token's log-prob. With `seq_mean_token_mean` this is the objective of the GSPO paper.
    """
    tokens = _counted(tokens)
    d_K = _log_ratio(tokens)
    mean_K = _sequence_mean(tokens, d_K).detach()
    ratio_K = (mean_K + (d_K - d_K.detach())).clamp(max=SEQUENCE_LOG_RATIO_BOUND).exp()
    loss_K, clipped_K = _clipped(ratio_K, tokens.advantages_K, low, high)
    return _sums(tokens, loss_K, pg_clipfrac=clipped_K)


def cispo(tokens: PolicyTokens, *, low: float, high: float) -> Sums:
    """CISPO (arXiv 2506.13585): -clip(r, 1 - low, 1 + high) A log p. The clipped ratio is a detached weight.

    The paper uses only the upper bound (low = 1). Every token keeps a gradient; `pg_clipfrac` counts clipped ratios.
    """
    tokens = _counted(tokens)
    ratio_K = _log_ratio(tokens).exp().detach()
    weight_K = ratio_K.clamp(1 - low, 1 + high)
    return _sums(tokens, -weight_K * tokens.advantages_K * tokens.logprobs_K, pg_clipfrac=weight_K != ratio_K)


def sapo(tokens: PolicyTokens, *, positive: float, negative: float) -> Sums:
    """SAPO (arXiv 2511.20347): -A sigmoid(tau (r - 1)) 4 / tau. The temperature tau depends on the sign of A.

    A soft gate replaces the clip: at r = 1 the gradient equals the gradient of -A r. The metric `pg_clipfrac` is 0.
    """
    tokens = _counted(tokens)
    ratio_K = _log_ratio(tokens).exp()
    tau_K = torch.full_like(ratio_K, negative).masked_fill(tokens.advantages_K > 0, positive)
    loss_K = -tokens.advantages_K * torch.sigmoid(tau_K * (ratio_K - 1)) * 4 / tau_K
    return _sums(tokens, loss_K, pg_clipfrac=torch.zeros_like(tokens.counted_K))


def geo_mean(tokens: PolicyTokens, *, low: float, high: float) -> Sums:
    """GMPO (arXiv 2507.20673): each token's loss is -A times the geometric mean of its sequence's token ratios.

    Each token's log ratio d is clamped before the mean: to at most `high` if A > 0, and to at least -`low` if A < 0.
    The bounds apply to the log ratio as in the paper (e^-0.4, e^0.4), not to the ratio. The mean is over the tokens of
    non-zero weight, and each of them gets a gradient. With `seq_mean_token_mean` this is the GMPO paper's objective.
    """
    tokens = _counted(tokens)
    d_K, advantages_K = _log_ratio(tokens), tokens.advantages_K
    clipped_K = ((advantages_K > 0) & (d_K > high)) | ((advantages_K < 0) & (d_K < -low))
    ratio_K = _sequence_mean(tokens, torch.where(clipped_K, d_K.clamp(-low, high), d_K)).exp()
    return _sums(tokens, -advantages_K * ratio_K, pg_clipfrac=clipped_K)


def clip_cov(tokens: PolicyTokens, *, low: float, high: float) -> Sums:
    """Clip-Cov (arXiv 2505.22617): PPO's clipped loss, but 0 at the tokens that `token_selection` selects."""
    selected_K = _selected(tokens)
    tokens = _counted(tokens)
    loss_K, clipped_K = _clipped(_log_ratio(tokens).exp(), tokens.advantages_K, low, high)
    return _sums(
        tokens, torch.where(selected_K, 0.0, loss_K), pg_clipfrac=clipped_K & ~selected_K, pg_heldfrac=selected_K
    )


def kl_cov(tokens: PolicyTokens, *, weight: float) -> Sums:
    """KL-Cov (arXiv 2505.22617): -A r without a clip, plus weight |d| at the tokens that `token_selection` selects."""
    selected_K = _selected(tokens)
    tokens = _counted(tokens)
    d_K = _log_ratio(tokens)
    loss_K = -tokens.advantages_K * d_K.exp() + torch.where(selected_K, weight * d_K.abs(), 0.0)
    return _sums(tokens, loss_K, pg_clipfrac=torch.zeros_like(selected_K), pg_heldfrac=selected_K)


def dppo_tv(tokens: PolicyTokens, *, low: float, high: float, cap: float) -> Sums:
    """DPPO (arXiv 2602.04879) with a bound on the total variation |p - p_old|: -min(r, cap) A log p, with r detached.

    The loss of a token is 0 if its probability moved too far in the direction of its advantage: A > 0 and p - p_old >
    `high`, or A < 0 and p - p_old < -`low`. A rare token may have a large ratio, because the ratio has no bound.
    """
    tokens = _counted(tokens)
    moved_K = tokens.logprobs_K.detach().exp() - tokens.old_K.exp()
    beyond_K = torch.where(tokens.advantages_K > 0, moved_K > high, moved_K < -low)
    return _within(tokens, beyond_K, cap)


def dppo_kl(tokens: PolicyTokens, *, low: float, high: float, cap: float) -> Sums:
    """DPPO (arXiv 2602.04879) as in `dppo_tv`, but with a bound on the Bernoulli KL((p_old, 1 - p_old), (p, 1 - p)).

    The loss of a token is 0 if this KL exceeds `high` (for A > 0 and increased p) or `low` (for A < 0 and decreased p).
    Probabilities above 1 - 1e-6 are replaced by 1 - 1e-6.
    """
    tokens = _counted(tokens)
    logprobs_K, old_K = tokens.logprobs_K.detach(), tokens.old_K
    rest_K = log_rest(old_K) - log_rest(logprobs_K)
    divergence_K = old_K.exp() * (old_K - logprobs_K) + (1 - old_K.exp()) * rest_K
    risen_K, fallen_K = logprobs_K > old_K, logprobs_K < old_K
    beyond_K = torch.where(tokens.advantages_K > 0, (divergence_K > high) & risen_K, (divergence_K > low) & fallen_K)
    return _within(tokens, beyond_K, cap)


def dro(tokens: PolicyTokens, *, beta: float) -> Sums:
    """Direct reward optimisation on tokens (arXiv 2405.19107): -A log p + beta / 2 (log p - log p_old)^2.

    The paper's loss, the squared error between advantage and beta (log p - log p_old), has the same gradient up to the
    factor beta. There is no clip: only the squared term keeps the policy near the old policy.
    """
    tokens = _counted(tokens)
    loss_K = -tokens.advantages_K * tokens.logprobs_K + 0.5 * beta * _log_ratio(tokens).square()
    return _sums(tokens, loss_K, pg_clipfrac=torch.zeros_like(tokens.counted_K))


def importance(tokens: PolicyTokens, *, cap: float, of: str) -> Sums:
    """The policy gradient of samples from the old policy: -min(w, cap) A log p, with a detached weight w.

    `of`: `token` uses the ratio of the token as w (IMPALA's truncation, arXiv 1802.01561), `sequence` the product of
    the sequence's ratios (log clamped to +-20), `response` this product with tokens of weight 0 (verl's `reinforce`).
    """
    every = replace(tokens, weights_K=torch.ones_like(tokens.weights_K)) if of == "response" else tokens
    tokens, d_K = _counted(tokens), _log_ratio(_counted(every)).detach()
    if of in ("sequence", "response"):
        count = int(tokens.sequence_K[-1]) + 1 if len(tokens.sequence_K) else 0
        totals_S = sum_by(d_K, tokens.sequence_K, count)
        d_K = totals_S.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)[tokens.sequence_K]
    elif of != "token":
        raise Refusal.at("algorithm.ratio_of", f"{of!r} is not known", "use token or sequence", code="unknown-name")
    ratio_K = d_K.exp()
    loss_K = -ratio_K.clamp(max=cap) * tokens.advantages_K * tokens.logprobs_K
    return _sums(tokens, loss_K, pg_clipfrac=ratio_K > cap)


def policy_gradient(tokens: PolicyTokens) -> Sums:
    """REINFORCE, -A log p (Williams 1992), without a ratio: the tokens must be sampled from the current policy."""
    tokens = _counted(tokens)
    loss_K = -tokens.advantages_K * tokens.logprobs_K
    return _sums(tokens, loss_K, pg_clipfrac=torch.zeros_like(tokens.counted_K))


def user_loss(tokens: PolicyTokens, *, function: Callable[[PolicyTokens], torch.Tensor]) -> Sums:
    """Applies mask and weights to the per-token losses that the user's `function` returns."""
    tokens = _counted(tokens)
    return _sums(tokens, torch.where(tokens.counted_K, function(tokens), 0.0))


own_loss = user_loss  # the former name of user_loss, kept for plug-ins

LOSSES: dict[str, Callable[..., Sums]] = {
    "clip": clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "geo_mean": geo_mean,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "importance": importance,
    "policy_gradient": policy_gradient,
}


def _counted(tokens: PolicyTokens) -> PolicyTokens:
    """Zeroes the tokens of weight 0 and replaces -inf log-probs, which would make the sum or its gradient NaN."""
    kept_K = tokens.counted_K
    return replace(
        tokens,
        logprobs_K=floor_logprobs(torch.where(kept_K, tokens.logprobs_K, 0.0)),
        old_K=floor_logprobs(torch.where(kept_K, tokens.old_K, 0.0)),
        advantages_K=torch.where(kept_K, tokens.advantages_K, 0.0),
    )


def _log_ratio(tokens: PolicyTokens) -> torch.Tensor:
    return (tokens.logprobs_K - tokens.old_K).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _sequence_mean(tokens: PolicyTokens, values_K: torch.Tensor) -> torch.Tensor:
    count = int(tokens.sequence_K[-1]) + 1 if len(tokens.sequence_K) else 0
    return sequence_mean(values_K, tokens.counted_K, tokens.sequence_K, count)


def _clipped(
    ratio_K: torch.Tensor, advantages_K: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's pessimistic loss, and the tokens at which the clip is active."""
    free_K = -advantages_K * ratio_K
    bound_K = -advantages_K * ratio_K.clamp(1 - low, 1 + high)
    return torch.maximum(free_K, bound_K), bound_K > free_K


def _within(tokens: PolicyTokens, beyond_K: torch.Tensor, cap: float) -> Sums:
    """-min(r, cap) A log p with a detached ratio r; 0 at the tokens marked in `beyond_K`."""
    ratio_K = _log_ratio(tokens).exp().detach()
    loss_K = -ratio_K.clamp(max=cap) * tokens.advantages_K * tokens.logprobs_K
    return _sums(
        tokens,
        torch.where(beyond_K, 0.0, loss_K),
        pg_clipfrac=beyond_K,
        pg_clipfrac_lower=(ratio_K > cap) & ~beyond_K,
    )


def _selected(tokens: PolicyTokens) -> torch.Tensor:
    if tokens.selected_K is None:
        raise Refusal.at("algorithm.loss", "clip_cov and kl_cov need selected tokens", code="missing-input")
    return tokens.selected_K > 0


def _sums(tokens: PolicyTokens, loss_K: torch.Tensor, **flags_K: torch.Tensor) -> Sums:
    counted_K = tokens.counted_K
    metrics = {name: (flag_K & counted_K).sum().to(loss_K.dtype) for name, flag_K in flags_K.items()}
    metrics["ppo_kl"] = -_log_ratio(tokens).detach().sum()
    return Sums(loss=(tokens.weights_K * loss_K).sum(), metrics=metrics)
