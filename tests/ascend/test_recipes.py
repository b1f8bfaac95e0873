"""Every method trains on the emulated NPU in step with the CPU: the same recipe, the same losses and rewards."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

from ascend_emulator import report
from conftest import REWARD, chat_rows, question_rows, write_jsonl
from lockstep.model.tiny import write_tiny
from lockstep.optimizers.stochastic_rounding import round_to_bf16
from lockstep.recipe import Recipe, load_recipe
from lockstep.recipe.methods import ONLINE
from lockstep.run import checkpoint as checkpoints
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.train.offline import train_offline
from lockstep.train.online import train_online
from preference_rows import METHODS, write_recipe
from runs import stored

from .processes import python

pytestmark = pytest.mark.ascend

# Bars of the Ascend documents for the mean relative error, which fp32 on an emulator must undercut by far.
LOSS_BAR, REWARD_BAR = 0.02, 0.04
LORA = ["model.lora.rank=4"]
RUNS: dict[str, tuple[str, list[str]]] = {
    "sft": ("sft", []),
    "sft lora": ("sft", LORA),
    "sft checkpointing": ("sft", ["model.gradient_checkpointing=true"]),
    "sft padded": ("sft", ["batch.tokens=null", "batch.micro_batch_size=2"]),
    "sft adamw8bit": ("sft", ["optim.name=adamw8bit"]),
    "sft adafactor": ("sft", ["optim.name=adafactor", "optim.eps=1e-8"]),
    "sft muon": ("sft", ["optim.name=muon"]),
    "sft lion": ("sft", ["optim.name=lion", "optim.eps=1e-8"]),
    "dpo": ("dpo", []),
    "dpo lora": ("dpo", LORA),
    "kto": ("kto", []),
    "rm": ("rm", []),
    "prm": ("prm", []),
    "distill": ("distill", ["distill.top_k=5"]),
    "grpo": ("grpo", []),
    "ppo": ("ppo", []),
    "reinforce_pp": ("reinforce_pp", []),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ascend")
    write_tiny(folder / "model", hidden=32, layers=1)
    write_tiny(folder / "teacher", hidden=32, layers=1, seed=1)
    return folder


def write_sft(folder: Path, model: Path) -> Path:
    rows = write_jsonl(folder / "train.jsonl", chat_rows(12))
    path = folder / "recipe.yaml"
    path.write_text(
        f"""
method: sft
device: cpu
run: {{name: run, folder: {folder / "runs"}, steps: 2}}
model: {{path: {model}}}
data: {{train: {rows}, val: {rows}}}
batch: {{rows_per_update: 4, tokens: 512}}
optim: {{lr: 1e-3, eps: 1e-4}}
""",
        encoding="utf-8",
    )
    return path


def write_online(folder: Path, model: Path, method: str) -> Path:
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    prompts = write_jsonl(folder / "prompts.jsonl", question_rows(6))
    path = folder / "recipe.yaml"
    path.write_text(
        f"""
