"""A fused operator is compared with the operators it replaces; its reproducer distinguishes right and wrong kernels."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from commands import warm_python
from lockstep.parity.replay.operator_bisect import WrongOperator, other_code, wrong_kernel
from lockstep.parity.replay.operator_log import ModuleLog, log_module
from lockstep.parity.replay.reproducer import write_reproducer
from lockstep.parity.replay.tolerances import operator_tolerance
from lockstep.tape.module_trace import BACKWARD

WIDTH = 24
# The operators of a device that nobody else has: no float64, as a vendor's kernels are.
VENDOR = """
import torch

library = torch.library.Library("vendor", "DEF")
library.define("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
library.define("swiglu(Tensor x) -> Tensor")


def rms_norm(x, weight, eps):
    if x.dtype == torch.float64:
        raise NotImplementedError("no kernel for float64")
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + FACTOR * eps)
    return (x.float() * rstd * weight.float()).to(x.dtype), rstd


def swiglu(x):
    if x.dtype == torch.float64:
        raise NotImplementedError("no kernel for float64")
    gate, up = x.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up * FACTOR).to(x.dtype)


library.impl("rms_norm", rms_norm, "CPU")
library.impl("swiglu", swiglu, "CPU")
"""


@pytest.fixture
def vendor() -> Iterator[Callable[[float], None]]:
    """Brings the operators, with a factor that is 1 where they are right."""
    libraries: list[Any] = []

    def bring(factor: float) -> None:
        space: dict[str, Any] = {"FACTOR": factor}
        exec(VENDOR, space)
        libraries.append(space["library"])

    yield bring
    for library in libraries:
        library._destroy()


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.eps = 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class FusedNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.vendor.rms_norm(x, self.weight, self.eps)[0]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.act = nn.Linear(2 * WIDTH, WIDTH), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class FusedGated(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.ops.vendor.swiglu(torch.cat([self.gate(x), self.up(x)], -1)))


MODULES = {"norm": (Norm, FusedNorm, "vendor.rms_norm"), "gated": (Gated, FusedGated, "vendor.swiglu")}


class Before(nn.Module):
    """The module behind one that rounds differently on the two sides, as everything before it does on two devices."""

    def __init__(self, part: nn.Module, noise: float):
        super().__init__()
        self.part, self.noise = part, noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part((x * (1 + self.noise * torch.cos(torch.arange(x.shape[-1])))).to(x.dtype))


def hearings(name: str, dtype: torch.dtype) -> tuple[ModuleLog, ModuleLog]:
    """The fused module, and the clean one on what the fused one was given."""
    torch.manual_seed(0)
    kind, other, _ = MODULES[name]
    clean, fused = kind(), other()
    fused.load_state_dict(clean.state_dict())
    x = torch.randn(5, 7, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours, theirs = Before(fused.to(dtype), 3e-6), Before(clean.to(dtype), 0.0)
    heard = log_module(ours, "part", lambda: ours(x))
    same = log_module(theirs, "part", lambda: theirs(x), given=heard.border)
    through = same.children - heard.children
    return heard, log_module(
        theirs, "part", lambda: theirs(x), given=heard.border, through=through
    ) if through else same


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])


def culprit_of(name: str, dtype: torch.dtype) -> WrongOperator | None:
    heard, same = hearings(name, dtype)
    precision = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return wrong_kernel(heard.calls) or other_code(heard.calls, same.calls, operator_tolerance(precision))


@DTYPES
@pytest.mark.parametrize("name", MODULES)
def test_a_right_fused_operator_is_no_culprit(name: str, dtype: torch.dtype, vendor: Callable[[float], None]) -> None:
    """Though it runs nothing of what the clean CPU copy of the module runs."""
    vendor(1.0)
    heard, same = hearings(name, dtype)
    assert not {call.name for call in heard.calls} & {call.name for call in same.calls}
    assert culprit_of(name, dtype) is None


@DTYPES
@pytest.mark.parametrize("name", MODULES)
def test_a_wrong_fused_operator_is_compared_with_the_operators_it_replaces(
    name: str, dtype: torch.dtype, vendor: Callable[[float], None]
) -> None:
    vendor(1.5)
    culprit = culprit_of(name, dtype)
    assert culprit is not None
    assert culprit.call.name == MODULES[name][2]
    if name == "norm":
        x, weight = culprit.call.inputs
        wanted = functional.rms_norm(x.double(), [WIDTH], weight.double(), 0.1)
    else:
        gate, up = culprit.call.inputs[0].double().chunk(2, -1)
        wanted = gate * torch.sigmoid(gate) * up
    rounding = 2 * torch.finfo(dtype).eps
    assert (culprit.expected.double() - wanted).norm() <= rounding * wanted.norm()
    off = (culprit.actual.double() - wanted).norm() / wanted.norm()
    assert culprit.error == pytest.approx(float(off) / (1.5 if name == "gated" else 1.0), rel=0.1)


@pytest.mark.daily
@DTYPES
@pytest.mark.parametrize("name", MODULES)
def test_the_reproducer_agrees_on_a_right_kernel_and_differs_on_a_wrong_one(
    name: str, dtype: torch.dtype, tmp_path: Path, vendor: Callable[[float], None]
) -> None:
    """Written where the kernel was wrong, then run where it is wrong still and where it was mended."""
    vendor(1.5)
    culprit = culprit_of(name, dtype)
    assert culprit is not None
    script = write_reproducer(culprit, tmp_path / "reproduce.py", f"{name} is off")
    assert script is not None
    for factor, wanted in ((1.5, 1), (1.0, 0)):
        driver = tmp_path / "vendor.py"
        driver.write_text(f"FACTOR = {factor}\n{VENDOR}\nimport runpy\nrunpy.run_path('reproduce.py')\n")
        done = subprocess.run([*warm_python(), str(driver)], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == wanted, done.stdout + done.stderr
        assert re.match("differs: found" if wanted else "agrees: found", done.stdout), done.stdout


# -- backwards


class Wrong(torch.autograd.Function):
    """The identity, with another factor on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 1.01


