"""The wrong operator of a module: wrong kernels, other code, and no alarm for a correct module."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import load
from torch import nn
from torch.nn import functional

from lockstep.data.batching import micro_batch
from lockstep.parity.replay.operator_bisect import WrongOperator, in_double, other_code, wrong_kernel
from lockstep.parity.replay.operator_log import ModuleLog, Operator, log_module
from lockstep.parity.replay.tolerances import TOLERANCES, tolerance_of
from lockstep.recipe.schema import Lora
from lockstep.types import Example, MicroBatch, Origin

FP32 = TOLERANCES["fp32"]


class Block(nn.Module):
    """A norm, a child and a gate, with a constant, a buffer and a weight that a fault can change."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.register_buffer("shift", torch.linspace(-1, 1, 8))
        self.eps = 1e-2
        self.gate: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
        self.cast: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        if self.cast is not None:
            x = x.to(self.cast).to(x.dtype)
        return self.gate(self.inner(x)) + self.shift


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x).square()


@pytest.fixture
def clean() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def heard(model: nn.Module, x: torch.Tensor, name: str = "block") -> ModuleLog:
    return log_module(model, name, lambda: model(x))


def calls(model: nn.Module, x: torch.Tensor, name: str = "block") -> list[Operator]:
    return heard(model, x, name).calls or []


def test_only_operators_outside_the_children_are_logged_in_order(clean: Model, x: torch.Tensor) -> None:
    found = heard(clean, x)
    names = [call.name for call in found.calls or []]
    expected = [
        "pow.Tensor_Scalar",
        "mean.dim",
        "add.Tensor",
        "rsqrt",
        "mul.Tensor",
        "mul.Tensor",
        "tanh",
        "add.Tensor",
    ]
    assert names == [f"aten.{name}" for name in expected]
    assert [call.name for call in calls(clean, x, "block.inner")] == ["aten.addmm"]
    assert [call.name for call in calls(clean, x, "(root)")] == ["aten.pow.Tensor_Scalar"]
    assert found.outputs is not None
    assert torch.equal(found.outputs[0], clean.block(x))
    assert clean.training
    assert not any(module._forward_hooks for module in clean.modules())


def test_inputs_are_kept_as_they_were_before_the_call(x: torch.Tensor) -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.clone().mul_(2.0)

    _, call = calls(Writes(), x, "(root)")
    assert call.writes
    assert torch.equal(call.inputs[0], x)
    assert torch.equal(call.outputs[0], 2 * x)


