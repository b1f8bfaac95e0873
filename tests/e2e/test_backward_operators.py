"""Wrong backward passes in a replay: it names the module and the operator, and writes a script."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import fault_modules as modules
from fault_scene import Inject, Scene, replay_with, wrap
from faults import OTHER_BATCHES

L1 = "model.layers.1"
pytestmark = pytest.mark.xdist_group("tapes")


@pytest.fixture(scope="module")
def run(tape: Callable[[str], Path]) -> Path:
    return tape("sft")


class RmsNorm(torch.autograd.Function):
    """A correct forward pass. The backward pass treats the scale as a constant."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return weight * (x * scale)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        return gradients[0] * weight * scale, (gradients[0] * x * scale).flatten(0, -2).sum(0), None


class Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return functional.silu(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(ctx.saved_tensors[0])
        return gradients[0] * gate * (1 + ctx.saved_tensors[0])  # the derivative has (1 + x (1 - gate))


class Rotated(torch.autograd.Function):
    """The rotary embedding, whose gradient is rotated in the wrong direction."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return x * cos + _half(x) * sin

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return gradients[0] * cos + _half(gradients[0]) * sin, None, None


def _half(x: torch.Tensor) -> torch.Tensor:
    one, two = x.chunk(2, -1)
    return torch.cat([-two, one], -1)


class Factor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 1.05


class SiluModule(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Silu.apply(x)


def norm(scene: Scene) -> None:
    layer = scene.module(f"{L1}.post_attention_layernorm")
    wrap(layer, "forward", lambda original, x: RmsNorm.apply(x, layer.weight, layer.variance_epsilon))


def attention(scene: Scene) -> None:
    """Wrong gradient of the keys, between the projections of the attention."""

    def rotate(turn: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        q, k = turn(q, k, cos, sin)
        return q, Factor.apply(k)

    modules.rotary(f"{L1}.self_attn", rotate)(scene)


def rotated(turn: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    return turn(q, k, cos, sin)[0], Rotated.apply(k, cos.unsqueeze(1), sin.unsqueeze(1))


FAULTS: dict[str, tuple[Inject, str, tuple[str, ...]]] = {
    "norm": (norm, f"{L1}.post_attention_layernorm", ("aten.mul.Tensor",)),
    "activation": (modules.activation(f"{L1}.mlp", SiluModule()), f"{L1}.mlp.act_fn", ("aten.mul.Tensor",)),
    "rotary": (modules.rotary(f"{L1}.self_attn", rotated), f"{L1}.self_attn", ("aten.add.Tensor", "aten.mul.Tensor")),
    "attention": (attention, f"{L1}.self_attn", ("aten.mul.Tensor",)),
    "projection": (
        modules.backward(f"{L1}.self_attn.v_proj", lambda g: 0.9 * g),
        f"{L1}.self_attn.v_proj",
        ("aten.mul.Tensor",),
    ),
    "weight": (
        modules.gradient(f"{L1}.mlp.up_proj.weight", lambda g: 1.05 * g),
        f"{L1}.mlp.up_proj",
        ("aten.mul.Tensor",),
    ),
    "detached": (modules.output(f"{L1}.mlp", lambda out: out.detach()), f"{L1}.mlp", ()),
}


# Daily: the gradient of a weight, and a fault without an operator.
DAILY = ("weight", "detached")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DAILY else pytest.mark.slow) for name in FAULTS]
)
def test_a_wrong_backward_operator_is_named(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inject, module, operators = FAULTS[name]

    def both(scene: Scene) -> None:
        modules.other_arithmetic(scene)
        inject(scene)

    found = replay_with(run, both, OTHER_BATCHES)
    assert found is not None
    assert found.module is not None
    assert (found.stage, found.module.module, found.module.phase) == ("gradient", module, "backward")
    where = found.operator
    assert where is not None
    assert where.side == "replay"
    if not operators:
        return
    assert where.operator in operators, where
    assert where.values is not None
    assert where.values[0] != pytest.approx(where.values[1], rel=1e-3)
    assert where.script is not None
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(where.script, run_name="__main__")
    assert (ended.value.code, capsys.readouterr().out[:14]) == (1, "differs: found")
