"""Two emulated NPUs over HCCL, however they share models and sequences, train what one does.

SFT and GRPO, sharded, in copies, with modules or sequences divided by two, and with every offload; two copies of two
slices on four; DPO and PPO, with its critic, sharded. In fp32: responses and their scores equal, metrics within 1e-4
(relative; 2e-5 absolute), weights within 1e-5. That one NPU trains what a CPU does is test_recipes.py's.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import job_ranks
from conftest import write_online_recipe, write_sft_recipe
from lockstep.model.tiny import write_tiny
from preference_rows import write_recipe
from runs import difference, samples

from .processes import torchrun

pytestmark = [pytest.mark.ascend, pytest.mark.torchrun, pytest.mark.xdist_group("npu worlds")]
STEPS = 2
# eps above the gradients' noise: Adam's first steps would blow a rounding difference up to a whole step.
COMMON = [
    *("device=npu", f"run.steps={STEPS}", "run.export=false"),
    *("optim.eps=1e-4", "optim.warmup=0", "log.samples=99"),
]
METHODS: dict[str, list[str]] = {
    "sft": [],
    "dpo": [],
    "grpo": ["batch.prompts_per_update=2", "algorithm.kl.where=loss"],
    "ppo": ["method=ppo", "rollout.n=1", "batch.prompts_per_update=2", "critic.lr=1e-3", "algorithm.kl.where=reward"],
}
IN_EVERY_LAYOUT = ("sft", "grpo")
LAYOUTS = {
    "sharded": [],
    "copies": ["parallel.replicate=2"],
    "tensor": ["parallel.tensor_parallel=2"],
    "zigzag": ["parallel.context_parallel=2"],
    "gather": ["parallel.context_parallel=2", "parallel.context_layout=gather"],
    "ulysses": ["parallel.context_parallel=2", "parallel.context_layout=ulysses"],
    "host-optimizer": ["parallel.offload=optimizer"],
    "host-params": ["parallel.offload=params"],
    "host-all": ["parallel.offload=all"],
}
# Method, name and keys of a run.
Case = tuple[str, str, list[str]]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of a model of four heads, and two of keys and values."""
    folder = tmp_path_factory.mktemp("worlds")
    write_tiny(folder / "model", hidden=128, layers=1)
    found = {}
    for method in METHODS:
        (folder / method).mkdir()
        if method == "dpo":
            found[method] = write_recipe(folder / method, folder / "model", "dpo")
        else:
            write = write_sft_recipe if method == "sft" else write_online_recipe
            found[method] = write(folder / method, folder / "model")
    return found


def differences(
    recipes: dict[str, Path], cases: list[tuple[str, str, list[str]]], ranks: int, folder: Path
) -> list[str]:
    """Train each method by one process, then each case by several; what of these is another."""
    for method in dict.fromkeys(method for method, _, _ in cases):
        if not (recipes[method].parent / "runs" / "one").is_dir():
            job_ranks.train([str(recipes[method]), "run.name=one", *COMMON, *METHODS[method]])
    jobs = [
        [str(recipes[method]), f"run.name={name}-{ranks}", *COMMON, *METHODS[method], *words]
        for method, name, words in cases
    ]
    settings = {"ASCEND_EMULATOR_DEVICES": str(ranks), "ASCEND_EMULATOR_REPORT": str(folder)}
    done = torchrun(job_ranks.PROGRAM, job_ranks.write_jobs(folder, jobs), ranks=ranks, **settings)
    assert done.returncode == 0, done.stderr[-3000:]
    # Every part of a divided sequence goes to the device's kernel, too.
    assert "plain torch" not in done.stderr + done.stdout
    reports = list(folder.glob("operators-*.json"))
    assert len(reports) >= ranks
    ran = [row for report in reports for row in json.loads(report.read_text())]
    assert "npu::npu_fusion_attention" in {row["name"] for row in ran}
    assert not [row for row in ran if row["kind"] == "cpu fallback"]
    found = []
    for method, name, _ in cases:
        runs = recipes[method].parent / "runs"
        parts = ("weights", "critic") if method == "ppo" else ("weights",)
        told = difference(runs / f"{name}-{ranks}", runs / "one", STEPS, parts)
        found += [f"{method}, {name}: {told}"] if told else []
    return found


def test_two_npus_train_what_one_does(recipes: dict[str, Path], tmp_path: Path) -> None:
    """The second run in the same processes meets anew."""
    assert not differences(recipes, [("grpo", "daily", []), ("sft", "daily", LAYOUTS["tensor"])], 2, tmp_path)


@pytest.mark.slow
def test_two_npus_train_what_one_does_in_every_layout(recipes: dict[str, Path], tmp_path: Path) -> None:
    cases = [(method, name, words) for method in IN_EVERY_LAYOUT for name, words in LAYOUTS.items()]
    cases.append(("grpo", "host-reference", ["parallel.offload_reference=true"]))
    assert not differences(recipes, cases, 2, tmp_path)
    assert len(samples(recipes["grpo"].parent / "runs" / "one")) > STEPS


@pytest.mark.slow
def test_two_npus_train_preferences_and_a_critic_as_one_does(recipes: dict[str, Path], tmp_path: Path) -> None:
    assert not differences(recipes, [("dpo", "sharded", []), ("ppo", "sharded", [])], 2, tmp_path)
    assert len(samples(recipes["ppo"].parent / "runs" / "one")) > STEPS


@pytest.mark.slow
def test_two_npus_with_half_of_the_experts_each_train_what_one_does(tmp_path: Path) -> None:
    """The tokens go to the experts by the all-to-all of HCCL."""
    write_tiny(tmp_path / "model")
    config = Qwen3MoeConfig(
        vocab_size=259,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    recipes = {}
    for method, write in (("sft", write_sft_recipe), ("grpo", write_online_recipe)):
        (tmp_path / method).mkdir()
        recipes[method] = write(tmp_path / method, tmp_path / "model")
    words = ["parallel.expert_parallel=2"]
    assert not differences(recipes, [("sft", "experts", words), ("grpo", "experts", words)], 2, tmp_path)


@pytest.mark.slow
def test_four_npus_train_what_one_does_in_copies_of_slices(recipes: dict[str, Path], tmp_path: Path) -> None:
    words = ["parallel.shard=2", "parallel.replicate=2"]
    assert not differences(recipes, [(method, "hybrid", words) for method in IN_EVERY_LAYOUT], 4, tmp_path)
