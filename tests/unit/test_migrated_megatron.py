"""Megatron command lines of verl: layout, offloading, precision and optimizer of the recipe, and the refused settings.

The expected values follow verl's Megatron configuration: biases and norms have no weight decay, betas come from
`override_optimizer_config`, and `lr_warmup_steps` counts only above 0.
"""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.compat.conversion_output import checked
from lockstep.compat.key_table import Conversion
from lockstep.compat.migrate import migrated
from lockstep.compat.verl.convert_verl import convert_verl
from lockstep.errors import Refusal
from lockstep.recipe import Recipe
from lockstep.recipe.section import Section

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
G = f"{A}.megatron"
BASE = (
    "algorithm.adv_estimator=grpo",
    "data.train_files=t.parquet",
    "data.max_prompt_length=512",
    "data.max_response_length=1536",
    "actor_rollout_ref.model.path=m",
    f"{R}.n=4",
    f"{A}.strategy=megatron",
)


def convert(*words: str) -> Conversion:
    return convert_verl("main_ppo", [*BASE, *words])


def recipe(*words: str) -> Recipe:
    return checked(convert(*words))


def why(done: Conversion, key: str) -> str:
    (found,) = [outcome for outcome in done.outcomes if outcome.key == key]
    assert found.outcome == "ignored"
    return found.note


def changed(section: Section) -> dict[str, Any]:
    return section.model_dump(exclude_defaults=True)


def test_sizes_become_tensor_parallelism_and_the_pipeline_is_sharded() -> None:
    done = convert(
        f"{G}.tensor_model_parallel_size=4", f"{G}.pipeline_model_parallel_size=2", f"{G}.expert_model_parallel_size=8",
        "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2",
    )  # fmt: skip
    assert changed(checked(done).parallel) == {"tensor_parallel": 4}
    assert "pipeline" in why(done, f"{G}.pipeline_model_parallel_size")
    assert "experts" in why(done, f"{G}.expert_model_parallel_size")
    assert "layout" in why(done, "actor_rollout_ref.ref.megatron.tensor_model_parallel_size")


def test_experts_are_divided_over_as_many_devices() -> None:
    """16 devices, of which 2 are one tensor-parallel group: 8 share a copy of the model, in 2 groups of 4."""
    devices = ("trainer.n_gpus_per_node=8", "trainer.nnodes=2", f"{G}.tensor_model_parallel_size=2")
    experts, offload = f"{G}.expert_model_parallel_size=4", f"{G}.param_offload=True"
    reference = ("actor_rollout_ref.ref.megatron.param_offload=True", f"{A}.use_kl_loss=True")
    done = convert(*devices, experts, f"{G}.expert_tensor_parallel_size=1")
    assert (checked(done).parallel.expert_parallel, checked(done).parallel.tensor_parallel) == (4, 2)
    assert "tensor_parallel" in why(done, f"{G}.expert_tensor_parallel_size")
    done = convert(*devices[:2], experts, offload, *reference)
    made = checked(done).parallel
    assert (made.expert_parallel, made.offload, made.offload_reference) == (4, "none", False)
    assert "expert-parallel weights" in why(done, f"{G}.param_offload")
    assert "expert-parallel weights" in why(done, "actor_rollout_ref.ref.megatron.param_offload")
    done = convert(*devices, experts.replace("4", "16"))
    assert checked(done).parallel.expert_parallel == 1
    assert "16 does not divide the 8 devices" in why(done, f"{G}.expert_model_parallel_size")


def test_context_parallelism_has_the_tokens_of_one_device() -> None:
    """4 devices hold 600 tokens each of a sequence of at most 2048 tokens."""
    words = (f"{G}.context_parallel_size=4", f"{A}.use_dynamic_bsz=True", f"{A}.ppo_max_token_len_per_gpu=600")
    done = convert(*words, f"{G}.tensor_model_parallel_size=2")
    made = checked(done)
    assert (made.parallel.context_parallel, made.parallel.tensor_parallel, made.batch.tokens) == (4, 1, 600)
    assert "context" in why(done, f"{G}.tensor_model_parallel_size")
    with pytest.raises(Refusal, match="ppo_max_token_len_per_gpu"):
        recipe(words[0].replace("4", "3"), *words[1:])
    packed = (f"{A}.ppo_micro_batch_size_per_gpu=2", "actor_rollout_ref.model.use_remove_padding=True")
    assert recipe(words[0], *packed).batch.tokens == 1024  # 2 x 2048 tokens on 4 devices


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["param_offload=True", "optimizer_offload=True", "grad_offload=True"], {"offload": "all"}),
        (["param_offload=True"], {"offload": "params"}),
        (["optimizer_offload=True"], {"offload": "optimizer"}),
        (["param_offload=False", "optimizer_offload=False"], {}),
        (
            ["param_offload=True", "optimizer_offload=True", "tensor_model_parallel_size=2"],
            {"offload": "optimizer", "tensor_parallel": 2},
        ),
    ],
)
def test_offloading(words: list[str], expected: dict[str, Any]) -> None:
    made = recipe(*(f"{G}.{word}" for word in words), "trainer.n_gpus_per_node=8")
    assert changed(made.parallel) == expected


