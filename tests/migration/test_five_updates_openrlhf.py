"""Commands of OpenRLHF's `train_ppo_ray`: five steps by its trainers and by the migrated recipe, same responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import question_rows, write_jsonl
from lockstep.compat.conversion_output import checked
from lockstep.compat.openrlhf.convert_openrlhf import convert_openrlhf
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

REWARD = """
def reward_func(queries, prompts, labels, **more):
    return [float(len(query) - len(prompt)) for query, prompt in zip(queries, prompts)]
"""
ALL = PROMPTS * EACH
FLAT = (
    "--pretrain MODEL --critic_pretrain CRITIC --remote_rm_url FOLDER/reward.py --prompt_data FOLDER/rows.jsonl "
    "--input_key prompt --label_key answer --apply_chat_template --prompt_max_len 64 --actor_num_gpus_per_node 1 "
    f"--generate_max_len {LONGEST} --rollout_batch_size {PROMPTS} --train_batch_size {ALL} "
    f"--micro_train_batch_size {ALL} --n_samples_per_prompt {EACH} --vllm_num_engines 1 --actor_learning_rate 1e-3 "
    "--critic_learning_rate 1e-3 --max_epochs 1 --num_episodes 1 --save_path FOLDER/runs --lr_warmup_ratio 0 "
)
DOTTED = (
    "--actor.model_name_or_path MODEL --critic.model_name_or_path CRITIC --reward.remote_url FOLDER/reward.py "
    "--data.prompt_dataset FOLDER/rows.jsonl --data.input_key prompt --data.label_key answer "
    f"--data.apply_chat_template --data.max_len {64 + LONGEST} --rollout.max_new_tokens {LONGEST} "
    f"--rollout.batch_size {PROMPTS} --train.batch_size {ALL} --train.micro_batch_size {ALL // 2} "
    f"--rollout.n_samples_per_prompt {EACH} --actor.num_gpus_per_node 1 --actor.adam.lr 1e-3 --critic.adam.lr 1e-3 "
    "--train.max_epochs 1 --train.num_episodes 1 --ckpt.output_dir FOLDER/runs --actor.lr_warmup_ratio 0 "
    "--critic.lr_warmup_ratio 0 "
)
CASES: dict[str, tuple[str, str]] = {
    "0.7.5 PPO": ("0.7.5", "--gamma 0.99 --lambd 0.95 --init_kl_coef 0.1"),
    "0.7.5 REINFORCE++": ("0.7.5", "--advantage_estimator reinforce --init_kl_coef 0.1 --gamma 0.95"),
    "0.7.5 REINFORCE++ with a baseline": (
        "0.7.5",
        "--advantage_estimator reinforce_baseline --use_kl_loss --kl_estimator k2 --init_kl_coef 0.1 --l2 0.3",
    ),
    "0.7.5 GRPO": (
        "0.7.5",
        "--advantage_estimator group_norm --use_kl_loss --kl_estimator k3 --init_kl_coef 0.1 --adam_betas 0.8 0.9 "
        "--max_norm 0.1",
    ),
    "0.7.5 REINFORCE++, warm-up, two epochs": (
        "0.7.5",
        "--advantage_estimator reinforce --init_kl_coef 0.1 --max_epochs 2 --lr_warmup_ratio 0.25",
    ),
    "0.11.2 PPO": ("0.11.2", "--algo.advantage.gamma 0.99 --algo.advantage.lambd 0.95 --algo.kl.init_coef 0.1"),
    "0.11.2 REINFORCE++": ("0.11.2", "--algo.advantage.estimator reinforce --algo.kl.init_coef 0.1"),
    "0.11.2 GRPO": (
        "0.11.2",
        "--algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.init_coef 0.1 --algo.kl.estimator k2 "
        "--actor.eps_clip_low_high 0.2 0.28 --actor.adam.weight_decay 0.3 --actor.entropy_coef 0.01",
    ),
}
# The same responses, but another setting on OpenRLHF's side.
WRONG: dict[str, str] = {
    "weight decay": "--l2 0.1",
    "betas": "--adam_betas 0.9 0.999",
    "warm-up": "--lr_warmup_ratio 0.4",
    "gradient clip": "--max_norm 0.1",
    "learning rate": "--actor_learning_rate 1.01e-3",
    "KL": "--init_kl_coef 0.2",
    "discount": "--gamma 0.9",
    "epochs": "--max_epochs 2",
}
WITHIN = 5e-4
Runs = dict[str, tuple[Trained, dict[str, Any]]]


def words_of(version: str, text: str, model: Path, critic: Path, folder: Path) -> list[str]:
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    rows = [{**row, "answer": "0"} for row in question_rows(PROMPTS * STEPS)]
    write_jsonl(folder / "rows.jsonl", rows)
    words = (FLAT if version == "0.7.5" else DOTTED) + text
    places = {"MODEL": model, "CRITIC": critic, "FOLDER": folder}
    for name, path in places.items():
        words = words.replace(name, str(path))
    return words.split()


def migrated(words: list[str], model: Path) -> Recipe:
    recipe = checked(convert_openrlhf("train_ppo_ray", words))
    return adapted(recipe, model).model_copy(update={"critic": recipe.critic})


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    critic = value_model(tiny_folder, tmp_path_factory.mktemp("critic"))
    ours: dict[str, Trained] = {}
    jobs: dict[str, Any] = {}

    def job(name: str, more: str = "") -> dict[str, Any]:
        version, text = CASES[name]
        words = words_of(version, f"{text} {more}", tiny_folder, critic, tmp_path_factory.mktemp("case"))
        if name not in ours:
            ours[name] = train_online(migrated(words, tiny_folder))
        return {"version": version, "words": words, "steps": ours[name].steps}

    wanted, base = chosen(request), "0.7.5 REINFORCE++"
    jobs = {name: job(name) for name in wanted if name in CASES}
    for name in [name for name in wanted if name in WRONG]:
        job(base)
        jobs[name], ours[name] = job(base, WRONG[name]), ours[base]
    theirs = other_trainer("openrlhf_trainer", tmp_path_factory.mktemp("openrlhf"), jobs)
    return {name: (ours[name], theirs[name]) for name in jobs}


@pytest.mark.parametrize("name", CASES)
def test_five_steps_are_openrlhfs(name: str, runs: Runs) -> None:
    found = compared(f"OpenRLHF {name}", *runs[name])
    assert max(max(one) for one in found.values()) <= WITHIN, found


@pytest.mark.parametrize("name", WRONG)
def test_another_setting_is_noticed(name: str, runs: Runs) -> None:
    found = compared(f"OpenRLHF, wrong {name}", *runs[name])
    assert max(found["actor"]) > 4 * WITHIN, found
