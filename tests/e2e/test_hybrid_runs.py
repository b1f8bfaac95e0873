"""Whole runs of models with recurrent layers: offline and online, with settings that change no number."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from commands import torchrun
from conftest import write_online_recipe, write_sft_recipe
from hybrid_models import write_hybrid
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.train.offline import train_offline
from lockstep.train.online import train_online
from runs import close, facts, stored

# eps above the gradients' noise: Adam's first steps would blow a rounding difference up to a whole step.
COMMON = ["optim.eps=1e-4", "checkpoint.every=6"]


def sft(recipe: Path, name: str, *words: str) -> Path:
    train_offline(load_recipe(str(recipe), [f"run.name={name}", *COMMON, *words]), Console.silent())
    return recipe.parent / "runs" / name


def online(recipe: Path, name: str, *words: str) -> Path:
    train_online(load_recipe(str(recipe), [f"run.name={name}", "run.steps=2", *words]), Console.silent())
    return recipe.parent / "runs" / name


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bamba", "jamba"])
def test_memory_settings_and_padding_change_no_number(family: str, tmp_path: Path, tiny_folder: Path) -> None:
    recipe = write_sft_recipe(tmp_path, write_hybrid(tmp_path / "model", family, tiny_folder))
    plain = sft(recipe, "plain")
    assert (plain / "export" / "model.safetensors").is_file()
    for name, words in {
        "checkpointed": ["model.gradient_checkpointing=true"],
        "offloaded": ["model.activation_offload=true"],
        "padded": ["batch.tokens=null", "batch.micro_batch_size=2"],
    }.items():
        run = sft(recipe, name, "run.export=false", *words)
        losses, wanted = ([told["train/loss"] for _, told in facts(one)] for one in (run, plain))
        assert losses == pytest.approx(wanted, rel=1e-5), name
        assert close(stored(run, 6), stored(plain, 6)), name


@pytest.mark.slow
@pytest.mark.torchrun
def test_slices_on_two_processes_change_no_number(tmp_path: Path, tiny_folder: Path) -> None:
    """The layers of Jamba tell their recurrent module where sequences start by a hook."""
    recipe = write_sft_recipe(tmp_path, write_hybrid(tmp_path / "model", "jamba", tiny_folder))
    plain = sft(recipe, "plain", "run.export=false")
    done = torchrun("train", recipe, "run.name=two", "run.export=false", *COMMON)
    assert done.returncode == 0, done.stderr
    assert close(stored(tmp_path / "runs" / "two", 6), stored(plain, 6))


@pytest.mark.parametrize("engine", ["native", pytest.param("hf", marks=pytest.mark.slow)])
def test_an_online_run_scores_what_its_engine_generates(engine: str, tmp_path: Path, tiny_folder: Path) -> None:
    recipe = write_online_recipe(tmp_path, write_hybrid(tmp_path / "model", "bamba", tiny_folder))
    run = online(recipe, "run", f"rollout.engine={engine}", "rollout.n=3")
    metrics = [told for _, told in read_metrics(run / "metrics.jsonl")]
    assert len(metrics) == 2
    for told in metrics:
        assert all(math.isfinite(value) for value in told.values())
        assert told["training/rollout_probs_diff_max"] < 1e-4
        assert told["actor/grad_norm"] > 0
    exported = AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32)
    assert exported.config.model_type == "bamba"


@pytest.mark.slow
def test_an_adapter_of_recurrent_layers_is_trained_online(tmp_path: Path, tiny_folder: Path) -> None:
    recipe = write_online_recipe(tmp_path, write_hybrid(tmp_path / "model", "bamba", tiny_folder))
    run = online(recipe, "lora", "rollout.n=3", "model.lora.rank=2", "run.export=false")
    for _, told in read_metrics(run / "metrics.jsonl"):
        assert told["training/rollout_probs_diff_max"] < 1e-4
        assert told["actor/grad_norm"] > 0
