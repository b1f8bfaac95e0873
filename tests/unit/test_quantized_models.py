"""Models whose frozen weights are quantised: read tensor by tensor, exported, and refused where nothing is frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_models import write_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from allocated import allocated, marked
from lockstep.kernels.quantized.formats import dequantize, quantize
from lockstep.kernels.quantized.quantized_experts import quantized_experts
from lockstep.kernels.quantized.quantized_linear import quantized_layers
from lockstep.model import load_folder
from lockstep.model.export_check import Verification, probe_of
from lockstep.model.export_folder import export_model, export_value_model
from lockstep.model.load import load_config, load_policy, load_value_model
from lockstep.model.miniature import miniature_config, randomise
from lockstep.model.quantized.merged_weights import RECORD
from lockstep.model.resolve import folders_of, model_folder
from lockstep.model.weights import trained_weights
from lockstep.preflight.model_sizes import count_parameters
from lockstep.recipe.schema import Lora, Model, Recipe
from recipe_files import BASE, keys, refused, write
from refusals import has_problem, refuses

CPU = torch.device("cpu")


def settings_of(folder: Path, format: Any = "nf4", **more: Any) -> Model:
    return Model(path=str(folder), **{"quantize": format, "lora": Lora(rank=4, alpha=8.0), **more})


@torch.no_grad()
def moved(module: Any) -> dict[str, torch.Tensor]:
    """The trained weights, after training that moved all of them."""
    torch.manual_seed(1)
    for _, weight in module.trainable():
        weight.add_(torch.randn_like(weight), alpha=0.05)
    return trained_weights(module.stored)


# Loading


@pytest.mark.slow
def test_the_original_model_is_never_in_memory(tmp_path: Path, tiny_folder: Path) -> None:
    """A load needs the codes, the rest of the model, and a few tensors at a time. The largest tensor has 0.5 MB."""
    config = LlamaConfig(
        vocab_size=259, hidden_size=256, intermediate_size=512, num_hidden_layers=12, num_attention_heads=4
    )
    folder = write_model(tmp_path / "wide", config, tiny_folder)
    # A mapped file counts completely while it is open, so each file has few tensors.
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="600KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert size > 30e6
    settings = settings_of(folder)
    load_policy(settings, CPU, "sdpa", 0)  # imports and trials are done once
    with allocated() as held:
        kept = marked("quantised", load_folder.load_base)(AutoModelForCausalLM, str(folder), settings, None, CPU, None)[
            1
        ]
    own = sum(parameter.numel() * parameter.element_size() for parameter in kept.parameters())
    assert own < size / 4
    assert held["quantised"] < own + 8e6 < size / 2
    with allocated() as held:
        marked("whole", load_folder.load_base)(
            AutoModelForCausalLM, str(folder), settings_of(folder, None), None, CPU, None
        )
    assert held["whole"] > size


@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_codes_come_from_the_values_of_the_files(tmp_path: Path, tiny_folder: Path, format: str) -> None:
    """Not from values that were rounded to the dtype of the model."""
    stored = load_file(tiny_folder / "model.safetensors")
    for dtype in ("fp32", "bf16"):
        policy = load_policy(settings_of(tiny_folder, format, dtype=dtype), CPU, "sdpa", 0)
        for name, layer in quantized_layers(policy.causal_lm):
            exact = quantize(stored[f"{name.removesuffix('.base_layer')}.weight"], format)
            assert torch.equal(layer.weight, dequantize(exact, layer.dtype))
            assert torch.equal(layer.codes, exact.codes)


def test_a_model_that_cannot_be_streamed_is_loaded_whole(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(tiny_folder, dtype="bf16")
    streamed = load_policy(settings, CPU, "sdpa", 0)
    monkeypatch.setattr(load_folder, "streamed", lambda *_: None)
    with pytest.warns(UserWarning, match="host memory"):
        whole = load_policy(settings, CPU, "sdpa", 0)
    one, other = dict(streamed.named_parameters()), dict(whole.named_parameters())
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)


@pytest.mark.daily("qwen3_moe")
@pytest.mark.parametrize("kind", ["qwen3_moe", "granitemoe", "deepseek_v3", "gpt_oss"])
def test_experts_are_streamed_into_stacks_of_codes(tmp_path: Path, kind: str) -> None:
    model = AutoModelForCausalLM.from_config(miniature_config(AutoConfig.for_model(kind)))
    randomise(model)
    model.save_pretrained(tmp_path / kind)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / kind)
    _, coded, _ = load_folder.load_base(
        AutoModelForCausalLM, str(tmp_path / kind), settings_of(tmp_path), None, CPU, None
    )
    stacks = list(quantized_experts(coded))
    assert stacks
    for name, experts in stacks:
        for part in experts.stacks:
            exact = quantize(model.get_submodule(name).get_parameter(part), "nf4")
            assert torch.equal(experts.stack(part).dequantized(), dequantize(exact, torch.float32)), (name, part)


def test_a_weight_that_is_not_finite_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    folder = write_model(tmp_path / "broken", model.config, tiny_folder)
    model.save_pretrained(folder)
    with refuses("model.path", "not-finite", "layers.1.mlp.up_proj.weight"):
        load_policy(settings_of(folder), CPU, "sdpa", 0)


# Export


def exported(settings: Model, out: Path, **how: Any) -> tuple[Any, Verification]:
    policy = load_policy(settings, CPU, "sdpa", 0)
    weights = moved(policy)
    probe = probe_of(policy, CPU)
    made = export_model(settings, weights, out, where="test", folders=folders_of(settings), probe=probe, **how)
    return policy, made


@pytest.mark.daily("nf4-bf16-True", "nf4-fp32-False", "int8-fp32-True", "fp8-bf16-False")
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("format", ["nf4", "int8", "fp8"])
def test_the_merged_model_has_the_trained_log_probs(
    tmp_path: Path, tiny_folder: Path, format: str, dtype: Any, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written tensor by tensor or in memory, merged weights are dequantised weights plus the adapter, rounded once."""
    if not streams:
        monkeypatch.setattr("lockstep.model.export_folder.merged_weights", lambda *_: None)
    policy, made = exported(settings_of(tiny_folder, format, dtype=dtype), tmp_path / "out")
    assert made.done
    assert "plain transformers" in made.sentence
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name, layer in policy.causal_lm.named_modules():
        if hasattr(layer, "lora_A"):
            b, a = (getattr(layer, part)["default"].weight.float() for part in ("lora_B", "lora_A"))
            exact = layer.get_base_layer().weight.float() + layer.scaling["default"] * (b @ a)
            torch.testing.assert_close(
                stored[f"{name}.weight"].float(), exact, rtol=1e-2 if dtype == "bf16" else 1e-5, atol=1e-6
            )