def test_one_device_keeps_its_weights() -> None:
    words = (f"{G}.param_offload=True", f"{G}.optimizer_offload=True", "trainer.n_gpus_per_node=1")
    assert changed(recipe(*words).parallel) == {"offload": "optimizer"}


def test_a_reference_is_offloaded_if_there_is_one() -> None:
    key = "actor_rollout_ref.ref.megatron.param_offload=True"
    assert changed(recipe(key).parallel) == {}
    assert changed(recipe(key, f"{A}.use_kl_loss=True").parallel) == {"offload_reference": True}
    lora = ("actor_rollout_ref.model.lora_rank=8", f"{A}.use_kl_loss=True")
    assert changed(recipe(key, *lora).parallel) == {}  # the reference is the policy without its adapter


def test_the_optimizer_of_megatron() -> None:
    made = recipe(f"{A}.optim.lr=2e-6", f"{A}.optim.betas=[0.8,0.9]", f"{A}.grad_clip=0.5")
    assert (made.optim.betas, made.optim.eps, made.optim.decay_all, made.optim.clip) == ([0.9, 0.999], 1e-8, False, 1.0)
    assert (made.optim.schedule, made.optim.warmup, made.optim.lr) == ("constant", 0.0, 2e-6)
    over = f"+{A}.optim.override_optimizer_config"
    made = recipe(f"{over}.adam_beta2=0.95", f"{over}.adam_eps=1e-6", f"{A}.optim.clip_grad=0.3")
    assert (made.optim.betas, made.optim.eps, made.optim.clip) == ([0.9, 0.95], 1e-6, 0.3)
    cpu = recipe(f"{over}.optimizer_cpu_offload=True", f"{over}.optimizer_offload_fraction=1.0")
    assert changed(cpu.parallel) == {"offload": "optimizer"}


def test_the_schedule_of_megatron() -> None:
    """`min_lr` is a learning rate: 2e-7 of 2e-6 is a tenth. Warm-up steps of 0 select the ratio."""
    optim = f"{A}.optim"
    words = (f"{optim}.lr=2e-6", f"{optim}.min_lr=2e-7", f"{optim}.lr_warmup_steps_ratio=0.1")
    made = recipe(*words, f"{optim}.lr_decay_style=linear", f"{optim}.lr_warmup_steps=0")
    assert (made.optim.schedule, made.optim.min_lr_ratio, made.optim.warmup) == ("linear", pytest.approx(0.1), 0.1)
    made = recipe(*words, f"{optim}.lr_decay_style=cosine", f"{optim}.lr_warmup_steps=5")
    assert (made.optim.schedule, made.optim.warmup) == ("cosine", 5)
    assert recipe(*words).optim.schedule == "constant"


def test_fp16_and_recomputation() -> None:
    made = recipe(f"{G}.dtype=float16", f"+{G}.override_transformer_config.recompute_granularity=full")
    assert (made.model.dtype, made.model.master_weights, made.model.gradient_checkpointing) == ("fp16", True, True)
    made = recipe()
    assert (made.model.dtype, made.model.master_weights, made.model.gradient_checkpointing) == ("bf16", True, False)
    assert recipe(f"{G}.pipeline_model_parallel_size=2").model.gradient_checkpointing


