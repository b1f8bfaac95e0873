"""Commands of verl and OpenRLHF train here, shrunk to the tiny model by nothing but their own settings."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from commands import completed, lockstep, warm_python
from conftest import write_jsonl
from hang import HANG
from lockstep.run.metrics import read_metrics
from refusals import has_problem, printed_problems


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, Path]:
    sums = [(a, b) for a in range(4) for b in range(4)]
    online: list[dict[str, object]] = [
        {
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": f"{a}+{b}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        }
        for a, b in sums
    ]
    texts: list[dict[str, object]] = [
        {"question": f"{a}+{b}?", "answer": str(a + b), "wrong": str(a + b + 1), "label": (a + b) % 2 == 0}
        for a, b in sums
    ]
    return {
        "rl": write_jsonl(tmp_path / "rl.jsonl", online),
        "texts": write_jsonl(tmp_path / "texts.jsonl", texts),
    }


def peer(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    return completed([*warm_python(), "-m", f"lockstep.compat.{name}", *map(str, words)], HANG, {})


def metrics(folder: Path) -> list[dict[str, float]]:
    return [values for _, values in read_metrics(folder / "metrics.jsonl")]


def assert_differences_are_known(run: Path) -> None:
    """The run stores what became of every key, and the comparison with a log of verl names the differences."""
    table = json.loads((run / "migration.json").read_text(encoding="utf-8"))
    verdicts = {row["key"]: row["verdict"] for row in table["rows"]}
    assert verdicts["data.train_batch_size"] == "kept"
    assert verdicts["actor_rollout_ref.rollout.name"] == "different"
    log = run.parent / "verl.log"
    lines = [f"step:{step} - actor/pg_loss:0.1 - critic/rewards/mean:0.{step}\n" for step in (1, 2)]
    log.write_text("".join(lines), encoding="utf-8")
    compared = lockstep("compare", log, run, "--json")
    known = {entry["key"]: entry for entry in json.loads(compared.stdout)["known"]}
    assert known['actor_rollout_ref.rollout.name = "vllm"']["everywhere"]
    assert "critic/rewards/mean" in known["random numbers"]["metrics"]
    assert "random numbers" in (run / "report.html").read_text(encoding="utf-8")


def test_verls_grpo_and_sft_commands_train(tiny_folder: Path, rows: dict[str, Path], tmp_path: Path) -> None:
    common = (
        f"trainer.default_local_dir={tmp_path}",
        "trainer.logger=[console]",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
    )
    grpo = peer(
        "verl", "main_ppo", "algorithm.adv_estimator=grpo", f"data.train_files=[{rows['rl']}]",
        f"data.val_files={rows['rl']}", "data.train_batch_size=8", "data.max_prompt_length=64",
        "data.max_response_length=8", "data.filter_overlong_prompts=True", "data.truncation=error",
        f"actor_rollout_ref.model.path={tiny_folder}", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8", "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=0.001", "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.fsdp_config.param_offload=False",
        "trainer.val_before_train=False", "trainer.test_freq=2", "trainer.total_epochs=1",
        "trainer.experiment_name=grpo", *common,
    )  # fmt: skip
    assert grpo.returncode == 0, grpo.stderr
    steps = metrics(tmp_path / "grpo")
    assert sum("actor/pg_loss" in step for step in steps) == 2  # 16 prompts, 8 a step
    assert all("actor/kl_loss" in step for step in steps if "actor/pg_loss" in step)
    assert "mapped with another meaning" in grpo.stdout
    assert_differences_are_known(tmp_path / "grpo")
    sft = peer(
        "verl", "fsdp_sft_trainer", f"data.train_files={rows['texts']}", "data.train_batch_size=6",
        "data.micro_batch_size_per_gpu=2", f"model.partial_pretrain={tiny_folder}", "model.lora_rank=4",
        "trainer.total_epochs=2", "trainer.experiment_name=sft", "data.max_length=128", *common,
    )  # fmt: skip
    assert sft.returncode == 0, sft.stderr
    losses = [step["train/loss"] for step in metrics(tmp_path / "sft") if "train/loss" in step]
    assert len(losses) == 4  # 16 rows, 6 an update, the last 4 of an epoch are dropped: 2 updates, twice
    assert "rank: 4" in (tmp_path / "sft" / "recipe.yaml").read_text()


@pytest.mark.slow
def test_verls_ppo_with_rejection_trains(tiny_folder: Path, rows: dict[str, Path], tmp_path: Path) -> None:
    """The critic starts with a random head and a bias; weights and rejection are computed as verl does."""
    correction = "algorithm.rollout_correction"
    ppo = peer(
        "verl", "main_ppo", "algorithm.adv_estimator=gae", f"data.train_files=[{rows['rl']}]",
        "data.train_batch_size=8", "data.max_prompt_length=64", "data.max_response_length=8",
        f"actor_rollout_ref.model.path={tiny_folder}", f"critic.model.path={tiny_folder}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", "actor_rollout_ref.rollout.name=vllm",
        f"{correction}.rollout_is=token", f"{correction}.rollout_is_threshold=0.5_2.0",
        f"{correction}.rollout_is_batch_normalize=True", f"{correction}.rollout_rs=token_k1",
        f"{correction}.rollout_rs_threshold=1.1", "trainer.val_before_train=False", "trainer.total_epochs=1",
        "trainer.experiment_name=ppo", f"trainer.default_local_dir={tmp_path}", "trainer.logger=[console]",
        "trainer.device=cpu", "trainer.n_gpus_per_node=1",
    )  # fmt: skip
    assert ppo.returncode == 0, ppo.stderr
    first, second = [step for step in metrics(tmp_path / "ppo") if "actor/pg_loss" in step]
    assert first["critic/values/max"] != first["critic/values/min"]  # a head of zeros would say 0 everywhere
    assert second["critic/vf_loss"] > 0
    assert first["rollout_corr/masked_share"] == 0  # the built-in engine's log-probs are the trainer's
    recipe = (tmp_path / "ppo" / "recipe.yaml").read_text()
    assert all(f"{word}\n" in recipe for word in ("mask_first: true", "rejected: counted", "outside: zero"))


def test_openrlhfs_dpo_kto_and_reinforce_commands_train(
    tiny_folder: Path, rows: dict[str, Path], tmp_path: Path
) -> None:
    common = ("--pretrain", tiny_folder, "--train_batch_size", 8, "--micro_train_batch_size", 2)
    dpo = peer(
        "openrlhf", "train_dpo", *common, "--dataset", rows["texts"], "--prompt_key", "question",
        "--chosen_key", "answer", "--rejected_key", "wrong", "--max_len", 64, "--beta", 0.1,
        "--save_path", tmp_path / "dpo",
    )  # fmt: skip
    assert dpo.returncode == 0, dpo.stderr
    first = next(step for step in metrics(tmp_path / "dpo") if "train/loss" in step)
    assert first["train/loss"] == pytest.approx(0.693147, abs=1e-4)  # -log sigmoid(0) before the first update
    kto = peer(
        "openrlhf", "train_kto", *common, "--dataset", rows["texts"], "--input_key", "question",
        "--output_key", "answer", "--label_key", "label", "--max_len", 64, "--max_samples", 8,
        "--save_path", tmp_path / "kto",
    )  # fmt: skip
    assert kto.returncode == 0, kto.stderr
    assert sum("train/loss" in step for step in metrics(tmp_path / "kto")) == 1  # 8 rows, 8 an update
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def reward_func(queries, prompts, labels, **more):\n"
        "    return [float(len(query) - len(prompt)) for query, prompt in zip(queries, prompts)]\n"
    )
    rpp = peer(
        "openrlhf", "train_ppo_ray", *common, "--advantage_estimator", "reinforce", "--remote_rm_url", reward,
        "--prompt_data", rows["texts"], "--input_key", "question", "--label_key", "answer",
        "--input_template", "Q: {}\nA: ", "--prompt_max_len", 64, "--generate_max_len", 6, "--rollout_batch_size", 8,
        "--actor_num_gpus_per_node", 1, "--reward_clip_range", -1, 2, "--save_path", tmp_path / "rpp",
    )  # fmt: skip
    assert rpp.returncode == 0, rpp.stderr
    steps = [step for step in metrics(tmp_path / "rpp") if "actor/pg_loss" in step]
    assert len(steps) == 2  # 16 prompts, 8 a step
    assert all(step["critic/score/max"] <= 2.0 for step in steps)
    sample = json.loads((tmp_path / "rpp" / "samples.jsonl").read_text().splitlines()[0])
    assert "?" in json.dumps(sample)


@pytest.mark.slow
def test_what_cannot_be_converted_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    done = peer("verl", "main_ppo", "actor_rollout_ref.actor.strategy=jax", "trainer.nnode=1")
    assert done.returncode == 2
    assert has_problem(
        printed_problems(done.stderr), "trainer.nnode", "unknown-key", remedy="did you mean trainer.nnodes?"
    )
    assert has_problem(printed_problems(done.stderr), "actor_rollout_ref.actor.strategy", "unsupported-setting")
