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
        ([f"{A}.ppo_micro_batch_size_per_gpu=4"], {"batch.micro_batch_size": 4, "batch.tokens": None}),
        # 32 sequences over 2 nodes with 8 devices: 2 on each.
        ([f"{A}.ppo_micro_batch_size=32", "trainer.nnodes=2"], {"batch.micro_batch_size": 2}),
        # Fewer than the devices: at least one.
        ([f"{A}.ppo_micro_batch_size=4"], {"batch.micro_batch_size": 1}),
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
            [f"{M}.lora_rank=8", f"{M}.lora_adapter_path=a"],
            {"model.lora.adapter": "a", "model.lora.rank": None},
        ),
        (["trainer.default_local_dir=/c", "trainer.experiment_name=e"], {"run.folder": "/c", "run.name": "e"}),
        (["trainer.project_name=p"], {"run.folder": "checkpoints/p", "log.project": "p"}),
    ],
)
def test_rules_of_main_ppo(words: list[str], expected: dict[str, Any]) -> None:
    assert values(convert_verl("main_ppo", [*GRPO, *words]), expected) == expected


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
        (["--eval_dataset", "org/e"], {"data.val": ["hub:org/e::test"]}),
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
    ],
)
def test_rules_of_train_ppo_ray(words: list[str], expected: dict[str, Any]) -> None:
    assert values(convert_openrlhf("train_ppo_ray", [*ONLINE, *words]), expected) == expected


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
