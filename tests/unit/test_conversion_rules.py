"""Rules of the conversions that compute: each value by hand from the settings of the command."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.compat.conversion_output import checked, lockstep_defaults, start_command
from lockstep.compat.key_table import Conversion, Setting, Settings, convert, table_rows
from lockstep.compat.openrlhf.convert_openrlhf import convert_openrlhf
from lockstep.compat.openrlhf.openrlhf_rules import sources
from lockstep.compat.verl.convert_verl import convert_verl, renamed
from lockstep.compat.verl.verl_rules import run_name

A, M, R = (f"actor_rollout_ref.{name}" for name in ("actor", "model", "rollout"))
GRPO = ("data.train_files=t.parquet", f"{M}.path=m", "algorithm.adv_estimator=grpo", f"{R}.n=4")
SFT = ("data.train_files=t.parquet", "model.partial_pretrain=m")
DPO = ("--pretrain", "m", "--dataset", "d.jsonl")
SHORT = ("--prompt_max_len", "100", "--generate_max_len", "300")
ONLINE = ("--pretrain", "m", "--prompt_data", "p.jsonl", "--reward_pretrain", "rm")


def values(done: Conversion, keys: Any) -> dict[str, Any]:
    checked(done)
    return {key: done.recipe[key].value if key in done.recipe else None for key in keys}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # 4 sequences of 512 + 512 tokens, packed.
        ([f"{A}.ppo_micro_batch_size_per_gpu=4", f"{M}.use_remove_padding=True"], {"batch.tokens": 4 * 1024}),
        (
            [f"{A}.ppo_micro_batch_size_per_gpu=4", f"{M}.use_remove_padding=False"],
            {"batch.micro_batch_size": 4, "batch.tokens": None},
        ),
        # 32 sequences over 2 nodes with 8 devices: 2 on each.
        (
            [f"{A}.ppo_micro_batch_size=32", "trainer.nnodes=2", f"{M}.use_remove_padding=False"],
            {"batch.micro_batch_size": 2},
        ),
        # Fewer than the devices: at least one.
        ([f"{A}.ppo_micro_batch_size=4", f"{M}.use_remove_padding=False"], {"batch.micro_batch_size": 1}),
        ([f"{A}.ppo_mini_batch_size=64", "data.train_batch_size=128"], {"batch.prompts_per_update": 64}),
        ([f"{A}.ppo_mini_batch_size=256", "data.train_batch_size=128"], {"batch.prompts_per_update": 128}),
        (
            [f"{M}.lora.rank=8", f"{M}.lora.dropout=0.1", f"{M}.target_modules=q_proj"],
            {
                "model.lora.rank": 8,
                "model.lora.alpha": 32.0,
                "model.lora.dropout": 0.1,
                "model.lora.targets": ["q_proj"],
            },
        ),
        (
            [f"{M}.lora.rank=8", f"{M}.lora.type=dora"],
            {"model.lora.rank": 8, "model.lora.dora": True},
        ),
        (
            [f"{M}.lora.rank=8", f"{M}.lora.type=canonical_lora"],
            {"model.lora.rank": 8, "model.lora.dora": None},
        ),
        (
            [f"{M}.lora_rank=8", f"{M}.lora_adapter_path=a"],
            {"model.lora.adapter": "a", "model.lora.rank": None},
        ),
        (["trainer.default_local_dir=/c", "trainer.experiment_name=e"], {"run.folder": "/c", "run.name": "e"}),
        (["trainer.project_name=p"], {"run.folder": "checkpoints/p", "log.project": "p"}),
        # Validation at the start only, and after every step.
        (
            ["data.val_files=v.parquet", "trainer.test_freq=0", "trainer.val_before_train=True"],
            {"val.questions": "v.parquet", "val.at_start": True, "val.every": None},
        ),
        (
            ["data.val_files=v.parquet", "trainer.test_freq=1", "trainer.val_before_train=False"],
            {"val.questions": "v.parquet", "val.at_start": False, "val.every": 1},
        ),
        (
            ["data.val_files=v.parquet", "trainer.test_freq=0", "trainer.val_before_train=False"],
            {"val.questions": None, "val.at_start": None, "val.every": None},
        ),
        (
            ["data.val_files=[v.parquet,w.parquet]", "trainer.test_freq=5"],
            {"val.questions": ["v.parquet", "w.parquet"]},
        ),
        (
            [f"{R}.top_p=0.9", f"{R}.top_k=-1"],
            {"rollout.top_p": 0.9, "rollout.top_k": 0, "rollout.truncated_sampling": "ignore"},
        ),
        ([f"{R}.top_p=1.0", f"{R}.top_k=20"], {"rollout.top_k": 20, "rollout.truncated_sampling": "ignore"}),
        ([f"{R}.top_p=1.0"], {"rollout.truncated_sampling": None}),
        # 8,000 tokens on each of 2 ranks of a sequence.
        (
            [
                f"{A}.use_dynamic_bsz=True",
                f"{A}.ppo_max_token_len_per_gpu=8000",
                f"{A}.ulysses_sequence_parallel_size=2",
            ],
            {"batch.tokens": 16000, "batch.micro_batch_size": None},
        ),
        (["data.filter_overlong_prompts=True"], {"data.overlong": "drop"}),
        (["data.seed=7"], {"run.seed": 7}),
    ],
)
def test_rules_of_main_ppo(words: list[str], expected: dict[str, Any]) -> None:
    assert values(convert_verl("main_ppo", [*GRPO, *words]), expected) == expected


V, OVERLONG = f"{R}.val_kwargs", "reward_model.reward_kwargs.overlong_buffer_cfg"
OVERLONG_ON = ("reward_model.reward_manager=dapo", f"{OVERLONG}.enable=True")
VALIDATED = ("data.val_files=v.parquet", "trainer.test_freq=5")
PPO = ("data.train_files=t.parquet", f"{M}.path=m", "critic.model.path=c")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            [*VALIDATED, f"{V}.do_sample=True", f"{V}.temperature=0.6", f"{V}.n=4", f"{V}.top_p=0.95", f"{V}.top_k=-1"],
            {"val.temperature": 0.6, "val.n": 4, "val.top_p": 0.95, "val.top_k": 0},
        ),
        (
            [*VALIDATED, f"{V}.do_sample=True", f"{V}.temperature=0", f"{V}.n=4"],
            {"val.temperature": None, "val.n": None},
        ),
        ([*VALIDATED, f"{V}.do_sample=False", f"{V}.temperature=0.6"], {"val.temperature": None}),
        ([*VALIDATED, "data.max_response_length=77"], {"val.max_new_tokens": 77, "rollout.max_tokens": 77}),
        ([*VALIDATED, "trainer.log_val_generations=6"], {"log.samples": 6}),
        ([*VALIDATED, "trainer.log_val_generations=0"], {"log.samples": None}),
        # The engines since 0.8 read only `clip_grad`; for them, 0 steps of warm-up are no setting.
        ([f"{A}.grad_clip=0.7"], {"optim.clip": None, "optim.decay_all": True}),
        ([f"{A}.grad_clip=0.7", f"{A}.optim.clip_grad=0.5"], {"optim.clip": 0.5}),
        (["trainer.remove_previous_ckpt_in_save=True"], {"checkpoint.keep_last": 1}),
        (["trainer.remove_previous_ckpt_in_save=False"], {"checkpoint.keep_last": 1_000_000}),
        ([f"{A}.optim.lr_warmup_steps=0", f"{A}.optim.lr_warmup_steps_ratio=0.2"], {"optim.warmup": 0.2}),
        (["custom_reward_function.path=r.py", "custom_reward_function.name=f"], {"reward.function": "r.py:f"}),
        (["custom_reward_function.path=r.py"], {"reward.rules": None}),
        (
            ["reward_model.enable=True", "reward_model.model.path=rm"],
            {"reward.model": "rm", "reward.rules": None, "reward.function": None},
        ),
        (
            [*OVERLONG_ON, f"{OVERLONG}.len=100", f"{OVERLONG}.penalty_factor=0.5"],
            {"algorithm.overlong.buffer": 100, "algorithm.overlong.factor": 0.5},
        ),
        (
            [f"{OVERLONG}.enable=False", f"{OVERLONG}.len=100"],
            {"algorithm.overlong.buffer": None, "algorithm.overlong.factor": None},
        ),
        # As many tokens as the longest sequence of 512 + 512 has.
        ([f"{A}.use_dynamic_bsz=True", f"{A}.ppo_max_token_len_per_gpu=1024"], {"batch.tokens": 1024}),
    ],
)
def test_more_rules_of_main_ppo(words: list[str], expected: dict[str, Any]) -> None:
    assert values(convert_verl("main_ppo", [*GRPO, *words]), expected) == expected


def test_workers_before_0_8_read_other_keys() -> None:
    words = [f"{A}.grad_clip=0.7", f"{A}.optim.lr_warmup_steps=0", f"{A}.optim.lr_warmup_steps_ratio=0.2"]
    expected = {"optim.clip": 0.7, "optim.warmup": 0}
    assert values(convert_verl("main_ppo", [*GRPO, *words], version="0.7"), expected) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["critic.optim.lr=3e-6", "critic.cliprange_value=0.3"], {"critic.lr": 3e-6, "critic.clip": 0.3}),
        ([], {"critic.path": "c", "critic.aggregation": None, "critic.warmup": None}),
        ([f"{A}.loss_agg_mode=seq-mean-token-mean"], {"critic.aggregation": "seq_mean_token_mean"}),
        (["critic.loss_agg_mode=seq-mean-token-sum"], {"critic.aggregation": "seq_mean_token_sum"}),
        # verl trains the policy from step 5 on.
        (["trainer.critic_warmup=5"], {"critic.warmup": 4}),
    ],
)
def test_rules_of_main_ppos_critic(words: list[str], expected: dict[str, Any]) -> None:
    assert values(convert_verl("main_ppo", [*PPO, *words]), expected) == expected
    assert not [key for key in convert_verl("main_ppo", [*GRPO, *words]).recipe if key.startswith("critic.")]


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["data.prompt_key=question"], "data.prompt_key"),
        (["data.reward_fn_key=source"], "data.reward_fn_key"),
        ([f"{A}.use_dynamic_bsz=True", f"{A}.ppo_max_token_len_per_gpu=1023"], f"{A}.ppo_max_token_len_per_gpu"),
        (["reward_model.reward_manager=batch"], "reward_model.reward_manager"),
        (["reward_model.enable=True", "reward_model.model.path=null"], "reward_model.enable"),
        (
            [*OVERLONG_ON, f"{OVERLONG}.len=100", "+reward_model.reward_kwargs.max_resp_len=9"],
            "reward_model.reward_kwargs.max_resp_len",
        ),
    ],
)
def test_what_main_ppo_may_not_set(words: list[str], where: str) -> None:
    assert [problem.where for problem in convert_verl("main_ppo", [*GRPO, *words]).problems] == [where]


@pytest.mark.parametrize(
    ("enabled", "length", "limit"),
    [
        ("True", "mapped", "critic/score, which lockstep always logs, contains the penalty"),
        ("False", "ignored", "the overlong buffer is off"),
    ],
)
def test_keys_of_the_overlong_buffer_that_are_not_read(enabled: str, length: str, limit: str) -> None:
    words = [*OVERLONG_ON[:1], f"{OVERLONG}.enable={enabled}", f"{OVERLONG}.len=100", f"{OVERLONG}.log=True"]
    done = convert_verl("main_ppo", [*GRPO, *words])
    outcomes = {one.key: (one.outcome, one.note) for one in done.outcomes}
    assert outcomes[f"{OVERLONG}.len"][0] == length
    assert outcomes[f"{OVERLONG}.log"] == ("ignored", limit)


@pytest.mark.parametrize("missing", ["data.train_files", f"{M}.path"])
def test_main_ppo_needs_data_and_a_model(missing: str) -> None:
    done = convert_verl("main_ppo", [word for word in GRPO if not word.startswith(missing)])
    assert [problem.where for problem in done.problems] == [missing]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=4096"], {"batch.tokens": 4096}),
        # A micro-batch must have room for the longest row.
        (
            ["data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=512", "data.max_length=2048"],
            {"batch.tokens": 2048},
        ),
        (["data.micro_batch_size=6"], {"batch.micro_batch_size": 6}),
        (["data.micro_batch_size=6", "data.micro_batch_size_per_gpu=2"], {"batch.micro_batch_size": 2}),
        (
            ["data.prompt_key=extra_info", "+data.prompt_dict_keys=[question]"],
            {"data.prompt_key": "extra_info.question"},
        ),
        (["data.truncation=right"], {"data.overlong": "truncate_right"}),
        (["optim.lr_warmup_steps=7"], {"optim.warmup": 7}),
        (["data.val_files=v.parquet", "trainer.test_freq=5"], {"data.val": ["v.parquet"], "val.every": 5}),
    ],
)
def test_rules_of_verls_sft(words: list[str], expected: dict[str, Any]) -> None:
    assert values(convert_verl("fsdp_sft_trainer", [*SFT, *words]), expected) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # Pairs of 2 x 1024 tokens, 2 per micro-batch.
        (
            ["--max_len", "1024", "--micro_train_batch_size", "2", "--packing_samples"],
            {"batch.tokens": 2 * 2 * 1024, "batch.micro_batch_size": None},
        ),
        (["--save_path", "/runs/dpo one"], {"run.folder": "/runs", "run.name": "dpo-one"}),
        (["--save_path", "/runs/a", "--wandb_run_name", "b"], {"run.folder": "/runs", "run.name": "b"}),
        (["--use_wandb", "KEY", "--use_tensorboard", "d"], {"log.track": ["wandb", "tensorboard"]}),
        (["--use_wandb", "KEY"], {"log.project": "openrlhf_train_dpo"}),
        (["--lr_scheduler", "constant_with_warmup"], {"optim.schedule": "constant", "optim.min_lr_ratio": None}),
        (["--eval_dataset", "org/e"], {"data.val": ["hub:org/e::test"], "val.every": None}),
        (["--eval_dataset", "org/e", "--eval_steps", "0"], {"val.every": None}),
        (["--eval_dataset", "org/e", "--eval_steps", "1"], {"val.every": 1}),
        (["--eval_steps", "5"], {"data.val": None, "val.every": None}),
        (["--save_steps", "1"], {"checkpoint.every": 1}),
        (["--save_steps", "0"], {"checkpoint.every": None}),
        (["--load_checkpoint"], {"run.resume": "auto"}),
        ([], {"run.resume": "never"}),
        (["--lora_rank", "4", "--target_modules", "all-linear"], {"model.lora.targets": "all-linear"}),
    ],
)
def test_rules_of_openrlhfs_dpo(words: list[str], expected: dict[str, Any]) -> None:
    assert values(convert_openrlhf("train_dpo", [*DPO, *words]), expected) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # 64 responses, 4 per prompt: 16 prompts an update.
        (
            ["--train_batch_size", "64", "--n_samples_per_prompt", "4"],
            {"batch.prompts_per_update": 16},
        ),
        # More responses than the step has: all 8 prompts.
        (["--train_batch_size", "64", "--rollout_batch_size", "8"], {"batch.prompts_per_update": 8}),
        # 2 sequences of 100 + 300 tokens, packed.
        ([*SHORT, "--micro_train_batch_size", "2", "--packing_samples"], {"batch.tokens": 800}),
        # At least the longest sequence.
        ([*SHORT, "--use_dynamic_batch", "--train_max_tokens_per_gpu", "200"], {"batch.tokens": 400}),
        (["--freezing_actor_steps", "-1"], {"critic.warmup": 0}),
        (["--remote_rm_url", "r.py"], {"reward.function": "r.py:reward_func"}),
        (["--remote_rm_url", "http://a:1/s,http://b:1/s"], {"reward.remote": ["http://a:1/s", "http://b:1/s"]}),
        (["--remote_rm_url", "http://a:1/s"], {"reward.remote": "http://a:1/s", "reward.remote_form": "openrlhf"}),
        (["--reward_pretrain", "a,b"], {"reward.model": ["a", "b"]}),
        (
            ["--eval_dataset", "e.jsonl", "--eval_steps", "1", "--generate_max_len", "300"],
            {"val.questions": "e.jsonl", "val.every": 1, "val.max_new_tokens": 300},
        ),
        (["--eval_dataset", "e.jsonl", "--eval_steps", "0"], {"val.questions": None, "val.every": None}),
        (["--top_p", "0.9"], {"rollout.top_p": 0.9, "rollout.truncated_sampling": "ignore"}),
        (["--top_p", "1.0"], {"rollout.truncated_sampling": None}),
        (["--init_kl_coef", "0"], {"algorithm.kl.where": "none", "algorithm.kl.coefficient": None}),
        (["--eps_clip_low_high", "0.1", "0.3"], {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.3}),
        (["--eps_clip", "0.15"], {"algorithm.clip_low": 0.15, "algorithm.clip_high": 0.15}),
        (["--init_kl_coef", "0.02"], {"algorithm.kl.where": "reward", "algorithm.kl.coefficient": 0.02}),
        (["--init_kl_coef", "0.02", "--use_kl_loss"], {"algorithm.kl.where": "loss"}),
        # OpenRLHF compares the scores of a group before it subtracts the KL.
        (
            ["--init_kl_coef", "0.02", "--advantage_estimator", "rloo", "--n_samples_per_prompt", "2"],
            {"algorithm.kl.before_baseline": False},
        ),
        (
            ["--init_kl_coef", "0.02", "--kl_target", "6", "--kl_horizon", "500"],
            {"algorithm.kl.target": 6.0, "algorithm.kl.horizon": 500},
        ),
        (
            ["--init_kl_coef", "0.02", "--kl_horizon", "500"],
            {"algorithm.kl.target": None, "algorithm.kl.horizon": None},
        ),
        (["--reward_clip_range", "-5", "5"], {"reward.clip": [-5.0, 5.0]}),
        (["--lambd", "0.9", "--gamma", "0.8"], {"algorithm.lam": 0.9, "algorithm.gamma": 0.8}),
        (
            ["--value_clip", "0.3", "--critic_learning_rate", "3e-6", "--critic_pretrain", "c"],
            {"critic.path": "c", "critic.clip": 0.3, "critic.lr": 3e-6},
        ),
        ([], {"critic.path": "rm", "algorithm.dual_clip": None}),
        (["--remote_rm_url", "http://a:1/s"], {"critic.path": "m"}),
        (["--freezing_actor_steps", "3"], {"critic.warmup": 3}),
        (
            ["--enable_vllm_is_correction", "--vllm_is_truncated_threshold", "3"],
            {"algorithm.rollout_correction.weight": "token", "algorithm.rollout_correction.cap": 3.0},
        ),
        (["--n_samples_per_prompt", "1", "--train_batch_size", "8"], {"batch.prompts_per_update": 8}),
        (["--label_key", "answer"], {"data.label_key": "answer"}),
        (["--actor_learning_rate", "3e-6"], {"optim.lr": 3e-6}),
        (["--input_key", "question"], {"data.prompt_key": "question"}),
        (["--entropy_loss_coef", "0.01"], {"algorithm.entropy": 0.01}),
        (["--lr_warmup_ratio", "0.1"], {"optim.warmup": 0.1}),
        (["--max_len", "900", *SHORT], {"data.max_prompt_tokens": 100, "rollout.max_tokens": 300}),
        (
            ["--overlong_buffer_len", "50", "--overlong_penalty_factor", "0.5"],
            {"algorithm.overlong.buffer": 50, "algorithm.overlong.factor": 0.5},
        ),
        ([], {"algorithm.overlong.buffer": None}),
        (["--micro_train_batch_size", "3"], {"batch.micro_batch_size": 3, "batch.tokens": None}),
    ],
)
def test_rules_of_train_ppo_ray(words: list[str], expected: dict[str, Any]) -> None:
    assert values(convert_openrlhf("train_ppo_ray", [*ONLINE, *words]), expected) == expected


@pytest.mark.parametrize(
    ("words", "key", "why"),
    [
        (["--train_max_tokens_per_gpu", "200"], "train_max_tokens_per_gpu", "only with dynamic batches"),
        (["--use_dynamic_batch", "--micro_train_batch_size", "3"], "micro_train_batch_size", "count tokens instead"),
        (["--remote_rm_url", "r.py"], "reward_pretrain", "takes precedence"),
        (["--kl_horizon", "500"], "kl_horizon", "only with kl_target"),
        (["--eps_clip", "0.1", "--eps_clip_low_high", "0.1", "0.3"], "eps_clip", "takes precedence"),
        (["--vllm_is_truncated_threshold", "3"], "vllm_is_truncated_threshold", "the correction is off"),
        (["--async_queue_size", "2"], "async_queue_size", "only with async training"),
        (["--max_len", "900"], "max_len", "take precedence"),
        (["--actor_num_gpus_per_node", "8"], "actor_num_gpus_per_node", "not part of the recipe"),
        (["--remote_rm_url", "r.py", "--normalize_reward"], "normalize_reward", "not normalized"),
        (["--eval_steps", "5"], "eval_steps", "needs eval_dataset"),
    ],
)
def test_keys_that_train_ppo_ray_does_not_read(words: list[str], key: str, why: str) -> None:
    done = convert_openrlhf("train_ppo_ray", [*ONLINE, *words])
    (found,) = [one for one in done.outcomes if one.key.lstrip("-") == key]
    assert found.outcome == "ignored"
    assert why in found.note


@pytest.mark.parametrize(
    ("words", "key", "note"),
    [
        (["--prompt_max_len", "100"], "prompt_max_len", "lockstep drops and counts prompts over the limit"),
        (["--advantage_estimator", "rloo", "--gamma", "0.9"], "gamma", "OpenRLHF uses 1 too"),
        (["--train_batch_size", "64", "--rollout_batch_size", "8"], "train_batch_size", "more than the step has"),
    ],
)
def test_remarks_on_keys_of_train_ppo_ray(words: list[str], key: str, note: str) -> None:
    done = convert_openrlhf("train_ppo_ray", [*ONLINE, "--n_samples_per_prompt", "2", *words])
    (found,) = [one for one in done.outcomes if one.key.lstrip("-") == key]
    assert note in found.note


def test_a_discount_of_one_needs_no_remark() -> None:
    words = ["--advantage_estimator", "rloo", "--gamma", "1", "--n_samples_per_prompt", "2"]
    done = convert_openrlhf("train_ppo_ray", [*ONLINE, *words])
    (found,) = [one for one in done.outcomes if one.key.lstrip("-") == "gamma"]
    assert found.note == ""


def test_sources_of_files_and_of_the_hub() -> None:
    assert sources("a.jsonl, org/b", "0.4,0.6", "train") == [
        {"path": "a.jsonl", "weight": 0.4},
        {"path": "hub:org/b::train", "weight": 0.6},
    ]
    assert sources("./folder", "1", "train") == [{"path": "./folder"}]


@pytest.mark.parametrize(("name", "folder"), [("a b/c", "a-b-c"), ("-x-", "x"), ("实验", "run"), ("_a", "run_a")])
def test_names_of_runs_are_names_of_folders(name: str, folder: str) -> None:
    assert run_name(name) == folder


def test_names_of_0_9_become_those_of_0_4() -> None:
    given = dict.fromkeys(("reward.reward_model.enable", "reward_manager.name", "data.seed"))
    assert list(renamed(given)) == ["reward_model.enable", "reward_model.reward_manager", "data.seed"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("devices", "nodes", "command"),
    [
        (1, 1, "lockstep train r.yaml"),
        (8, 1, "torchrun --nproc-per-node 8 -m lockstep train r.yaml"),
        (
            8,
            2,
            "torchrun --nproc-per-node 8 --nnodes 2 --node-rank RANK --master-addr HOST -m lockstep train r.yaml",
        ),
    ],
)
def test_the_command_that_starts_the_recipe(devices: int, nodes: int, command: str) -> None:
    done = Conversion(Settings("verl 0.4", "main_ppo", {}), devices=devices, nodes=nodes)
    assert start_command(done, "r.yaml") == command


def test_a_command_without_rules_has_the_outcome_of_its_rows() -> None:
    """Rows alone: a cast key, an ignored one, a refused one that requests nothing, and an unknown one."""
    given = {
        "algorithm.gamma": Setting("0.5"),
        f"{R}.mode": Setting("async"),
        f"{R}.do_sample": Setting(True),
        "algorithm.gama": Setting(1),
    }
    done = convert(Settings("verl 0.4", "main_ppo", given), table_rows("verl", "main_ppo"), (), lockstep_defaults)
    assert [outcome.outcome for outcome in done.outcomes] == ["mapped", "ignored", "ignored", "refused"]
    assert done.recipe["algorithm.gamma"].value == 0.5
    assert [(p.where, p.remedy) for p in done.problems] == [("algorithm.gama", "did you mean algorithm.gamma?")]
