"""Complete commands of verl and OpenRLHF: the recipe of each, key by key, and the refusals of their settings.

A key too many is as wrong as a missing one, so the complete recipe is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.compat.conversion_output import checked, report
from lockstep.compat.key_table import Conversion
from lockstep.compat.openrlhf.convert_openrlhf import convert_openrlhf, defaults_of
from lockstep.compat.verl.convert_verl import convert_verl
from lockstep.errors import Refusal

FILE = Path(__file__).parents[1] / "data" / "migration" / "recipes.yaml"
COMMANDS: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
CONVERTERS: dict[str, Callable[..., Conversion]] = {"verl": convert_verl, "openrlhf": convert_openrlhf}

A, M, R = (f"actor_rollout_ref.{name}" for name in ("actor", "model", "rollout"))
C, F = "algorithm.rollout_correction", "reward_model.reward_kwargs"
BOTH_REWARDS = ("reward_model.enable=True", "reward_model.model.path=rm", "custom_reward_function.path=f.py")
IS = "--algo.advantage.is_correction"
GRPO = ("data.train_files=t.parquet", f"{M}.path=m", "algorithm.adv_estimator=grpo", f"{R}.n=4")
PPO = ("data.train_files=t.parquet", f"{M}.path=m", "critic.model.path=c")
SFT = ("data.train_files=t.parquet", "model.partial_pretrain=m")
FLAT = ("--pretrain", "m", "--prompt_data", "p.jsonl", "--reward_pretrain", "rm")
DOTTED = ("--actor.model_name_or_path", "m", "--data.prompt_dataset", "p.jsonl", "--reward.model_name_or_path", "rm")
GROUP = ("--advantage_estimator", "group_norm", "--n_samples_per_prompt", "4")
ROWS = ("--pretrain", "m", "--dataset", "d.jsonl")


def values(done: Conversion) -> dict[str, Any]:
    return {key: written.value for key, written in done.recipe.items()}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_recipe_of_a_command(name: str) -> None:
    case = COMMANDS[name]
    done = CONVERTERS[case["peer"]](case["program"], case["command"].split())
    assert not done.problems
    assert values(done) == case["recipe"]
    checked(done)
    assert all(done.settings.spelling(key) in report(done) for key in done.settings.given)


def test_defaults_that_both_share_have_their_values_in_the_recipe() -> None:
    """Keys that are left out because lockstep has the same default."""
    ppo = checked(convert_verl("main_ppo", PPO))
    assert (ppo.rollout.n, ppo.rollout.temperature, ppo.rollout.top_p, ppo.rollout.top_k) == (1, 1.0, 1.0, 0)
    assert (ppo.algorithm.clip_low, ppo.algorithm.clip_high, ppo.algorithm.dual_clip) == (0.2, 0.2, 3.0)
    assert (ppo.algorithm.gamma, ppo.algorithm.lam, ppo.algorithm.epochs) == (1.0, 1.0, 1)
    assert (ppo.optim.clip, ppo.optim.weight_decay, ppo.data.shuffle) == (1.0, 0.01, True)
    assert (ppo.critic.lr, ppo.critic.clip, ppo.critic.warmup) == (1e-5, 0.5, 0)
    sft = checked(convert_openrlhf("train_sft", [*ROWS, "--output_key", "o"]))
    assert (sft.optim.betas, sft.optim.clip, sft.optim.schedule) == ([0.9, 0.95], 1.0, "cosine")
    assert (sft.run.seed, sft.model.dtype, sft.model.gradient_checkpointing) == (42, "fp32", False)


# The defaults of OpenRLHF's argparse: learning rate, epochs, longest sequence, micro-batch.
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("train_sft", (5e-6, 2, 2048, 8)),
        ("train_dpo", (1e-5, 1, 512, 8)),
        ("train_kto", (1e-5, 1, 2048, 8)),
        ("train_rm", (9e-6, 1, 512, 1)),
        ("train_prm", (1e-6, 1, 2048, 1)),
        ("train_kd", (5e-6, 1, 2048, 8)),
    ],
)
def test_defaults_of_openrlhfs_programs(program: str, expected: tuple[float, int, int, int]) -> None:
    defaults = defaults_of(program, dotted=False)
    names = ("learning_rate", "max_epochs", "max_len", "micro_train_batch_size")
    assert tuple(defaults[name] for name in names) == expected
    # In OpenRLHF two programs share the project of another.
    other = {"train_kto": "openrlhf_train_dpo", "train_kd": "openrlhf_train_sft"}
    more = ["--output_key", "o", "--teacher_model", "t", "--placeholder_token", "x", "--reward_tokens", "+", "-"]
    flags = [*ROWS, "--use_wandb", "KEY", *(more[:2] if program in ("train_sft", "train_kto", "train_kd") else [])]
    flags += more[2:4] if program == "train_kd" else more[4:] if program == "train_prm" else []
    assert values(convert_openrlhf(program, flags))["log.project"] == other.get(program, f"openrlhf_{program}")


# Rules for single settings: what a command adds to the recipe of its base.
@pytest.mark.parametrize(
    ("base", "words", "expected"),
    [
        (GRPO, ["data.seed=7"], {"run.seed": 7}),
        (GRPO, [f"{M}.lora_rank=8", f"{M}.exclude_modules=.*visual.*"], {"model.lora.exclude": ".*visual.*"}),
        (GRPO, [f"{M}.override_config={{}}", f"{R}.use_fire_sampling=False"], {}),
        # GSPO: 0.4 always averages over sequences; a set aggregation counts.
        (
            GRPO,
            [f"{A}.policy_loss.loss_mode=gspo", f"{A}.loss_agg_mode=token-mean"],
            {"algorithm.loss": "gspo", "algorithm.aggregation": "token_mean"},
        ),
        # SAPO averages over sequences in any mode, but its KL and entropy by the mode.
        (
            GRPO,
            [f"{A}.policy_loss.loss_mode=sapo"],
            {"algorithm.aggregation": "seq_mean_token_mean", "algorithm.penalty_aggregation": "token_mean"},
        ),
        # The sums are divided by the longest response, which is also what a scale factor may say.
        (
            GRPO,
            [f"{A}.loss_agg_mode=seq-mean-token-sum-norm", f"{A}.loss_scale_factor=512"],
            {"algorithm.aggregation": "seq_mean_token_sum_norm"},
        ),
        # Without weights the plain policy gradient needs no old log-probs.
        (
            GRPO,
            [f"{C}.bypass_mode=true", f"{C}.loss_type=reinforce", f"{A}.ppo_mini_batch_size=1024"],
            {"algorithm.loss": "policy_gradient", "algorithm.rollout_correction.bypass": False},
        ),
        (GRPO, [f"{A}.kl_loss_type=k3+", f"{A}.use_kl_loss=True"], {"algorithm.kl.estimator": "k3+"}),
        # verl trains the vision tower with the language model, unless it is frozen.
        (GRPO, ["data.image_key=images"], {"model.vision": "train"}),
        (GRPO, ["data.image_key=images", f"{A}.freeze_vision_tower=True"], {"model.vision": "freeze"}),
        (GRPO, ["data.image_key=images", f"{M}.lora_rank=8"], {"model.vision": "freeze", "model.lora.rank": 8}),
        (GRPO, ["data.image_key=null"], {}),
        (GRPO, ["algorithm.adv_estimator=opo"], {"method": "opo", "algorithm.advantage": "opo"}),
        (GRPO, ["algorithm.adv_estimator=remax"], {"method": "remax"}),
        # The critic reads the aggregation of the policy if it has none.
        (PPO, [f"{A}.loss_agg_mode=seq-mean-token-mean"], {"critic.aggregation": "seq_mean_token_mean"}),
        (PPO, ["critic.loss_agg_mode=token-mean", f"{A}.loss_agg_mode=seq-mean-token-mean"], {}),
        (PPO, ["trainer.log_val_generations=4", "data.val_files=v"], {"log.samples": 4}),
        (PPO, ["trainer.logger=[console,tensorboard,clearml]"], {"log.track": ["tensorboard"]}),
    ],
)
def test_single_settings_of_main_ppo(base: Sequence[str], words: list[str], expected: dict[str, Any]) -> None:
    done = convert_verl("main_ppo", [*base, *words])
    checked(done)
    assert {key: values(done).get(key) for key in expected} == expected
    if "critic.loss_agg_mode=token-mean" in words:
        assert checked(done).critic.aggregation == "token_mean"


@pytest.mark.parametrize(
    ("program", "words", "expected"),
    [
        # 0.7.5's correction: token weights up to a cap.
        (
            "train_ppo_ray",
            [*FLAT, "--enable_vllm_is_correction", "--vllm_is_truncated_threshold", "3"],
            {"algorithm.rollout_correction.weight": "token", "algorithm.rollout_correction.cap": 3.0},
        ),
        (
            "train_ppo_ray",
            [*FLAT, "--overlong_buffer_len", "100", "--overlong_penalty_factor", "0.5"],
            {"algorithm.overlong.buffer": 100, "algorithm.overlong.factor": 0.5},
        ),
        # At most 10 generation batches; the mean score must be inside the range.
        (
            "train_ppo_ray",
            [*FLAT, *GROUP, "--dynamic_filtering", "--dynamic_filtering_reward_range", "0.1", "0.9"],
            {"algorithm.dynamic_sampling.max_gen_batches": 10, "algorithm.dynamic_sampling.between": [0.1, 0.9]},
        ),
        # Group estimators force gamma to 1, and compare scores before a KL in the reward.
        (
            "train_ppo_ray",
            [*FLAT, *GROUP, "--gamma", "0.9"],
            {"algorithm.gamma": 1.0, "algorithm.kl.before_baseline": False},
        ),
        ("train_ppo_ray", [*FLAT, "--policy_loss_type", "gspo"], {"algorithm.aggregation": "seq_mean_token_mean"}),
        ("train_ppo_ray", [*FLAT, "--max_samples", "7"], {"data.train": [{"path": "p.jsonl", "rows": 7}]}),
        # The rows of each data set; OpenRLHF counts them in the mixture.
        (
            "train_sft",
            ["--pretrain", "m", "--dataset", "a.jsonl,b.jsonl", "--max_samples", "9", "--output_key", "o"],
            {"data.train": [{"path": "a.jsonl", "rows": 9}, {"path": "b.jsonl", "rows": 9}]},
        ),
        (
            "train_sft",
            [*ROWS, "--input_key", "chat", "--apply_chat_template", "--multiturn"],
            {"data.shape": "messages", "data.messages_key": "chat", "data.template": "auto"},
        ),
        ("train_sft", [*ROWS, "--pretrain_mode", "--input_key", "t"], {"data.shape": "text", "data.text_key": "t"}),
        # A template without {} is not used.
        ("train_sft", [*ROWS, "--output_key", "o", "--input_template", "Q:"], {"data.prompt_format": None}),
        ("train_dpo", [*ROWS, "--ipo"], {"preference.loss": "ipo", "preference.average": False}),
        ("train_dpo", [*ROWS, "--prompt_key", "q"], {"data.prompt_key": "q"}),
        ("train_dpo", [*ROWS, "--eval_dataset", "e.jsonl", "--eval_steps", "20"], {"val.every": 20}),
        ("train_rm", [*ROWS, "--loss", "anything"], {"rm.loss": "logexp"}),
        ("train_dpo", [*ROWS, "--load_checkpoint", "--save_steps", "5"], {"run.resume": "auto", "checkpoint.every": 5}),
    ],
)
def test_single_flags_of_openrlhf(program: str, words: list[str], expected: dict[str, Any]) -> None:
    done = convert_openrlhf(program, words)
    checked(done)
    assert {key: values(done).get(key) for key in expected} == expected


# What cannot be converted: the setting that is in the way, and how to change it.
@pytest.mark.parametrize(
    ("words", "where", "remedy"),
    [
        ([*GRPO, f"{M}.override_config.num_hidden_layers=2"], f"{M}.override_config.num_hidden_layers", "config.json"),
        ([*GRPO, f"{R}.use_fire_sampling=True"], f"{R}.use_fire_sampling", "False"),
        ([*GRPO, f"{A}.use_kl_lost=True"], f"{A}.use_kl_lost", f"did you mean {A}.use_kl_loss?"),
        ([*GRPO, f"{A}.strategy=jax"], f"{A}.strategy", "megatron"),
        ([*GRPO, "reward_model.reward_manager=batch"], "reward_model.reward_manager", "naive, dapo, prime"),
        ([*GRPO, "reward_model.enable=True"], "reward_model.enable", "give the reward model's path"),
        # A generative reward model (FAPO): the function asks the model, which verl serves.
        ([*GRPO, *BOTH_REWARDS, "reward_model.rollout.name=vllm"], "reward_model.enable", "vllm serve"),
        ([*GRPO, *BOTH_REWARDS, "reward_model.enable_resource_pool=True"], "reward_model.enable", "vllm serve"),
        ([*GRPO, *BOTH_REWARDS, f"{C}.rollout_is=token"], "reward_model.enable", "vllm serve"),
        (
            [
                *(*GRPO, "reward_model.reward_manager=dapo", f"{F}.overlong_buffer_cfg.enable=True"),
                *(f"{F}.overlong_buffer_cfg.len=9", f"{F}.max_resp_len=9"),
            ],
            f"{F}.max_resp_len",
            "512",
        ),
        (
            [
                *GRPO,
                f"{A}.use_kl_loss=True",
                "algorithm.use_kl_in_reward=True",
                "algorithm.kl_ctrl.type=adaptive",
            ],
            "algorithm.kl_ctrl.type",
            "algorithm.kl_ctrl.type=fixed",
        ),
        ([*GRPO, f"{C}.rollout_is=group"], f"{C}.rollout_is", "token, sequence or null"),
        (
            [*GRPO, f"{C}.rollout_is=token", f"{C}.rollout_is_threshold=5.0_2.0"],
            f"{C}.rollout_is_threshold",
            "lower_upper",
        ),
        (
            [
                *GRPO,
                f"{C}.rollout_rs=token_k1",
                f"{C}.rollout_rs_threshold=2",
                "algorithm.adv_estimator=optimal_token_baseline",
            ],
            "algorithm.adv_estimator",
            "tir_optimal_token_baseline",
        ),
        (
            [
                *GRPO,
                f"{C}.bypass_mode=true",
                f"{C}.loss_type=reinforce",
                f"{C}.rollout_is=token",
                f"{C}.rollout_is_threshold=0.5_5.0",
            ],
            f"{C}.rollout_is_threshold",
            "one number",
        ),
        (
            [
                *GRPO,
                "algorithm.adv_estimator=gdpo",
                "algorithm.gdpo_reward_keys=[a,b]",
                "algorithm.gdpo_reward_weights=[1]",
                "custom_reward_function.path=r.py",
            ],
            "algorithm.gdpo_reward_weights",
            "one weight per reward",
        ),
        ([*GRPO, "data.image_key=pictures"], "data.image_key", "rename the column"),
        ([f"{M}.path=m", "algorithm.adv_estimator=grpo"], "data.train_files", "give the paths of the training files"),
        (["data.train_files=t", "algorithm.adv_estimator=grpo"], f"{M}.path", "give the path of the model"),
        (["data.train_files=t", f"{M}.path=m"], "critic.model.path", "give the path of the critic's model"),
    ],
)
def test_settings_of_verl_that_are_refused(words: list[str], where: str, remedy: str) -> None:
    assert_refused(convert_verl("main_ppo", words), where, remedy)


@pytest.mark.parametrize(
    ("program", "words", "where", "remedy"),
    [
        ("train_dpo", ["--dataset", "d.jsonl"], "--pretrain", "give the path of the model"),
        ("train_dpo", ["--pretrain", "m"], "--dataset", "give the training data"),
        ("train_dpo", [*ROWS[:2], "--dataset", "name@folder"], "--dataset", "give file paths"),
        ("train_dpo", [*ROWS, "--ipo", "--label_smoothing", "0.1"], "--label_smoothing", "--ipo"),
        ("train_dpo", [*ROWS, "--learning_rat", "x"], "--learning_rat", "correct the value"),
        ("train_dpo", [*ROWS, "--learnin_rates", "1"], "--learnin_rates", "did you mean --learning_rate?"),
        ("train_kto", ROWS, "--output_key", "--output_key output"),
        ("train_prm", [*ROWS, "--reward_tokens", "+"], "--placeholder_token", "--placeholder_token"),
        ("train_ppo_ray", FLAT[:4], "--reward_pretrain", "set one of them"),
        ("train_ppo_ray", [*FLAT, "--advantage_estimator", "vtrace"], "--advantage_estimator", "group_norm"),
        ("train_ppo_ray", [*DOTTED, f"{IS}_enable", f"{IS}_type", "x"], f"{IS}_type", "tis, icepop, seq-mask-tis"),
        ("train_ppo_ray", [*DOTTED, f"{IS}_level", "word"], f"{IS}_level", "token or seq"),
        ("train_ppo_ray", [*DOTTED, f"{IS}_level", "seq", f"{IS}_mode", "clip"], f"{IS}_mode", "mask"),
        (
            "train_ppo_ray",
            [*DOTTED, "--actor.policy_loss_type", "x"],
            "--actor.policy_loss_type",
            "use one of ppo, gspo",
        ),
    ],
)
def test_flags_of_openrlhf_that_are_refused(program: str, words: Sequence[str], where: str, remedy: str) -> None:
    assert_refused(convert_openrlhf(program, words), where, remedy)


def assert_refused(done: Conversion, where: str, remedy: str) -> None:
    with pytest.raises(Refusal) as refused:
        checked(done)
    (problem,) = refused.value.problems
    assert problem.where == where
    assert problem.why
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    ("convert", "program", "remedy"),
    [
        (convert_verl, "main_eval", "lockstep eval"),
        (convert_verl, "main_dpo", "main_ppo"),
        (convert_verl, "main_generation", "lockstep sample"),
        (convert_openrlhf, "train_pt", "train_sft"),
        (convert_openrlhf, "lora_combiner", "lockstep export"),
    ],
)
def test_programs_that_are_refused(convert: Callable[..., Conversion], program: str, remedy: str) -> None:
    with pytest.raises(Refusal) as refused:
        convert(program, [])
    (problem,) = refused.value.problems
    assert problem.where.endswith(program)
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    ("words", "different"), [([], False), (["lr_scheduler_type=cosine"], True), (["lr_warmup_steps=5"], True)]
)
def test_a_schedule_does_not_wait_for_the_critic(words: list[str], different: bool) -> None:
    done = convert_verl("main_ppo", [*PPO, "trainer.critic_warmup=3", *(f"{A}.optim.{word}" for word in words)])
    assert values(done)["critic.warmup"] == 2
    assert ("trainer.critic_warmup" in done.decided) == different


def test_verl_0_4_returns_the_score_of_the_reward_model_alone() -> None:
    done = convert_verl("main_ppo", [*GRPO, *BOTH_REWARDS, "+custom_reward_function.reward_kwargs.a=1"], version="0.4")
    recipe = checked(done)
    assert (recipe.reward.model, recipe.reward.function, recipe.reward.arguments) == ("rm", None, {})
    outcomes = {found.key: found.outcome for found in done.outcomes}
    assert outcomes["custom_reward_function.path"] == outcomes["custom_reward_function.reward_kwargs.a"] == "ignored"