def test_the_first_call_of_a_module_is_logged(x: torch.Tensor) -> None:
    layer = nn.Linear(8, 8)
    twice = nn.Sequential(layer, nn.Tanh(), layer)
    [call] = calls(twice, x, "0")
    assert torch.equal(call.inputs[1], x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_clean_module_has_no_culprit(clean: Model, x: torch.Tensor, dtype: torch.dtype) -> None:
    clean, x = clean.to(dtype), x.to(dtype)
    tolerance = TOLERANCES[{torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")]
    for name in ("block", "block.inner", "(root)"):
        assert wrong_kernel(calls(clean, x, name)) is None
        assert other_code(calls(clean, x, name), calls(copy.deepcopy(clean), x, name), tolerance) is None


@pytest.mark.parametrize("place", range(8))
def test_a_kernel_with_a_wrong_result_is_found(clean: Model, x: torch.Tensor, place: int) -> None:
    """One operator's result is wrong; the operators after it are correct on their inputs."""
    found = calls(clean, x)
    bad = found[place].outputs[0].clone()
    bad.view(-1)[0] += 0.01 * bad.norm()
    found[place] = replace(found[place], outputs=[bad])
    culprit = wrong_kernel(found)
    assert culprit is not None
    assert (culprit.fault, culprit.call) == ("kernel", found[place])
    assert culprit.error == pytest.approx(0.01, rel=0.1)
    assert torch.equal(culprit.actual, bad)
    assert "float64" in culprit.why


def test_a_kernel_that_makes_no_number_is_found(clean: Model, x: torch.Tensor) -> None:
    found = calls(clean, x)
    bad = found[3].outputs[0].clone()
    bad[1] = float("nan")
    found[3] = replace(found[3], outputs=[bad])
    culprit = wrong_kernel(found)
    assert culprit is not None
    assert culprit.call.name == "aten.rsqrt"


def test_nan_from_nan_is_honest() -> None:
    x = torch.tensor([[float("nan"), 1.0]])
    assert wrong_kernel(calls(nn.Tanh(), x, "(root)")) is None


def test_the_judge_does_not_write_to_what_was_recorded() -> None:
    x = torch.ones(2, dtype=torch.float64)
    call = Operator(torch.ops.aten.add_.Tensor, (x, torch.ones(2, dtype=torch.float64)), {}, [x + 1], "cpu")
    for _ in range(2):
        wanted = in_double(call)
        assert wanted is not None
        assert wanted[0].tolist() == [2.0, 2.0]
    assert wrong_kernel([call]) is None


def test_an_operator_that_the_judge_does_not_have_is_passed_over() -> None:
    call = Operator(_Foreign(), (torch.ones(1),), {}, [torch.zeros(1)], "other:0")
    assert in_double(call) is None
    assert wrong_kernel([call]) is None


class _Foreign:
    """A logged operator that exists only on another device."""

    def __call__(self, *_: Any) -> torch.Tensor:
        raise NotImplementedError("on another device only")

    def __str__(self) -> str:
        return "vendor.norm.default"


# -- code


def fault(clean: Model, x: torch.Tensor, change: Callable[[Block], Any], name: str = "block") -> WrongOperator:
    faulty = copy.deepcopy(clean)
    change(faulty.block)
    ours = calls(faulty, x, name)
    assert wrong_kernel(ours) is None, "every operator is correct on its inputs"
    culprit = other_code(ours, calls(clean, x, name), FP32)
    assert culprit is not None
    assert culprit.fault == "code"
    return culprit


def test_another_constant(clean: Model, x: torch.Tensor) -> None:
    def change(block: Block) -> None:
        block.eps = 0.5

    culprit = fault(clean, x, change)
    assert culprit.call.name == "aten.add.Tensor"
    assert culprit.why == "with 0.5 instead of 0.01"
    mean = x.pow(2).mean(-1, keepdim=True)
    torch.testing.assert_close(culprit.actual, mean + 0.5)
    torch.testing.assert_close(culprit.expected, mean + 1e-2)


def test_an_extra_cast(clean: Model, x: torch.Tensor) -> None:
    def change(block: Block) -> None:
        block.cast = torch.bfloat16

    culprit = fault(clean, x, change)
    assert culprit.call.name == "aten._to_copy"
    assert "clean CPU copy of the module does not run it (to torch.bfloat16)" in culprit.why
    assert culprit.actual.dtype == torch.bfloat16
    assert torch.equal(culprit.actual, culprit.expected.bfloat16())


def test_a_missing_cast(clean: Model, x: torch.Tensor) -> None:
    """The clean CPU copy of the module runs an operator that this one does not."""
    with_cast = copy.deepcopy(clean)
    with_cast.block.cast = torch.bfloat16
    culprit = other_code(calls(clean, x), calls(with_cast, x), FP32)
    assert culprit is not None
    assert culprit.call.name == "aten.mul.Tensor"
    torch.testing.assert_close(culprit.expected, culprit.actual.bfloat16().float(), rtol=0, atol=0)
    assert "clean CPU copy of the module runs aten._to_copy here" in culprit.why


def test_another_operator(clean: Model, x: torch.Tensor) -> None:
    def change(block: Block) -> None:
        block.gate = functional.gelu

    culprit = fault(clean, x, change)
    assert culprit.call.name == "aten.gelu"
    assert culprit.why == "the clean CPU copy of the module runs aten.tanh instead"
    assert culprit.clean is not None
    torch.testing.assert_close(culprit.expected, clean.block(x) - clean.block.shift)


def test_another_buffer(clean: Model, x: torch.Tensor) -> None:
    culprit = fault(clean, x, lambda block: block.shift.add_(0.25))
    assert culprit.call.name == "aten.add.Tensor"
    assert "input number 2" in culprit.why
    assert torch.equal(culprit.expected, clean.block.shift)
    assert torch.equal(culprit.actual, clean.block.shift + 0.25)


def test_another_weight_of_the_module_itself(clean: Model, x: torch.Tensor) -> None:
    def change(block: Block) -> None:
        with torch.no_grad():
            block.weight[3] = 9.0

    culprit = fault(clean, x, change)
    assert culprit.call.name == "aten.mul.Tensor"
    assert any(torch.equal(one, torch.tensor([9.0])) or 9.0 in one.flatten().tolist() for one in culprit.call.inputs)


def test_another_table_of_embeddings() -> None:
    """Integer inputs do not hide that a weight differs."""
    torch.manual_seed(3)
    table = nn.Embedding(20, 4)
    other = copy.deepcopy(table)
    with torch.no_grad():
        other.weight[7] += 1.0
    ids = torch.tensor([[1, 7, 2]])
    culprit = other_code(calls(other, ids, "(root)"), calls(table, ids, "(root)"), FP32)
    assert culprit is not None
    assert culprit.call.name == "aten.embedding"


def test_places_without_a_number_do_not_hide_the_others() -> None:
    """Minus infinity on both sides, as in masks, and one wrong number."""
    x = torch.tensor([[0.5, 2.0, -1.0]])
    masked = torch.tensor([[False, False, True]])
    call = Operator(
        torch.ops.aten.masked_fill.Scalar,
        (x, masked, float("-inf")),
        {},
        [torch.tensor([[0.6, 2.0, float("-inf")]])],
        "cpu",
    )
    culprit = wrong_kernel([call])
    assert culprit is not None
    assert culprit.error == pytest.approx(0.1 / (0.36 + 4) ** 0.5, rel=1e-5)
    assert wrong_kernel([replace(call, outputs=[x.masked_fill(masked, float("-inf"))])]) is None


def test_a_bias_that_was_dropped(clean: Model, x: torch.Tensor) -> None:
    def change(block: Block) -> None:
        block.inner.register_parameter("bias", None)

    culprit = fault(clean, x, change, "block.inner")
    assert culprit.call.name == "aten.mm"
    assert "aten.addmm instead" in culprit.why


def test_a_small_error_that_is_inherited_is_not_blamed(clean: Model, x: torch.Tensor) -> None:
    """Inputs that differ by rounding give results that differ by rounding."""
    noisy = x * (1 + 1e-7 * torch.randn(x.shape, generator=torch.Generator().manual_seed(2)))
    assert other_code(calls(clean, noisy), calls(clean, x), FP32) is None


# -- real modules


def batch() -> MicroBatch:
    draw = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 256, (length,), generator=draw).tolist() for length in (9, 14)]
    examples = [Example(ids, [0] + [1] * (len(ids) - 1), Origin("here", i)) for i, ids in enumerate(rows)]
    return micro_batch(examples, packed=True, pad_id=0)


@pytest.mark.daily("bf16", "lora")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "lora"])
def test_no_module_of_a_clean_policy_has_a_wrong_operator(tiny_folder: Path, dtype: str) -> None:
    policy = load(tiny_folder, Lora(rank=4, alpha=8) if dtype == "lora" else None)
    precision = "bf16" if dtype == "bf16" else "fp32"
    if precision == "bf16":
        policy.to(torch.bfloat16)
    rows, tolerance = batch(), tolerance_of(precision)
    looked_at = 0
    for name, _ in policy.named_modules():
        if "layers.1" in name or (dtype == "lora" and "q_proj" not in name):
            continue  # like those that are looked at
        place = name.removeprefix("model.") or "(root)"
        ours = log_module(policy, place, lambda: policy(rows)).calls or []
        theirs = log_module(policy, place, lambda: policy(rows)).calls or []
        assert wrong_kernel(ours) is None, place
        assert other_code(ours, theirs, tolerance) is None, place
        looked_at += len(ours)
    assert looked_at > 5


def test_an_operator_crosses_to_another_rank(clean: Model, x: torch.Tensor) -> None:
    found = heard(clean, x)
    again: ModuleLog = pickle.loads(pickle.dumps(found))
    assert [call.function for call in again.calls or []] == [call.function for call in found.calls or []]
    for one, other in zip(found.calls or [], again.calls or [], strict=True):
        assert torch.equal(one.outputs[0], other.outputs[0])
        assert one.settings == other.settings
