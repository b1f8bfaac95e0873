"""Offload keys of verl and OpenRLHF become keys of `parallel`; a key that is on is never ignored silently."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.compat.command_devices import set_devices
from lockstep.compat.conversion_output import checked
from lockstep.compat.key_table import Conversion
from lockstep.compat.openrlhf.convert_openrlhf import convert_openrlhf
from lockstep.compat.verl.convert_verl import convert_verl

A, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref.fsdp_config.param_offload=True"
GRPO = ["algorithm.adv_estimator=grpo", "data.train_files=t", "actor_rollout_ref.model.path=m"]
GRPO += ["actor_rollout_ref.rollout.name=sglang", "trainer.n_gpus_per_node=8", "actor_rollout_ref.rollout.n=4"]
PPO = [*GRPO, "algorithm.adv_estimator=gae", "critic.model.path=c"]
WEIGHTS, STATE = f"{A}.fsdp_config.param_offload=True", f"{A}.fsdp_config.optimizer_offload=True"
SFT = ["data.train_files=t", "model.partial_pretrain=m", "optim.lr=1e-5", "trainer.n_gpus_per_node=8"]
DPO = ["--pretrain", "m", "--dataset", "t"]
RAY = ["--pretrain", "m", "--prompt_data", "t", "--input_key", "q", "--reward_pretrain", "r"]
RAY += ["--critic_pretrain", "m", "--actor_num_gpus_per_node", "8"]


def parallel(done: Conversion) -> dict[str, Any]:
    checked(done)
    return {key: value.value for key, value in done.recipe.items() if key.startswith("parallel.")}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([WEIGHTS], {"parallel.offload": "params"}),
        ([STATE], {"parallel.offload": "optimizer"}),
        ([WEIGHTS, STATE], {"parallel.offload": "all"}),
        ([f"{A}.fsdp_config.offload_policy=True"], {"parallel.offload": "all"}),
        ([f"{A}.fsdp_config.param_offload=False", f"{A}.fsdp_config.optimizer_offload=False"], {}),
        ([REF, f"{A}.use_kl_loss=True"], {"parallel.offload_reference": True}),
        ([REF], {}),  # no KL term, so no reference model
        ([REF, f"{A}.use_kl_loss=True", "actor_rollout_ref.model.lora_rank=8"], {}),
        ([WEIGHTS, STATE, "trainer.n_gpus_per_node=1"], {"parallel.offload": "optimizer"}),
        (
            [
                "reward_model.enable=True",
                "reward_model.model.path=r",
                "reward_model.model.fsdp_config.param_offload=True",
            ],
            {"parallel.offload_reward": True},
        ),
    ],
)
def test_verls_keys(words: list[str], expected: dict[str, Any]) -> None:
    done = convert_verl("main_ppo", [*GRPO, *words])
    assert parallel(done) == expected
    for found in done.outcomes:
        if "offload" in found.key and found.given.value and not found.to:
            assert (found.outcome, bool(found.note)) == ("ignored", True)


def test_the_critic_of_both_versions() -> None:
    for group in ("critic.model.fsdp_config", "critic.fsdp"):
        done = convert_verl("main_ppo", [*PPO, f"{group}.param_offload=True", f"{group}.optimizer_offload=True"])
        assert parallel(done) == {"parallel.offload_critic": "all"}
    ignored = convert_verl("main_ppo", [*GRPO, "critic.model.fsdp_config.param_offload=True"])
    assert parallel(ignored) == {}


def test_verls_sft_trainers() -> None:
    both = ["model.fsdp_config.cpu_offload=True", "model.fsdp_config.offload_params=True"]
    assert parallel(convert_verl("fsdp_sft_trainer", [*SFT, *both])) == {"parallel.offload": "all"}
    assert parallel(convert_verl("fsdp_sft_trainer", [*SFT, both[0]])) == {}
    new = ["data.train_files=t", "model.path=m", "optim.lr=1e-5", "engine.optimizer_offload=True"]
    assert parallel(convert_verl("sft_trainer", new)) == {"parallel.offload": "optimizer"}


def test_openrlhfs_flags() -> None:
    offloads = {"parallel.offload": "optimizer", "parallel.offload_critic": "optimizer"}
    frozen = {"parallel.offload_reference": True, "parallel.offload_reward": True}
    words = [*RAY, "--adam_offload", "--ref_reward_offload"]
    assert parallel(convert_openrlhf("train_ppo_ray", words)) == {**offloads, **frozen}
    words = [*RAY, "--ref_reward_offload", "--init_kl_coef", "0"]
    assert parallel(convert_openrlhf("train_ppo_ray", words)) == {"parallel.offload_reward": True}
    assert parallel(convert_openrlhf("train_dpo", [*DPO, "--ref_offload"])) == {"parallel.offload_reference": True}
    assert parallel(convert_openrlhf("train_dpo", [*DPO, "--ref_offload", "--lora_rank", "8"])) == {}
    assert parallel(convert_openrlhf("train_dpo", [*DPO, "--adam_offload"])) == {"parallel.offload": "optimizer"}
    teacher = [*DPO, "--teacher_model", "t", "--teacher_offload", "--output_key", "o"]
    assert parallel(convert_openrlhf("train_kd", teacher)) == {"parallel.offload_teacher": True}


def test_one_process_keeps_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    done = convert_verl("main_ppo", [*GRPO, WEIGHTS])
    set_devices(done, "main_ppo")
    assert parallel(done) == {"parallel.offload": "optimizer"}
    assert any("parallel.offload" in remark for remark in done.remarks)
