"""Kernels in the place of a model's modules, by a device's row: here the host's, of torch's own functions."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNorm, KimiLinearRMSNormGated
from transformers.models.llama import modeling_llama

from host_kernels import HOST, host_norm, turned, unscaled
from lockstep.data.batching import micro_batch
from lockstep.kernels import fused_modules
from lockstep.kernels import fused_modules as fused_rotary
from lockstep.kernels.fused_modules import (
    Heads,
    ModuleKernel,
    Rotary,
    are_experts,
    is_gelu_gated,
    is_rms_norm,
    is_silu_gated,
    plug_in,
)
from lockstep.methods.sft import token_loss
from lockstep.model.load import load_policy
from lockstep.parallel.world import World
from lockstep.recipe.keys_optim import Optim
from lockstep.recipe.schema import Model
from lockstep.train.optim import Optimizer
from lockstep.train.step import Learner
from lockstep.types import Example, Origin

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "eager",
}


@pytest.fixture(autouse=True)
def own_function() -> Iterator[None]:
    """The modelling file has its own function again afterwards."""
    own = modeling_llama.apply_rotary_pos_emb
    turned.clear()
    yield
    modeling_llama.apply_rotary_pos_emb = own


def llama(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **more})).eval()


def logits(model: nn.Module) -> torch.Tensor:
    turned.clear()
    with torch.no_grad():
        return model(torch.tensor([[3, 1, 4, 1, 5, 9]])).logits


@pytest.mark.parametrize("gradients", [True, False])
def test_what_computes_the_same_is_replaced_and_the_numbers_stay(gradients: bool) -> None:
    model = llama()
    wanted = logits(model)
    kernels = HOST._replace(trial=replace(HOST.trial, gradients=gradients))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plug_in(model, kernels) == [
            "2 x LlamaMLP by host_gated",
            "5 x LlamaRMSNorm by host_norm",
            "apply_rotary_pos_emb of modeling_llama by host_rotary",
        ]
    torch.testing.assert_close(logits(model), wanted, atol=1e-5, rtol=1e-5)
    assert turned == [(1, 4, 6, 8)] * 2


def plugged(model: nn.Module) -> list[nn.Module]:
    return [
        module for module in model.modules() if isinstance(vars(module).get("forward"), fused_modules.KernelForward)
    ]


def test_weights_go_with_their_model_though_nobody_looks_for_circles(tiny_folder: Path) -> None:
    """As between two models on one device: also after a step, with the optimizer gone."""
    policy = load_policy(Model(path=str(tiny_folder)), torch.device("cpu"), "sdpa", seed=0)
    plug_in(policy.model, HOST)
    assert len(plugged(policy)) > 2
    rows = [Example([1, 2, 3, 4, 5], [0, 1, 1, 1, 1], Origin("rows", 0))]
    optimizer = Optimizer(policy.trainable(), Optim(), masters=False, fused=False)
    learner = Learner(policy, optimizer, torch.device("cpu"), World())
    gc.collect()
    gc.disable()
    try:
        learner.forward_backward([micro_batch(rows, packed=True, pad_id=0)], token_loss)
        learner.optim_step(1e-3)
        weights = [weakref.ref(parameter) for parameter in policy.parameters()]
        del policy, optimizer, learner
        assert weights
        assert not [one for one in weights if one() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_computes_with_its_own_weights(copied: Any) -> None:
    model = llama()
    plug_in(model, HOST)
    before, other = logits(model), copied(model)
    assert len(plugged(other)) == len(plugged(model)) > 2
    with torch.no_grad():
        for module in plugged(model):
            for parameter in module.parameters():
                parameter.zero_()
    assert torch.equal(logits(other), before)
    assert not torch.equal(logits(model), before)


def test_another_model_of_the_file_keeps_its_own_rotation() -> None:
    """The function is the file's, the mark is the model's."""
    other = llama()
    plug_in(llama(), HOST)
    assert isinstance(modeling_llama.apply_rotary_pos_emb, Rotary)
    logits(other)
    assert turned == []


def test_heads_that_were_not_tried_keep_their_rotation_where_the_row_says_so() -> None:
    cos = torch.ones(1, 6, 8)
    setattr(cos, fused_rotary.MARK, True)
    q, k = torch.ones(1, 2, 6, 8), torch.ones(1, 1, 6, 8)
    for only_tried in (True, False):
        rotary = Rotary(modeling_llama.apply_rotary_pos_emb, HOST.rotary._replace(only_tried=only_tried))
        assert rotary.fits(q, k, cos, cos) is not only_tried
        assert not rotary.fits(q, k, cos.clone(), cos)


def test_scaled_angles_stay_with_a_row_that_cannot_take_them() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    for takes, times in ((unscaled, 0), (lambda module: True, 2)):
        model = llama(rope_parameters=yarn, max_position_embeddings=256)
        assert model.model.rotary_emb.attention_scaling > 1
        wanted = logits(model)
        modeling_llama.apply_rotary_pos_emb = getattr(
            modeling_llama.apply_rotary_pos_emb, "own", modeling_llama.apply_rotary_pos_emb
        )
        plug_in(model, HOST._replace(rotary=HOST.rotary._replace(marks=takes)))
        torch.testing.assert_close(logits(model), wanted, atol=1e-5, rtol=1e-5)
        assert len(turned) == times


def off(self: Any, x: torch.Tensor) -> torch.Tensor:
    return 1.001 * host_norm(self, x)


def bent(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The same numbers with another gradient."""
    out = host_norm(self, x)
    return out + 0.01 * (x - x.detach())


