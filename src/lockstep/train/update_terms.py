"""The policy loss with its KL and entropy terms, the critic update, and the metrics of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lockstep.algorithms.divergence import divergence
from lockstep.algorithms.policy_loss import LOSSES, PolicyTokens
from lockstep.algorithms.reduce import aggregation_weights
from lockstep.algorithms.token_losses import value_loss
from lockstep.algorithms.token_selection import SELECTORS
from lockstep.algorithms.user_functions import user_policy_loss
from lockstep.device.base import sent
from lockstep.errors import Refusal
from lockstep.kernels.logprob import Scores, TokenGrads
from lockstep.recipe import Recipe
from lockstep.recipe.keys_online import Algorithm
from lockstep.recipe.registry import loss_row
from lockstep.run.runtime import generator_of
from lockstep.train.advantages import TrainBatch
from lockstep.train.experience import UpdatePlan
from lockstep.train.models import Models
from lockstep.train.step import Outcome
from lockstep.types import MicroBatch, Sums


def combine_updates(done: Sequence[dict[str, float]]) -> dict[str, float]:
    """Combines the metrics of several updates. A metric is the mean over the updates that have it, or the maximum if
    its name ends in `_max`."""
    names = dict.fromkeys(name for metrics in done for name in metrics)
    return {name: _combine(name, [metrics[name] for metrics in done if name in metrics]) for name in names}


def _combine(name: str, values: Sequence[float]) -> float:
    return max(values) if name.endswith("_max") else sum(values) / len(values)


def mean_over_kept(sums: dict[str, float], kept: float) -> dict[str, float]:
    """Divides sums by the number of tokens that are not masked. Returns an empty dict if all tokens are masked."""
    return {name: value / kept for name, value in sums.items()} if kept else {}


def policy_metrics(outcome: Outcome, divisor: float, kept: float) -> dict[str, float]:
    """Returns the metrics of a policy update. `pg_loss` and `kl_loss` are divided by `divisor`, which also divides the
    loss. Other sums are divided by the number of unmasked tokens (`kept`). The probability differences between engine
    and trainer are divided by the number of all tokens. Undefined values are omitted: means over no token, and the
    standard deviation of one token."""
    sums, means = dict(outcome.sums), outcome.means()
    averaged = {name: sums.pop(name) / divisor for name in ("pg_loss", "kl_loss") if name in sums}
    averaged = averaged if kept else {}
    del sums["probs_diff"], sums["probs_diff_squared"]
    variance = means["probs_diff_squared"] - means["probs_diff"] ** 2
    return {
        "actor/loss": outcome.loss,
        **{f"actor/{name}": value for name, value in averaged.items()},
        **{f"actor/{name}": value for name, value in mean_over_kept(sums, kept).items()},
        "training/rollout_probs_diff_mean": means["probs_diff"],
        "training/rollout_probs_diff_max": outcome.maxima["probs_diff"],
        **({"training/rollout_probs_diff_std": max(variance, 0.0) ** 0.5} if outcome.targets > 1 else {}),
    }


def refuse_disagreement(metrics: dict[str, float], most: float | None) -> None:
    """Raises `Refusal` before the optimizer step if the token probabilities of engine and trainer differ too much."""
    mean = metrics["training/rollout_probs_diff_mean"]
    if most is not None and mean > most:
        raise Refusal.at(
            "rollout.max_probs_diff",
            f"the token probabilities of engine and trainer differ by {mean:.3g} on average, and the limit is {most:g}",
            "use fp32 or the hf engine to find out whether the engine or the trainer is wrong, or set "
            "algorithm.rollout_correction; with rollout.max_staleness, some difference is normal. The last checkpoint "
            "is untouched",
            code="logprobs-differ",
        )


def make_policy_loss(algorithm: Algorithm) -> Callable[[PolicyTokens], Sums]:
    """Returns the policy loss function of the recipe: a built-in loss with its settings, or a user function."""
    if algorithm.loss not in LOSSES:
        return user_policy_loss(algorithm.loss, algorithm.function_timeout)
    return partial(LOSSES[algorithm.loss], **_keys(algorithm, loss_row(algorithm.loss).keys))


def _keys(algorithm: Algorithm, names: Mapping[str, str]) -> dict[str, Any]:
    return {argument: getattr(algorithm, key) for argument, key in names.items()}


def select_tokens(
    algorithm: Algorithm, batch: TrainBatch, plan: UpdatePlan, seed: tuple[int, ...]
) -> torch.Tensor | None:
    """Returns the tokens that the loss `clip_cov` or `kl_cov` selects in an update, or None for every other loss."""
    keys = loss_row(algorithm.loss).selection_keys
    if keys is None:
        return None
    old_K, advantages = batch.outputs.old_K, batch.advantages
    assert old_K is not None
    experience, tokens = batch.experience, plan.tokens
    # The selection needs all tokens of the update, so every rank gathers them.
    vectors = [
        experience.all_gather(vector_K[tokens], plan.responses)
        for vector_K in (old_K, advantages.advantages_K, advantages.keep_K)
    ]
    selected_K = SELECTORS[algorithm.loss](*vectors, **_keys(algorithm, keys), generator=generator_of(seed))
    return selected_K if experience.world.size == 1 else selected_K[experience.local_positions(plan.responses)]


@dataclass(frozen=True)
class PolicyLoss:
    """Computes the policy loss of a micro-batch. The vectors of this class have one number per token of the update on
    this rank."""

    algorithm: Algorithm
    policy_loss: Callable[[PolicyTokens], Sums]
    device: torch.device
    kl_coefficient: float
    sequence_K: torch.Tensor
    advantages_K: torch.Tensor
    loss_weights_K: torch.Tensor
    penalty_K: torch.Tensor
    """The token weights of the KL and entropy terms, which are divided by the same divisor as the policy loss."""
    is_weights_K: torch.Tensor
    rollout_logprobs_K: torch.Tensor
    old_K: torch.Tensor | None
    reference_K: torch.Tensor | None
    selected_K: torch.Tensor | None

    def __call__(self, scores: Scores, batch: MicroBatch) -> Sums:
        tokens, logprobs = self._tokens(batch.vector_index_K), scores.logprobs_K
        sums = self._sums(logprobs, scores.entropies_K, tokens)
        # The probabilities of engine and trainer are compared for all tokens, including tokens that are masked in the
        # loss.
        bypass = self.algorithm.rollout_correction.bypass
        old = logprobs.detach() if tokens.old_K is None or bypass else tokens.old_K
        difference = (old.exp() - sent(self.rollout_logprobs_K[batch.vector_index_K], self.device).exp()).abs()
        sums.metrics |= {"probs_diff": difference.sum(), "probs_diff_squared": difference.square().sum()}
        largest = difference.max() if len(difference) else difference.new_zeros(())
        return Sums(sums.loss, sums.metrics, {"probs_diff": largest})

    def token_grads(self, batch: MicroBatch) -> TokenGrads | None:
        """Returns a function that computes the gradients of the loss with respect to the log-probs and entropies of
        tokens, up to a constant factor. Returns None if the loss of a token depends on other tokens."""
        if not loss_row(self.algorithm.loss).tokenwise:
            return None
        cached: list[_Tokens] = []

        def token_grads(
            logprobs_R: torch.Tensor, entropies_R: torch.Tensor | None, part: slice
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            if not cached:
                cached.append(self._tokens(batch.vector_index_K))
            with torch.enable_grad():
                logprobs = logprobs_R.detach().requires_grad_()
                entropies = None if entropies_R is None else entropies_R.detach().requires_grad_()
                loss = self._sums(logprobs, entropies, cached[0].part(part)).loss
                inputs = [logprobs] if entropies is None or not self.algorithm.entropy else [logprobs, entropies]
                grads = torch.autograd.grad(loss, inputs)
            return grads[0], grads[1] if len(grads) > 1 else None

        return token_grads

    def _tokens(self, index_K: torch.Tensor) -> _Tokens:
        def take(vector: torch.Tensor | None) -> torch.Tensor | None:
            return None if vector is None else sent(vector[index_K], self.device)

        local_K = torch.unique_consecutive(self.sequence_K[index_K], return_inverse=True)[1]
        weights = (self.advantages_K, self.loss_weights_K, self.penalty_K, self.is_weights_K)
        vectors = (*weights, self.old_K, self.reference_K, self.selected_K)
        return _Tokens(sent(local_K, self.device), *map(take, vectors))  # type: ignore[arg-type]

    def _sums(self, logprobs: torch.Tensor, entropies: torch.Tensor | None, tokens: _Tokens) -> Sums:
        penalty = tokens.penalty_K
        old = logprobs.detach() if tokens.old_K is None else tokens.old_K
        weights = tokens.loss_weights_K * tokens.is_weights_K
        policy_tokens = PolicyTokens(logprobs, old, tokens.advantages_K, weights, tokens.local_K, tokens.selected_K)
        sums = self.policy_loss(policy_tokens)
        loss, metrics = sums.loss, {**sums.metrics, "pg_loss": sums.loss}
        if tokens.old_K is None:
            del metrics["ppo_kl"]  # always 0 here
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
        self, logprobs: torch.Tensor, reference: torch.Tensor, old: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the weighted loss term of the KL divergence from the reference, and its metrics."""
        # The log-probs of excluded tokens are replaced by 0, because zero times infinity would be NaN in the sum or its
        # gradient.
        kept = weights > 0
        logprobs_K, reference_K, old_K = (torch.where(kept, one, 0.0) for one in (logprobs, reference, old))
        kl = self.algorithm.kl
        kl_K = divergence(kl.estimator, logprobs_K, reference_K, old_K if kl.weighted else None)
        total = (weights * kl_K).sum()
        return total, {"kl_loss": total, "kl": kl_K.sum()}


