"""int8 rollouts on the emulated Ascend: the operators of torch_npu against plain torch, the engine, and refusals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch_npu

from ascend_emulator.kernels import reference
from hand_rollouts import recipe_of
from lockstep.device.npu import Npu
from lockstep.kernels.quantized.formats import quantize
from lockstep.kernels.quantized.token_products import quantized_product
from lockstep.preflight.model_checks import matmul_of_device, precision_of_device

pytestmark = pytest.mark.ascend


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_product_is_that_of_the_host(tokens: int, dtype: torch.dtype) -> None:
    x, weight = drawn(tokens, 48, dtype=dtype), drawn(24, 48, seed=1, dtype=dtype)
    before = reference.calls.copy()
    made = quantized_product(x.npu(), quantize(weight.npu(), "int8"))
    assert reference.calls["npu_dynamic_quant"] == before["npu_dynamic_quant"] + 1
    assert reference.calls["npu_quant_matmul"] == before["npu_quant_matmul"] + 1
    assert made.dtype == dtype
    expected = quantized_product(x, quantize(weight, "int8"))
    torch.testing.assert_close(made.cpu(), expected, rtol=1e-2, atol=1e-2)
    exact = x.float() @ weight.float().t()
    assert (made.cpu().float() - exact).abs().max() < 0.3


def test_fp32_stays_plain_torch() -> None:
    x, weight = drawn(3, 32, dtype=torch.float32), drawn(16, 32, seed=1, dtype=torch.float32)
    before = reference.calls.copy()
    made = quantized_product(x.npu(), quantize(weight.npu(), "int8"))
    assert reference.calls["npu_quant_matmul"] == before["npu_quant_matmul"]
    torch.testing.assert_close(made.cpu(), quantized_product(x, quantize(weight, "int8")), rtol=1e-5, atol=1e-5)


def test_the_operators_refuse_what_their_documents_exclude() -> None:
    codes = torch.ones(2, 16, dtype=torch.int8).npu()
    with pytest.raises(RuntimeError, match="npu_dynamic_quant"):
        torch_npu.npu_dynamic_quant(torch.ones(2, 16).npu())
    scale = torch.ones(2).npu()
    with pytest.raises(RuntimeError, match="scale"):
        torch_npu.npu_quant_matmul(codes, codes.t(), scale.bfloat16(), pertoken_scale=scale, output_dtype=torch.float16)


def test_fp8_is_refused_by_name_and_int8_is_not() -> None:
    def problems(check: object, **keys: str) -> list[str]:
        context = SimpleNamespace(recipe=recipe_of(**keys), device=Npu())
        return [problem.where for problem in check(context)]  # type: ignore[operator]

    assert problems(precision_of_device, rollout__precision="fp8") == ["rollout.precision"]
    assert problems(precision_of_device, rollout__precision="int8") == []
    assert problems(matmul_of_device, model__matmul="fp8") == ["model.matmul"]