@pytest.mark.parametrize(
    ("word", "key"),
    [
        (f"{A}.optim.lr_decay_style=inverse_square_root", f"{A}.optim.lr_decay_style"),
        (f"{A}.optim.optimizer=muon", f"{A}.optim.optimizer"),
        (f"{A}.optim.exp_avg_dtype=bf16", f"{A}.optim.exp_avg_dtype"),
        (f"+{A}.optim.override_optimizer_config.sgd_momentum=0.5", f"{A}.optim.override_optimizer_config.sgd_momentum"),
        (f"+{G}.override_transformer_config.hidden_dropout=0.1", f"{G}.override_transformer_config.hidden_dropout"),
        (f"+{G}.override_transformer_config.fp8=e4m3", f"{G}.override_transformer_config.fp8"),
        (f"+{G}.override_transformer_config.moe_z_loss_coeff=1", f"{G}.override_transformer_config.moe_z_loss_coeff"),
        (f"+{G}.override_transformer_config.num_layers=3", f"{G}.override_transformer_config.num_layers"),
        (f"{G}.qat.enable=True", f"{G}.qat.enable"),
        (f"{G}.router_replay.mode=R4", f"{G}.router_replay.mode"),
        (f"{G}.router_replay.record_file=routes.pt", f"{G}.router_replay.record_file"),
    ],
)
def test_what_would_change_numbers_is_refused(word: str, key: str) -> None:
    with pytest.raises(Refusal) as refused:
        recipe(word)
    (problem,) = refused.value.problems
    assert problem.where == key
    assert problem.remedy


@pytest.mark.parametrize("group", [A, G])
@pytest.mark.parametrize(("mode", "expected"), [("disabled", "off"), ("R2", "old"), ("R3", "rollout")])
def test_routing_replay(group: str, mode: str, expected: str) -> None:
    """R2 replays the experts of the old log-probs, R3 those of the rollout."""
    recorded = "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
    made = recipe(f"{group}.router_replay.mode={mode}", recorded)
    assert made.algorithm.routing_replay == expected


def test_settings_that_repeat_the_model_are_accepted() -> None:
    group = f"+{G}.override_transformer_config"
    recipe(f"{group}.normalization=RMSNorm", f"{group}.swiglu=True", f"{group}.use_distributed_optimizer=True")
    with pytest.raises(Refusal, match="normalization"):
        recipe(f"{group}.normalization=LayerNorm")


@pytest.mark.parametrize(
    "key", [f"{A}.ulysses_sequence_parallel_size", f"{A}.fsdp_config.ulysses_sequence_parallel_size"]
)
def test_the_tokens_of_ulysses_count_all_devices_of_a_sequence(key: str) -> None:
    """8 devices x 256 tokens are the 2048 tokens of the longest sequence."""
    words = (f"{A}.use_dynamic_bsz=True", f"{A}.ppo_max_token_len_per_gpu=256", f"{key}=8")
    assert checked(convert_verl("main_ppo", [*BASE[:-1], *words])).batch.tokens == 2048


def test_a_warmup_may_start_above_zero() -> None:
    start = f"{A}.optim.lr_warmup_init=1e-7"
    assert (recipe(start).optim.warmup, recipe(start).optim.warmup_start) == (0, None)
    made = recipe(start, f"{A}.optim.lr_warmup_steps=3", f"{A}.optim.lr=2e-6").optim
    assert (made.warmup, made.warmup_start, made.warmup_rounding) == (3, pytest.approx(0.05), "down")


def test_a_schedule_that_ends_before_the_run_is_refused() -> None:
    optim = f"{A}.optim"
    words = (f"{optim}.lr_decay_style=cosine", f"{optim}.lr_decay_steps=50")
    with pytest.raises(Refusal, match="lr_decay_steps"):
        recipe(*words, "trainer.total_training_steps=100")
    assert recipe(*words, "trainer.total_training_steps=50").run.steps == 50


def test_the_configuration_file_names_megatron() -> None:
    command = "python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' "
    (found,), problems, _ = migrated(command + " ".join(BASE[:-1]))
    assert not problems
    assert (checked(found.done).optim.decay_all, checked(found.done).model.gradient_checkpointing) == (False, False)


def test_supervised_training_with_megatron() -> None:
    words = ("data.train_files=t.parquet", "model.path=m", "engine.strategy=megatron", "optim.lr=1e-5")
    sizes = ("engine.tensor_model_parallel_size=2", "engine.pipeline_model_parallel_size=2")
    schedule = ("optim.lr_decay_style=cosine", "optim.min_lr=1e-6", "optim.lr_warmup_steps=10")
    made = checked(convert_verl("sft_trainer", [*words, *sizes, *schedule, "engine.optimizer_offload=True"]))
    assert (made.method, changed(made.parallel)) == ("sft", {"tensor_parallel": 2, "offload": "optimizer"})
    assert (made.optim.schedule, made.optim.warmup, made.optim.decay_all) == ("cosine", 10, False)
    assert (made.optim.min_lr_ratio, made.optim.betas) == (pytest.approx(0.1), [0.9, 0.999])