@dataclass(frozen=True)
class _Tokens:
    """The inputs of the loss for the tokens of a micro-batch, on the device."""

    local_K: torch.Tensor
    """For each token, the index of its sequence within the micro-batch."""
    advantages_K: torch.Tensor
    loss_weights_K: torch.Tensor
    penalty_K: torch.Tensor
    is_weights_K: torch.Tensor
    old_K: torch.Tensor | None
    reference_K: torch.Tensor | None
    selected_K: torch.Tensor | None

    def part(self, part: slice) -> _Tokens:
        return _Tokens(*(None if vector is None else vector[part] for vector in vars(self).values()))  # type: ignore[arg-type]


def update_critic(plan: UpdatePlan, batch: TrainBatch, models: Models, recipe: Recipe, lr: float) -> dict[str, float]:
    """Performs one optimizer step of the critic on one mini-batch. Returns its metrics."""
    values_K, advantages = batch.outputs.values_K, batch.advantages
    assert models.critic is not None
    assert values_K is not None
    tokens, clip = plan.tokens, recipe.critic.clip
    old_K, returns_K, keep_K = values_K[tokens], advantages.returns_K[tokens], advantages.keep_K[tokens]
    sequence_K = batch.experience.sequence_K[tokens] - plan.responses.start
    sequences, reduce = plan.responses.stop - plan.responses.start, batch.experience.reduce
    repeats_S = None if advantages.repeats_S is None else advantages.repeats_S[plan.responses]
    loss_weights_K, divisor = aggregation_weights(
        recipe.critic.aggregation,
        sequence_K,
        keep_K,
        sequences,
        recipe.rollout.max_tokens,
        repeats_S,
        reduce,
        advantages.counts_masked,
    )

    def loss(values_K: torch.Tensor, micro_batch: MicroBatch) -> Sums:
        old, returns, weights = (
            sent(vector[micro_batch.vector_index_K], models.device) for vector in (old_K, returns_K, loss_weights_K)
        )
        return value_loss(values_K, old, returns, weights, clip=clip)

    kept = float(reduce.count(int((loss_weights_K > 0).sum())))
    outcome = models.critic.forward_backward(plan.batches, loss, divisor)
    names = {"vf_clipfrac": "critic/vf_clipfrac", "vpred": "critic/vpred_mean"}
    return {
        "critic/vf_loss": outcome.loss,
        **{names[name]: value for name, value in mean_over_kept(outcome.sums, kept).items()},
        **models.critic.optim_step(lr),
    }
