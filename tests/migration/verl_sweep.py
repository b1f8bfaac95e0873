"""Random commands of verl, and one update of each by verl's own functions and by the migrated recipe.

The order of the steps is that of verl's trainers: the KL penalty in the reward, the rollout correction, the advantages,
the loss. `trainer.use_v1` decides which tokens the mean over tokens divides by (`loss_mask` of verl 0.9).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hand_rollouts import plans_of
from lockstep.recipe import Recipe
from lockstep.reward.row_rewards import shaped
from lockstep.train.advantages import TrainBatch, estimate_advantages
from lockstep.train.experience import ModelOutputs, build_experience
from lockstep.types import Score

from .batch import EACH, LONGEST, PROMPTS, Batch, Ours, drawn
from .peers import module
from .verl_update import VerlUpdate

A, G, R = "actor_rollout_ref.actor", "algorithm", "algorithm.rollout_correction"
HELPER = "trainer.ppo.rollout_corr_helper"


class SweepBatch(Batch):
    """A batch with the log-probs of an engine, two separate rewards, a greedy baseline and squared probabilities.

    `each` is the number of responses per prompt. `drift` is how far the policy moved since the old log-probs.
    """

    def __init__(self, model: Path, each: int = EACH, drift: float = 0.4):
        super().__init__(model)
        with torch.no_grad():
            now_K = self.logprobs()[0][self.mask > 0]
        tokens, responses = len(now_K), len(self.mask)
        self.old_K = now_K + drawn(2, tokens, scale=drift)
        self.rollout_K = self.old_K + drawn(5, tokens, scale=0.5)
        self.squares_K = self.old_K.exp().square() + drawn(6, tokens).abs() * 0.1
        self.parts = {"score": self.scores, "format": drawn(7, responses)}
        self.each = each
        rows, place = [], 0
        for i, row in enumerate(self.experience.rollouts):
            ratio_K = self.rollout_K[place : place + len(row.ids)]
            place += len(row.ids)
            parts = {"function": float(self.scores[i]), "function/format": float(self.parts["format"][i])}
            rows.append(
                replace(
                    row,
                    prompt_index=i // each,
                    sample=i % each,
                    logprobs=ratio_K.tolist(),
                    score=Score(float(self.scores[i]), parts),
                )
            )
        self.experience = build_experience(rows)
        self.groups = self.experience.group_S
        self.baselines = {i: 0.1 * i - 0.2 for i in range(responses // each)}

    def common(self) -> str:
        prompts = len(self.mask) // self.each
        return (
            "data.train_files=rows.parquet data.max_prompt_length=8 actor_rollout_ref.model.path=m "
            f"critic.model.path=m data.train_batch_size={prompts} {A}.ppo_mini_batch_size={prompts} "
            f"actor_rollout_ref.rollout.n={self.each} data.max_response_length={LONGEST} "
            f"{A}.ppo_micro_batch_size_per_gpu={PROMPTS * EACH} actor_rollout_ref.rollout.name=vllm"
        )


class OursAgain(Ours):
    """The update of another recipe with the models of `first`, whose weights no update has changed."""

    def __init__(self, recipe: Recipe, batch: SweepBatch, first: Ours):
        self.recipe, self.batch, self.models = recipe, batch, first.models
        for learner in (self.models.trained, self.models.critic):
            if learner is not None:
                learner.module.zero_grad()
        algorithm = recipe.algorithm
        bypass, named = algorithm.rollout_correction.bypass, algorithm.advantage
        known = ModelOutputs(
            batch.rollout_K if bypass else batch.old_K,
            batch.reference_K if algorithm.kl.where != "none" else None,
            batch.values_K if named == "gae" else None,
            batch.old_K if bypass else None,
            batch.squares_K if named == "optimal_token_baseline" else None,
        )
        self.beta = algorithm.kl.coefficient
        rows = [shaped(row, recipe) for row in batch.experience.rollouts]
        experience = build_experience(rows, batch.baselines if named == "remax" else None)
        self.advantages = estimate_advantages(experience, known, recipe, self.beta)
        self.learned = TrainBatch(experience, known, self.advantages)
        (self.plan,) = plans_of(experience, self.models, recipe.batch)


class SweptUpdate(VerlUpdate):
    """verl's update with its rollout correction, and with the estimators that need more than scores."""

    batch: SweepBatch

    def __init__(self, version: str, words: list[str], batch: SweepBatch):
        self.kept, self.is_weights = batch.mask, None
        super().__init__(version, words, batch)

    def _advantages(self) -> tuple[torch.Tensor, torch.Tensor]:
        batch, algorithm, core = self.batch, self.settings.algorithm, self.core
        last = batch.mask.sum(1).long() - 1
        rewards = torch.zeros_like(batch.mask).scatter(1, last[:, None], batch.scores[:, None])
        correction = algorithm.get("rollout_correction")
        self.bypass = bool(correction and correction.get("bypass_mode"))
        self.old = batch.matrix(batch.rollout_K if self.bypass else batch.old_K)
        if algorithm.use_kl_in_reward:
            divergence = core.kl_penalty(self.old, batch.matrix(batch.reference_K), algorithm.kl_penalty) * batch.mask
            rewards = rewards - core.get_kl_controller(algorithm.kl_ctrl).value * divergence
        if correction and not self.bypass:
            self._correct(correction)
        given: dict[str, Any] = {"token_level_rewards": rewards, "response_mask": self.kept}
        name, index = str(algorithm.adv_estimator), batch.groups.numpy()
        if name == "gae":
            values = batch.matrix(batch.values_K)
            return core.compute_gae_advantage_return(**given, values=values, gamma=algorithm.gamma, lam=algorithm.lam)
        if name == "grpo":
            std = algorithm.norm_adv_by_std_in_grpo
            return core.compute_grpo_outcome_advantage(**given, index=index, norm_adv_by_std_in_grpo=std)
        if name == "remax":
            greedy = torch.tensor([batch.baselines[int(group)] for group in batch.groups])
            return core.get_adv_estimator_fn(name)(**given, reward_baselines=greedy, config=algorithm)
        if name == "gdpo":
            given |= {"non_tensor_batch": {key: values.numpy() for key, values in batch.parts.items()}}
            given |= {"batch": {"prompts": torch.zeros(len(batch.mask), 1), "attention_mask": self._attended()}}
        if "optimal_token_baseline" in name:
            given |= {"old_log_probs": self.old, "sum_pi_squared": batch.matrix(batch.squares_K)}
            given |= {"rollout_is_weights": self.is_weights}
        return core.get_adv_estimator_fn(name)(**given, index=index, config=algorithm)

    def _attended(self) -> torch.Tensor:
        return torch.cat([torch.ones(len(self.batch.mask), 1), self.batch.mask], dim=1).long()

    def _correct(self, settings: Any) -> None:
        helper = module("verl", self.version, HELPER)
        names = (
            "rollout_is",
            "rollout_is_threshold",
            "rollout_is_batch_normalize",
            "rollout_rs",
            "rollout_rs_threshold",
        )
        weights, self.kept, _ = helper.compute_rollout_correction_and_rejection_mask(
            old_log_prob=self.old,
            rollout_log_prob=self.batch.matrix(self.batch.rollout_K),
            response_mask=self.batch.mask,
            **{name: settings.get(name) for name in names},
        )
        self.is_weights = None if weights is None else weights.batch["rollout_is_weights"]

    def loss(self, own: torch.Tensor, entropy: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        core, actor, kind = self.core, self.actor, self.actor.loss_agg_mode
        given = self.old, own, self.advantages, self.kept
        name = actor.policy_loss.loss_mode
        if self.version == "0.4.1" and name == "vanilla":
            names = {"cliprange": "clip_ratio", "cliprange_low": "clip_ratio_low", "cliprange_high": "clip_ratio_high"}
            bounds = {ours: actor[theirs] for ours, theirs in names.items()} | {"clip_ratio_c": actor.clip_ratio_c}
            loss = core.compute_policy_loss(*given, **bounds, loss_agg_mode=kind)[0]
        elif self.version == "0.4.1":
            loss = core.get_policy_loss_fn(name)(*given, kind, actor)[0]
        else:
            with self._importable():
                function = core.get_policy_loss_fn("bypass_mode" if self.bypass else name)
                loss = function(*given, kind, self._config(), self.is_weights)[0]
        mask, whole = self.kept, self._whole()
        if actor.entropy_coeff:
            loss = loss - actor.entropy_coeff * core.agg_loss(entropy, mask, kind, **whole)
        if actor.use_kl_loss:
            divergence = core.kl_penalty(own, self.batch.matrix(self.batch.reference_K), actor.kl_loss_type)
            loss = loss + actor.kl_loss_coef * core.agg_loss(divergence, mask, kind, **whole)
        return loss

    @contextmanager
    def _importable(self) -> Iterator[None]:
        """The loss of bypass mode imports the module of the correction when it is called."""
        name = f"verl.{HELPER}"
        sys.modules[name] = module("verl", self.version, HELPER)
        try:
            yield
        finally:
            del sys.modules[name]

    def _config(self) -> Any:
        config = super()._config()
        config.policy_loss.rollout_correction = self.settings.algorithm.rollout_correction
        config.policy_loss.get = lambda name, default=None: getattr(config.policy_loss, name, default)
        return config

    def _whole(self) -> dict[str, Any]:
        whole = super()._whole()
        if whole and self.settings.trainer.use_v1 is False:
            whole["batch_num_tokens"] = float(self.kept.sum())
        return whole

    def value_loss(self, values_K: torch.Tensor) -> torch.Tensor:
        batch, critic = self.batch, self.settings.critic
        whole = {**self._whole(), "loss_scale_factor": critic.get("loss_scale_factor")}
        loss, _ = self.core.compute_value_loss(
            vpreds=batch.matrix(values_K),
            returns=self.returns,
            values=batch.matrix(batch.values_K),
            response_mask=self.kept,
            cliprange_value=critic.cliprange_value,
            loss_agg_mode=critic.loss_agg_mode,
            **({} if self.version == "0.4.1" else whole),
        )
        return loss


# Random commands -----------------------------------------------------------------------------------------------------

ESTIMATORS = (
    "gae",
    "grpo",
    "grpo",
    "grpo_passk",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "opo",
    "remax",
)
NEWER_ESTIMATORS = (
    "grpo_vectorized", "rloo_vectorized", "gpg", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline",
)  # fmt: skip
LOSSES = ("vanilla", "vanilla", "vanilla", "clip_cov", "kl_cov")
NEWER_LOSSES = ("gspo", "sapo", "gpg", "geo_mean", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "dro")
AGGREGATIONS = ("token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_TYPES = ("kl", "abs", "mse", "low_var_kl")
CRITERIA = {
    "token_k1": ("0.6_1.5", "1.7", "2.5"), "token_k2": ("0.1", "0.3"), "token_k3": ("0.1", "0.3"),
    "seq_sum_k1": ("0.2_4.0", "3.0"), "seq_sum_k2": ("0.6", "1.2"), "seq_sum_k3": ("0.6", "1.2"),
    "seq_mean_k1": ("0.8_1.2", "1.15"), "seq_mean_k2": ("0.12",), "seq_mean_k3": ("0.12", "0.2"),
    "seq_max_k2": ("0.3", "0.6"), "seq_max_k3": ("0.3", "0.6"),
}  # fmt: skip


def drawn_command(seed: int) -> tuple[str, str]:
    """The verl version and the words of a random command."""
    draw = random.Random(seed)
    newer = draw.random() < 0.8
    words = []

    def often(share: float) -> bool:
        return draw.random() < share

    def put(key: str, *values: object) -> None:
        words.append(f"{key}={draw.choice(values)}")

    if newer:  # a key that only verl 0.9 has
        words.append(f"{A}.optim.lr_scheduler_type=constant")
    put(f"{G}.adv_estimator", *ESTIMATORS, *(NEWER_ESTIMATORS * newer))
    if "gdpo" in words[-1]:
        words += [f"{G}.gdpo_reward_keys=[score,format]", "custom_reward_function.path=f.py"]
        if often(0.5):
            put(f"{G}.gdpo_reward_weights", "[1.0,0.5]", "[0.2,2.0]")
    for share, key, values in (
        (0.4, f"{G}.norm_adv_by_std_in_grpo", (True, False)),
        (0.4, f"{G}.gamma", (0.9, 0.99)),
        (0.3, f"{G}.lam", (0.8, 0.95)),
        (0.6, f"{A}.loss_agg_mode", AGGREGATIONS + ("token-sum",) * newer),
        (0.3, f"{A}.entropy_coeff", (0.01, 0.05)),
        (0.3, f"{A}.clip_ratio_low", (0.1, 0.3)),
        (0.3, f"{A}.clip_ratio_high", (0.15, 0.28)),
        (0.3, f"{A}.clip_ratio_c", (1.3, 5.0)),
        (0.2, f"{A}.clip_ratio", (0.1,)),
        (0.2, "critic.cliprange_value", (0.1, 0.3)),
    ):
        if often(share):
            put(key, *values)
    if often(0.35):
        words.append(f"{G}.use_kl_in_reward=True")
        put(f"{G}.kl_penalty", *KL_TYPES)
        put(f"{G}.kl_ctrl.kl_coef", 0.05, 0.2)
    if often(0.35):
        words.append(f"{A}.use_kl_loss=True")
        put(f"{A}.kl_loss_type", *KL_TYPES, *(("k3+", "k1+", "abs+") * newer))
        put(f"{A}.kl_loss_coef", 0.05, 0.2)
    if often(0.6):
        words += _loss(draw, newer)
    if newer and often(0.6):
        words += _correction(draw)
    return "0.9.1" if newer else "0.4.1", " ".join(words)


def _loss(draw: random.Random, newer: bool) -> list[str]:
    name = draw.choice(LOSSES + NEWER_LOSSES * newer)
    words = [f"{A}.policy_loss.loss_mode={name}"]
    if name == "dro":
        words.append(f"{A}.policy_loss.dro_beta={draw.choice((0.5, 2.0))}")
    if name == "sapo" and draw.random() < 0.5:
        words += [f"{A}.tau_pos=1.5", f"{A}.tau_neg=2.0"]
    if name == "clip_cov":  # every token in the range is chosen, so that the choice is not random
        words += [f"{A}.policy_loss.clip_cov_ratio=1.0", f"{A}.policy_loss.clip_cov_lb=0.1"]
    if name == "kl_cov":
        words.append(f"{A}.policy_loss.kl_cov_ratio={draw.choice((0.1, 0.3))}")
    return words


def _correction(draw: random.Random) -> list[str]:
    words = []
    if draw.random() < 0.6:
        words.append(f"{R}.rollout_is={draw.choice(('token', 'sequence'))}")
        words.append(f"{R}.rollout_is_threshold={draw.choice(('1.5', '2.0', '5.0', '0.7_1.6', '0.5_3.0'))}")
        if draw.random() < 0.4:
            words.append(f"{R}.rollout_is_batch_normalize=True")
    if draw.random() < 0.6:
        names = draw.sample(sorted(CRITERIA), draw.choice((1, 1, 2)))
        bounds = [draw.choice(CRITERIA[name]) for name in names]
        # Hydra reads 0.6_1.5 as text, and a list of words only in quotes.
        words += [f"{R}.rollout_rs='{','.join(names)}'", f"{R}.rollout_rs_threshold='{','.join(bounds)}'"]
    if draw.random() < 0.25:
        words += [f"{R}.bypass_mode=True", f"{R}.loss_type={draw.choice(('ppo_clip', 'reinforce'))}"]
    elif draw.random() < 0.3:
        words.append("trainer.use_v1=False")
    return words
