"""Runs with each kind of LoRA: two ranks and a tensor group train what one process trains, and a resumed run too."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

import job_ranks
from commands import torchrun
from conftest import write_online_recipe
from lockstep.model.tiny import write_tiny
from lockstep.recipe import load_recipe
from lockstep.run.checkpoint import folder_of
from lockstep.train.start import run_recipe
from runs import difference, facts, stored

SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
MOE = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
EXPERTS = "targets: [q_proj, gate_proj, up_proj, down_proj]"
KINDS = {
    "dora": "dora: true",
    "pissa": "init: pissa, rslora: true",
    "niter": "init: pissa_niter_2, layers: [1]",
    "copies": "modules_to_save: [embed_tokens, lm_head, norm]",
}
EXPERT_KINDS = {"experts": EXPERTS, "router": "modules_to_save: [mlp.gate], targets: [q_proj]"}
WORDS = ["run.steps=2", "log.samples=99", "batch.prompts_per_update=2", "algorithm.kl.where=loss", "optim.eps=1e-4"]


def written(folder: Path, config: PreTrainedConfig) -> Path:
    write_tiny(folder, hidden=64, layers=1)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def trained(recipe: Path, *words: str) -> Path:
    loaded = load_recipe(str(recipe), [*WORDS, *words])
    run_recipe(loaded)
    return (
        Path(loaded.run.folder)
        if loaded.run.folder.endswith(str(loaded.run.name))
        else (recipe.parent / "runs" / str(loaded.run.name))
    )


def lora(keys: str) -> str:
    return f"model.lora={{rank: 4, {keys}}}"


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.parametrize(
    ("config", "kinds", "layout"),
    [
        (LlamaConfig(**SIZES), ("dora", "pissa", "niter", "copies"), ()),
        (LlamaConfig(**SIZES), ("dora", "pissa", "copies"), ("parallel.tensor_parallel=2",)),
        (MOE, ("experts", "router"), ()),
        (MOE, ("experts", "router"), ("parallel.tensor_parallel=2",)),
    ],
    ids=["shards", "tensor", "shards of experts", "tensor of experts"],
)
def test_two_ranks_train_what_one_trains(
    tmp_path: Path, config: PreTrainedConfig, kinds: tuple[str, ...], layout: tuple[str, ...]
) -> None:
    recipe = write_online_recipe(tmp_path, written(tmp_path / "model", config))
    every = KINDS | EXPERT_KINDS
    jobs = [[str(recipe), *WORDS, *layout, lora(every[kind]), f"run.name={kind}-two"] for kind in kinds]
    done = torchrun(job_ranks.write_jobs(tmp_path, jobs), program=job_ranks.PROGRAM, processes=2)
    assert done.returncode == 0, done.stderr
    for kind in kinds:
        one = trained(recipe, lora(every[kind]), f"run.name={kind}-one")
        assert not difference(tmp_path / "runs" / f"{kind}-two", one, 2), kind
        assert facts(one)[-1][1]["actor/kl_loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, kind: str) -> None:
    recipe = write_online_recipe(tmp_path, written(tmp_path / "model", LlamaConfig(**SIZES)))
    words = [lora(KINDS[kind]), "checkpoint.every=1", "checkpoint.keep_last=9"]
    whole = trained(recipe, *words, "run.name=whole")
    again = shutil.copytree(whole, whole.with_name("again"))
    shutil.rmtree(folder_of(again / "checkpoints", 2))
    trained(recipe, *words, "run.name=again")
    weights = [stored(run, 2) for run in (whole, again)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_an_adapter_that_is_the_reference(tmp_path: Path, kind: str) -> None:
    """Its KL is zero at the first step, and grows; that of the base is not."""
    recipe = write_online_recipe(tmp_path, written(tmp_path / "model", LlamaConfig(**SIZES)))
    first = trained(recipe, lora(KINDS[kind]), "run.name=first")
    start = f"model.lora={{adapter: {first}, reference: start}}"
    at_once = "batch.prompts_per_update=4"
    second = trained(recipe, start, at_once, "run.name=second")
    kls = [told["actor/kl_loss"] for _, told in facts(second)]
    assert abs(kls[0]) < 1e-6 < kls[1]
    against_base = trained(recipe, f"model.lora={{adapter: {first}}}", at_once, "run.name=third")
    assert facts(against_base)[0][1]["actor/kl_loss"] > 1e-4
