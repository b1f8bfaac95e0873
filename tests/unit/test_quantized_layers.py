"""Quantised layers compute with the dequantised weights, forward and backward, and save only codes for it."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import write_model
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep.kernels.quantized.formats import FORMATS, dequantize, quantize
from lockstep.kernels.quantized.quantized_experts import QuantizedExperts, QuantizedStack
from lockstep.kernels.quantized.quantized_linear import PARTS, Coding, QuantizedLinear, quantized_layers
from lockstep.model.check import packed_row, tokens
from lockstep.model.load import load_policy
from lockstep.model.load_folder import load_base
from lockstep.model.lora import with_adapter
from lockstep.model.miniature import miniature_config, randomise
from lockstep.model.policy import Policy
from lockstep.model.quantized.quantize import CodedWeight, dequantize_layers, quantize_loaded
from lockstep.recipe.schema import Lora, Model
from refusals import refuses
from tiny_sizes import TINY

CPU = torch.device("cpu")
FORMAT_SETTINGS = [("nf4", True), ("nf4", False), ("int8", True), ("fp8", True)]


def layer_of(weight: torch.Tensor, format: str, double: bool, bias: torch.Tensor | None = None) -> QuantizedLinear:
    coding = Coding(format, double, tuple(weight.shape))
    layer = QuantizedLinear(coding, weight.dtype, CPU, None if bias is None else nn.Parameter(bias))
    CodedWeight("weight", nn.Parameter(weight), layer, coding).fill(weight)
    return layer


def settings_of(folder: Path, format: Any = "nf4", **more: Any) -> Model:
    lora = Lora(rank=4, alpha=8.0)
    return Model(path=str(folder), **{"quantize": format, "lora": lora, **more})


def loss_and_gradients(policy: Policy) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of two rows, with a different weight for each token, and the gradients of all trained weights."""
    policy.train()
    policy.zero_grad()
    logprobs = policy(packed_row([tokens(17, 250), tokens(30, 250, 5)], CPU)).logprobs_K
    loss = -(logprobs * torch.linspace(0.5, 1.5, len(logprobs))).mean()
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in policy.trainable() if p.grad is not None}


@torch.no_grad()
def moved(policy: Policy) -> Policy:
    """The policy with an adapter that has an effect: lora_B starts at zero."""
    torch.manual_seed(1)
    for _, weight in policy.trainable():
        weight.add_(torch.randn_like(weight), alpha=0.05)
    return policy


@pytest.mark.parametrize(("format", "double"), FORMAT_SETTINGS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_computes_with_the_dequantised_weight(format: str, double: bool, bias: bool) -> None:
    torch.manual_seed(0)
    weight, offset = torch.randn(48, 128), torch.randn(48) if bias else None
    layer = layer_of(weight, format, double, offset)
    exact = dequantize(quantize(weight, format, double), torch.float32)
    assert torch.equal(layer.weight, exact)
    assert torch.equal(layer.dequantized(torch.bfloat16), dequantize(quantize(weight, format, double), torch.bfloat16))
    given, upstream = torch.randn(2, 5, 128, requires_grad=True), torch.randn(2, 5, 48)
    found = layer(given)
    wanted = functional.linear(given, exact, offset)
    assert torch.equal(found, wanted)
    ours, theirs = (torch.autograd.grad(out, given, upstream)[0] for out in (found, wanted))
    torch.testing.assert_close(ours, theirs)
    if layer.bias is not None:
        (gradient,) = torch.autograd.grad(layer(given), layer.bias, upstream)
        torch.testing.assert_close(gradient, upstream.sum((0, 1)))


@pytest.mark.parametrize("format", FORMATS)
def test_autograd_saves_only_codes(format: str) -> None:
    layer = layer_of(torch.randn(64, 128), format, True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        layer(torch.randn(3, 128, requires_grad=True))
    stored = {parameter.data_ptr() for parameter in layer.parameters()}
    assert saved
    assert all(one.data_ptr() in stored for one in saved)
    assert sum(one.numel() * one.element_size() for one in saved) < 64 * 128 * 2


@pytest.mark.daily("nf4-bf16", "nf4-fp32", "int8-fp32", "fp8-fp32")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("format", FORMATS)
def test_loss_and_gradients_are_those_of_the_dequantised_model(tiny_folder: Path, format: str, dtype: Any) -> None:
    policy = moved(load_policy(settings_of(tiny_folder, format, dtype=dtype), CPU, "sdpa", 0))
    reference = deepcopy(policy)
    dequantize_layers(reference, policy.model.dtype)
    assert list(quantized_layers(policy))
    assert not list(quantized_layers(reference))
    loss, gradients = loss_and_gradients(policy)
    wanted, wanted_gradients = loss_and_gradients(reference)
    assert loss == pytest.approx(wanted, rel=1e-6 if dtype == "fp32" else 1e-2)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in gradients.items():
        off = (gradient - wanted_gradients[name]).norm() / wanted_gradients[name].norm()
        assert off < (1e-5 if dtype == "fp32" else 0.05), name
    # The codes are not the original weights: the same adapter on these gives another loss.
    original = load_policy(settings_of(tiny_folder, None, dtype=dtype), CPU, "sdpa", 0)
    assert loss_and_gradients(moved(original))[0] != pytest.approx(loss, rel=1e-4)


def test_the_adapter_starts_as_without_quantisation(tiny_folder: Path) -> None:
    for dtype in ("fp32", "bf16"):
        ours = load_policy(settings_of(tiny_folder, dtype=dtype), CPU, "sdpa", 3)
        theirs = load_policy(settings_of(tiny_folder, None, dtype=dtype), CPU, "sdpa", 3)
        one, other = dict(ours.trainable()), dict(theirs.trainable())
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)


@pytest.mark.slow
def test_gradient_checkpointing_gives_the_same_gradients(tiny_folder: Path) -> None:
    plain = moved(load_policy(settings_of(tiny_folder), CPU, "sdpa", 0))
    again = moved(load_policy(settings_of(tiny_folder, gradient_checkpointing=True), CPU, "sdpa", 0))
    (loss, gradients), (other, others) = loss_and_gradients(plain), loss_and_gradients(again)
    assert loss == other
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)


