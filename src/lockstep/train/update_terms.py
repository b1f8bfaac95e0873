"""The terms of an update: policy loss, value loss, and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.algorithms import user_functions as own
from lockstep.algorithms.divergence import divergence
from lockstep.algorithms.policy_loss import PolicyTokens
from lockstep.algorithms.reduce import aggregation_weights
from lockstep.algorithms.token_losses import value_loss
from lockstep.algorithms.token_selection import HELD
from lockstep.device.base import sent
from lockstep.errors import Refusal
from lockstep.kernels.logprob import Scores, TokenGrads
from lockstep.recipe import Recipe
from lockstep.recipe.keys_online import Algorithm
from lockstep.recipe.registry import loss_row
from lockstep.run.runtime import generator_of
from lockstep.train.advantages import Learned
from lockstep.train.logprobs import UpdatePlan
from lockstep.train.models import Models
from lockstep.train.step import Outcome
from lockstep.types import MicroBatch, Sums

# The metrics of updates: sums as means, several updates as one, and what stops a run before it learns from them.


def over_updates(done: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of several updates as means over those that have them; of maxima, the largest."""
    names = dict.fromkeys(name for metrics in done for name in metrics)
    return {name: _together(name, [metrics[name] for metrics in done if name in metrics]) for name in names}


def _together(name: str, values: Sequence[float]) -> float:
    return max(values) if name.endswith("_max") else sum(values) / len(values)


def per_kept(sums: dict[str, float], kept: float) -> dict[str, float]:
    """Sums over the kept tokens of an update as their means. An update that keeps none has no such number."""
    return {name: value / kept for name, value in sums.items()} if kept else {}


def policy_metrics(outcome: Outcome, divisor: float, kept: float) -> dict[str, float]:
    """Terms of the loss as the loss averages them, the rest per kept token; engine against trainer per token. What is
    undefined is left out: means over no kept token, the deviation of one token."""
    sums, means = dict(outcome.sums), outcome.means()
    averaged = {name: sums.pop(name) / divisor for name in ("pg_loss", "kl_loss") if name in sums}
    averaged = averaged if kept else {}
    del sums["probs_diff"], sums["probs_diff_squared"]
    variance = means["probs_diff_squared"] - means["probs_diff"] ** 2
    return {
        "actor/loss": outcome.loss,
        **{f"actor/{name}": value for name, value in averaged.items()},
        **{f"actor/{name}": value for name, value in per_kept(sums, kept).items()},
        "training/rollout_probs_diff_mean": means["probs_diff"],
        "training/rollout_probs_diff_max": outcome.maxima["probs_diff"],
        **({"training/rollout_probs_diff_std": max(variance, 0.0) ** 0.5} if outcome.targets > 1 else {}),
    }


def refuse_disagreement(metrics: dict[str, float], most: float | None) -> None:
    """Stop before the update when engine and trainer see different models."""
    mean = metrics["training/rollout_probs_diff_mean"]
    if most is not None and mean > most:
        raise Refusal.at(
            "rollout.max_probs_diff",
            f"engine and trainer differ by {mean:.3g} in the probability of a token on average, over {most:g}",
            "use fp32 or the hf engine to find out which side is off, or correct it (algorithm.rollout_correction); "
            "stale responses differ by themselves (rollout.max_staleness). The last checkpoint is untouched",
            code="logprobs-differ",
        )


# The loss of the policy's updates: that which a recipe names, with divergence and entropy, on a micro-batch.


def loss_of(algorithm: Algorithm) -> Callable[[PolicyTokens], Sums]:
    """The policy loss with the keys it reads."""
    keys = _keys(algorithm, loss_row(algorithm.loss).keys)
    return own.policy_loss(algorithm.loss, keys, algorithm.function_timeout)


def _keys(algorithm: Algorithm, names: Mapping[str, str]) -> dict[str, Any]:
    return {argument: getattr(algorithm, key) for argument, key in names.items()}


