"""One update as verl makes it of a command: its settings, its estimators, its losses, its aggregation.

The order of the terms is that of `dp_actor.py` (0.4.1) and `losses.py` (0.9.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from .batch import Batch, Gradients
from .peers import module, verl_settings


class VerlUpdate:
    def __init__(self, version: str, words: list[str], batch: Batch):
        self.version, self.batch = version, batch
        self.settings = verl_settings(version, words)
        self.actor = self.settings.actor_rollout_ref.actor
        self.core = module("verl", version, "trainer.ppo.core_algos")
        self.advantages, self.returns = self._advantages()

    def _advantages(self) -> tuple[torch.Tensor, torch.Tensor]:
        batch, algorithm, core = self.batch, self.settings.algorithm, self.core
        last = batch.mask.sum(1).long() - 1
        scores = torch.zeros_like(batch.mask).scatter(1, last[:, None], batch.scores[:, None])
        if algorithm.use_kl_in_reward:
            old, reference = batch.matrix(batch.old_K), batch.matrix(batch.reference_K)
            divergence = core.kl_penalty(old, reference, algorithm.kl_penalty) * batch.mask
            scores = scores - core.get_kl_controller(algorithm.kl_ctrl).value * divergence
        given: dict[str, Any] = {"token_level_rewards": scores, "response_mask": batch.mask}
        name = str(algorithm.adv_estimator)
        if name == "gae":
            values = batch.matrix(batch.values_K)
            return core.compute_gae_advantage_return(**given, values=values, gamma=algorithm.gamma, lam=algorithm.lam)
        if name == "grpo":
            std = algorithm.norm_adv_by_std_in_grpo
            index = batch.groups.numpy()
            return core.compute_grpo_outcome_advantage(**given, index=index, norm_adv_by_std_in_grpo=std)
        estimator = core.get_adv_estimator_fn(name)
        return estimator(**given, index=batch.groups.numpy(), config=algorithm)

    def policy(self) -> tuple[float, Gradients]:
        return self.batch.theirs(self.loss)

    def policy_in_parts(
        self, size: int, divided_by: int = 1, weights: Sequence[float] | None = None
    ) -> tuple[float, Gradients]:
        """In micro-batches of `size` responses, whose losses are added up."""
        count = len(self.batch.mask) // size

        def loss(own: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
            parts = [self.loss(own, entropy, slice(i * size, (i + 1) * size)) for i in range(count)]
            return (torch.stack(parts) * torch.tensor(weights or [1.0] * count)).sum() / divided_by

        return self.batch.theirs(loss)

    def loss(self, own: torch.Tensor, entropy: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        core, actor, batch = self.core, self.actor, self.batch
        mask, own, entropy = batch.mask[rows], own[rows], entropy[rows]
        old, advantages = batch.matrix(batch.old_K)[rows], self.advantages[rows]
        kind, whole = actor.loss_agg_mode, self._whole()
        if self.version == "0.4.1":
            bounds = {
                "cliprange": actor.clip_ratio,
                "cliprange_low": actor.clip_ratio_low,
                "cliprange_high": actor.clip_ratio_high,
                "clip_ratio_c": actor.clip_ratio_c,
            }
            loss = core.compute_policy_loss(old, own, advantages, mask, **bounds, loss_agg_mode=kind)[0]
        else:
            name = actor.policy_loss.loss_mode
            loss = core.get_policy_loss_fn(name)(old, own, advantages, mask, kind, self._config())[0]
        if actor.entropy_coeff:
            loss = loss - actor.entropy_coeff * core.agg_loss(entropy, mask, kind, **whole)
        if actor.use_kl_loss:
            reference = batch.matrix(batch.reference_K)[rows]
            divergence = core.kl_penalty(own, reference, actor.kl_loss_type)
            loss = loss + actor.kl_loss_coef * core.agg_loss(divergence, mask, kind, **whole)
        return loss

    def _whole(self) -> dict[str, Any]:
        """Counts of the whole update, which 0.9.1 divides by."""
        if self.version == "0.4.1":
            return {}
        mask = self.batch.mask
        counts = {"dp_size": 1, "batch_num_tokens": float(mask.sum()), "global_batch_size": len(mask)}
        return {**counts, "loss_scale_factor": self.actor.loss_scale_factor}

    def _config(self) -> Any:
        """The settings as the class that the losses ask for."""
        actor = self.actor
        names = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg")
        config = object.__new__(self.core.ActorConfig)
        for name in names:
            object.__setattr__(config, name, actor.get(name))
        object.__setattr__(config, "policy_loss", SimpleNamespace(**actor.policy_loss))
        object.__setattr__(config, "global_batch_info", self._whole())
        return config

    def value_loss(self, values_K: torch.Tensor) -> torch.Tensor:
        batch, critic = self.batch, self.settings.critic
        loss, _ = self.core.compute_value_loss(
            vpreds=batch.matrix(values_K),
            returns=self.returns,
            values=batch.matrix(batch.values_K),
            response_mask=batch.mask,
            cliprange_value=critic.cliprange_value,
            loss_agg_mode=critic.loss_agg_mode,
        )
        return loss