class Silu(torch.autograd.Function):
    """Its derivative as its author meant it: right, or without a term."""

    term = 1.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return functional.silu(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return gradients[0] * (gate + Silu.term * x * gate * (1 - gate))


class Own(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Silu.apply(x)


def heard_back(model: nn.Module, name: str, x: torch.Tensor, **how: Any) -> ModuleLog:
    return log_module(model, name, lambda: model(x).flatten(), phase=BACKWARD, **how)


def backwards(change: Callable[[Gated], Any], name: str) -> tuple[ModuleLog, ModuleLog]:
    torch.manual_seed(0)
    clean = Gated()
    other = Gated()
    other.load_state_dict(clean.state_dict())
    change(other)
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    ours, theirs = nn.Sequential(nn.Linear(WIDTH, WIDTH), other), nn.Sequential(nn.Linear(WIDTH, WIDTH), clean)
    theirs[0].load_state_dict(ours[0].state_dict())
    heard = heard_back(ours, name, x)
    return heard, heard_back(theirs, name, x, given=heard.border)


def back_culprit(change: Callable[[Gated], Any], name: str) -> WrongOperator | None:
    heard, same = backwards(change, name)
    return wrong_kernel(heard.calls) or other_code(heard.calls, same.calls, operator_tolerance("fp32", backwards=True))


def test_backward_operators_of_children_are_not_logged() -> None:
    heard, _ = backwards(lambda _: None, "1")
    assert [call.name for call in heard.calls] == ["aten.mul.Tensor", "aten.mul.Tensor"]
    heard, _ = backwards(lambda _: None, "1.act")
    assert [call.name for call in heard.calls] == ["aten.silu_backward"]
    heard, _ = backwards(lambda _: None, "1.down")
    assert sorted(call.name for call in heard.calls) == ["aten.mm", "aten.mm", "aten.sum.dim_IntList"]
    assert set(heard.parameters) == {"weight", "bias"}
    assert len(heard.outputs) == 1


@pytest.mark.parametrize("name", ["1", "1.act", "1.down", "1.gate", "0"])
def test_a_clean_backward_pass_has_no_wrong_operator(name: str) -> None:
    assert back_culprit(lambda _: None, name) is None


def test_a_hearing_leaves_no_gradients_and_no_hooks() -> None:
    model = Gated()
    heard_back(model, "act", torch.ones(1, WIDTH))
    assert all(weight.grad is None for weight in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_wrong_derivative_is_found_with_its_numbers() -> None:
    def change(module: Gated) -> None:
        module.act = Own()  # type: ignore[assignment]

    Silu.term = 1.0
    assert back_culprit(change, "1.act") is None, "the formula is right, though it is not torch's operator"
    Silu.term = 0.5
    try:
        culprit = back_culprit(change, "1.act")
    finally:
        Silu.term = 1.0
    assert culprit is not None
    assert culprit.clean is not None
    assert culprit.clean.name == "aten.silu_backward"
    gradient, x = (one.double() for one in culprit.clean.inputs)
    gate = torch.sigmoid(x)
    torch.testing.assert_close(
        culprit.expected.double(), gradient * (gate + x * gate * (1 - gate)), atol=1e-6, rtol=1e-5
    )
    torch.testing.assert_close(
        culprit.actual.double(), gradient * (gate + 0.5 * x * gate * (1 - gate)), atol=1e-6, rtol=1e-5
    )


def test_a_factor_between_children_is_found(tmp_path: Path) -> None:
    def change(module: Gated) -> None:
        module.forward = lambda x: module.down(Wrong.apply(module.act(module.gate(x)) * module.up(x)))  # type: ignore[method-assign]

    culprit = back_culprit(change, "1")
    assert culprit is not None
    assert culprit.call.name == "aten.mul.Tensor"
    assert "clean CPU copy of the module does not run it" in culprit.why
    torch.testing.assert_close(culprit.actual, 1.01 * culprit.expected)
    script = write_reproducer(culprit, tmp_path / "reproduce.py", "a factor")
    assert script is not None
    for text, wanted in ((script.read_text(), 1), (script.read_text().replace("1.01", "1.0"), 0)):
        script.write_text(text)
        done = subprocess.run([*warm_python(), str(script)], capture_output=True, text=True, check=False)
        assert done.returncode == wanted, done.stdout + done.stderr


def test_a_hook_on_a_weight_is_found() -> None:
    def change(module: Gated) -> None:
        module.down.weight.register_hook(lambda gradient: 1.01 * gradient)

    culprit = back_culprit(change, "1.down")
    assert culprit is not None
    assert culprit.call.name == "aten.mul.Tensor"
    heard, same = backwards(change, "1.down")
    assert heard.parameters["weight"][0] == pytest.approx(1.01 * float(same.parameters["weight"][0]), rel=1e-5)


def test_a_detached_backward_pass_is_found() -> None:
    def change(module: Gated) -> None:
        module.forward = lambda x: module.down((module.act(module.gate(x)) * module.up(x)).detach())  # type: ignore[method-assign]

    culprit = back_culprit(change, "1")
    assert culprit is not None
    assert "clean CPU copy of the module runs aten.mul.Tensor here" in culprit.why
