"""Linear layers with a LoRA adapter as one operation, beside PEFT's own forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from lockstep.kernels import adapted_linear
from lockstep.kernels.adapted_linear import join_adapters

ROWS, INPUTS, OUTPUTS = 6, 12, 20


def _pair(bias: bool = False, dtype: torch.dtype = torch.float32, **config: Any) -> tuple[Any, Any]:
    """Two equal models of one layer; the second one computes its adapter together with its product."""
    torch.manual_seed(0)
    theirs: Any = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=bias).to(dtype))
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=6, target_modules=["0"], **config), theirs)
    layer = theirs[0]
    for matrix in layer.lora_B.values():
        nn.init.normal_(matrix.weight)
    layer.to(dtype)
    layer.base_layer.requires_grad_(False)
    ours = copy.deepcopy(theirs)
    join_adapters(ours)
    return theirs, ours


def _results(model: Any, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, ROWS, INPUTS, generator=generator).to(dtype).requires_grad_()
    out = model(x)
    out.backward(torch.randn(out.shape, generator=generator).to(dtype))
    grads = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
    return {"out": out.detach(), "x": x.grad, **grads}  # type: ignore[dict-item]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 1e-2)])
def test_outputs_and_gradients_are_those_of_peft(bias: bool, dtype: torch.dtype, share: float) -> None:
    theirs, ours = _pair(bias, dtype)
    wanted = _results(theirs, dtype)
    with patch.object(adapted_linear._AdaptedLinear, "apply", wraps=adapted_linear._AdaptedLinear.apply) as used:
        found = _results(ours, dtype)
    assert used.call_count == 1
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        largest = float(value.abs().max())
        torch.testing.assert_close(found[name], value, rtol=0, atol=share * largest)


def _two(model: Any) -> None:
    model[0].update_layer("second", 2, lora_alpha=2, config=LoraConfig(init_lora_weights=False))
    model[0]._active_adapter = ["default", "second"]


def _off(model: Any) -> None:
    model[0]._disable_adapters = True


def _hooked(model: Any) -> None:
    model[0].lora_B["default"].register_forward_hook(lambda _, args, out: 2 * out)


def _trained_base(model: Any) -> None:
    model[0].base_layer.requires_grad_(True)


def _replaced_base(model: Any) -> None:
    base = model[0].base_layer
    vars(base)["forward"] = lambda x: 3 * nn.functional.linear(x, base.weight)


def _wide_adapter(model: Any) -> None:
    for one in (*model[0].lora_A.values(), *model[0].lora_B.values()):
        one.double()


@pytest.mark.parametrize("change", [_two, _off, _hooked, _trained_base, _replaced_base, _wide_adapter])
def test_other_layers_run_as_those_of_peft(change: Callable[[Any], None]) -> None:
    theirs, ours = _pair()
    for model in (theirs, ours):
        torch.manual_seed(2)
        change(model)
    x = torch.randn(ROWS, INPUTS)
    with patch.object(adapted_linear._AdaptedLinear, "apply", side_effect=AssertionError):
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("config", [{"use_dora": True}, {"lora_dropout": 0.5}])
def test_dora_and_dropout_run_as_those_of_peft(config: dict[str, Any]) -> None:
    theirs, ours = _pair(**config)
    results = []
    for model in (theirs, ours):
        torch.manual_seed(3)
        results.append(_results(model))
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value), name


def test_dropout_is_none_in_evaluation() -> None:
    theirs, ours = _pair(lora_dropout=0.5)
    x = torch.randn(ROWS, INPUTS)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


def test_a_copy_computes_with_its_own_weights() -> None:
    _, ours = _pair()
    copied = copy.deepcopy(ours)
    with torch.no_grad():
        copied[0].base_layer.weight.zero_()
        copied[0].lora_B["default"].weight.zero_()
    x = torch.randn(ROWS, INPUTS)
    assert not copied(x).any()
    assert ours(x).any()
