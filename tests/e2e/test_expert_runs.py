"""Expert parallelism: processes that divide the experts of every layer compute, generate and train what one does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

import expert_ranks
from commands import lockstep, torchrun
from conftest import write_online_recipe, write_sft_recipe
from lockstep.model.tiny import write_tiny
from lockstep.run.checkpoint import folder_of, steps_in
from runs import close, facts, stored

pytestmark = pytest.mark.torchrun
# eps above the gradients' noise: Adam's first steps would blow a rounding difference up to a whole step.
COMMON = ["optim.eps=1e-4"]
SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3MoeConfig(**SIZES, head_dim=16),
    # A shared expert in every layer.
    "qwen2": Qwen2MoeConfig(**SIZES, shared_expert_intermediate_size=32),
}
ADAPTER = ["model.lora.rank=4", "model.lora.targets=[q_proj,experts.gate_up_proj,experts.down_proj]", "optim.lr=1e-2"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    found = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        found[name] = tmp_path_factory.mktemp(name) / "model"
        write_tiny(found[name])
        AutoModelForCausalLM.from_config(config).save_pretrained(found[name])
    return found


def divided(recipe: Path, processes: int, layout: list[str], *words: str) -> tuple[Path, Path]:
    """The run folders of one process and of several with divided experts."""
    one = lockstep("train", recipe, "run.name=one", *COMMON, *words)
    assert one.returncode == 0, one.stderr
    several = torchrun("train", recipe, "run.name=several", *layout, *COMMON, *words, processes=processes)
    assert several.returncode == 0, several.stderr
    if "run.export=false" not in words:
        told = "".join(several.stdout.split())  # long lines are wrapped
        assert told.count("verified:loadedbyplain") == 1
    folder = recipe.parent / "runs"
    return folder / "one", folder / "several"


def weights(run: Path) -> Mapping[str, torch.Tensor]:
    return stored(run, steps_in(run / "checkpoints")[-1], "weights")


def assert_same(one: Path, several: Path) -> None:
    assert len(facts(one)) == len(facts(several)) > 1
    for (_, ours), (_, theirs) in zip(facts(one), facts(several), strict=True):
        assert ours.keys() == theirs.keys()
        assert theirs == pytest.approx(ours, rel=1e-4, abs=2e-5)
    assert close(weights(several), weights(one))


def samples(run: Path) -> list[tuple[str, float]]:
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return [(sample["response"], sample["score"]) for sample in lines]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_models_with_divided_experts_are_whole_ones(ranks: int) -> None:
    done = torchrun(program=Path(expert_ranks.__file__), processes=ranks)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "processes", "layout", "words"),
    [
        ("qwen2", 2, ["parallel.expert_parallel=2"], ["model.aux_loss_coef=0.05", "run.steps=3"]),
        pytest.param(
            "qwen3",
            2,
            ["parallel.expert_parallel=2"],
            # One row an update: the second process has only rows without loss.
            ["batch.rows_per_update=1", "optim.clip=0.1", "model.gradient_checkpointing=true"],
            marks=pytest.mark.slow,
        ),
        pytest.param("qwen3", 4, ["parallel.expert_parallel=2"], ["val.every=3"], marks=pytest.mark.slow),
        pytest.param(
            "qwen2",
            4,
            ["parallel.expert_parallel=4"],
            ["batch.tokens=null", "batch.micro_batch_size=1"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qwen2",
            4,
            ["parallel.expert_parallel=2", "parallel.replicate=2"],
            ["model.aux_loss_coef=0.05"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qwen3", 4, ["parallel.expert_parallel=2", "parallel.tensor_parallel=2"], [], marks=pytest.mark.slow
        ),
        pytest.param(
            "qwen2", 4, ["parallel.expert_parallel=4", "parallel.context_parallel=2"], [], marks=pytest.mark.slow
        ),
        pytest.param("qwen3", 2, ["parallel.expert_parallel=2"], ADAPTER, marks=pytest.mark.slow),
        pytest.param(
            "qwen3",
            4,
            ["parallel.expert_parallel=2", "parallel.tensor_parallel=2", "parallel.offload=optimizer"],
            [*ADAPTER, "model.gradient_checkpointing=true"],
            marks=pytest.mark.slow,
        ),
        # One expert per process, experts that two processes shard, and experts of four tensor-parallel groups.
        pytest.param("qwen2", 8, ["parallel.expert_parallel=8"], [], marks=pytest.mark.slow),
        pytest.param("qwen3", 8, ["parallel.expert_parallel=4"], ["model.aux_loss_coef=0.05"], marks=pytest.mark.slow),
        pytest.param(
            "qwen3", 8, ["parallel.expert_parallel=4", "parallel.tensor_parallel=2"], [], marks=pytest.mark.slow
        ),
    ],
)
def test_supervised_fine_tuning(
    models: Mapping[str, Path], tmp_path: Path, name: str, processes: int, layout: list[str], words: list[str]
) -> None:
    one, several = divided(write_sft_recipe(tmp_path, models[name]), processes, layout, *words)
    assert_same(one, several)
    exports = [load_file(run / "export" / "model.safetensors") for run in (one, several)]
    assert close(*exports)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "processes", "layout", "words"),
    [
        ("qwen3", 2, ["parallel.expert_parallel=2"], ["algorithm.kl.where=loss"]),
        ("qwen3", 2, ["parallel.expert_parallel=2"], ["algorithm.routing_replay=rollout"]),
        ("qwen2", 4, ["parallel.expert_parallel=2"], []),
        ("qwen3", 4, ["parallel.expert_parallel=2", "parallel.tensor_parallel=2"], []),
        ("qwen3", 2, ["parallel.expert_parallel=2"], ADAPTER),
    ],
)
def test_group_relative_policy_optimisation(
    models: Mapping[str, Path], tmp_path: Path, name: str, processes: int, layout: list[str], words: list[str]
) -> None:
    """Generation gathers the experts; samples, scores, metrics and weights are those of one process."""
    words = ["run.steps=2", "log.samples=99", "batch.prompts_per_update=2", *words]
    one, several = divided(write_online_recipe(tmp_path, models[name]), processes, layout, *words)
    assert samples(several) == samples(one)
    assert_same(one, several)


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout(models: Mapping[str, Path], tmp_path: Path) -> None:
    """Two ranks with divided experts, then one process, then four in two groups; the curve is that of one process."""
    recipe = write_sft_recipe(tmp_path, models["qwen2"])
    words = [*COMMON, "checkpoint.every=2", "checkpoint.keep_last=9", "val.every=2"]
    assert lockstep("train", recipe, "run.name=one", *words).returncode == 0
    whole = torchrun("train", recipe, "run.name=moved", *words, "parallel.expert_parallel=2")
    assert whole.returncode == 0, whole.stderr
    one, run = tmp_path / "runs" / "one", tmp_path / "runs" / "moved"
    assert_same(one, run)
    shutil.rmtree(folder_of(run / "checkpoints", 6))
    shutil.rmtree(folder_of(run / "checkpoints", 4))
    alone = lockstep("train", recipe, "run.name=moved", *words)
    assert alone.returncode == 0, alone.stderr
    assert "afterstep2" in "".join(alone.stdout.split())  # long lines are wrapped
    assert_same(one, run)
    shutil.rmtree(folder_of(run / "checkpoints", 6))
    four = torchrun("train", recipe, "run.name=moved", *words, "parallel.expert_parallel=2", processes=4)
    assert four.returncode == 0, four.stderr
    assert "afterstep4" in "".join(four.stdout.split())
    assert_same(one, run)