def test_an_adapter_is_verified_on_the_quantised_weights(tmp_path: Path, tiny_folder: Path) -> None:
    _, made = exported(settings_of(tiny_folder), tmp_path / "out", adapter=True)
    assert made.done
    assert "nf4" in made.sentence
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_an_exported_adapter_is_merged_into_the_weights_it_was_trained_on(tmp_path: Path, tiny_folder: Path) -> None:
    """`model.path` may name an adapter. Merged into the original weights it would be another model."""
    policy, _ = exported(settings_of(tiny_folder), tmp_path / "adapter", adapter=True)
    probe = probe_of(policy, CPU)
    merged = model_folder(str(tmp_path / "adapter"))
    found = probe_of(load_policy(Model(path=merged), CPU, "sdpa", 0), CPU)
    assert found["values"] == pytest.approx(probe["values"], abs=1e-4)
    (tmp_path / "adapter" / RECORD).unlink()
    original = probe_of(load_policy(Model(path=model_folder(str(tmp_path / "adapter"))), CPU, "sdpa", 0), CPU)
    assert original["values"] != pytest.approx(probe["values"], abs=1e-3)
    (tmp_path / "adapter" / RECORD).write_text("[]")
    with refuses("model.path", "damaged-file", RECORD):
        model_folder(str(tmp_path / "adapter"))


