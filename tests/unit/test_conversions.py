"""Single settings of verl and OpenRLHF: what each becomes, and what is said about it."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.compat.conversion_output import checked
from lockstep.compat.key_table import Conversion
from lockstep.compat.openrlhf.convert_openrlhf import convert_openrlhf
from lockstep.compat.verl.convert_verl import convert_verl
from lockstep.errors import Refusal
from lockstep.recipe.keys_online import Reject
from lockstep.recipe.keys_optim import ParameterGroup
from refusals import refuses

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GRPO = ("data.train_files=t.parquet", "actor_rollout_ref.model.path=m", "algorithm.adv_estimator=grpo", f"{R}.n=4")
PPO = ("data.train_files=t.parquet", "actor_rollout_ref.model.path=m", "critic.model.path=c")
ONLINE = ("--pretrain", "m", "--prompt_data", "p.jsonl", "--reward_pretrain", "rm")
DOTTED = ("--actor.model_name_or_path", "m", "--data.prompt_dataset", "p.jsonl", "--reward.model_name_or_path", "rm")
MUON = ("--actor.optim", "muon", "--algo.advantage.estimator", "rloo", "--rollout.n_samples_per_prompt", "2")


def value(done: Conversion, key: str) -> Any:
    """A key of the checked recipe, by its dotted name."""
    found: Any = checked(done)
    for part in key.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.daily(every=4)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"optim.warmup": 0.0, "optim.schedule": "constant", "algorithm.kl.where": "none", "run.epochs": 30}),
        ([f"{A}.optim.lr_warmup_steps=10"], {"optim.warmup": 10}),
        ([f"{A}.optim.lr_warmup_steps_ratio=0.1"], {"optim.warmup": 0.1}),
        # Steps below 0 leave the word to the share.
        ([f"{A}.optim.lr_warmup_steps=-1", f"{A}.optim.lr_warmup_steps_ratio=0.05"], {"optim.warmup": 0.05}),
        (
            [f"{A}.optim.warmup_style=cosine", f"{A}.optim.min_lr_ratio=0.1"],
            {"optim.schedule": "cosine", "optim.min_lr_ratio": 0.1},
        ),
        ([f"{A}.optim.lr_scheduler_type=cosine", f"{A}.optim.betas=[0.9,0.95]"], {"optim.betas": [0.9, 0.95]}),
        ([f"{A}.optim.clip_grad=0.5"], {"optim.clip": 0.5}),
        ([f"{A}.optim.optimizer=AdamW", f"{A}.optim.optimizer_impl=torch.optim"], {"optim.name": "adamw"}),
        (
            [f"{A}.optim.optimizer=AdamW8bit", f"{A}.optim.optimizer_impl=bitsandbytes.optim"],
            {"optim.name": "adamw8bit", "optim.betas": [0.9, 0.999]},
        ),
        (["actor_rollout_ref.model.enable_activation_offload=True"], {"model.activation_offload": True}),
        (["actor_rollout_ref.model.enable_activation_offload=False"], {"model.activation_offload": False}),
        (
            [
                f"{A}.use_kl_loss=True",
                f"{A}.kl_loss_coef=0.01",
                "algorithm.use_kl_in_reward=True",
                "algorithm.kl_penalty=mse",
            ],
            {
                "algorithm.kl.where": "loss",
                "algorithm.kl.coefficient": 0.01,
                "algorithm.kl.reward_coefficient": 0.001,
                "algorithm.kl.reward_estimator": "k2",
            },
        ),
        (
            ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.2"],
            {"algorithm.kl.where": "reward", "algorithm.kl.target": 0.2, "algorithm.kl.estimator": "k1"},
        ),
        (
            ["algorithm.norm_adv_by_std_in_grpo=False"],
            {"method": "grpo", "algorithm.advantage": "dr_grpo", "algorithm.aggregation": "token_mean"},
        ),
        (
            [f"{A}.policy_loss.loss_mode=gspo"],
            {"algorithm.loss": "gspo", "algorithm.aggregation": "token_mean"},
        ),
        ([f"{A}.policy_loss.loss_mode=kl_cov"], {"algorithm.loss": "kl_cov", "algorithm.cov_kl": 0.1}),
        ([f"{A}.policy_loss.loss_mode=sapo", f"{A}.tau_neg=1.2"], {"algorithm.sapo_negative": 1.2}),
        ([f"{A}.loss_agg_mode=seq-mean-token-sum"], {"algorithm.aggregation": "seq_mean_token_sum"}),
        # Over all devices: 64 / 8 = 8 on each.
        (
            [f"{A}.ppo_micro_batch_size=64", "actor_rollout_ref.model.use_remove_padding=False"],
            {"batch.micro_batch_size": 8},
        ),
        ([f"{A}.use_dynamic_bsz=True", f"{A}.ulysses_sequence_parallel_size=2"], {"batch.tokens": 32768}),
        (["actor_rollout_ref.model.lora_rank=8"], {"model.lora.alpha": 16.0}),
        (["+actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16"], {"model.master_weights": False}),
        (
            [f"{R}.top_p=0.9", f"{R}.top_k=50"],
            {"rollout.top_p": 0.9, "rollout.top_k": 50, "rollout.truncated_sampling": "ignore"},
        ),
        (["data.truncation=left"], {"data.overlong": "truncate_left"}),
        (
            [
                "data.val_files=[a,b]",
                f"{R}.val_kwargs.do_sample=True",
                f"{R}.val_kwargs.temperature=1.0",
                f"{R}.val_kwargs.top_p=0.7",
                f"{R}.val_kwargs.n=3",
            ],
            {"val.questions": ["a", "b"], "val.temperature": 1.0, "val.top_p": 0.7, "val.n": 3, "val.at_start": True},
        ),
        (["data.val_files=a", f"{R}.val_kwargs.temperature=1.0"], {"val.temperature": 0.0}),
        (["custom_reward_function.path=r.py"], {"reward.function": "r.py:compute_score", "reward.rules": {}}),
        (
            ["reward.custom_reward_function.path=r.py", "reward.custom_reward_function.name=f"],
            {"reward.function": "r.py:f"},
        ),
        (
            ["custom_reward_function.path=r.py", "+custom_reward_function.reward_kwargs.scale=2"],
            {"reward.arguments": {"scale": 2}},
        ),
        (["reward_model.enable=True", "reward_model.model.path=rm"], {"reward.model": "rm", "reward.rules": {}}),
        (
            [
                "reward_model.reward_manager=dapo",
                "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
                "+reward_model.reward_kwargs.overlong_buffer_cfg.len=128",
            ],
            {"algorithm.overlong.buffer": 128, "algorithm.overlong.factor": 1.0},
        ),
        (
            ["algorithm.rollout_correction.rollout_is=token"],
            {"algorithm.rollout_correction.weight": "token", "algorithm.rollout_correction.cap": 2.0},
        ),
        (
            ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=5"],
            {"algorithm.dynamic_sampling.max_gen_batches": 5},
        ),
        (["trainer.total_training_steps=7", "trainer.total_epochs=3"], {"run.steps": 7, "run.epochs": None}),
        (["trainer.max_actor_ckpt_to_keep=3"], {"checkpoint.keep_last": 3}),
        (["trainer.experiment_name='a b/c:d'"], {"run.name": "a-b-c-d"}),
        (["trainer.logger=console"], {"log.track": []}),
        (["trainer.resume_mode=disable"], {"run.resume": "never"}),
    ],
)
def test_verls_settings(words: list[str], expected: dict[str, Any]) -> None:
    done = convert_verl("main_ppo", [*GRPO, *words])
    assert {key: value(done, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("version", "aggregation", "size", "clip"),
    [("0.4", "seq_mean_token_mean", "batch.micro_batch_size", "verl/gsm8k@0.4"),
     ("0.8", "seq_mean_token_mean", "batch.tokens", "verl/gsm8k@0.8"),
     ("0.9", "token_mean", "batch.tokens", "verl/gsm8k@0.9")],
)  # fmt: skip
def test_the_named_release_decides(version: str, aggregation: str, size: str, clip: str) -> None:
    words = [*GRPO, f"{A}.policy_loss.loss_mode=gspo", f"{A}.ppo_micro_batch_size_per_gpu=2"]
    done = convert_verl("main_ppo", words, version=version)
    assert value(done, "algorithm.aggregation") == aggregation
    assert value(done, size)
    assert value(done, "reward.rules")["openai/gsm8k"] == clip


def test_the_critics_warm_up_counts_the_step_that_ends_it() -> None:
    """verl updates the policy from step N on: N - 1 steps are the critic's alone."""
    done = convert_verl("main_ppo", [*PPO, "trainer.critic_warmup=5", "critic.optim.lr=2e-5"])
    assert (value(done, "method"), value(done, "critic.warmup"), value(done, "critic.lr")) == ("ppo", 4, 2e-5)