def test_embedding_head_norms_and_excluded_layers_keep_their_values(tiny_folder: Path) -> None:
    from safetensors.torch import load_file

    policy = load_policy(
        settings_of(tiny_folder, quantize_exclude=["layers.0.mlp.down_proj", "k_proj"]), CPU, "sdpa", 0
    )
    stored = load_file(tiny_folder / "model.safetensors")
    kept = {name.replace(".base_layer", ""): one for name, one in policy.causal_lm.named_parameters()}
    same = [name for name in stored if name in kept]
    assert all(torch.equal(kept[name], stored[name]) for name in same)
    coded = {name.replace(".base_layer", "") for name, _ in quantized_layers(policy.causal_lm)}
    assert coded.isdisjoint(name.removesuffix(".weight") for name in same)
    expected = {"model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.down_proj.weight"}
    assert expected <= set(same)
    assert not any("k_proj" in name for name in coded)
    assert "model.layers.1.mlp.down_proj" in coded


def test_an_unknown_layer_is_refused(tiny_folder: Path) -> None:
    with refuses("model.quantize_exclude", "unknown-module", "q_prok"):
        load_policy(settings_of(tiny_folder, quantize_exclude=["q_prok"]), CPU, "sdpa", 0)


# Experts


def experts_of(kind: str, implementation: str) -> tuple[Any, Any]:
    """A model of experts with quantised stacks, and the same model with the dequantised weights."""
    config = miniature_config(AutoConfig.for_model(kind))
    config._experts_implementation = implementation
    model = AutoModelForCausalLM.from_config(config)
    randomise(model)
    quantize_loaded(model, Model(path="m", quantize="nf4"), torch.float32, "m")
    model.requires_grad_(False)
    reference = deepcopy(model)
    dequantize_layers(reference, torch.float32)
    return model, reference


@pytest.mark.daily("qwen3_moe-grouped_mm", "gpt_oss-eager", "mixtral-batched_mm")
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_experts_compute_with_the_dequantised_weights(kind: str, implementation: str) -> None:
    model, reference = experts_of(kind, implementation)
    stacks = [module for module in model.modules() if isinstance(module, QuantizedExperts)]
    assert stacks
    assert not any(isinstance(module, QuantizedExperts) for module in reference.modules())
    names = {name for name, _ in quantized_layers(model)}
    assert not any("router" in name or name.endswith(".gate") for name in names)
    ids = torch.tensor([tokens(20, 30)])
    found = []
    for one in (model, reference):
        embedded = one.get_input_embeddings()(ids).detach().requires_grad_()
        logits = one(inputs_embeds=embedded, use_cache=False).logits
        (gradient,) = torch.autograd.grad(logits, embedded, torch.linspace(-1, 1, logits.numel()).view_as(logits))
        found.append((logits.detach(), gradient))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-4)


def test_experts_save_only_codes() -> None:
    model, _ = experts_of("qwen3_moe", "grouped_mm")
    experts = next(module for module in model.modules() if isinstance(module, QuantizedExperts))
    parts = {parameter.data_ptr() for parameter in experts.parameters()}
    sizes = {stack.shape for stack in (experts.stack(name) for name in experts.stacks)}
    saved: list[torch.Tensor] = []
    width = experts.stack("gate_up_proj").shape[-1]
    chosen = torch.tensor([[0, 1], [1, 2], [0, 2]])
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        experts(torch.randn(3, width, requires_grad=True), chosen, torch.rand(3, 2))
    assert not any(one.shape in sizes or one.transpose(-2, -1).shape in sizes for one in saved if one.dim() == 3)
    assert any(one.data_ptr() in parts for one in saved)


