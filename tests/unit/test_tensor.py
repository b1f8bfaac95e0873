"""Tensor parallelism, as far as one process can tell: what is refused, and what the plan counts."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from transformers import (
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from conftest import run, write_online_recipe, write_sft_recipe
from lockstep.errors import Refusal
from lockstep.model.division.tensor_plan import refuse_indivisible
from lockstep.model.miniature import miniature_config
from lockstep.model.tiny import write_tiny
from lockstep.preflight.memory_plan import plan_memory
from lockstep.preflight.model_sizes import count_parameters
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


@pytest.mark.parametrize(
    ("config", "size", "why"),
    [
        (LlamaConfig(**SIZES), 4, "2 key/value heads .* 4 processes"),
        (LlamaConfig(**SIZES), 3, "4 query heads .* 3 processes"),
        (Qwen2Config(**SIZES | {"intermediate_size": 97}), 2, r"mlp\.gate_proj has 97 outputs, not divisible by 2"),
        (GPT2Config(n_embd=64, n_head=4, n_layer=1), 2, "no plan for its tensor parallelism"),
        (Phi3Config(**SIZES, pad_token_id=0), 2, "'colwise_gather_output', which is not supported"),
        (MixtralConfig(**SIZES, num_local_experts=3), 2, r"mlp\.experts has 3 experts, not divisible by 2"),
        (PhimoeConfig(**SIZES), 2, "plan .* does not divide its attention"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_by_name(config: PreTrainedConfig, size: int, why: str) -> None:
    with pytest.raises(Refusal, match=why) as caught:
        refuse_indivisible(config, "folder", size)
    (problem,) = caught.value.problems
    assert (problem.where, problem.code) == ("parallel.tensor_parallel", "indivisible")
    assert "folder" in problem.why
    assert problem.remedy
    refuse_indivisible(config, "folder", 1)


def test_dora_with_dropout_is_refused_before_a_weight_is_loaded(tmp_path: Path, tiny_folder: Path) -> None:
    path = write_sft_recipe(tmp_path, tiny_folder)
    lora = "model.lora={rank: 2, dora: true, dropout: 0.1, targets: [q_proj]}"
    config = MixtralConfig(**SIZES, num_local_experts=4)
    with refuses("model.lora.dora", "unfit-adapter", "layers.0.self_attn.q_proj", remedy="parallel.tensor_parallel=1"):
        count_parameters(load_recipe(path, [lora, "parallel.tensor_parallel=2"]), config)
    # The remedies hold.
    assert count_parameters(load_recipe(path, [lora]), config).trained
    without = "model.lora={rank: 2, dora: true, targets: [q_proj]}"
    assert count_parameters(load_recipe(path, [without, "parallel.tensor_parallel=2"]), config).trained
    others = "model.lora={rank: 2, targets: [w1, w2, w3, q_proj]}"
    assert count_parameters(load_recipe(path, [others, "parallel.tensor_parallel=2"]), config).trained


def test_8_bit_states_of_split_rows_are_refused_before_a_weight_is_loaded(tmp_path: Path, tiny_folder: Path) -> None:
    path = write_sft_recipe(tmp_path, tiny_folder)
    config = LlamaConfig(**SIZES | {"hidden_size": 512, "intermediate_size": 520})
    words = ["optim.name=adamw8bit", "parallel.tensor_parallel=2"]
    # Half of a row of down_proj has 260 elements: not complete blocks of 256.
    with refuses("optim.name", "wrong-shape", "layers.0.mlp.down_proj", remedy="parallel.tensor_parallel=1"):
        count_parameters(load_recipe(path, words), config)
    assert count_parameters(load_recipe(path, words[:1]), config).trained
    even = LlamaConfig(**SIZES | {"hidden_size": 512, "intermediate_size": 512})
    assert count_parameters(load_recipe(path, words), even).trained
    # The adapter of rank 4 has too few elements for codes, that of rank 16 has not.
    for rank, refused in ((4, False), (16, True)):
        lora = f"model.lora={{rank: {rank}, targets: [down_proj]}}"
        with refuses("optim.name", "wrong-shape", "lora_A") if refused else nullcontext():
            count_parameters(load_recipe(path, [lora, *words]), config)


def test_heads_that_come_out_even_are_not_refused() -> None:
    refuse_indivisible(LlamaConfig(**SIZES), "folder", 2)
    refuse_indivisible(Qwen3Config(**SIZES), "folder", 2)


@pytest.mark.parametrize("divisor", [1, 2, 3, 4, 8])
def test_the_miniature_can_be_divided(divisor: int) -> None:
    small = miniature_config(Qwen3Config(num_attention_heads=32, num_key_value_heads=8), divisor)
    heads, key_heads = small.num_attention_heads, small.num_key_value_heads
    assert not any(count % divisor for count in (heads, key_heads, small.intermediate_size))
    assert heads // key_heads > 1
    assert small.hidden_size == heads * small.head_dim


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["parallel.context_parallel=2"], "parallel.tensor_parallel"),
        (["parallel.offload=params"], "parallel.offload"),
        (["tape=true"], "tape"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, tiny_folder: Path, words: list[str], where: str) -> None:
    recipe = write_sft_recipe(tmp_path, tiny_folder)
    load_recipe(recipe, words)
    with pytest.raises(Refusal) as caught:
        load_recipe(recipe, [*words, "parallel.tensor_parallel=2"])
    (problem,) = caught.value.problems
    assert problem.where == where
    assert "parallel.tensor_parallel=1" in problem.remedy or "to 1" in problem.remedy


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["rollout.engine=hf"], "rollout.engine"),
        (["rollout.function=own.py:act"], "rollout.function"),
        (["parallel.offload_reference=true", "algorithm.kl.where=loss"], "parallel.offload_reference"),
    ],
)
def test_who_does_not_generate_together_is_refused(
    tmp_path: Path, tiny_folder: Path, words: list[str], where: str
) -> None:
    with pytest.raises(Refusal) as caught:
        load_recipe(write_online_recipe(tmp_path, tiny_folder), [*words, "parallel.tensor_parallel=2"])
    assert where in {problem.where for problem in caught.value.problems}


def test_the_plan_refuses_what_cannot_be_divided(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tiny model of the tests has one head of keys and values, one of the other size two."""
    words = ["plan", recipe_file, "--devices", 4, "parallel.tensor_parallel=2"]
    assert run(*words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "parallel.tensor_parallel [indivisible]" in said
    assert re.search("1 key/value heads .* 2 processes", said)
    write_tiny(tmp_path / "larger", hidden=128, layers=1)
    assert run(*words, f"model.path={tmp_path / 'larger'}") == 0
    assert "on each of 2 group(s) of 2 devices" in " ".join(capsys.readouterr().out.split())


def test_the_plan_counts_what_each_device_holds(tmp_path: Path, tiny_folder: Path) -> None:
    """Weights by hand: a Llama of one layer whose projections two devices divide; embedding and head are sliced."""
    config = LlamaConfig(**SIZES | {"num_hidden_layers": 1})
    embedding, attention = 100 * 64, 64 * 64 * 2 + 64 * 32 * 2
    projections = attention + 3 * 64 * 96
    norms = 3 * 64
    parameters = 2 * embedding + projections + norms
    path = write_online_recipe(tmp_path, tiny_folder)
    words = ["parallel.tensor_parallel=2", "rollout.n=2", "algorithm.kl.where=none"]
    plan = plan_memory(load_recipe(path, words), config, 4, 49, 8)
    phases = {phase.name: phase for phase in plan.phases}
    assert plan.parameters == parameters
    assert phases["optimizer step"].weights == parameters * 4 // 4
    assert phases["optimizer step"].optimizer == parameters * 2 * 4 // 4
    # The policy is gathered but for the projections. Two groups share four prompts of two responses: four of 49 tokens
    # each, and of two heads of 16 numbers one has its keys and values here.
    assert phases["generation"].weights == (2 * embedding + norms + projections // 2) * 4
    assert phases["generation"].activations == 4 * 49 * 2 * 16 * 4