@pytest.mark.slow
def test_a_continued_adapter_needs_the_format_it_was_trained_on(tmp_path: Path, tiny_folder: Path) -> None:
    exported(settings_of(tiny_folder), tmp_path / "adapter", adapter=True)
    lora = Lora(adapter=str(tmp_path / "adapter"))
    same = settings_of(tiny_folder).model_copy(update={"lora": lora})
    for key, value in (("quantize", None), ("quantize", "int8"), ("double_quantize", False)):
        with refuses(f"model.{key}", "changed-setting", "nf4" if key == "quantize" else "true", remedy=f"model.{key}="):
            folders_of(same.model_copy(update={key: value}))
    assert folders_of(same).adapter == str(tmp_path / "adapter")
    (tmp_path / "adapter" / RECORD).unlink()  # an adapter of another program
    assert folders_of(same.model_copy(update={"quantize": "int8"})).adapter == str(tmp_path / "adapter")


@pytest.mark.slow
def test_a_reward_model_is_exported_with_its_adapter_merged(tmp_path: Path, tiny_folder: Path) -> None:
    settings = settings_of(tiny_folder)
    model = load_value_model(settings, settings.path, CPU, "sdpa", 0, key="model.path")
    assert list(quantized_layers(model.decoder))
    weights, out = moved(model), tmp_path / "out"
    made = export_value_model(
        settings, weights, out, where="test", folders=folders_of(settings), probe=probe_of(model, CPU)
    )
    assert made.done, made.sentence
    assert AutoModelForSequenceClassification.from_pretrained(out).num_labels == 1


# Refusals


def test_full_fine_tuning_of_quantised_weights_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {**BASE, "model": {"path": "m", "quantize": "nf4"}})
    assert has_problem(refused(path), "model.quantize", remedy="model.lora.rank")


def test_keys_without_effect_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {**BASE, "model": {"path": "m", "quantize_exclude": ["q_proj"], "lora": {"rank": 2}}})
    assert "model.quantize_exclude" in keys(refused(path))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_with_other_weights_is_refused(tmp_path: Path, engine: str) -> None:
    recipe = {"method": "grpo", "model": {"path": "m", "quantize": "nf4", "lora": {"rank": 2}}}
    recipe |= {"data": {"train": "rows.jsonl"}, "rollout": {"engine": engine}, "reward": {"rules": {"a": "gsm8k"}}}
    assert has_problem(refused(write(tmp_path, recipe)), "model.quantize", "", engine, remedy="native")


def test_other_low_precision_of_the_same_weights_is_refused(tmp_path: Path) -> None:
    """Quantised layers would be left out of it, so the key would have no effect."""
    model = {"path": "m", "quantize": "nf4", "lora": {"rank": 2}}
    assert has_problem(refused(write(tmp_path, {**BASE, "model": {**model, "matmul": "fp8"}})), "model.matmul")
    recipe = {"method": "grpo", "model": model, "data": {"train": "rows.jsonl"}, "rollout": {"precision": "int8"}}
    recipe |= {"reward": {"rules": {"a": "gsm8k"}}}
    assert has_problem(refused(write(tmp_path, recipe)), "rollout.precision", "", "nf4")


# Plan


@pytest.mark.parametrize(("format", "double"), [("nf4", True), ("nf4", False), ("int8", True), ("fp8", True)])
def test_the_plan_counts_the_bytes_of_the_loaded_model(tiny_folder: Path, format: str, double: bool) -> None:
    settings = settings_of(tiny_folder, format, double_quantize=double, quantize_exclude=["k_proj"], dtype="bf16")
    recipe = Recipe(model=settings, data={"train": "rows.jsonl"})
    counted = count_parameters(recipe, load_config(str(tiny_folder)))
    policy = load_policy(settings, CPU, "sdpa", 0)
    held = sum(parameter.numel() * parameter.element_size() for parameter in policy.parameters())
    assert counted.weight_bytes(2) == held
    assert counted.coded.parameters == sum(layer.weight.numel() for _, layer in quantized_layers(policy))
    assert counted.coded.largest == max(layer.weight.numel() for _, layer in quantized_layers(policy))
    plain = count_parameters(
        recipe.model_copy(update={"model": settings_of(tiny_folder, None)}), policy.causal_lm.config
    )
    assert plain.parameters == counted.parameters
    assert plain.weight_bytes(2) == 2 * plain.parameters
