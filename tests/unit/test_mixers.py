"""Recurrent layers start every packed sequence with an empty state, and the check at load notices if they do not."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig
from transformers.models.qwen3_next import modeling_qwen3_next

from hybrid_models import DAILY, FURTHER, hybrid_config
from lockstep.data.batching import micro_batch, shared_beginnings
from lockstep.device.select import select
from lockstep.errors import Refusal
from lockstep.kernels.attention import keywords
from lockstep.kernels.attention.keywords import carried_layout
from lockstep.kernels.mixers import PackedMixer, regrouped
from lockstep.model.check import LENGTHS, build_miniature, check_architecture, packed_row, tokens
from lockstep.model.miniature import VOCABULARY, miniature_config
from lockstep.model.policy import Policy
from lockstep.types import Example, MicroBatch, Origin
from refusals import refuses

CPU = torch.device("cpu")
FAMILIES = [*DAILY, *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER)]

pytestmark = pytest.mark.usefixtures("nothing_remembered")


def check(config: Any, dtype: torch.dtype = torch.float32) -> None:
    check_architecture(config, "folder", dtype, "sdpa", CPU)


def run(policy: Policy, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    policy.zero_grad(set_to_none=True)
    logprobs = policy(batch).logprobs_K
    (logprobs**2).sum().backward()
    return logprobs.detach(), {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}


def assert_same(one: tuple[torch.Tensor, dict[str, torch.Tensor]], other: Any) -> None:
    torch.testing.assert_close(one[0], other[0], atol=2e-5, rtol=1e-4)
    largest = max(float(gradient.norm()) for gradient in other[1].values())
    assert one[1].keys() == other[1].keys()
    for name, gradient in other[1].items():
        assert float((one[1][name] - gradient).norm()) <= 1e-4 * max(float(gradient.norm()), 1e-2 * largest), name


def unreset(self: PackedMixer, layout: Any, named: dict[str, Any]) -> Any:
    """What transformers does with a packed row: the state goes on from one sequence to the next."""
    return self.original_forward(**named)


@pytest.mark.daily("bamba", "lfm2")
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_of_packed_rows_are_those_of_each_row_alone(family: str) -> None:
    check(hybrid_config(family))


@pytest.mark.daily("qwen3_next", "lfm2")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_reset_is_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedMixer, "_packed", unreset)
    # The first sequence of the row starts with an empty state in any case.
    with pytest.raises(Refusal, match=rf"\[unsupported-model\]: .*packed log-probs differ .* of {LENGTHS[1]} on"):
        check(hybrid_config(family))


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_the_rounding_error_in_bf16_is_that_of_transformers(family: str) -> None:
    """Mamba-2 adds up its residuals in fp32, and rounds the final states to the dtype of the output head."""
    check(hybrid_config(family), torch.bfloat16)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device")
@pytest.mark.parametrize("family", [*DAILY, *FURTHER])
def test_an_nvidia_device_gives_the_numbers_of_transformers(family: str) -> None:
    """With the kernels of the device, and those of flash-linear-attention and others if they are installed."""
    device = select("cuda")
    check_architecture(hybrid_config(family), "folder", torch.bfloat16, device.attention, device.torch_device())


def test_a_package_for_nvidia_devices_is_not_called_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers calls flash-linear-attention wherever it is installed, and without a device it raises."""

    def needs_a_device(plain: Any) -> Any:
        def run(*_: Any, **__: Any) -> Any:
            raise RuntimeError("0 active drivers ([]). There should only be one.")

        return wraps(plain)(run)

    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        plain = inspect.unwrap(getattr(modeling_qwen3_next, name))
        monkeypatch.setattr(modeling_qwen3_next, name, needs_a_device(plain))
    check(hybrid_config("qwen3_next"))


