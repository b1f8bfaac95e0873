"""Commands of verl's: one update of the same batch by verl and by the migrated recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.compat.conversion_output import checked
from lockstep.compat.verl.convert_verl import convert_verl
from lockstep.recipe import Recipe

from .batch import EACH, LONGEST, PROMPTS, Batch, Ours, adapted, assert_same, distance, gradients
from .verl_update import VerlUpdate

pytestmark = pytest.mark.peers

A, G = "actor_rollout_ref.actor", "algorithm"
COMMON = (
    "data.train_files=rows.parquet data.max_prompt_length=8 actor_rollout_ref.model.path=m critic.model.path=m "
    f"data.train_batch_size={PROMPTS} {A}.ppo_mini_batch_size={PROMPTS} actor_rollout_ref.rollout.n={EACH} "
    f"data.max_response_length={LONGEST} {A}.ppo_micro_batch_size_per_gpu={PROMPTS * EACH} "
    "actor_rollout_ref.rollout.name=vllm"
)
GRPO = f"{G}.adv_estimator=grpo"
KL_LOSS = f"{A}.use_kl_loss=True {A}.kl_loss_coef=0.05"
# The keys of example scripts that decide an update, with values at which they bite. Both versions have them.
BOTH: dict[str, str] = {
    "PPO": f"{G}.adv_estimator=gae {G}.gamma=0.99 {G}.lam=0.95",
    "PPO, KL in the reward": f"{G}.adv_estimator=gae {G}.use_kl_in_reward=True {G}.kl_ctrl.kl_coef=0.1",
    "PPO, mean of sums": f"{G}.adv_estimator=gae {A}.loss_agg_mode=seq-mean-token-sum critic.cliprange_value=0.1",
    "GRPO": GRPO,
    "GRPO, KL in the loss": f"{GRPO} {KL_LOSS} {A}.kl_loss_type=low_var_kl {A}.entropy_coeff=0.01",
    "GRPO, KL in the reward": f"{GRPO} {G}.use_kl_in_reward=True {G}.kl_penalty=low_var_kl {G}.kl_ctrl.kl_coef=0.1",
    "GRPO, KL in both": f"{GRPO} {KL_LOSS} {A}.kl_loss_type=mse {G}.use_kl_in_reward=True {G}.kl_ctrl.kl_coef=0.1",
    "GRPO, mean of sums": f"{GRPO} {KL_LOSS} {A}.loss_agg_mode=seq-mean-token-sum",
    "GRPO, mean of means": f"{GRPO} {KL_LOSS} {A}.loss_agg_mode=seq-mean-token-mean {A}.entropy_coeff=0.01",
    "clip-higher": f"{GRPO} {A}.clip_ratio_low=0.2 {A}.clip_ratio_high=0.28 {A}.clip_ratio_c=10.0",
    "dual clip": f"{GRPO} {A}.clip_ratio_c=1.2 {A}.clip_ratio_low=0.1",
    "Dr. GRPO": f"{GRPO} {G}.norm_adv_by_std_in_grpo=False {A}.loss_agg_mode=token-mean",
    "REINFORCE++": f"{G}.adv_estimator=reinforce_plus_plus {G}.gamma=0.95 {KL_LOSS} {A}.kl_loss_type=mse",
    "REINFORCE++ with a baseline": f"{G}.adv_estimator=reinforce_plus_plus_baseline {KL_LOSS}",
    "RLOO": f"{G}.adv_estimator=rloo {G}.use_kl_in_reward=True {G}.kl_penalty=kl {G}.kl_ctrl.kl_coef=0.1",
    "OPO": f"{G}.adv_estimator=opo",
    "pass@k": f"{G}.adv_estimator=grpo_passk",
}
# These are 0.9's.
NEWER: dict[str, str] = {
    "GSPO": f"{GRPO} {A}.policy_loss.loss_mode=gspo {A}.clip_ratio_low=0.0003 {A}.clip_ratio_high=0.0004 "
    f"{A}.loss_agg_mode=seq-mean-token-mean",
    "GSPO over tokens": f"{GRPO} {A}.policy_loss.loss_mode=gspo {KL_LOSS} {A}.loss_agg_mode=token-mean",
    "GSPO by default": f"{GRPO} {A}.policy_loss.loss_mode=gspo {KL_LOSS} {A}.optim.lr_scheduler_type=constant",
    "SAPO": f"{GRPO} {A}.policy_loss.loss_mode=sapo {A}.tau_pos=1.0 {A}.tau_neg=1.05 {KL_LOSS} {A}.entropy_coeff=0.01",
    "CISPO": f"{GRPO} {A}.policy_loss.loss_mode=cispo {A}.clip_ratio_low=1.0 {A}.clip_ratio_high=0.28",
    "GMPO": f"{GRPO} {A}.policy_loss.loss_mode=geo_mean {A}.clip_ratio_low=0.4 {A}.clip_ratio_high=0.4 {KL_LOSS}",
    "policy gradient": f"{G}.adv_estimator=rloo {A}.policy_loss.loss_mode=gpg",
    "straight-through KL": f"{GRPO} {KL_LOSS} {A}.kl_loss_type=k3+",
    "Dr. GRPO, sums over a constant": f"{GRPO} {G}.norm_adv_by_std_in_grpo=False {KL_LOSS} "
    f"{A}.loss_agg_mode=seq-mean-token-sum-norm {A}.loss_scale_factor={LONGEST}",
    "vectorised": f"{G}.adv_estimator=grpo_vectorized",
    "GPG": f"{G}.adv_estimator=gpg {A}.policy_loss.loss_mode=gpg",
}
CASES = {
    f"{version} {name}": (version, words)
    for versions, commands in ((("0.4.1", "0.9.1"), BOTH), (("0.9.1",), NEWER))
    for name, words in commands.items()
    for version in versions
}


def words_of(text: str) -> list[str]:
    return f"{COMMON} {text}".split()


def migrated(words: list[str], model: Path) -> Recipe:
    return adapted(checked(convert_verl("main_ppo", words)), model)


@pytest.mark.parametrize("name", CASES)
def test_the_update_is_verls(name: str, tiny_folder: Path, batch: Batch) -> None:
    version, text = CASES[name]
    words = words_of(text)
    theirs, ours = VerlUpdate(version, words, batch), Ours(migrated(words, tiny_folder), batch)
    assert_same(ours.policy(), theirs.policy())
    if ours.models.critic is not None:
        done = ours.critic()
        expected = theirs.value_loss(ours.values())
        expected.backward()
        assert_same(done, (float(expected.detach()), gradients(ours.models.critic.module)))


def test_means_of_means_are_what_0_4_differs_by(tiny_folder: Path, batch: Batch) -> None:
    """It averages each micro-batch by itself, then the averages; 0.9 and we count the tokens of the whole update."""
    words = words_of(f"{GRPO} {KL_LOSS}")
    ours = Ours(migrated(words, tiny_folder), batch).policy()
    older, newer = VerlUpdate("0.4.1", words, batch), VerlUpdate("0.9.1", words, batch)
    size, count = 2, PROMPTS * EACH // 2
    assert_same(ours, newer.policy_in_parts(size))
    loss, found = older.policy_in_parts(size, divided_by=count)
    assert abs(ours[0] - loss) > 1e-3
    assert distance(ours[1], found) > 1e-2
    # The same averages, each weighed by its share of the tokens, are the mean over all tokens.
    tokens = batch.mask.reshape(count, -1).sum(1)
    assert_same(ours, older.policy_in_parts(size, weights=(tokens / tokens.sum()).tolist()))


def test_sums_over_a_constant_are_added_up_in_0_4(tiny_folder: Path, batch: Batch) -> None:
    """By as many times as a micro-batch has sequences, and the report says so."""
    words = words_of(f"{GRPO} {KL_LOSS} {A}.loss_agg_mode=seq-mean-token-sum-norm")
    done = convert_verl("main_ppo", words, version="0.4")
    (found,) = [found for found in done.outcomes if found.key == f"{A}.loss_agg_mode"]
    assert found.outcome == "changed"
    assert "larger by the number of sequences" in found.note
    loss, found = Ours(migrated(words, tiny_folder), batch).policy()
    times = PROMPTS * EACH
    assert_same((times * loss, {n: times * g for n, g in found.items()}), VerlUpdate("0.4.1", words, batch).policy())