def held_tokens(algorithm: Algorithm, learned: Learned, plan: UpdatePlan, seed: tuple[int, ...]) -> torch.Tensor | None:
    """Tokens that the covariance losses hold back, chosen over the whole update."""
    held = loss_row(algorithm.loss).held
    if held is None:
        return None
    old_K, advantages = learned.known.old_K, learned.advantages
    assert old_K is not None
    experience, tokens = learned.experience, plan.tokens
    # Chosen by rank and by a draw over all of them, which no sum tells: every rank looks at the whole update.
    vectors = [
        experience.everywhere(vector_K[tokens], plan.responses)
        for vector_K in (old_K, advantages.advantages_K, advantages.keep_K)
    ]
    held_K = HELD[algorithm.loss](*vectors, **_keys(algorithm, held), generator=generator_of(seed))
    return held_K if experience.world.size == 1 else held_K[experience.places_of(plan.responses)]


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of a micro-batch, which finds its tokens in this rank's vectors of the update."""

    algorithm: Algorithm
    policy_loss: Callable[[PolicyTokens], Sums]
    device: torch.device
    kl_coefficient: float
    sequence_K: torch.Tensor
    advantages_K: torch.Tensor
    average_K: torch.Tensor
    penalty_K: torch.Tensor
    """How divergence and entropy are averaged, up to the same divisor."""
    importance_K: torch.Tensor
    engine_K: torch.Tensor
    old_K: torch.Tensor | None
    reference_K: torch.Tensor | None
    held_K: torch.Tensor | None

    def __call__(self, scores: Scores, batch: MicroBatch) -> Sums:
        tokens, logprobs = self._tokens(batch.own_K), scores.logprobs_K
        sums = self._sums(logprobs, scores.entropies_K, tokens)
        # The first update of a step compares what the engine said with what the trainer says of the same weights: over
        # all tokens, since those that disagree most are left out of everything else.
        bypass = self.algorithm.rollout_correction.bypass
        old = logprobs.detach() if tokens.old_K is None or bypass else tokens.old_K
        difference = (old.exp() - sent(self.engine_K[batch.own_K], self.device).exp()).abs()
        sums.metrics |= {"probs_diff": difference.sum(), "probs_diff_squared": difference.square().sum()}
        largest = difference.max() if len(difference) else difference.new_zeros(())
        return Sums(sums.loss, sums.metrics, {"probs_diff": largest})

    def token_grads(self, batch: MicroBatch) -> TokenGrads | None:
        """The loss's gradients by log-probabilities and entropies, token by token; None where tokens depend on others.

        Up to the factor that the update puts before the sum.
        """
        if not loss_row(self.algorithm.loss).tokenwise:
            return None
        whole: list[_Tokens] = []

        def token_grads(
            logprobs_R: torch.Tensor, entropies_R: torch.Tensor | None, part: slice
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            if not whole:
                whole.append(self._tokens(batch.own_K))
            with torch.enable_grad():
                own = logprobs_R.detach().requires_grad_()
                spread = None if entropies_R is None else entropies_R.detach().requires_grad_()
                loss = self._sums(own, spread, whole[0].part(part)).loss
                inputs = [own] if spread is None or not self.algorithm.entropy else [own, spread]
                found = torch.autograd.grad(loss, inputs)
            return found[0], found[1] if len(found) > 1 else None

        return token_grads

    def _tokens(self, own_K: torch.Tensor) -> _Tokens:
        def take(vector: torch.Tensor | None) -> torch.Tensor | None:
            return None if vector is None else sent(vector[own_K], self.device)

        local_K = torch.unique_consecutive(self.sequence_K[own_K], return_inverse=True)[1]
        weights = (self.advantages_K, self.average_K, self.penalty_K, self.importance_K)
        vectors = (*weights, self.old_K, self.reference_K, self.held_K)
        return _Tokens(sent(local_K, self.device), *map(take, vectors))  # type: ignore[arg-type]

    def _sums(self, logprobs: torch.Tensor, entropies: torch.Tensor | None, tokens: _Tokens) -> Sums:
        penalty = tokens.penalty_K
        old = logprobs.detach() if tokens.old_K is None else tokens.old_K
        weights = tokens.average_K * tokens.importance_K
        seen = PolicyTokens(logprobs, old, tokens.advantages_K, weights, tokens.local_K, tokens.held_K)
        sums = self.policy_loss(seen)
        loss, metrics = sums.loss, {**sums.metrics, "pg_loss": sums.loss}
        if tokens.old_K is None:
            del metrics["ppo_kl"]  # 0 by definition
        if self.algorithm.kl.where == "loss" and tokens.reference_K is not None:
            kl, kl_metrics = self._divergence(logprobs, tokens.reference_K, old, penalty)
            loss, metrics = loss + self.kl_coefficient * kl, metrics | kl_metrics
        if entropies is not None:
            entropies = torch.where(penalty > 0, entropies, 0.0)
            if self.algorithm.entropy:
                loss = loss - self.algorithm.entropy * (penalty * entropies).sum()
            metrics["entropy"] = entropies.sum()
        return Sums(loss, metrics)

    def _divergence(
        self, logprobs: torch.Tensor, reference: torch.Tensor, old: torch.Tensor, average: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """From the reference: as averaged in the loss, and in the metrics also per token whatever the aggregation."""
        # Zero times the infinity of a token that is left out would be NaN, in the sum or in its gradient.
        kept = average > 0
        own_K, reference_K, old_K = (torch.where(kept, said, 0.0) for said in (logprobs, reference, old))
        kl = self.algorithm.kl
        kl_K = divergence(kl.estimator, own_K, reference_K, old_K if kl.weighted else None)
        total = (average * kl_K).sum()
        return total, {"kl_loss": total, "kl": kl_K.sum()}


@dataclass(frozen=True)
class _Tokens:
    """What the loss reads of the tokens of a micro-batch, on the device."""

    local_K: torch.Tensor
    """Which of its sequences, 0, 1, ..., a token belongs to."""
    advantages_K: torch.Tensor
    average_K: torch.Tensor
    penalty_K: torch.Tensor
    importance_K: torch.Tensor
    old_K: torch.Tensor | None
    reference_K: torch.Tensor | None
    held_K: torch.Tensor | None

    def part(self, part: slice) -> _Tokens:
        return _Tokens(*(None if vector is None else vector[part] for vector in vars(self).values()))  # type: ignore[arg-type]


# An update of the critic: its values on the returns.


def update_critic(plan: UpdatePlan, learned: Learned, models: Models, recipe: Recipe, lr: float) -> dict[str, float]:
    """One optimizer step of the critic on a part of the experience."""
    values_K, advantages = learned.known.values_K, learned.advantages
    assert models.critic is not None
    assert values_K is not None
    tokens, clip = plan.tokens, recipe.critic.clip
    old_K, returns_K, keep_K = values_K[tokens], advantages.returns_K[tokens], advantages.keep_K[tokens]
    sequence_K = learned.experience.sequence_K[tokens] - plan.responses.start
    sequences, whole = plan.responses.stop - plan.responses.start, learned.experience.whole
    times_S = None if advantages.times_S is None else advantages.times_S[plan.responses]
    average_K, divisor = aggregation_weights(
        recipe.critic.aggregation, sequence_K, keep_K, sequences, recipe.rollout.max_tokens, times_S, whole
    )

    def loss(values_K: torch.Tensor, batch: MicroBatch) -> Sums:
        old, returns, average = (sent(vector[batch.own_K], models.device) for vector in (old_K, returns_K, average_K))
        return value_loss(values_K, old, returns, average, clip=clip)

    kept = float(whole.count(int((average_K > 0).sum())))
    outcome = models.critic.forward_backward(plan.batches, loss, divisor)
    names = {"vf_clipfrac": "critic/vf_clipfrac", "vpred": "critic/vpred_mean"}
    return {
        "critic/vf_loss": outcome.loss,
        **{names[name]: value for name, value in per_kept(outcome.sums, kept).items()},
        **models.critic.optim_step(lr),
    }