def test_a_wrong_gradient_alone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are right, but one sequence of the row sends no gradient back."""

    def deaf(named: dict[str, Any], shape: tuple[int, int], layout: Any) -> list[dict[str, Any]]:
        grids = regrouped(named, shape, layout)
        return [{**grids[0], "hidden_states": grids[0]["hidden_states"].detach()}, *grids[1:]]

    monkeypatch.setattr("lockstep.kernels.mixers.regrouped", deaf)
    with pytest.raises(Refusal, match=r"the gradient of .* is off"):
        check(hybrid_config("lfm2"))


def test_a_shared_prompt_has_the_numbers_of_whole_sequences() -> None:
    policy = build_miniature(hybrid_config("qwen3_next"), "sdpa", CPU).policy
    prompt, answers = tokens(9, VOCABULARY), [tokens(n, VOCABULARY, 5 + n) for n in (4, 7, 2)]
    group = [Example([*prompt, *answer], [0] * 9 + [1] * len(answer), Origin("rows.jsonl", 0)) for answer in answers]
    whole, shared = (
        micro_batch(group, packed=True, pad_id=0, shares=shares) for shares in (None, shared_beginnings(group))
    )
    assert shared.input_ids_NT.numel() < whole.input_ids_NT.numel()
    assert_same(run(policy, shared), run(policy, whole))


@pytest.mark.parametrize("family", ["qwen3_next", "jamba", "mamba"])
def test_gradient_checkpointing_resets_the_state_in_its_second_forward_pass(family: str) -> None:
    """The layers of Jamba do not pass the keywords of the forward pass on to the recurrent module, and the decoder of
    Mamba-1 not to its layers."""
    policy = build_miniature(hybrid_config(family), "sdpa", CPU).policy.train()
    batch = packed_row([tokens(length, VOCABULARY) for length in LENGTHS], CPU)
    plain = run(policy, batch)
    policy.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same(run(policy, batch), plain)
    assert all(carried_layout(mixer.module) is None for mixer in policy.decoder.mixers)


def test_a_layout_that_does_not_reach_a_module_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keywords, "_relaying", lambda kind: kind)
    with pytest.raises(Refusal, match="packed log-probs differ"):
        check(hybrid_config("mamba"))


@pytest.mark.parametrize("family", ["stablelm", "nemotron"])
def test_attention_gets_the_layout_that_its_layer_drops(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model(family)
    check(config)
    policy = build_miniature(config, "sdpa", CPU).policy.train()
    batch = packed_row([tokens(length, VOCABULARY) for length in LENGTHS], CPU)
    plain = run(policy, batch)
    policy.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same(run(policy, batch), plain)
    monkeypatch.setattr(keywords, "_set", lambda *_: None)
    with pytest.raises(RuntimeError, match="called without a layout"):
        policy(batch)


def test_adapters_of_recurrent_modules_are_trained() -> None:
    model = build_miniature(hybrid_config("bamba"), "sdpa", CPU).model
    policy = Policy(get_peft_model(model, LoraConfig(r=2, target_modules=["in_proj", "out_proj"])), "sdpa").train()
    _, gradients = run(policy, packed_row([tokens(length, VOCABULARY) for length in LENGTHS], CPU))
    moved = [name for name, gradient in gradients.items() if ".lora_B." in name and float(gradient.norm()) > 0]
    assert any(".in_proj." in name for name in moved)
    assert any(".out_proj." in name for name in moved)


def test_an_adapter_that_the_module_bypasses_is_refused() -> None:
    model = build_miniature(hybrid_config("jamba"), "sdpa", CPU).model
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["in_proj", "dt_proj"]))
    with refuses("model.lora.targets", "unfit-adapter", "dt_proj", "JambaMambaMixer", remedy="add dt_proj"):
        Policy(adapted, "sdpa")


def test_a_small_model_has_every_layer_kind_of_the_model() -> None:
    for family in ("bamba", "jamba", "recurrent_gemma", "zamba2", "nemotron_h"):
        config = hybrid_config(family)
        assert set(miniature_config(config).layers_block_type) == set(config.layers_block_type), family