@pytest.mark.parametrize(
    ("words", "key", "note"),
    [
        ([f"{A}.clip_ratio=0.3"], f"{A}.clip_ratio", "clip_ratio_low and clip_ratio_high"),
        (["algorithm.kl_ctrl.kl_coef=0.5"], "algorithm.kl_ctrl.kl_coef", "without use_kl_in_reward"),
        (["trainer.critic_warmup=0"], "trainer.critic_warmup", "no critic"),
        ([f"{A}.fsdp_config.forward_prefetch=True"], f"{A}.fsdp_config.forward_prefetch", "lockstep plan"),
        ([f"{A}.ppo_max_token_len_per_gpu=9"], f"{A}.ppo_max_token_len_per_gpu", "only with use_dynamic_bsz"),
        (["trainer.save_freq=-1"], "trainer.save_freq", "at the end"),
    ],
)
def test_settings_without_effect_say_why(words: list[str], key: str, note: str) -> None:
    (found,) = [found for found in convert_verl("main_ppo", [*GRPO, *words]).outcomes if found.key == key]
    assert found.outcome == "ignored"
    assert note in found.note


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ([f"{A}.policy_loss.loss_mode=user_loss"], f"{A}.policy_loss.loss_mode"),
        (["data.prompt_key=question"], "data.prompt_key"),
        (["data.truncation=middle"], "data.truncation"),
        (["trainer.n_gpus_per_node=many"], "trainer.n_gpus_per_node"),
        (["data.train_batch_size=x"], "data.train_batch_size"),
        (["trainer.device=tpu"], "trainer.device"),
        ([f"{A}.optim.optimizer=SGD"], f"{A}.optim.optimizer"),
        ([f"{A}.optim.optimizer_impl=my.optim"], f"{A}.optim.optimizer_impl"),
        (["--config-name=my_config"], "--config-name my_config"),
        ([f"{A}.use_dynamic_bsz=True", f"{A}.ppo_max_token_len_per_gpu=100"], f"{A}.ppo_max_token_len_per_gpu"),
    ],
)
def test_verls_settings_that_are_refused(words: list[str], where: str) -> None:
    with pytest.raises(Refusal) as refused:
        checked(convert_verl("main_ppo", [*GRPO, *words]))
    assert [problem.where for problem in refused.value.problems] == [where]


