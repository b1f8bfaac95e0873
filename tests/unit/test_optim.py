"""Schedules by hand, AdamW against a written-out one, master weights, clipping and loss scaling."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    Qwen3Config,
    get_scheduler,
)

from lockstep.model.weights import biases_and_norms
from lockstep.parallel.sharding import total_norm
from lockstep.parity.replay.optimizer_checks import formula_error
from lockstep.recipe.keys_optim import Optim
from lockstep.run.checkpoint import State
from lockstep.tape.tape_format import StepRecord
from lockstep.train.optim import LossScale, Optimizer, learning_rate, update_rates, warmup_steps
from lockstep.train.optim_offload import HostOptimizer
from lockstep.train.resume import weight_decay_changes


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
    assert rates(6, schedule="constant", warmup=4, warmup_start=0.2) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    lengths = [warmup_steps(45, Optim(warmup=0.1, warmup_rounding=how)) for how in ("nearest", "down", "up")]
    assert lengths == [4, 4, 5]


@pytest.mark.parametrize(
    ("name", "ours", "more"),
    [
        ("constant_with_warmup", {"schedule": "constant"}, {}),
        ("linear", {"schedule": "linear"}, {}),
        ("cosine", {"schedule": "cosine"}, {}),
        ("cosine_with_min_lr", {"schedule": "cosine", "min_lr_ratio": 0.1}, {"min_lr_rate": 0.1}),
    ],
)
def test_a_warmup_from_zero_is_that_of_transformers(name: str, ours: dict, more: dict) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(name, optimizer, num_warmup_steps=3, num_training_steps=10, scheduler_specific_kwargs=more)
    theirs = []
    for _ in range(10):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates(10, warmup=0.25, warmup_rounding="up", warmup_start=0.0, **ours) == pytest.approx(theirs)


def test_the_updates_of_a_step_share_a_rate_or_follow_the_schedule() -> None:
    settings = Optim(lr=1.0, schedule="linear", warmup=0.5, warmup_start=0.0)
    assert update_rates(1, 2, 2, settings, 3.0) == [(1.0, 3.0), (1.0, 3.0)]
    each = settings.model_copy(update={"schedule_unit": "update"})
    assert update_rates(0, 2, 2, each, 3.0) == [(0.0, 0.0), (0.5, 1.5)]
    assert update_rates(1, 2, 2, each, 3.0) == [(1.0, 3.0), (0.5, 1.5)]


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


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PLAIN = {"input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight"}


@pytest.mark.parametrize(
    ("config", "spared"),
    [
        (LlamaConfig(**SIZES), PLAIN),
        (Qwen3Config(**SIZES, head_dim=8), PLAIN | {"q_norm.weight", "k_norm.weight"}),
        (
            CohereConfig(**SIZES, use_qk_norm=True),
            {"input_layernorm.weight", "norm.weight", "q_norm.weight", "k_norm.weight"},
        ),
        (
            GptOssConfig(
                **SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"]
            ),
            PLAIN
            | {f"{side}_proj.bias" for side in "qkvo"}
            | {"router.bias", "experts.gate_up_proj_bias", "experts.down_proj_bias"},
        ),
        (
            GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64, bos_token_id=1, eos_token_id=1),
            {f"{name}.{part}" for name in ("ln_1", "ln_2", "ln_f") for part in ("weight", "bias")}
            | {"c_attn.bias", "c_proj.bias", "c_fc.bias"},
        ),
    ],
    ids=["llama", "qwen3", "cohere", "gpt-oss", "gpt2"],
)
def test_biases_and_norms_are_told_by_their_role(config, spared):
    """Of gpt-oss the biases of experts have two dimensions, of Cohere the norms of heads."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert {".".join(name.split(".")[-2:]) for name in biases_and_norms(model)} == spared