def fails(self: Any, x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such kernel here. And more")


@pytest.mark.parametrize(
    ("forward", "gradients", "said"),
    [
        (off, True, "host_norm gives different results"),
        (off, False, "host_norm gives different results"),
        (bent, True, "host_norm gives different results"),
        (bent, False, None),
        (fails, True, "host_norm failed on a trial: no such kernel here"),
    ],
)
def test_a_kernel_that_is_another_function_is_left_out_with_a_message(forward: Any, gradients: bool, said: Any) -> None:
    norm = modeling_llama.LlamaRMSNorm(16)
    kernels = HOST._replace(
        modules=(ModuleKernel("host_norm", is_rms_norm, forward),), trial=replace(HOST.trial, gradients=gradients)
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        replaced = plug_in(norm, kernels)
    assert [str(one.message) for one in told] == ([f"LlamaRMSNorm stays plain torch: {said}"] if said else [])
    assert ("forward" in vars(norm)) == (said is None) == bool(replaced)


def test_a_late_error_of_the_device_is_the_trial_s() -> None:
    def wait() -> None:
        raise RuntimeError("the last kernel stopped")

    norm = modeling_llama.LlamaRMSNorm(16)
    with pytest.warns(UserWarning, match="LlamaRMSNorm stays plain torch: host_norm failed on a trial: the last"):
        assert plug_in(norm, HOST._replace(trial=replace(HOST.trial, wait=wait))) == []


def test_a_norm_that_subtracts_the_mean_is_another_function() -> None:
    with pytest.warns(UserWarning, match="LayerNorm stays plain torch: host_norm gives different results"):
        assert plug_in(nn.LayerNorm(16, bias=False), HOST) == []


def test_a_feed_forward_that_clamps_keeps_its_own_code() -> None:
    """The kernels do not clamp, and a trial with small inputs would not notice it."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = modeling.DeepseekV4Config(hidden_size=16, moe_intermediate_size=32, n_routed_experts=4, swiglu_limit=10.0)
    mlp, experts = modeling.DeepseekV4MLP(config), modeling.DeepseekV4Experts(config)
    assert not is_silu_gated(mlp)
    assert not are_experts(experts)
    mlp.limit = experts.limit = float("inf")
    assert is_silu_gated(mlp)
    assert are_experts(experts)


def test_projections_that_clamp_are_not_fused() -> None:
    """The tower of Gemma 4 wraps its linear layers, and the wrapper may clamp."""
    modeling = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    config = modeling.Gemma4VisionConfig(hidden_size=16, intermediate_size=32, hidden_activation="gelu_pytorch_tanh")
    mlp = modeling.Gemma4VisionMLP(config)
    assert not is_gelu_gated(mlp)
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = (one.linear for one in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    assert is_gelu_gated(mlp)


def test_a_norm_with_a_gate_is_no_plain_norm() -> None:
    """Its forward fails without a gate, although the gate has a default."""
    assert is_rms_norm(KimiLinearRMSNorm(8))
    assert not is_rms_norm(KimiLinearRMSNormGated(8))


def test_nothing_of_a_device_is_imported_by_the_mechanism() -> None:
    assert "torch_npu" not in vars(fused_modules)
    assert not {name for name in sys.modules if name.startswith("torch_npu")}


def test_the_rotary_operator_of_ascend_is_used_only_for_heads_that_were_tried() -> None:
    """Its documents do not cover every pair of head counts, so an untried pair stays with the model's own function."""
    from lockstep.kernels.fused_modules_npu import KERNELS as ASCEND

    q, k = (torch.zeros(1, heads, 3, 8) for heads in (4, 2))
    cos = torch.ones(1, 3, 8)
    setattr(cos, fused_rotary.MARK, True)
    rotary = Rotary(modeling_llama.apply_rotary_pos_emb, ASCEND.rotary._replace(fits=lambda *tensors: True))
    assert not rotary.fits(q, k, cos, cos)
    rotary.tried[Heads(q.dtype, 4, 2, 8)] = True
    assert rotary.fits(q, k, cos, cos)