def test_the_two_versions_of_verls_sft_have_defaults_of_their_own() -> None:
    old = checked(convert_verl("fsdp_sft_trainer", ["data.train_files=t", "model.partial_pretrain=m"]))
    new = checked(convert_verl("verl.trainer.sft_trainer", ["data.train_files=t", "model.path=m"]))
    assert (old.optim.lr, old.optim.betas, old.optim.schedule, old.optim.warmup) == (1e-5, [0.9, 0.95], "cosine", 0.1)
    assert (old.data.shape, old.data.prompt_key, old.batch.micro_batch_size) == ("prompt_response", "question", 4)
    assert (new.optim.lr, new.optim.betas, new.optim.schedule, new.optim.warmup) == (
        1e-3,
        [0.9, 0.999],
        "constant",
        0.0,
    )
    assert (new.data.shape, new.data.messages_key, new.batch.tokens) == ("messages", "messages", 8192)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # The defaults of a bare PPO command.
        ([], {"method": "ppo", "model.dtype": "fp32", "critic.path": "rm", "critic.clip": 0.2, "run.resume": "never"}),
        (["--bf16", "--critic_pretrain", "c"], {"model.dtype": "bf16", "critic.path": "c"}),
        (
            ["--advantage_estimator", "rloo", "--n_samples_per_prompt", "4"],
            {
                "algorithm.loss": "clip",
                "algorithm.aggregation": "token_mean",
                "algorithm.whiten.over": "step",
                "algorithm.whiten.biased": True,
                "batch.prompts_per_update": 32,
                "reward.clip": None,
            },
        ),
        (
            [
                "--advantage_estimator",
                "group_norm",
                "--n_samples_per_prompt",
                "8",
                "--use_kl_loss",
                "--kl_estimator",
                "k3",
            ],
            {
                "method": "grpo",
                "algorithm.kl.where": "loss",
                "algorithm.kl.estimator": "k3",
                "algorithm.whiten.over": "none",
                "algorithm.dual_clip": None,
            },
        ),
        (["--advantage_estimator", "reinforce", "--no_advantage_std_norm"], {"algorithm.whiten.divide": False}),
        (["--init_kl_coef", "0"], {"algorithm.kl.where": "none"}),
        (["--kl_target", "0.1"], {"algorithm.kl.target": 0.1, "algorithm.kl.horizon": 10000}),
        (["--eps_clip_low_high", "0.2", "0.3"], {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.3}),
        (
            ["--remote_rm_url", "http://a/x,http://b/x"],
            {
                "reward.remote": ["http://a/x", "http://b/x"],
                "reward.remote_form": "openrlhf",
                "critic.path": "m",
            },
        ),
        (["--reward_pretrain", "a,b"], {"reward.model": ["a", "b"], "critic.path": "a"}),
        (["--top_p", "0.9"], {"rollout.top_p": 0.9, "rollout.truncated_sampling": "ignore"}),
        (
            ["--lora_rank", "8", "--target_modules", "q_proj", "v_proj"],
            {
                "model.lora.alpha": 16.0,
                "model.lora.targets": ["q_proj", "v_proj"],
            },
        ),
        (["--prompt_data", "org/set", "--prompt_split", "test"], {"data.prompt_key": "input"}),
        (["--freezing_actor_steps", "3"], {"critic.warmup": 3}),
    ],
)
def test_openrlhfs_flags(words: list[str], expected: dict[str, Any]) -> None:
    done = convert_openrlhf("train_ppo_ray", [*ONLINE, *words])
    assert {key: value(done, key) for key in expected} == expected


