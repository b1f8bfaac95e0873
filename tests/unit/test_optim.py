"""Schedules by hand, AdamW against a written-out one, master weights, clipping and loss scaling."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.recipe.schema import Optim
from lockstep.train.optim import LossScale, Optimizer, learning_rate, warmup_steps


def rates(total: int, **settings) -> list[float]:
    return [learning_rate(step, total, Optim(lr=1.0, **settings)) for step in range(total)]


def test_schedules_by_hand():
    assert rates(6, schedule="constant", warmup=2) == pytest.approx([0.5, 1, 1, 1, 1, 1])
    assert rates(6, schedule="linear", warmup=2) == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25])
    assert rates(4, schedule="linear", min_lr_ratio=0.2) == pytest.approx([1, 0.8, 0.6, 0.4])
    assert rates(4, schedule="cosine") == pytest.approx([1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2])
    assert rates(4, schedule="cosine", min_lr_ratio=0.5)[2] == pytest.approx(0.75)
    assert rates(10, schedule="wsd", decay=0.4) == pytest.approx([1] * 7 + [0.75, 0.5, 0.25])
    assert warmup_steps(200, Optim(warmup=0.1)) == 20
    assert warmup_steps(200, Optim(warmup=7)) == 7


def parameters(seed: int = 0, dtype=torch.float32):
    torch.manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(3, 4).to(dtype))
    bias = torch.nn.Parameter(torch.randn(4).to(dtype))
    return {"weight": weight, "bias": bias}


def written_out_adamw(values, grads, settings: Optim, lr: float, steps: int):
    """AdamW of Loshchilov and Hutter in plain arithmetic, with decay on matrices only."""
    result = {}
    for name, value in values.items():
        p, m, v = value.double().clone(), torch.zeros_like(value).double(), torch.zeros_like(value).double()
        decay = settings.weight_decay if value.ndim >= 2 else 0.0
        b1, b2 = settings.betas
        for t in range(1, steps + 1):
            g = grads[name].double()
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            p = p * (1 - lr * decay) - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + settings.eps)
        result[name] = p
    return result


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("masters", [False, True])
def test_adamw_spares_biases_from_decay(fused, masters):
    settings = Optim(weight_decay=0.5, clip=None)
    params = parameters()
    grads = {name: torch.randn_like(p) for name, p in params.items()}
    expected = written_out_adamw({n: p.detach() for n, p in params.items()}, grads, settings, 0.1, 3)
    optimizer = Optimizer(params.items(), settings, masters=masters, fused=fused)
    for _ in range(3):
        for name, p in params.items():
            p.grad = grads[name].clone()
        optimizer.collect()
        optimizer.step(0.1, optimizer.gradient_norm())
    for name, p in params.items():
        torch.testing.assert_close(p.detach().double(), expected[name], rtol=1e-5, atol=1e-6)


def test_small_updates_survive_bf16_with_masters_and_not_without():
    """2^-9 of 1.0 is below bf16's half step; a hundred such updates must still move the weight."""

    def moved(masters: bool) -> float:
        p = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
        optimizer = Optimizer([("p", p)], Optim(weight_decay=0, clip=None), masters=masters, fused=False)
        for _ in range(100):
            p.grad = torch.ones_like(p)
            optimizer.collect()
            optimizer.step(2.0**-10, optimizer.gradient_norm())
        return p.detach().float().mean().item()

    assert moved(True) == pytest.approx(1 - 100 * 2.0**-10, abs=4e-3)
    assert moved(False) == 1.0


def test_micro_batch_gradients_add_up_in_fp32_with_masters():
    p = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    optimizer = Optimizer([("p", p)], Optim(clip=None), masters=True, fused=False)
    for value in (256.0, 1.0, 1.0):
        p.grad = torch.full_like(p, value)
        optimizer.collect()
    # bf16 has eight significant bits: 256 + 1 would stay 256.
    assert optimizer.gradient_norm().item() == 258.0


def test_clipping_by_hand():
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = Optimizer([("p", p)], Optim(clip=1.0), masters=False, fused=False)
    p.grad = torch.tensor([3.0, 4.0])
    norm = optimizer.gradient_norm()
    assert norm.item() == 5.0
    torch.nn.utils.clip_grads_with_norm_([p], 1.0, norm)
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8]), rtol=1e-5, atol=1e-6)


def test_state_round_trip_continues_bit_identical():
    def run(steps, optimizer, params):
        for step in range(steps):
            for p in params.values():
                torch.manual_seed(step)
                p.grad = torch.randn_like(p)
            optimizer.collect()
            optimizer.step(0.01, optimizer.gradient_norm())

    params = parameters(dtype=torch.bfloat16)
    optimizer = Optimizer(params.items(), Optim(), masters=True, fused=True)
    run(2, optimizer, params)
    other = {name: torch.nn.Parameter(p.detach().clone()) for name, p in params.items()}
    restored = Optimizer(other.items(), Optim(), masters=True, fused=True)
    restored.restore(optimizer.tensors())
    run(3, optimizer, params)
    run(3, restored, other)
    assert all(bool((params[name] == other[name]).all()) for name in params)


def test_loss_scale():
    scale = LossScale(8.0)
    scale.update(overflowed=True)
    assert scale.value == 4.0
    for _ in range(LossScale.GROWTH_INTERVAL):
        scale.update(overflowed=False)
    assert scale.value == 8.0