def test_a_stack_stands_in_for_its_tensor() -> None:
    """Operations without a product of their own get the dequantised values; each expert has its own codes."""
    torch.manual_seed(0)
    weight = torch.randn(3, 32, 64)
    coding = Coding("nf4", True, (3, 32, 64))
    parts = coding.parts_of(quantize(weight, "nf4", True))
    stored = [parts.get(name) for name in ("codes", "scales", "scale_codes", "scale_scales", "scale_offset")]
    stack, exact = (
        QuantizedStack(coding, torch.float32, stored),
        dequantize(quantize(weight, "nf4", True), torch.float32),
    )
    assert stack.shape == exact.shape
    assert stack.transpose(-2, -1).shape == exact.transpose(1, 2).shape
    assert torch.equal(torch.mul(stack, 2.0), exact * 2)  # type: ignore[call-overload]
    assert torch.equal(stack[torch.tensor([2, 0])], exact[[2, 0]])
    assert torch.equal(stack[:, 1:5], exact[:, 1:5])
    given = torch.randn(7, 64, requires_grad=True)
    for index in (1, torch.tensor(1)):
        assert torch.equal(functional.linear(given, stack[index]), functional.linear(given, exact[1]))
        assert torch.equal(given @ stack[index].mT, given @ exact[1].mT)


def test_a_tied_or_unknown_class_is_left_alone(tmp_path: Path, tiny_folder: Path) -> None:
    """gpt2 has Conv1D layers and no linear ones: nothing could be quantised."""
    from transformers import GPT2Config

    config = GPT2Config(vocab_size=TINY["vocab_size"], n_embd=32, n_layer=2, n_head=2, n_positions=128)
    folder = write_model(tmp_path / "gpt2", config, tiny_folder)
    with refuses("model.quantize", "unsupported-model", "GPT2LMHeadModel"):
        load_policy(settings_of(folder), CPU, "sdpa", 0)


def test_adapters_on_quantised_experts_are_refused(tmp_path: Path) -> None:
    """PEFT would leave them out without a word. Experts that are not quantised get their adapter."""
    model = AutoModelForCausalLM.from_config(miniature_config(AutoConfig.for_model("qwen3_moe")))
    randomise(model)
    model.save_pretrained(tmp_path)
    lora = Lora(rank=2, alpha=4.0, targets=["q_proj", "down_proj"])
    for exclude in ([], ["experts"]):
        settings = settings_of(tmp_path, lora=lora, quantize_exclude=exclude)
        _, base, _ = load_base(AutoModelForCausalLM, str(tmp_path), settings, None, CPU, None)
        if exclude:
            trained = [name for name, p in with_adapter(base, lora, 0, None).named_parameters() if p.requires_grad]
            assert any("experts" in name for name in trained)
        else:
            with refuses("model.lora.targets", "unfit-adapter", "experts.down_proj", remedy="quantize_exclude"):
                with_adapter(base, lora, 0, None)


def test_a_trained_copy_of_a_quantised_layer_is_refused(tiny_folder: Path) -> None:
    lora = Lora(rank=2, alpha=4.0, targets=["q_proj"], modules_to_save=["layers.1.mlp.down_proj"])
    with refuses("model.lora.modules_to_save", "unfit-adapter", "layers.1.mlp.down_proj", remedy="quantize_exclude"):
        load_policy(settings_of(tiny_folder, lora=lora), CPU, "sdpa", 0)
    policy = load_policy(settings_of(tiny_folder, lora=lora, quantize_exclude=["down_proj"]), CPU, "sdpa", 0)
    assert any("down_proj" in name and "modules_to_save" in name for name, _ in policy.trainable())


@pytest.mark.parametrize(("format", "double"), FORMAT_SETTINGS)
@pytest.mark.parametrize("style", ["columns", "rows"])
def test_a_tensor_parallel_rank_has_its_slice_of_the_weight(format: str, double: bool, style: str) -> None:
    """Several groups of scales: the scales of a slice are those that its blocks have in the full weight."""
    torch.manual_seed(0)
    layer = layer_of(torch.randn(512, 384) * torch.linspace(0.1, 3, 512)[:, None], format, double)
    split = layer.divided_parts(style)
    for rank in range(3 if style == "rows" else 2):
        ranks = 3 if style == "rows" else 2
        coding = Coding(format, double, (512, 384))
        coding.slice_of(style, rank, ranks)
        parts = [
            None if part is None else part.detach().chunk(ranks, split[name])[rank] if name in split else part.detach()
            for name, part in zip(PARTS, layer.coding.stored(layer), strict=True)
        ]
        wanted = layer.weight.chunk(ranks, 0 if style == "columns" else 1)[rank]
        assert torch.equal(coding.dequantized(parts, torch.float32), wanted)
