"""Grouped products of experts against transformers' modules and PEFT's adapters of stacked experts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GptOssConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from lockstep.kernels.experts.grouped_experts import grouped_experts, merged_pairs, sort_pairs, stacks_experts
from lockstep.model.adapters.expert_adapters import adapt_experts

TOKENS, WIDTH, EXPERTS = 20, 32, 6


def _modules() -> Iterator[Any]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "_experts_implementation": "eager"}
    qwen = Qwen3MoeConfig(**sizes, moe_intermediate_size=24, num_experts=EXPERTS)
    # Transposed weights with biases and a gate of its own.
    gpt = GptOssConfig(**sizes, intermediate_size=24, num_local_experts=EXPERTS)
    for module in (Qwen3MoeExperts(qwen), GptOssExperts(gpt)):
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.2)
        yield module


def _results(module: Any, call: Any, chosen: torch.Tensor) -> list[torch.Tensor]:
    """The outputs and the gradients of states, shares and all parameters."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
    shares = torch.rand(chosen.shape, generator=generator).requires_grad_()
    out = call(states, chosen, shares)
    (out * torch.randn(out.shape, generator=generator)).sum().backward()
    found = [out.detach(), states.grad, shares.grad, *(one.grad for one in module.parameters())]
    module.zero_grad()
    assert all(one is not None for one in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("most", [EXPERTS, 2])
def test_outputs_and_gradients_are_those_of_the_modules(most: int) -> None:
    """Also if most experts have no tokens."""
    for module in _modules():
        assert stacks_experts(module)
        chosen = torch.rand(TOKENS, most, generator=torch.Generator().manual_seed(2)).topk(2).indices
        wanted = _results(module, module, chosen)
        found = _results(module, lambda *inputs, module=module: grouped_experts(module, *inputs), chosen)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_modules_of_older_transformers_are_stacks_of_experts() -> None:
    """transformers 5.17 has neither of the two attributes."""
    module = next(_modules())
    chosen = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(2)).topk(2).indices
    states, shares = torch.randn(TOKENS, WIDTH), torch.rand(chosen.shape)
    wanted = module(states, chosen, shares)
    for name in ("_is_expert_parallel", "has_post_expert_norm"):
        vars(module).pop(name, None)
    assert stacks_experts(module)
    torch.testing.assert_close(grouped_experts(module, states, chosen, shares), wanted)


def test_experts_of_other_ranks_count_as_nothing() -> None:
    module = next(_modules())
    chosen = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(2)).topk(2).indices
    own = chosen < 4
    elsewhere = chosen.masked_fill(~own, EXPERTS)
    module._is_expert_parallel = True
    found = _results(module, lambda *inputs: grouped_experts(module, *inputs), elsewhere)

    def masked(states: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = module(states, chosen, shares * own)
        return answer

    for ours, theirs in zip(found, _results(module, masked, chosen), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
def test_received_rows_are_merged_as_a_stable_sort_does(ranks: int) -> None:
    """Some experts and ranks have no rows."""
    generator = torch.Generator().manual_seed(ranks)
    counts = torch.randint(4, (ranks, EXPERTS), generator=generator, dtype=torch.int32)
    counts[:, 1], counts[0] = 0, 0
    ids = torch.arange(EXPERTS).repeat(ranks).repeat_interleave(counts.flatten())
    wanted = sort_pairs(ids[:, None], EXPERTS)
    for found, other in zip(merged_pairs(counts, len(ids)), wanted, strict=True):
        torch.testing.assert_close(found, other, rtol=0, atol=0)


class Stacks(TorchDispatchMode):
    """The operators that allocate a tensor as large as the weights of all experts."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.found = size, set[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        large = isinstance(out, torch.Tensor) and out.numel() >= self.size
        if large and out.untyped_storage().data_ptr() not in given:
            self.found.add(str(function))
        return out


@pytest.mark.parametrize("rank", [3, 8])
def test_adapters_are_those_of_peft_without_the_sum_of_the_weights(rank: int) -> None:
    config = Qwen3MoeConfig(
        vocab_size=50,
        hidden_size=WIDTH,
        moe_intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    lora = LoraConfig(r=rank, lora_alpha=5, target_modules=["q_proj"], target_parameters=targets)
    theirs = get_peft_model(Qwen3MoeForCausalLM(config), lora)
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    ours = copy.deepcopy(theirs)
    adapt_experts(ours)
    # A copy of an adapted model has adapters of its own.
    copied = copy.deepcopy(ours)
    ids = torch.arange(40).view(2, 20)
    results, allocated = [], []
    for model in (theirs, ours, copied):
        with Stacks(EXPERTS * 48 * WIDTH) as seen:
            out = model(input_ids=ids).logits
            out.square().sum().backward()
        allocated.append(seen.found)
        results.append([out.detach(), *(one.grad for one in model.parameters() if one.requires_grad)])
    for found in results[1:]:
        for one, other in zip(found, results[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert any("baddbmm" in name for name in allocated[0])
    assert allocated[1] == set()
    with ours.disable_adapter(), theirs.disable_adapter():
        torch.testing.assert_close(ours(input_ids=ids).logits, theirs(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    merged = ours.merge_and_unload()(input_ids=ids).logits
    torch.testing.assert_close(merged, results[0][0], rtol=1e-4, atol=1e-4)
