"""Expert parallelism, as far as one process can tell: what is refused, and what the plan counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from conftest import write_online_recipe, write_sft_recipe
from lockstep.errors import Refusal
from lockstep.model.division.expert_plan import refuse_undivided_experts
from lockstep.model.tiny import write_tiny
from lockstep.parallel.sharding import Grid, grid_of
from lockstep.preflight.cluster import cluster_named, model_cost
from lockstep.preflight.memory_plan import plan_memory
from lockstep.preflight.model_sizes import LayerKernels, count_parameters
from lockstep.preflight.step_time import ModelCosts, StepTimes, StepWork
from lockstep.recipe.keys_parallel import Parallel
from lockstep.recipe.loader import load_recipe
from refusals import refuses

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE = Qwen3MoeConfig(**SIZES, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24)
# Weights of all experts: two layers of 8 experts with three matrices.
EXPERTS = 2 * 8 * 3 * 24 * 64


@pytest.mark.parametrize(
    ("config", "expert", "tensor", "why"),
    [
        (LlamaConfig(**SIZES), 2, 1, "no layers with stacked experts"),
        (MOE, 3, 1, r"layers\.0\.mlp\.experts has 8 experts, not divisible by 3"),
        (MOE, 4, 4, "8 experts, not divisible by 16"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused_by_name(
    config: PreTrainedConfig, expert: int, tensor: int, why: str, tmp_path: Path
) -> None:
    with refuses("parallel.expert_parallel", "indivisible", remedy="parallel.expert_parallel=1"):
        refuse_undivided_experts(config, str(tmp_path), "folder", expert, tensor)
    with pytest.raises(Refusal, match=why):
        refuse_undivided_experts(config, str(tmp_path), "folder", expert, tensor)
    refuse_undivided_experts(config, str(tmp_path), "folder", 1, tensor)
    refuse_undivided_experts(MOE, str(tmp_path), "folder", 4, 2)


def test_groups_are_parts_of_a_copy_of_the_model() -> None:
    assert grid_of(Parallel(expert_parallel=4), 8) == Grid(1, 8, 1, 4)
    assert grid_of(Parallel(expert_parallel=2, tensor_parallel=2, replicate=2), 8) == Grid(2, 2, 2, 2)
    for settings, ranks in ((Parallel(expert_parallel=4, replicate=4), 8), (Parallel(expert_parallel=2), 1)):
        with refuses("parallel.expert_parallel", "wrong-process-count"):
            grid_of(settings, ranks)


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["parallel.offload=params"], "parallel.offload"),
        (["model.quantize=int8", "model.lora.rank=4"], "model.quantize"),
        (["tape=true"], "tape"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, tiny_folder: Path, words: list[str], where: str) -> None:
    recipe = write_sft_recipe(tmp_path, tiny_folder)
    load_recipe(recipe, words)
    with refuses(where, remedy="parallel.expert_parallel=1"):
        load_recipe(recipe, [*words, "parallel.expert_parallel=2"])


def test_a_reference_on_the_host_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    words = ["parallel.offload_reference=true", "algorithm.kl.where=loss", "parallel.expert_parallel=2"]
    with refuses("parallel.offload_reference", remedy="parallel.expert_parallel=1"):
        load_recipe(write_online_recipe(tmp_path, tiny_folder), words)


def test_a_trained_copy_of_divided_experts_is_refused_before_a_weight_is_loaded(
    tmp_path: Path, tiny_folder: Path
) -> None:
    path = write_sft_recipe(tmp_path, tiny_folder)
    lora = "model.lora={rank: 2, targets: [q_proj], modules_to_save: [experts]}"
    assert count_parameters(load_recipe(path, [lora]), MOE).trained
    with refuses("model.lora.modules_to_save", "unfit-adapter", "layers.0.mlp.experts"):
        count_parameters(load_recipe(path, [lora, "parallel.expert_parallel=2"]), MOE)
    others = "model.lora={rank: 2, targets: [q_proj, experts.gate_up_proj, experts.down_proj]}"
    assert count_parameters(load_recipe(path, [others, "parallel.expert_parallel=2"]), MOE).experts == EXPERTS


def test_the_plan_counts_the_experts_of_a_rank(tmp_path: Path) -> None:
    """While the model loads, two copies of a gathered layer have half of its experts."""
    folder = tmp_path / "model"
    write_tiny(folder)
    AutoModelForCausalLM.from_config(MOE).save_pretrained(folder)
    path, loads = write_sft_recipe(tmp_path, folder), []
    for words in ([], ["parallel.expert_parallel=2"]):
        plan = plan_memory(load_recipe(path, words), MOE, 4, longest=32, rows=8)
        loads.append(next(phase for phase in plan.phases if phase.name == "load").total)
    # The previous layer is the third copy, unless the embedding is larger.
    assert loads[0] - loads[1] in (2 * EXPERTS // 2 // 2 * 4, 3 * EXPERTS // 2 // 2 * 4)


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_plan_counts_the_exchanges(tmp_path: Path, tiny_folder: Path, tensor: int) -> None:
    path = write_sft_recipe(tmp_path, tiny_folder)
    cluster, work = (
        cluster_named("1x8:h200"),
        StepWork(rows=8, tokens=4096, whole=4096, squares=8 * 512**2, targets=4000),
    )
    traffic = []
    for expert in (1, 2):
        words = [f"parallel.expert_parallel={expert}", f"parallel.tensor_parallel={tensor}", "batch.tokens=4096"]
        recipe = load_recipe(path, words)
        cost, counted = model_cost(MOE), count_parameters(recipe, MOE)
        times = StepTimes(recipe, ModelCosts(MOE, cost, counted, cost), work, cluster, LayerKernels())
        traffic.append(times.update().traffic)
    # 4096 tokens of 8 / tensor groups, two experts each, half of them on the other rank: there and back, in the forward
    # and the backward pass of two layers. Of the pairs of a tensor-parallel group each rank sends a part.
    tokens = 4096 / (8 / tensor)
    assert traffic[1].exchanged - traffic[0].exchanged == 2 * 2 * 2 * tokens * 2 / tensor / 2 * 64 * 4
    # The experts of a rank are gathered over 8 / tensor / 2 ranks, twice for an update, instead of all experts.
    ranks = 8 // tensor
    wanted = EXPERTS / tensor * (ranks - 1) / ranks - EXPERTS / tensor / 2 * (ranks / 2 - 1) / (ranks / 2)
    assert traffic[0].gathered - traffic[1].gathered == pytest.approx(2 * 4 * wanted)
