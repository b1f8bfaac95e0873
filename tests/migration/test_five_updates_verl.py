"""Commands of verl's: five steps by verl 0.9.1's engine workers and by the migrated recipe, with the same responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import REWARD, question_rows, write_jsonl
from lockstep.compat.conversion_output import checked
from lockstep.compat.verl.convert_verl import convert_verl
from lockstep.recipe import Recipe

from .batch import adapted
from .five_updates import (
    EACH,
    LONGEST,
    PROMPTS,
    STEPS,
    Trained,
    chosen,
    compared,
    other_trainer,
    train_online,
    value_model,
)

pytestmark = pytest.mark.peers

A, G = "actor_rollout_ref.actor", "algorithm"
GRPO = f"{G}.adv_estimator=grpo"
KL_LOSS = f"{A}.use_kl_loss=True {A}.kl_loss_coef=0.1"
CASES: dict[str, str] = {
    "GRPO": GRPO,
    "GRPO, KL in the loss": f"{GRPO} {KL_LOSS} {A}.kl_loss_type=low_var_kl {A}.entropy_coeff=0.01",
    "GRPO, KL in the reward": f"{GRPO} {G}.use_kl_in_reward=True {G}.kl_penalty=low_var_kl {G}.kl_ctrl.kl_coef=0.1",
    "Dr. GRPO, two epochs": f"{GRPO} {G}.norm_adv_by_std_in_grpo=False {A}.ppo_epochs=2 {A}.clip_ratio_high=0.28",
    "GRPO, mean of means, two epochs": f"{GRPO} {KL_LOSS} {A}.kl_loss_type=low_var_kl {A}.ppo_epochs=2 "
    f"{A}.loss_agg_mode=seq-mean-token-mean {A}.clip_ratio_c=100.0",
    "GSPO": f"{GRPO} {A}.policy_loss.loss_mode=gspo {A}.clip_ratio_low=0.0003 {A}.clip_ratio_high=0.0004 "
    f"{A}.loss_agg_mode=seq-mean-token-mean",
    "CISPO": f"{GRPO} {A}.policy_loss.loss_mode=cispo {A}.clip_ratio_low=1.0 {A}.clip_ratio_high=0.28",
    "REINFORCE++": f"{G}.adv_estimator=reinforce_plus_plus {G}.gamma=0.95 {KL_LOSS} {A}.kl_loss_type=mse",
    "RLOO, cosine": f"{G}.adv_estimator=rloo {A}.optim.lr_scheduler_type=cosine {A}.optim.min_lr_ratio=0.1",
    "GRPO, warm-up": f"{GRPO} {A}.optim.lr_warmup_steps_ratio=0.5 {A}.optim.lr_scheduler_type=cosine",
    "optimizer": f"{GRPO} {A}.optim.weight_decay=0.3 {A}.optim.betas=[0.8,0.9] {A}.optim.clip_grad=0.1",
    "a bound that is not read": f"{GRPO} {A}.optim.betas=[0.9,0.99] {A}.grad_clip=0.1",
    "PPO": f"{G}.adv_estimator=gae {G}.gamma=0.99 {G}.lam=0.95 critic.cliprange_value=0.2",
    "PPO, KL in the reward": f"{G}.adv_estimator=gae {G}.use_kl_in_reward=True {G}.kl_ctrl.kl_coef=0.1",
}


# The same responses, but another setting on verl's side.
WRONG: dict[str, str] = {
    "weight decay": f"{A}.optim.weight_decay=0.1",
    "betas": f"{A}.optim.betas=[0.9,0.95]",
    "warm-up": f"{A}.optim.lr_warmup_steps=2",
    "schedule": f"{A}.optim.lr_scheduler_type=cosine",
    "gradient clip": f"{A}.optim.clip_grad=0.1",
    "learning rate": f"{A}.optim.lr=1.01e-3",
    "order of updates": f"{A}.shuffle=True",
    "bounds": f"{A}.clip_ratio_high=0.01",
    "aggregation": f"{A}.loss_agg_mode=seq-mean-token-mean",
    "epochs": f"{A}.ppo_epochs=2",
}
WITHIN = 5e-4
Runs = dict[str, tuple[Trained, dict[str, Any]]]


def words_of(text: str, model: Path, critic: Path, folder: Path) -> list[str]:
    """Two updates in every step, each of two micro-batches; large steps, so that the ratios leave 1."""
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    rows = write_jsonl(folder / "rows.jsonl", question_rows(PROMPTS * STEPS))
    common = (
        f"data.train_files={rows} data.train_batch_size={PROMPTS} data.max_prompt_length=64 "
        f"data.max_response_length={LONGEST} actor_rollout_ref.model.path={model} critic.model.path={critic} "
        f"{A}.ppo_mini_batch_size={PROMPTS // 2} {A}.ppo_micro_batch_size_per_gpu={PROMPTS * EACH // 4} "
        f"critic.ppo_micro_batch_size_per_gpu={PROMPTS * EACH // 4} "
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={PROMPTS * EACH} "
        f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={PROMPTS * EACH} "
        f"actor_rollout_ref.rollout.n={EACH} actor_rollout_ref.rollout.name=vllm {A}.optim.lr=1e-3 "
        "critic.optim.lr=1e-3 "
        f"custom_reward_function.path={folder / 'reward.py'} custom_reward_function.name=letters "
        f"trainer.total_training_steps={STEPS} trainer.total_epochs=1 trainer.device=cpu trainer.n_gpus_per_node=1 "
        f"trainer.default_local_dir={folder / 'runs'} trainer.logger=[console] trainer.val_before_train=False"
    )
    return f"{common} {text}".split()


def migrated(words: list[str], model: Path) -> Recipe:
    recipe = checked(convert_verl("main_ppo", words))
    return adapted(recipe, model).model_copy(update={"critic": recipe.critic})


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    critic = value_model(tiny_folder, tmp_path_factory.mktemp("critic"))
    ours: dict[str, Trained] = {}
    jobs: dict[str, Any] = {}

    def job(name: str, text: str) -> dict[str, Any]:
        words = words_of(text, tiny_folder, critic, tmp_path_factory.mktemp("case"))
        if name not in ours:
            ours[name] = train_online(migrated(words, tiny_folder))
        head = ours[name].weights.get("critic", [{}])[0]
        return {"words": words, "steps": ours[name].steps, "bias": "score.bias" in head}

    for name in chosen(request):
        # The first run of a case decides on the responses; another setting gets those of GRPO.
        jobs[name] = job(name, CASES[name]) if name in CASES else {}
    for name in set(jobs) & set(WRONG):
        job("GRPO", GRPO)
        jobs[name] = job("GRPO", f"{GRPO} {WRONG[name]}")
        ours[name] = ours["GRPO"]
    theirs = other_trainer("verl_engine", tmp_path_factory.mktemp("verl"), jobs)
    return {name: (ours[name], theirs[name]) for name in jobs}


@pytest.mark.parametrize("name", CASES)
def test_five_steps_are_verls(name: str, runs: Runs) -> None:
    found = compared(f"verl 0.9.1, {name}", *runs[name])
    assert max(max(one) for one in found.values()) <= WITHIN, found


@pytest.mark.parametrize("name", WRONG)
def test_another_setting_is_noticed(name: str, runs: Runs) -> None:
    found = compared(f"verl 0.9.1, wrong {name}", *runs[name])
    assert max(found["actor"]) > 4 * WITHIN, found
