"""The plan of an online run: how prompts become updates, what the memory holds, and how long a prompt may be."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, MixtralConfig, PreTrainedConfig, Qwen2Config

from hand_rollouts import question, recipe_of
from lockstep.data.batching import plan_micro_batches
from lockstep.data.encode.prompt_rows import PromptCounts, PromptSet
from lockstep.device.base import Device
from lockstep.device.cpu import Cpu
from lockstep.device.cuda import Cuda
from lockstep.errors import Refusal
from lockstep.parallel.sharding import Grid
from lockstep.preflight import memory_plan
from lockstep.preflight.batch_plan import OnlinePlan, plan_online, prompt_limit
from lockstep.preflight.memory_plan import MemoryPlan, Phase, plan_memory
from lockstep.preflight.model_sizes import count_parameters, reduced_beside
from lockstep.preflight.state_sizes import kv_bytes
from lockstep.recipe.keys_lora import Lora
from lockstep.types import Prompt
from refusals import refuses


class OwnStep(Cpu):
    """Its own step of AdamW takes gradients as they are."""

    adamw = "own"


class Lean(Cpu):
    lean_layers = True


def prompt_set(rows: int, longest: int) -> PromptSet:
    prompts = [Prompt(question(i), [1]) for i in range(rows)]
    return PromptSet([prompts], None, [], counts=PromptCounts(rows, rows, longest))


def planned(rows: int = 20, longest: int = 30, devices: int = 1, **keys: Any) -> OnlinePlan:
    keys = {"batch__prompts": 4, "rollout__n": 3, "rollout__max_tokens": 70, "batch__tokens": 400, **keys}
    return plan_online(recipe_of(**keys), prompt_set(rows, longest), devices)


# -- prompts x samples -> updates --------------------------------------------------------------------------------------


def test_the_lines_count_from_prompts_to_updates() -> None:
    lines = dict(planned(run__steps=9, batch__prompts_per_update=2).lines())
    assert lines["steps"] == "9 of 4 prompts (5.0 an epoch)"
    assert lines["sequences"] == "4 prompts x 3 = 12 a step, up to 100 tokens"
    # Six sequences of 100 tokens into lines of 400.
    assert re.findall(r"\d+", lines["updates"]) == ["2", "6", "2", "1"]


def test_one_update_a_step_by_default() -> None:
    plan = planned(devices=3)
    assert plan.updates == 1
    assert re.findall(r"\d+", dict(plan.lines())["updates"]) == ["1", "12", "1", "3"]


def test_padded_rows_have_no_token_budget() -> None:
    lines = dict(planned(batch__tokens=None, batch__micro_batch_size=2).lines())
    assert lines["updates"] == "1 a step of 12 sequences"


@pytest.mark.parametrize(
    ("keys", "steps"), [({}, 5), ({"run__epochs": 2}, 10), ({"run__steps": 7}, 7), ({"batch__prompts": 6}, 4)], ids=str
)
def test_epochs_are_counted_in_prompts(keys: dict[str, Any], steps: int) -> None:
    assert planned(**keys).steps == steps


def test_passes_over_a_step_multiply_its_updates() -> None:
    assert planned(batch__prompts_per_update=2, algorithm__epochs=3).updates == 6


def test_a_pass_does_not_make_an_update_smaller() -> None:
    """Each of the six updates has 2 prompts x 3 samples."""
    assert (
        "6 a step of 6 sequences" in dict(planned(batch__prompts_per_update=2, algorithm__epochs=3).lines())["updates"]
    )


def test_sequences_over_half_a_line_have_it_alone() -> None:
    """Twelve sequences of 300 tokens, and only one fits into 400."""
    most = len(plan_micro_batches([300] * 12, devices=1, tokens=400, rows=None)[0])
    assert most == 12
    assert f"at most {most} micro-batches" in dict(planned(longest=230).lines())["updates"]


# -- memory ------------------------------------------------------------------------------------------------------------

CONFIG = Qwen2Config(
    vocab_size=100,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)
# Embedding and head; a layer: queries and output, keys and values (half as wide), three biases, feed-forward, norms.
LAYER = 2 * 64 * 64 + 2 * 64 * 32 + (64 + 32 + 32) + 3 * 64 * 128 + 2 * 64
PARAMETERS = 2 * 100 * 64 + 2 * LAYER + 64
LONGEST, ROWS = 50, 12


def memory(devices: int = 1, **keys: Any) -> MemoryPlan:
    keys = {"batch__prompts": 4, "batch__tokens": 400, **keys}
    return plan_memory(recipe_of(**keys), CONFIG, devices, LONGEST, ROWS)


def phase(plan: MemoryPlan, name: str) -> Phase:
    (found,) = [each for each in plan.phases if each.name == name]
    return found


def test_a_policy_alone_keeps_its_weights_and_its_moments_while_it_generates() -> None:
    plan = memory(method="dr_grpo", rollout__n=3)
    assert plan.parameters == plan.trained == PARAMETERS
    generation = phase(plan, "generation")
    assert generation.weights == 4 * PARAMETERS
    assert generation.optimizer == 2 * 4 * PARAMETERS
    assert generation.gradients == 0
    # Keys and values of two heads of 16, in two layers, in fp32, for each token of twelve sequences.
    assert kv_bytes(CONFIG, 4) == 2 * 2 * (2 * 16) * 4
    assert generation.activations == 12 * LONGEST * 512
    assert plan.checkpoint_bytes == 3 * 4 * PARAMETERS


def test_a_reference_stands_beside_the_policy_in_every_phase() -> None:
    alone, both = memory(method="dr_grpo", rollout__n=3), memory(method="grpo", rollout__n=3)
    for one, two in zip(alone.phases, both.phases, strict=True):
        assert two.weights - one.weights == 4 * PARAMETERS
        assert two.optimizer == one.optimizer
    assert both.checkpoint_bytes == alone.checkpoint_bytes


def test_a_critic_brings_weights_and_moments_and_is_saved() -> None:
    alone = memory(method="reinforce")
    critic = memory(method="ppo", algorithm__kl__where="none")
    for one, two in zip(alone.phases, critic.phases, strict=True):
        assert two.weights - one.weights == 4 * PARAMETERS
        assert two.optimizer - one.optimizer == 2 * 4 * PARAMETERS
    assert critic.checkpoint_bytes == 2 * alone.checkpoint_bytes


def test_masters_and_shards() -> None:
    plan = memory(2, method="ppo", model__dtype="bf16")
    backward = phase(plan, "forward and backward")
    # Policy, reference and critic in bf16 over two devices; two of them with fp32 moments and masters.
    # Beside them the gathered weights: embedding, head and last norm, and one layer with the buffer it arrives in.
    assert backward.weights == 3 * 2 * PARAMETERS // 2 + 2 * (2 * 100 * 64 + 64 + 2 * LAYER)
    assert backward.optimizer == 2 * 12 * PARAMETERS // 2
    # Each rank generates with the whole policy.
    assert phase(plan, "generation").weights == 2 * PARAMETERS + 2 * 2 * PARAMETERS // 2


def test_a_server_has_a_cache_of_its_own_and_gets_the_weights_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several devices keep their shards while they send the weights, with a tensor, or two buckets for a broadcast."""
    monkeypatch.setattr(memory_plan, "BUCKET_BYTES", 40_000)
    largest = 64 * 128 * 4

    def planned(devices: int, **more: Any) -> Phase:
        return phase(memory(devices, method="dr_grpo", rollout__engine="vllm", **more), "generation")

    assert planned(1).weights == 4 * PARAMETERS
    assert planned(16).weights == 4 * PARAMETERS // 16 + largest
    assert planned(16, rollout__weight_sync="collective").weights == 4 * PARAMETERS // 16 + 2 * 40_000
    assert planned(16, rollout__weight_sync="memory").weights == 4 * PARAMETERS
    # An adapter of rank 4: of its matrices, those of the feed-forward are the largest.
    adapters = 2 * 4 * (4 * 64 + 2 * (64 + 32) + 3 * (64 + 128))
    adapter = planned(16, model__lora=Lora(rank=4)).weights
    assert adapter == pytest.approx(4 * (PARAMETERS + adapters) // 16 + 4 * 4 * 128, abs=16)
    assert planned(1).activations == planned(16).activations == 0
    assert phase(memory(16, method="dr_grpo"), "generation").weights == 4 * PARAMETERS


def test_gradients_that_several_devices_have_not_reduced_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a layer and of what is outside the layers, each with an fp32 buffer, and that of the output head."""
    recipe = recipe_of(method="sft", batch__tokens=4, model__dtype="bf16")
    of_layer, of_outside = reduced_beside(count_parameters(recipe, CONFIG), CONFIG, Grid(1, 2), 2)
    assert of_layer == (2 + 4) * LAYER + 2 * 100 * 64
    assert of_outside == (2 + 4) * (2 * 100 * 64 + 64)

    def planned(devices: int, *reduced: int) -> int:
        monkeypatch.setattr(memory_plan, "reduced_beside", lambda *_: reduced)
        return phase(plan_memory(recipe, CONFIG, devices, 2, 2), "forward and backward").total

    most = 10**7
    assert planned(2, 2 * most, 0) - planned(2, most, 0) == most
    assert planned(2, 0, 2 * most) - planned(2, 0, most) == most
    assert planned(1, most, most) == planned(1, 0, 0)


def test_an_adapters_reference_is_the_model_under_it() -> None:
    lora = {"model__lora": {"rank": 2, "alpha": 4.0}, "rollout__n": 3}
    assert phase(memory(method="grpo", **lora), "load") == phase(memory(method="dr_grpo", **lora), "load")


def test_a_reference_of_its_own_is_counted_as_large_as_it_is(tmp_path: Path) -> None:
    lora = {"model__lora": {"rank": 2, "alpha": 4.0}, "rollout__n": 3}
    larger = Qwen2Config(**{**CONFIG.to_dict(), "num_hidden_layers": 3, "layer_types": None})
    for config, extra in ((CONFIG, 0), (larger, LAYER)):
        folder = tmp_path / str(extra)
        config.save_pretrained(folder)
        apart = memory(method="grpo", algorithm__kl__reference=str(folder), **lora)
        added = phase(apart, "load").weights - phase(memory(method="grpo", **lora), "load").weights
        assert added == 4 * (PARAMETERS + extra)


def test_each_device_has_the_cache_of_its_own_prompts() -> None:
    """Twelve sequences on one device, of five prompts three each on two."""
    one, two = (memory(devices, method="dr_grpo", rollout__n=3, batch__prompts=5) for devices in (1, 2))
    assert phase(one, "generation").activations == 15 * LONGEST * 512
    assert phase(two, "generation").activations == 9 * LONGEST * 512


def test_a_cache_that_is_kept_stands_beside_the_update() -> None:
    keys = {"method": "dr_grpo", "rollout__n": 3, "batch__prompts": 4, "batch__tokens": 400}
    cache = 12 * LONGEST * 512
    for free, most, kept in ((None, cache, True), (None, cache - 1, False), (True, cache, False), (False, 0, True)):
        recipe = recipe_of(**keys, rollout__free_cache=free)
        given = plan_memory(recipe, CONFIG, 1, LONGEST, ROWS)
        plan = plan_memory(recipe, CONFIG, 1, LONGEST, ROWS, keeps_cache=most)
        without = plan_memory(recipe_of(**keys, rollout__free_cache=True), CONFIG, 1, LONGEST, ROWS)
        for one, two in zip(without.phases, plan.phases, strict=True):
            beside = kept and one.name not in ("load", "generation")
            assert two.activations - one.activations == (cache if beside else 0), (free, most, one.name)
        assert given.phases[0] == plan.phases[0]


def test_an_adapters_critic_trains_its_adapter_and_head_alone() -> None:
    lora = {"model__lora": {"rank": 2, "alpha": 4.0}, "algorithm__kl__where": "none"}
    plan = memory(method="ppo", **lora)
    # Two moments of fp32 for the policy's adapter, and as many and a head for the critic's.
    assert phase(plan, "generation").optimizer == 2 * 4 * (2 * plan.trained + 64)


@pytest.mark.parametrize(
    ("keys", "tokens"),
    [
        ({"rollout__n": 3}, 12 * LONGEST),
        ({"rollout__n": 3, "rollout__max_sequences": 5}, 5 * LONGEST),
        ({"rollout__n": 3, "rollout__cache_gb": 1e-4}, 100_000 / 512),
        ({"rollout__n": 3, "rollout__cache_gb": 1.0}, 12 * LONGEST),
    ],
    ids=str,
)
def test_the_cache_is_for_the_sequences_at_once_within_its_limit(keys: dict[str, Any], tokens: float) -> None:
    assert phase(memory(method="dr_grpo", **keys), "generation").activations == tokens * 512


# Measured on an H200 (bench/results/sft_h200_bf16_*_1024.json): 16 rows of 1,024 tokens, one micro-batch, masters.
@pytest.mark.parametrize(
    ("hidden", "layers", "heads", "keys", "inner", "gigabytes"),
    [(896, 24, 14, 2, 4864, 20.8), (1536, 28, 12, 2, 8960, 49.3)],
    ids=["0.5B", "1.5B"],
)
def test_lean_layers_are_planned_as_they_were_measured(
    hidden: int, layers: int, heads: int, keys: int, inner: int, gigabytes: float
) -> None:
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        intermediate_size=inner,
        tie_word_embeddings=True,
    )
    recipe = recipe_of(method="sft", model__dtype="bf16", batch__tokens=16384, batch__rows_per_update=16)
    plan = plan_memory(recipe, config, 1, 1024, 16, device=Cuda)
    assert 1.0 <= plan.peak.total / 1e9 / gigabytes <= 1.08
    assert plan_memory(recipe, config, 1, 1024, 16, device=OwnStep).peak.total > 1.3 * plan.peak.total


def test_gradients_of_one_micro_batch_stay_as_they_are_where_the_step_takes_them_so() -> None:
    """With masters. Those of several are added up in fp32, and those of the last one stand beside the sum."""
    recipe = recipe_of(method="sft", model__dtype="bf16", batch__tokens=4)

    def gradients(rows: int, devices: int = 1, device: type[Device] = OwnStep) -> tuple[int, int]:
        """At the end of a backward pass, which is when most is there with so few tokens, and when they are used."""
        plan = plan_memory(recipe, CONFIG, devices, 2, rows, device=device)
        return phase(plan, "forward and backward").gradients, phase(plan, "optimizer step").gradients

    assert gradients(2) == (2 * PARAMETERS, 2 * PARAMETERS)
    assert gradients(2, device=Cpu) == (4 * PARAMETERS, 4 * PARAMETERS)
    assert gradients(2, 2) == (2 * PARAMETERS, 2 * PARAMETERS)  # half of those in fp32: slices are stepped by torch
    assert gradients(3) == ((4 + 2) * PARAMETERS, 4 * PARAMETERS)
    assert gradients(3, 2) == ((2 + 1) * PARAMETERS, 2 * PARAMETERS)


def test_layers_that_are_not_the_devices_own_are_not_planned_lean() -> None:
    dropped = recipe_of(method="sft", batch__tokens=400, model__dtype="bf16", model__lora={"rank": 2, "dropout": 0.1})
    plain = recipe_of(method="sft", batch__tokens=400, model__dtype="bf16", model__attention="sdpa")
    whole = recipe_of(method="sft", batch__tokens=400, model__dtype="bf16")
    for recipe, devices in ((dropped, 1), (plain, 1), (whole, 2)):
        plans = [plan_memory(recipe, CONFIG, devices, LONGEST, ROWS, device=kind) for kind in (Cpu, Lean)]
        assert plans[0] == plans[1]


@pytest.mark.parametrize(("lora", "inner", "more"), [(None, 2, 256), ({"rank": 2}, 3, 768)])
def test_lean_layers_by_hand(lora: dict[str, int] | None, inner: int, more: int) -> None:
    """Two layers in bf16, hidden 64, four heads and two of keys of 16, a feed-forward of 128. The kernels recompute the
    activated gate, and without adapters the product. One layer has more in its backward pass: without an adapter the
    gradients of the attention (768 bytes of a token, its feed-forward has 512), with an adapter three gradients of the
    feed-forward."""
    recipe = recipe_of(method="sft", batch__tokens=400, model__dtype="bf16", **({"model__lora": lora} if lora else {}))
    plans = [plan_memory(recipe, CONFIG, 1, LONGEST, ROWS, device=kind) for kind in (Cpu, Lean)]
    theirs, lean = (plan.phases[1].activations for plan in plans)
    tokens = min(400, LONGEST * ROWS)
    each = 2 * (4 * 64 + 3 * (4 + 2 * 2) * 16 + 4 * 16 + 4 * 128) + 2 * 2 * 4 * 64
    ours = 2 * (4 * 64 + (4 + 2 * 2) * 16 + 4 * 16 + inner * 128)
    assert theirs - lean == 2 * tokens * (each - ours) - tokens * more


def test_fp32_layers_have_the_fused_feed_forward_only() -> None:
    recipe = recipe_of(method="sft", batch__tokens=400)
    plans = [plan_memory(recipe, CONFIG, 1, LONGEST, ROWS, device=kind) for kind in (Cpu, Lean)]
    theirs, lean = (plan.phases[1].activations for plan in plans)
    assert theirs - lean == 2 * min(400, LONGEST * ROWS) * 4 * 2 * 128


@pytest.mark.parametrize("name", ["memory_h200", "memory_activations_h200", "memory_7b_h200"])
def test_planned_peaks_are_those_of_an_h200(name: str) -> None:
    """The stored measurements of bench/memory.py, with today's plan."""
    bench = Path(__file__).parents[2] / "bench"
    sys.path.insert(0, str(bench))
    from memory import SHAPE, planned
    from memory import recipe_of as case_recipe
    from shapes import SHAPES

    config = SHAPES["qwen2.5-7b"].config() if "7b" in name else Qwen2Config(**SHAPE)
    for result in json.loads((bench / "results" / f"{name}.json").read_text())["results"]:
        measured, keys = result["measured_gib"], ("planned_gib", "measured_gib", "ratio", "update_s", "losses")
        case = {key: value for key, value in result.items() if key not in keys}
        peak = planned(case_recipe(case, Path("-")), config, Cuda).peak.total / 2**30
        assert peak == pytest.approx(measured, rel=0.07), case


def test_an_offline_plan_has_no_generation() -> None:
    plan = plan_memory(recipe_of(method="sft", batch__tokens=400), CONFIG, 1, LONGEST, ROWS)
    assert "generation" not in [each.name for each in plan.phases]


# -- how long a prompt may be ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(tiny_folder: Path) -> Any:
    """A context of 100 tokens."""
    config = copy.copy(AutoConfig.from_pretrained(tiny_folder))
    config.max_position_embeddings = 100
    return config


@pytest.mark.parametrize(
    ("keys", "limit"),
    [
        ({"rollout__max_tokens": 60}, 40),
        ({"rollout__max_tokens": 60, "batch__tokens": 90}, 30),
        ({"rollout__max_tokens": 60, "batch__micro_batch_size": 2}, 40),
        ({"rollout__max_tokens": 60, "data__max_prompt_tokens": 40}, 40),
        ({"rollout__max_tokens": 60, "data__max_prompt_tokens": 7}, 7),
        ({"rollout__max_tokens": 99}, 1),
    ],
    ids=str,
)
def test_a_prompt_gets_what_a_response_leaves(config: Any, keys: dict[str, Any], limit: int) -> None:
    assert prompt_limit(recipe_of(**keys), config) == limit


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"rollout__max_tokens": 100}, "model's context (100)"),
        ({"rollout__max_tokens": 60, "data__max_prompt_tokens": 41}, "set data.max_prompt_tokens to 40 or less"),
        ({"rollout__max_tokens": 60, "batch__tokens": 60}, "batch.tokens (60)"),
        ({"rollout__max_tokens": 60, "batch__tokens": 65, "data__max_prompt_tokens": 6}, "raise batch.tokens"),
    ],
    ids=str,
)
def test_no_room_for_a_prompt_is_refused(config: Any, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(Refusal) as caught:
        prompt_limit(recipe_of(**keys), config)
    (problem,) = caught.value.problems
    assert problem.where == "rollout.max_tokens"
    assert said in str(problem)


def test_a_model_without_a_context_has_no_limit_of_its_own() -> None:
    recipe = recipe_of(batch__micro_batch_size=2, data__max_prompt_tokens=None)
    assert prompt_limit(recipe, PreTrainedConfig()) == 2**31


# -- what lives on the host -------------------------------------------------------------------------------------------


def test_the_optimizer_on_the_host_is_on_the_device_for_its_step_only() -> None:
    keys = {"method": "dr_grpo", "rollout__n": 3}
    kept, moved = memory(**keys), memory(**keys, parallel__offload="optimizer")
    for one, two in zip(kept.phases, moved.phases, strict=True):
        gone = 0 if one.name in ("load", "optimizer step") else 2 * 4 * PARAMETERS
        assert (one.weights, one.gradients, one.activations) == (two.weights, two.gradients, two.activations)
        assert one.optimizer - two.optimizer == gone, one.name
    # A small model's state is brought whole.
    assert phase(moved, "optimizer step").optimizer == 2 * 4 * PARAMETERS
    (told,) = [freed for freed in kept.freed if freed.setting == "parallel.offload=optimizer"]
    assert (told.bytes, told.chosen) == (2 * 4 * PARAMETERS, False)
    assert [freed.setting for freed in moved.freed if freed.chosen] == ["parallel.offload=optimizer"]


def test_weights_on_the_host_leave_a_layer_on_the_device() -> None:
    keys = {"method": "sft", "batch__rows_per_update": 4}
    kept, moved = (
        plan_memory(recipe_of(**keys, batch__tokens=400, parallel__offload=one), CONFIG, 2, LONGEST, ROWS)
        for one in ("none", "all")
    )
    layer, share = 4 * PARAMETERS // 2, 4 * PARAMETERS // 2
    # What a pass has gathered: the weights outside the layers, a layer and its buffer.
    hidden, words = CONFIG.hidden_size, CONFIG.vocab_size
    outside = hidden * (words if CONFIG.tie_word_embeddings else 2 * words) + hidden
    beside = 4 * (outside + 2 * ((PARAMETERS - outside) // CONFIG.num_hidden_layers))
    assert phase(kept, "forward and backward").weights == share + beside
    assert phase(moved, "forward and backward").weights == beside
    assert phase(moved, "forward and backward").gradients == 0
    assert phase(moved, "forward and backward").optimizer == 0
    assert phase(moved, "optimizer step").gradients == 4 * PARAMETERS // 2
    assert {freed.setting: freed.bytes for freed in kept.freed} == {
        "parallel.offload=optimizer": 2 * 4 * PARAMETERS // 2,
        "parallel.offload=params": share + 4 * PARAMETERS // 2 - layer,
        "parallel.offload=all": 2 * 4 * PARAMETERS // 2 + share + 4 * PARAMETERS // 2 - layer,
    }


def test_loading_takes_a_share_and_what_is_gathered_to_enter_the_model() -> None:
    keys = {"method": "sft", "batch__rows_per_update": 4, "batch__tokens": 400}

    def load(devices: int, config: Any = CONFIG, **more: Any) -> int:
        return phase(plan_memory(recipe_of(**keys, **more), config, devices, LONGEST, ROWS), "load").total

    hidden, words = CONFIG.hidden_size, CONFIG.vocab_size
    outside = hidden * (words if CONFIG.tie_word_embeddings else 2 * words) + hidden
    layer = (PARAMETERS - outside) // CONFIG.num_hidden_layers
    beside = outside + 2 * layer + max(outside, layer)
    assert load(1) == 4 * PARAMETERS
    assert load(4) == 4 * (PARAMETERS // 4 + beside)
    # Two copies of two slices each.
    assert load(4, parallel__shard=2) == 4 * (PARAMETERS // 2 + beside)
    # Slices that live on the host never were on the device.
    assert load(4, parallel__offload="all") == 4 * beside
    # Of merged experts a device has its own too: of a layer that a tensor group divides the norms and the router are
    # whole. What every process reads whole, as a quantised model, is divided on the device before it is sliced.
    sizes = {"hidden_size": 64, "intermediate_size": 4096, "num_hidden_layers": 16, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2}
    merged = MixtralConfig(**sizes, **heads, tie_word_embeddings=False)
    quantised = MixtralConfig(**sizes, **heads, tie_word_embeddings=False, quantization_config={"quant_method": "fp8"})
    attention, experts, rest = 2 * 64 * 64 + 2 * 64 * 32, 2 * 3 * 64 * 4096, 2 * 64 + 2 * 64
    whole, both = 16 * (attention + experts + rest) + 2 * 64 * 64 + 64, 16 * (attention + experts) // 2
    entered = 2 * 64 * 64 + 64 + 3 * ((attention + experts) // 2 + rest)
    assert load(8, merged, parallel__tensor_parallel=2) == 4 * (whole // 8 + entered)
    assert load(8, quantised, parallel__tensor_parallel=2) == 4 * (whole // 8 + both - both // 4)


def test_a_model_that_every_process_reads_whole_is_told() -> None:
    def remarks(devices: int, **more: Any) -> tuple[str, ...]:
        config = MixtralConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, vocab_size=64, **more)
        return plan_memory(recipe_of(method="sft", batch__rows_per_update=4), config, devices, LONGEST, ROWS).remarks

    quantised = {"quantization_config": {"quant_method": "fp8"}}
    assert remarks(2) == remarks(1, **quantised) == ()
    (told,) = remarks(2, **quantised)
    assert "(0.0 GiB each)" in told


def test_a_reference_on_the_host_comes_for_its_own_pass() -> None:
    keys = {"method": "grpo", "rollout__n": 3}
    kept, moved = memory(**keys), memory(**keys, parallel__offload_reference=True)
    assert [one.name for one in moved.phases] == [*(one.name for one in kept.phases), "reference"]
    for one in kept.phases:
        gone = 0 if one.name == "load" else 4 * PARAMETERS
        assert one.weights - phase(moved, one.name).weights == gone, one.name
    assert phase(moved, "reference").weights == phase(kept, "validation").weights
    assert [freed.bytes for freed in kept.freed if freed.setting == "parallel.offload_reference=true"] == [
        4 * PARAMETERS
    ]


# A reward model of the policy's sizes has no head but one row; a process reward model is a causal LM.
REWARD = 100 * 64 + 2 * LAYER + 64 + 64


def config_folder(folder: Path, architecture: str, dtype: str | None) -> str:
    settings = copy.deepcopy(CONFIG)
    settings.architectures, settings.num_labels = [architecture], 1
    settings.dtype = dtype
    settings.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("devices", [1, 2])
def test_reward_models_are_whole_on_every_device_and_leave_it_where_that_is_asked(tmp_path: Path, devices: int) -> None:
    half, single = (
        config_folder(tmp_path / str(dtype), "Qwen2ForSequenceClassification", dtype) for dtype in ("bfloat16", None)
    )
    process = config_folder(tmp_path / "process", "Qwen2ForCausalLM", "float32")
    # In the precision that each is stored in, whatever the policy's; fp32 where it does not say.
    for keys, own in (
        ({"reward__model": half}, 2 * REWARD),
        ({"reward__model": [half, single]}, (2 + 4) * REWARD),
        ({"reward__process": process}, 4 * PARAMETERS),
        ({"reward__model": half, "reward__process": process}, 2 * REWARD + 4 * PARAMETERS),
    ):
        shared = {"method": "grpo", "rollout__n": 3, "parallel__offload_reference": True}
        none, kept = memory(devices, **shared), memory(devices, **shared, **keys)
        moved = memory(devices, **shared, **keys, parallel__offload_reward=True)
        for one in none.phases:
            assert phase(kept, one.name).weights - one.weights == own, one.name
            # It scores while other responses are still generated.
            assert phase(moved, one.name).weights - one.weights == (own if one.name == "generation" else 0), one.name
            assert phase(kept, one.name).activations == one.activations
        for plan, chosen in ((kept, False), (moved, True)):
            (told,) = [freed for freed in plan.freed if freed.setting == "parallel.offload_reward=true"]
            assert (told.bytes, told.chosen) == (own, chosen)
        assert not [freed for freed in none.freed if "reward" in freed.setting]


def test_a_reward_model_that_is_none_is_refused_by_the_plan(tmp_path: Path) -> None:
    wrong = config_folder(tmp_path / "wrong", "Qwen2ForCausalLM", None)
    with refuses("reward.model", "wrong-model-kind", "Qwen2ForCausalLM"):
        memory(method="grpo", reward__model=wrong)


def test_a_critics_optimizer_on_the_host() -> None:
    keys = {"method": "ppo", "rollout__n": 1}
    kept, moved = memory(**keys), memory(**keys, parallel__offload_critic="optimizer")
    assert phase(kept, "generation").optimizer - phase(moved, "generation").optimizer == 2 * 4 * PARAMETERS
    assert phase(kept, "optimizer step").optimizer == phase(moved, "optimizer step").optimizer


def test_activations_on_the_host_leave_two_layers_on_the_device() -> None:
    config = Qwen2Config(**{**CONFIG.to_dict(), "num_hidden_layers": 5, "layer_types": None})
    keys = {"method": "sft", "batch__rows_per_update": 4, "batch__tokens": 400, "model__dtype": "fp32"}

    def plans(**more: Any) -> list[MemoryPlan]:
        switched = (recipe_of(**keys, **more, model__activation_offload=on) for on in (False, True))
        # Two rows of the longest are a micro-batch of 100 tokens.
        return [plan_memory(recipe, config, 1, LONGEST, 2) for recipe in switched]

    # Four tensors of 64 numbers, three times queries, keys and values of 4 + 2 + 2 heads of 16, the attention's output,
    # four of the feed-forward's 128, all in fp32; and four fp32 copies of 64 in the norms.
    layer = 100 * 4 * (4 * 64 + 3 * 8 * 16 + 64 + 4 * 128 + 4 * 64)
    states = 100 * 4 * 64
    for more, gone in (({}, 3 * layer), ({"model__gradient_checkpointing": True}, 3 * states)):
        kept, moved = plans(**more)
        for one, two in zip(kept.phases, moved.phases, strict=True):
            assert one.activations - two.activations == (gone if one.name == "forward and backward" else 0), one.name
        (told,) = [freed for freed in kept.freed if freed.setting == "model.activation_offload=true"]
        assert (told.bytes, told.chosen) == (gone, False)
        assert [freed.setting for freed in moved.freed if freed.chosen] == ["model.activation_offload=true"]
    # The head's chunk of logits is three copies of 100 words, its gradient 100 x 64. With checkpointing the chunk is
    # freed before the larger layer is computed again.
    (_, whole), (_, checkpointed) = plans(), plans(model__gradient_checkpointing=True)
    head = 3 * 4 * 100 * 100 + 4 * 100 * 64
    assert phase(whole, "forward and backward").activations == 2 * layer + head
    assert phase(checkpointed, "forward and backward").activations == 2 * states + layer + 4 * 100 * 64
    # Two layers have nothing that could wait.
    assert "model.activation_offload=true" not in {freed.setting for freed in memory(method="dr_grpo").freed}


def test_slices_are_those_of_one_copy() -> None:
    whole, copies = memory(4, method="dr_grpo"), memory(4, method="dr_grpo", parallel__shard=2)
    assert phase(whole, "optimizer step").weights == 4 * PARAMETERS // 4
    assert phase(copies, "optimizer step").weights == 4 * PARAMETERS // 2
