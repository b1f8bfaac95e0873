"""Runs with quantised weights: every method, both engines, kills, several processes, and what they leave on disk."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from commands import lockstep, torchrun
from conftest import write_online_recipe, write_sft_recipe
from kills import killed, lines
from lockstep.model.tiny import write_tiny
from lockstep.recipe import load_recipe
from lockstep.recipe.methods import ONLINE
from lockstep.run.checkpoint import steps_in
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.train.offline import train_offline
from lockstep.train.online import train_online
from preference_rows import METHODS, write_recipe
from runs import close, difference, facts, stored
from tiny_sizes import TINY

NF4 = ["model.quantize=nf4", "model.lora.rank=4"]
# eps above the noise of gradients: Adam's first steps would blow a rounding difference up to a whole step.
ALIKE = ["optim.eps=1e-4", "run.export=false"]

LAYOUTS = {"shard": (), "tensor": ("parallel.tensor_parallel=2",), "offload": ("parallel.offload=all",)}


def online(recipe: Path, *words: str) -> list[dict[str, float]]:
    train_online(load_recipe(str(recipe), list(words)), Console.silent())
    return [metrics for _, metrics in read_metrics(recipe.parent / "runs" / "run" / "metrics.jsonl")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its feed-forward has two blocks of inputs for each of two ranks."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny(folder, hidden=128, layers=2)
    return folder


def weights(run: Path, part: str = "weights") -> Mapping[str, torch.Tensor]:
    return stored(run, steps_in(run / "checkpoints")[-1], part)


@pytest.mark.daily("grpo")
@pytest.mark.parametrize("method", ONLINE)
def test_online_methods_generate_from_the_weights_they_train_on(online_file: Path, tmp_path: Path, method: str) -> None:
    """The log-probs of the engine are those of the trainer, also after updates of the adapter."""
    words = [f"method={method}", "run.steps=2", f"run.export={method == 'grpo'}", *NF4, "optim.lr=1e-2"]
    if method == "on_policy_distill":
        write_tiny(tmp_path / "teacher", hidden=64, layers=2, seed=1)
        words.append(f"algorithm.kl.reference={tmp_path / 'teacher'}")
    grouped = "rollout.n=3" if load_recipe(str(online_file), words).rollout.n > 1 else "rollout.n=1"
    for metrics in online(online_file, grouped, *words):
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
        assert metrics["actor/grad_norm"] > 0
    run = tmp_path / "runs" / "run"
    assert (run / "export" / "model.safetensors").is_file() == (method == "grpo")
    if method == "ppo":
        assert {name.rpartition("lora_")[2] for name in weights(run, "critic")} >= {"A.default.weight", "head.weight"}


@pytest.mark.slow
@pytest.mark.parametrize("words", [["rollout.engine=hf"], ["rollout.max_staleness=1"]], ids=["hf", "a worker"])
def test_other_ways_to_generate(online_file: Path, words: list[str]) -> None:
    for metrics in online(online_file, "run.steps=2", "run.export=false", "optim.lr=1e-2", *NF4, *words):
        assert math.isfinite(metrics["actor/grad_norm"])
        if "rollout.engine=hf" in words:
            assert metrics["training/rollout_probs_diff_max"] < 1e-4


@pytest.mark.daily("rm")
@pytest.mark.parametrize("method", [*METHODS, "distill"])
def test_offline_methods_train_an_adapter(tmp_path: Path, tiny_folder: Path, method: str) -> None:
    words = [*NF4, "run.steps=3"]
    if method == "distill":
        write_tiny(tmp_path / "teacher", hidden=64, layers=1, seed=5)
        words.append(f"distill.teacher={tmp_path / 'teacher'}")
    recipe = load_recipe(str(write_recipe(tmp_path, tiny_folder, method)), words)
    train_offline(recipe, Console.silent())
    run = Path(recipe.run.folder) / recipe.run.name
    told = [metrics for _, metrics in read_metrics(run / "metrics.jsonl")]
    assert all(math.isfinite(value) for metrics in told for value in metrics.values())
    assert any(metrics.get("train/grad_norm", 0) > 0 for metrics in told)
    assert (run / "export" / "model.safetensors").is_file()


@pytest.mark.daily("nf4")
@pytest.mark.parametrize("format", ["nf4", "int8", "fp8"])
def test_an_adapter_learns_on_every_format(recipe_file: Path, tmp_path: Path, format: str) -> None:
    """And the checkpoint has the adapter only; the recipe names the format and the state the files of the base."""
    words = [f"model.quantize={format}", "model.lora.rank=8", "optim.lr=5e-3", "run.steps=20", "model.dtype=bf16"]
    train_offline(load_recipe(str(recipe_file), words), Console.silent())
    run = tmp_path / "runs" / "run"
    losses = [metrics["train/loss"] for _, metrics in read_metrics(run / "metrics.jsonl") if "train/loss" in metrics]
    assert losses[-1] < 0.6 * losses[0]
    assert all("lora_" in name for name in weights(run))
    state = json.loads((run / "checkpoints" / "step_20" / "state.json").read_text())
    assert state["recipe"]["model"]["quantize"] == format
    assert "model.safetensors" in state["models"]["model.path"]["files"]
    assert (run / "export" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_killed_run_ends_bit_identical(recipe_file: Path, tmp_path: Path) -> None:
    words = [*NF4, "model.lora.dropout=0.2", "run.steps=6", "checkpoint.every=3", "optim.lr=1e-2"]
    whole, folder = tmp_path / "runs" / "whole", tmp_path / "runs" / "killed"
    done = lockstep("train", recipe_file, "run.name=whole", *words)
    assert done.returncode == 0, done.stderr
    killed(["train", recipe_file, "run.name=killed", *words], lines(folder / "metrics.jsonl", 4))
    assert steps_in(folder / "checkpoints") == [3]
    done = lockstep("train", recipe_file, "run.name=killed", *words)
    assert done.returncode == 0, done.stderr
    assert facts(folder) == facts(whole)
    assert all(torch.equal(weight, weights(whole)[name]) for name, weight in weights(folder).items())
    # Another format is another base model.
    done = lockstep("train", recipe_file, "run.name=killed", *words, "model.quantize=int8")
    assert done.returncode != 0
    assert "model.quantize" in done.stderr


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.parametrize("format", ["nf4", "int8", "fp8"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_two_processes_train_what_one_does(tmp_path: Path, model: Path, format: str, layout: tuple[str, ...]) -> None:
    recipe = write_sft_recipe(tmp_path, model)
    words = [f"model.quantize={format}", "model.lora.rank=4", "optim.lr=1e-2", "run.steps=3", *ALIKE]
    one = lockstep("train", recipe, "run.name=one", *words)
    assert one.returncode == 0, one.stderr
    two = torchrun("train", recipe, "run.name=two", *words, *layout)
    assert two.returncode == 0, two.stderr
    assert difference(tmp_path / "runs" / "two", tmp_path / "runs" / "one", 3) == ""


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.parametrize("layout", [(), ("parallel.tensor_parallel=2",)], ids=["shard", "tensor"])
def test_two_processes_generate_what_one_does(tmp_path: Path, model: Path, layout: tuple[str, ...]) -> None:
    recipe = write_online_recipe(tmp_path, model)
    words = ["method=ppo", "rollout.n=1", "run.steps=2", "log.samples=99", *NF4, *ALIKE, "optim.lr=1e-2"]
    one = lockstep("train", recipe, "run.name=one", *words)
    assert one.returncode == 0, one.stderr
    two = torchrun("train", recipe, "run.name=two", *words, *layout)
    assert two.returncode == 0, two.stderr
    assert difference(tmp_path / "runs" / "two", tmp_path / "runs" / "one", 2, ("weights", "critic")) == ""
    assert close(weights(tmp_path / "runs" / "two"), weights(tmp_path / "runs" / "one"))


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.parametrize("layout", [(), ("parallel.tensor_parallel=2",)], ids=["shard", "experts"])
def test_two_processes_train_experts_as_one_does(tmp_path: Path, model: Path, layout: tuple[str, ...]) -> None:
    """Stacks of codes are sharded, or each process has the codes of its own experts."""
    torch.manual_seed(0)
    folder = shutil.copytree(model, tmp_path / "experts")
    sizes = {**TINY, "hidden_size": 128, "head_dim": 32, "intermediate_size": 128}
    config = Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    recipe = write_online_recipe(tmp_path, folder)
    words = ["run.steps=2", "log.samples=99", *NF4, *ALIKE, "optim.lr=1e-2"]
    words.append("model.lora.targets=[q_proj,k_proj,v_proj,o_proj]")
    one = lockstep("train", recipe, "run.name=one", *words)
    assert one.returncode == 0, one.stderr
    two = torchrun("train", recipe, "run.name=two", *words, *layout)
    assert two.returncode == 0, two.stderr
    assert difference(tmp_path / "runs" / "two", tmp_path / "runs" / "one", 2) == ""
    exported = lockstep("export", tmp_path / "runs" / "one", tmp_path / "out")
    assert exported.returncode == 0, exported.stderr
    assert "verified" in exported.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [["model.lora.dora=true"], ["model.lora.rslora=true"], ["model.lora.modules_to_save=[input_layernorm]"]],
    ids=["dora", "rslora", "a saved module"],
)
def test_kinds_of_adapters(recipe_file: Path, tmp_path: Path, words: list[str]) -> None:
    """Each is merged into the dequantised weights, and the export is verified against the trained model."""
    done = lockstep("train", recipe_file, "run.name=run", *NF4, "optim.lr=1e-2", *words)
    assert done.returncode == 0, done.stderr
    assert "verified" in done.stdout
    assert (tmp_path / "runs" / "run" / "export" / "model.safetensors").is_file()