def test_a_data_set_of_the_hub_and_several_with_shares() -> None:
    done = convert_openrlhf("train_ppo_ray", [*ONLINE, "--prompt_data", "org/set", "--max_samples", "5"])
    assert done.recipe["data.train"].value == [{"path": "hub:org/set::train", "rows": 5}]
    with refuses("prompt_data_probs", "unsupported-setting", "2 data sets"):
        checked(
            convert_openrlhf("train_ppo_ray", [*ONLINE, "--prompt_data", "a.json,b.json", "--prompt_data_probs", "1"])
        )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"model.dtype": "bf16", "critic.clip": 0.5, "rollout.max_tokens": 1024, "data.max_prompt_tokens": 1024}),
        (
            ["--data.max_len", "9216", "--rollout.max_new_tokens", "8192"],
            {"rollout.max_tokens": 8192, "data.max_prompt_tokens": 1024},
        ),
        (["--train.dynamic_batch_enable"], {"batch.tokens": 16192}),
        (["--reward.stop_properly_penalty_coef", "0.0"], {"algorithm.overlong.truncated_reward": 0.0}),
        (
            ["--algo.advantage.is_correction_enable"],
            {
                "algorithm.rollout_correction.weight": "token",
                "algorithm.rollout_correction.cap": 5.0,
                "algorithm.rollout_correction.mask": "none",
            },
        ),
        (
            ["--algo.advantage.is_correction_enable", "--algo.advantage.is_correction_type", "icepop"],
            {
                "algorithm.rollout_correction.reject": [Reject(over="token", by="ratio", low=0.5, high=5.0)],
                "algorithm.rollout_correction.rejected": "zero",
            },
        ),
        (["--actor.lr_scheduler", "constant", "--actor.min_lr_ratio", "0.2"], {"optim.schedule": "constant"}),
        (["--actor.muon.lr", "0.01", "--actor.adam.lr", "2e-6"], {"optim.name": "adamw", "optim.lr": 2e-6}),
        (
            [*MUON, "--actor.muon.lr", "0.01", "--actor.adam.lr", "2e-6", "--actor.max_norm", "0"],
            {
                "optim.name": "muon",
                "optim.lr": 0.01,
                "optim.momentum": 0.95,
                "optim.adjust_lr": "original",
                "optim.clip": None,
                "optim.decay_all": True,
                "optim.groups": [ParameterGroup(match="embed|lm_head|norm|bias", name="adam", lr=2e-6)],
            },
        ),
    ],
)
def test_openrlhfs_dotted_flags(words: list[str], expected: dict[str, Any]) -> None:
    done = convert_openrlhf("train_ppo_ray", [*DOTTED, *words])
    assert {key: value(done, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("program", "words", "where"),
    [
        ("train_sft", ["--pretrain", "m", "--dataset", "d.jsonl"], "--output_key"),
        ("train_dpo", ["--pretrain", "m", "--dataset", "d.jsonl", "--load_in_4bit"], "--load_in_4bit"),
        ("train_prm", ["--pretrain", "m", "--dataset", "d.jsonl", "--placeholder_token", "ки"], "--reward_tokens"),
        ("train_kd", ["--pretrain", "m", "--dataset", "d.jsonl"], "--teacher_model"),
        ("train_ppo_ray", [*ONLINE, "--n_samples_per_prompt", "3"], "--train_batch_size"),
        (
            "train_kto",
            ["--pretrain", "m", "--dataset", "d.jsonl", "--output_key", "a", "--ref_pretrain", "r"],
            "--ref_pretrain",
        ),
        ("train_dpo", ["--pretrain", "m", "--dataset", "d.jsonl", "--bata", "1"], "--bata"),
        ("serve_rm", [], "openrlhf serve_rm"),
        ("train_ppo_ray", [*DOTTED, *MUON], "--actor.max_norm"),
        ("train_ppo_ray", [*DOTTED, "--actor.optim", "muon", "--actor.max_norm", "0"], "--actor.optim"),
    ],
)
def test_openrlhfs_commands_that_are_refused(program: str, words: list[str], where: str) -> None:
    with pytest.raises(Refusal) as refused:
        checked(convert_openrlhf(program, words))
    assert [problem.where for problem in refused.value.problems] == [where]


def test_training_beside_generation() -> None:
    done = convert_openrlhf("train_ppo_ray", [*ONLINE, "--async_train", "--async_queue_size", "2"])
    assert value(done, "rollout.max_staleness") == 2
    assert checked(done).algorithm.rollout_correction.weight == "none"  # ours would weigh by default
    assert "rollout.max_staleness" not in convert_openrlhf("train_ppo_ray", ONLINE).recipe


@pytest.mark.parametrize("program", ["batch_inference", "serve_rm"])
def test_inference_becomes_no_recipe_and_runs_as_it_is(program: str) -> None:
    with pytest.raises(Refusal) as refused:
        convert_openrlhf(program, [])
    (problem,) = refused.value.problems
    assert problem.where == f"openrlhf {program}"
    assert problem.remedy.endswith(f": python -m lockstep.compat.openrlhf {program} ...")


def test_each_program_of_openrlhf_is_a_method_here() -> None:
    rows = ["--pretrain", "m", "--dataset", "d.jsonl"]
    more = {
        "train_sft": ["--output_key", "a"],
        "train_dpo": ["--ipo"],
        "train_kto": ["--output_key", "a"],
        "train_rm": ["--loss", "logexp"],
        "train_prm": ["--placeholder_token", "ки", "--reward_tokens", "+", "-"],
        "train_kd": ["--teacher_model", "t"],
    }
    recipes = {name: checked(convert_openrlhf(name, [*rows, *words])) for name, words in more.items()}
    assert [recipe.method for recipe in recipes.values()] == ["sft", "dpo", "kto", "rm", "prm", "distill"]
    assert [recipe.optim.lr for recipe in recipes.values()] == [5e-6, 1e-5, 1e-5, 9e-6, 1e-6, 5e-6]
    assert (recipes["train_sft"].run.epochs, recipes["train_kto"].preference.beta) == (2, 0.01)
    assert recipes["train_sft"].data.prompt_format == "User: {}\nAssistant: "
    assert (recipes["train_dpo"].preference.loss, recipes["train_dpo"].preference.average) == ("ipo", False)
    assert (recipes["train_kd"].distill.coefficient, recipes["train_prm"].prm.tokens) == (0.4, ["+", "-"])


def test_what_is_said_is_written_and_what_holds_anyway_is_not() -> None:
    """Defaults that are ours too are left out; a setting that the command says stands in the recipe all the same."""
    unsaid = convert_verl("main_ppo", GRPO).recipe
    said = convert_verl("main_ppo", [*GRPO, f"{R}.temperature=1.0", "data.shuffle=True"]).recipe
    for key in ("rollout.temperature", "data.shuffle", "algorithm.gamma", "optim.clip", "rollout.top_p"):
        assert key not in unsaid
    assert (said["rollout.temperature"].value, said["data.shuffle"].value) == (1.0, True)


def test_arguments_of_the_chat_template_are_one_key() -> None:
    done = convert_verl("main_ppo", [*GRPO, "+data.apply_chat_template_kwargs.enable_thinking=False"])
    assert value(done, "data.template_arguments") == {"enable_thinking": False}
