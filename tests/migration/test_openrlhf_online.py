"""Commands of OpenRLHF's `train_ppo_ray`: one update of the same batch by OpenRLHF and by the migrated recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.compat.conversion_output import checked
from lockstep.compat.openrlhf.convert_openrlhf import convert_openrlhf
from lockstep.recipe import Recipe

from .batch import EACH, LONGEST, PROMPTS, Batch, Ours, adapted, assert_same
from .openrlhf_update import OpenrlhfUpdate

pytestmark = pytest.mark.peers

FLAT = (
    "--pretrain m --remote_rm_url reward.py --prompt_data rows.jsonl --prompt_max_len 8 --actor_num_gpus_per_node 1 "
    f"--generate_max_len {LONGEST} --rollout_batch_size {PROMPTS} --train_batch_size {PROMPTS * EACH} "
    f"--micro_train_batch_size {PROMPTS * EACH} --n_samples_per_prompt {EACH} --vllm_num_engines 1 "
)
DOTTED = (
    "--actor.model_name_or_path m --reward.remote_url reward.py --data.prompt_dataset rows.jsonl "
    f"--data.max_len {8 + LONGEST} --rollout.max_new_tokens {LONGEST} --rollout.batch_size {PROMPTS} "
    f"--train.batch_size {PROMPTS * EACH} --train.micro_batch_size {PROMPTS * EACH} "
    f"--rollout.n_samples_per_prompt {EACH} --actor.num_gpus_per_node 1 "
)
NO_KL, NO_KL_DOTTED = "--init_kl_coef 0", "--algo.kl.init_coef 0"
KL_DOTTED = "--algo.kl.use_loss --algo.kl.init_coef 0.05 --algo.kl.estimator k2"
CASES: dict[str, tuple[str, str]] = {
    "PPO": ("0.7.5", "--gamma 0.99 --lambd 0.95 --init_kl_coef 0.1"),
    "PPO, narrow bounds": ("0.7.5", f"--eps_clip 0.1 --value_clip 0.05 --reward_clip_range -0.25 0.9 {NO_KL}"),
    "REINFORCE++": ("0.7.5", "--advantage_estimator reinforce --init_kl_coef 0.1 --gamma 0.95"),
    "REINFORCE++, mean only": ("0.7.5", f"--advantage_estimator reinforce --no_advantage_std_norm {NO_KL}"),
    "REINFORCE++ with a baseline": (
        "0.7.5",
        "--advantage_estimator reinforce_baseline --use_kl_loss --kl_estimator k2 --init_kl_coef 0.05",
    ),
    "RLOO": ("0.7.5", f"--advantage_estimator rloo {NO_KL} --entropy_loss_coef 0.01"),
    "GRPO": (
        "0.7.5",
        "--advantage_estimator group_norm --use_kl_loss --kl_estimator k3 --init_kl_coef 0.05 --eps_clip 0.25",
    ),
    "GRPO, KL in the reward": ("0.7.5", "--advantage_estimator group_norm --init_kl_coef 0.1"),
    "RLOO, KL in the reward": ("0.7.5", "--advantage_estimator rloo --init_kl_coef 0.1 --kl_estimator k2"),
    "REINFORCE++ with a baseline, KL in the reward": (
        "0.7.5",
        "--advantage_estimator reinforce_baseline --init_kl_coef 0.1 --gamma 0.9",
    ),
    "Dr. GRPO": ("0.7.5", f"--advantage_estimator dr_grpo {NO_KL}"),
    "dotted PPO": ("0.11.2", "--algo.advantage.gamma 0.99 --algo.advantage.lambd 0.95 --algo.kl.init_coef 0.1"),
    "dotted REINFORCE++": ("0.11.2", "--algo.advantage.estimator reinforce --algo.kl.init_coef 0.1"),
    "dotted GRPO, clip-higher": (
        "0.11.2",
        f"--algo.advantage.estimator group_norm {KL_DOTTED} --actor.eps_clip_low_high 0.2 0.28",
    ),
    "dotted dual clip": (
        "0.11.2",
        f"--algo.advantage.estimator group_norm {NO_KL_DOTTED} --actor.dual_clip 1.2 --actor.eps_clip 0.1",
    ),
    "dotted RLOO": ("0.11.2", f"--algo.advantage.estimator rloo {NO_KL_DOTTED}"),
    "dotted GSPO": ("0.11.2", f"--algo.advantage.estimator group_norm --actor.policy_loss_type gspo {NO_KL_DOTTED}"),
    "dotted GSPO, KL and entropy": (
        "0.11.2",
        f"--algo.advantage.estimator group_norm --actor.policy_loss_type gspo {KL_DOTTED} --actor.entropy_coef 0.01",
    ),
    "dotted REINFORCE++ with a baseline, KL in the reward": (
        "0.11.2",
        "--algo.advantage.estimator reinforce_baseline --algo.kl.init_coef 0.1 --algo.kl.estimator k1",
    ),
    "dotted mean of means": (
        "0.11.2",
        f"--algo.advantage.estimator group_norm --actor.loss_agg_mode seq-mean-token-mean {NO_KL_DOTTED}",
    ),
    "dotted mean of means, KL and entropy": (
        "0.11.2",
        f"--algo.advantage.estimator dr_grpo --actor.loss_agg_mode seq-mean-token-mean {KL_DOTTED} "
        "--actor.entropy_coef 0.01",
    ),
}


def words_of(version: str, text: str) -> list[str]:
    return ((FLAT if version == "0.7.5" else DOTTED) + text).split()


def migrated(words: list[str], model: Path) -> Recipe:
    return adapted(checked(convert_openrlhf("train_ppo_ray", words)), model)


@pytest.mark.parametrize("name", CASES)
def test_the_update_is_openrlhfs(name: str, tiny_folder: Path, batch: Batch) -> None:
    version, text = CASES[name]
    words = words_of(version, text)
    theirs, ours = OpenrlhfUpdate(version, words, batch), Ours(migrated(words, tiny_folder), batch)
    assert_same(ours.policy(), theirs.policy())
    if ours.models.critic is not None:
        done = ours.critic()
        assert_same(done, theirs.critic(ours.values(), ours.models.critic.module))