def hybrid(kind, settings, masters):
    """An optimizer over a matrix, a bias and a norm that are matrices too, and a vector."""
    torch.manual_seed(0)
    shapes = {"weight": (3, 4), "experts_bias": (2, 4), "q_norm.weight": (2, 4), "bias": (4,)}
    dtype = torch.bfloat16 if masters else torch.float32
    params = {name: torch.nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in shapes.items()}
    how = {"masters": masters, "fused": False, "kernel": "torch", "spared": {"experts_bias", "q_norm.weight", "bias"}}
    if kind == "device":
        return params, Optimizer(params.items(), settings, **how)
    place = {"device": torch.device("cpu"), "state_on_host": kind == "host"}
    return params, HostOptimizer(params.items(), settings, **how, **place)


@pytest.mark.parametrize("decay_all", [False, True])
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("kind", ["device", "host", "only weights there"])
def test_decay_reaches_what_it_should_wherever_the_optimizer_lives(kind, masters, decay_all):
    """Without a gradient AdamW is its decay alone: a factor of 1 - lr * weight_decay for each update."""
    settings = Optim(weight_decay=0.5, clip=None, decay_all=decay_all)
    params, optimizer = hybrid(kind, settings, masters)
    before = {name: p.detach().float().clone() for name, p in params.items()}
    for _ in range(2):
        for p in params.values():
            p.grad = torch.zeros_like(p)
        optimizer.collect()
        optimizer.step(0.5, optimizer.gradient_norm())
    after = optimizer.local_masters() if masters else params
    for name, start in before.items():
        factor = 0.75**2 if decay_all or name == "weight" else 1.0
        torch.testing.assert_close(after[name].detach().float(), start * factor, rtol=1e-6, atol=1e-7, msg=name)


def test_a_checkpoint_whose_steps_decayed_biases_is_resumed_aloud():
    settings = Optim(weight_decay=0.1)
    _, optimizer = hybrid("device", settings, masters=False)
    old = State(step=3, rows_seen=0, recipe={}, data={}, world_size=1)
    (said,) = weight_decay_changes(old, [optimizer], settings)
    assert "weight decay skips experts_bias and 1 more" in said
    assert not weight_decay_changes(replace(old, decay_rule="role"), [optimizer], settings)
    assert not weight_decay_changes(old, [optimizer], Optim(weight_decay=0.0))
    every = Optim(weight_decay=0.1, decay_all=True)
    assert not weight_decay_changes(old, [optimizer], every)
    (said,) = weight_decay_changes(replace(old, recipe={"parallel": {"offload": "all"}}), [optimizer], every)
    assert "optim.decay_all" in said


def test_the_judge_of_an_optimizer_spares_the_same():
    """A bias of two dimensions that decayed is not where the formula puts it."""
    before = torch.full((4,), 2.0)
    sample = {"gradient": torch.ones(4), "before": before, "count": torch.tensor(0.0)}
    optim = {"weight_decay": 0.5, "betas": [0.9, 0.95], "eps": 1e-8, "clip": None}
    # One step from fresh moments moves by the rate; decay, where there is any, takes lr * decay of the weight.
    for after, off in ((before - 0.1, ()), (before * 0.95 - 0.1, ("experts_bias",))):
        tensors = {f"train/0/sample/experts_bias/{key}": value for key, value in {**sample, "after": after}.items()}
        record = StepRecord(1, {}, tensors)
        found = formula_error(record, "train", {"experts_bias": [2, 2]}, optim, 0.1, 2.0, 1e-3, ["experts_bias"])
        assert found.differing == off


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
    restored.restore(optimizer.full_state())
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


def test_the_gradient_norm_of_large_tensors_is_exact_on_a_cpu() -> None:
    """A few large numbers come first: a sum in fp32 then loses the small ones."""
    large = torch.cat([torch.full((1000,), 0.3), torch.full((2**22,), 1e-3)])
    small = torch.full((100,), 0.01)
    wanted = math.sqrt(1000 * 0.3**2 + 2**22 * 1e-6 + 100 * 1e-4)
    assert total_norm([large, small]).item() == pytest.approx(wanted, rel=1e-6)
    assert total_norm([large]).item() == pytest.approx(math.sqrt(1000 * 0.3**2 + 2**22 * 1e-6), rel=1e-6)
    assert total_norm([]).item() == 0
    empty = torch.zeros(0)
    assert total_norm([small, empty]).item() == pytest.approx(0.1, rel=1e-6)