method: {method}
device: cpu
run: {{name: run, folder: {folder / "runs"}, steps: 2}}
model: {{path: {model}}}
data: {{train: {prompts}}}
batch: {{prompts: 3, tokens: 512}}
rollout: {{n: 2, max_tokens: 6}}
reward: {{function: "{folder / "reward.py"}:letters", workers: 1}}
optim: {{lr: 1e-3, eps: 1e-4, schedule: constant}}
""",
        encoding="utf-8",
    )
    return path


def recipe_of(folder: Path, made: Path, method: str, words: list[str]) -> Recipe:
    if method == "sft":
        path = write_sft(folder, made / "model")
    elif method in ONLINE:
        path = write_online(folder, made / "model", method)
    else:
        draw = METHODS[method](8, 0)
        random.Random(0).shuffle(draw)
        path = write_recipe(folder, made / "model", method, draw)
        words = ["batch.rows_per_update=4", *words]
    words = [f"distill.teacher={made / 'teacher'}", *words] if method == "distill" else words
    return load_recipe(str(path), ["run.steps=2", "run.export=false", *words])


def history(recipe: Recipe, device: str) -> list[dict[str, float]]:
    """Train on the device; the metrics of each step."""
    run = recipe.run.model_copy(update={"name": device})
    recipe = recipe.model_copy(update={"device": device, "run": run})
    (train_online if recipe.method in ONLINE else train_offline)(recipe, Console.silent())
    return [metrics for _, metrics in read_metrics(Path(run.folder) / device / "metrics.jsonl")]


def mean_error(ours: list[float], theirs: list[float]) -> float:
    return sum(abs(a - b) / max(abs(b), 1e-8) for a, b in zip(ours, theirs, strict=True)) / len(ours)


# Another run of the same method, or with the same key, is there for every day.
OPTIMIZERS = ("sft adamw8bit", "sft adafactor", "sft muon", "sft lion")
SLOW_RUNS = ("sft checkpointing", "dpo lora", "reinforce_pp", *OPTIMIZERS)


@pytest.mark.daily("sft", "dpo", "rm", "grpo", "ppo")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW_RUNS else ()) for name in RUNS]
)
def test_in_step_with_the_cpu(model: Path, tmp_path: Path, name: str, recwarn: pytest.WarningsRecorder) -> None:
    method, words = RUNS[name]
    recipe = recipe_of(tmp_path, model, method, words)
    report.clear()
    npu = history(recipe, "npu")
    assert not report.fallbacks()
    assert not [w for w in recwarn.list if "fall back to run on the CPU" in str(w.message)]
    ran = {operator.name for operator in report.operators()}
    assert {"npu::npu_fusion_attention", "npu::npu_rms_norm", "npu::npu_rotary_mul", "npu::npu_swiglu"} <= ran
    cpu = history(recipe, "cpu")
    assert len(npu) == len(cpu) == 2
    loss = "actor/loss" if method in ONLINE else "train/loss"
    assert [m[loss] for m in npu] == pytest.approx([m[loss] for m in cpu], rel=1e-5, abs=1e-6)
    if method in ONLINE:
        rewards = [[m["critic/score/mean"] for m in side] for side in (npu, cpu)]
        assert mean_error(*rewards) <= REWARD_BAR
        assert rewards[0] == pytest.approx(rewards[1], rel=1e-5)
    else:
        assert mean_error([m[loss] for m in npu], [m[loss] for m in cpu]) <= LOSS_BAR
        assert npu[-1]["val/loss"] == pytest.approx(cpu[-1]["val/loss"], rel=1e-5)


@pytest.mark.slow
def test_stochastic_rounding_draws_the_numbers_of_the_cpu(model: Path, tmp_path: Path) -> None:
    words = ["model.dtype=bf16", "model.master_weights=false", "optim.stochastic_rounding=true"]
    recipe = recipe_of(tmp_path, model, "sft", words)
    report.clear()
    npu = history(recipe, "npu")
    assert not report.fallbacks()
    cpu = history(recipe, "cpu")
    assert mean_error([m["train/loss"] for m in npu], [m["train/loss"] for m in cpu]) <= LOSS_BAR
    values, index = torch.rand(1000), torch.arange(1000)
    there = round_to_bf16(values.to("npu"), 11, index.to("npu")).cpu()
    assert torch.equal(there, round_to_bf16(values, 11, index))


@pytest.mark.daily("grpo")
@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_bf16_stays_within_the_bars(model: Path, tmp_path: Path, method: str) -> None:
    """Decoding goes through the paged operator, which has no fp32."""
    recipe = recipe_of(tmp_path, model, method, ["model.dtype=bf16"])
    report.clear()
    npu = history(recipe, "npu")
    ran = {operator.name for operator in report.operators()}
    assert ("npu::npu_fused_infer_attention_score" in ran) == (method == "grpo")
    assert not report.fallbacks()
    cpu = history(recipe, "cpu")
    if method == "sft":
        assert mean_error([m["train/loss"] for m in npu], [m["train/loss"] for m in cpu]) <= LOSS_BAR
    else:
        # Samples may part where two words are within rounding, so only the first step's prompts are the same.
        assert abs(npu[0]["critic/score/mean"] - cpu[0]["critic/score/mean"]) <= 0.1


# What every method exchanges is the same, but for the responses and rewards that an online one does besides.
@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", "dpo", "grpo"])
def test_two_ranks_over_hccl_equal_one(model: Path, tmp_path: Path, method: str) -> None:
    """By the command. Every day, in processes of its own, test_emulator_worlds.py does so."""
    one = history(recipe_of(tmp_path, model, method, []), "npu")
    words = ["device=npu", "run.steps=2", "run.export=false", "run.name=ranks"]
    words += ["batch.rows_per_update=4"] if method == "dpo" else []
    done = python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2),
        *("-m", "lockstep", "train", tmp_path / "recipe.yaml", *words),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    two = [metrics for _, metrics in read_metrics(tmp_path / "runs" / "ranks" / "metrics.jsonl")]
    online = ("actor/loss", "critic/score/mean", "actor/grad_norm")
    for name in online if method in ONLINE else ("train/loss", "train/grad_norm"):
        assert [m[name] for m in two] == pytest.approx([m[name] for m in one], rel=1e-5, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_two_ranks_with_their_optimizer_on_the_host_resume(model: Path, tmp_path: Path, name: str) -> None:
    """The state of a rank is on the host, and its mesh is of devices."""
    recipe_of(tmp_path, model, "sft", [])
    words = ["device=npu", "run.export=false", "model.dtype=bf16", "parallel.offload=optimizer", f"optim.name={name}"]
    words += ["run.steps=3", "optim.schedule=constant", "checkpoint.every=2", "checkpoint.keep_last=9"]

    def train(run: str) -> None:
        done = python(
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2),
            *("-m", "lockstep", "train", tmp_path / "recipe.yaml", f"run.name={run}", *words),
        )
        assert done.returncode == 0, done.stderr[-3000:]

    train("once")
    runs = tmp_path / "runs"
    shutil.copytree(runs / "once", runs / "again")
    shutil.rmtree(checkpoints.folder_of(runs / "again" / "checkpoints", 3))
    train("again")
    for part in ("weights", "optimizer"):
        mine, theirs = stored(runs / "again", 3, part), stored(runs / "once", 3, part)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


@pytest.mark.slow
def test_int8_rollouts_run_on_the_operators_for_int8(model: Path, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, model, "grpo", ["model.dtype=bf16", "rollout.precision=int8"])
    report.clear()
    npu = history(recipe, "npu")
    ran = {operator.name for operator in report.operators()}
    assert {"npu::npu_dynamic_quant", "npu::npu_quant_matmul"} <= ran
    assert not report.fallbacks()
    assert all(0 < metrics["training/rollout_logprob_diff_mean"] < 0.25 for metrics in npu)
