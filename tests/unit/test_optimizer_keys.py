"""Keys of the optimizer: parameter groups by name, what does not fit together, and what `plan` counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from conftest import write_sft_recipe
from lockstep.device.cpu import Cpu
from lockstep.errors import Refusal
from lockstep.model.load import load_config
from lockstep.parallel.world import World
from lockstep.parity.replay.optimizer_checks import formula_error
from lockstep.preflight.memory_plan import plan_memory
from lockstep.recipe import Recipe, load_recipe
from lockstep.recipe.keys_optim import Optim
from lockstep.recipe.optim_checks import unmatched_groups
from lockstep.tape.tape_format import StepRecord
from lockstep.train.models import build_learner
from lockstep.train.optim import Optimizer
from lockstep.train.optim_offload import HostOptimizer
from lockstep.train.optim_rules import RuleOptimizer

CPU = torch.device("cpu")
GROUPS = [
    {"match": r"\.embed", "name": "embedding", "lr": 2e-3, "weight_decay": 0.0},
    {"match": "bias$", "weight_decay": 0.5},
    {"match": r"layers\.1\.", "lr_ratio": 0.25},
]
NAMES = ["model.embed.weight", "model.layers.0.weight", "model.layers.1.weight", "model.layers.1.bias"]


def loaded(recipe_file: Path, *words: str) -> Recipe:
    return load_recipe(str(recipe_file), [*words])


def refused(recipe_file: Path, *words: str) -> dict[str, str]:
    with pytest.raises(Refusal) as caught:
        loaded(recipe_file, *words)
    return {problem.where: problem.code for problem in caught.value.problems}


def parameters() -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return {n: nn.Parameter(torch.randn((4,) if "bias" in n else (3, 4), generator=draw)) for n in NAMES}


@pytest.mark.parametrize("kind", ["device", "host", "rule"])
def test_the_first_matching_group_gives_rate_and_decay(kind: str) -> None:
    """With gradients of one size AdamW moves every weight by its learning rate, after its decay."""
    settings = Optim(lr=1e-3, weight_decay=0.1, clip=None, groups=GROUPS)
    params = parameters()
    how = {"masters": False, "spared": {"model.layers.1.bias"}}
    optimizer: Optimizer
    if kind == "device":
        optimizer = Optimizer(params.items(), settings, fused=False, **how)
    elif kind == "host":
        place = {"device": CPU, "state_on_host": True}
        optimizer = HostOptimizer(params.items(), settings, fused=False, kernel="torch", **how, **place)
    else:
        optimizer = RuleOptimizer(params.items(), settings, device=CPU, **how)
    before = {name: one.detach().clone() for name, one in params.items()}
    for one in params.values():
        one.grad = torch.ones_like(one)
    optimizer.step(5e-4, optimizer.gradient_norm())  # half of the peak
    # (rate, decay): the bias is in the second group, although the third matches it too.
    wanted = dict(zip(NAMES, [(1e-3, 0.0), (5e-4, 0.1), (1.25e-4, 0.1), (5e-4, 0.5)], strict=True))
    for name, (rate, decay) in wanted.items():
        torch.testing.assert_close(params[name].detach(), before[name] * (1 - rate * decay) - rate, rtol=0, atol=1e-6)
    assert optimizer.group_ratios == {"embedding": 2.0}


def test_the_fused_kernel_and_its_reference_know_rates_of_groups() -> None:
    kernel = pytest.importorskip("lockstep.kernels.adamw_triton")
    weight = torch.ones(8)
    entry = kernel.Entry(weight.clone(), torch.ones(8), weight, torch.zeros(8), torch.zeros(8), 0.5, 0.25)
    kernel.plain_step([entry], [1.0], torch.ones(()), lr=0.4, betas=(0.9, 0.95), eps=1e-8)
    torch.testing.assert_close(weight, torch.full((8,), 1 - 0.1 * 0.5 - 0.1))


def test_a_replay_knows_the_groups() -> None:
    before = torch.full((4,), 2.0)
    sample = {"gradient": torch.ones(4), "before": before, "count": torch.tensor(0.0)}
    optim = {"lr": 0.1, "weight_decay": 0.5, "betas": [0.9, 0.95], "eps": 1e-8, "clip": None}
    optim["groups"] = [{"match": "up", "lr_ratio": 0.5, "weight_decay": 0.0}]
    for after, off in ((before - 0.05, ()), (before * 0.95 - 0.1, ("up.weight",))):
        tensors = {f"train/0/sample/up.weight/{key}": value for key, value in {**sample, "after": after}.items()}
        found = formula_error(StepRecord(1, {}, tensors), "train", {"up.weight": [2, 2]}, optim, 0.1, 2.0, 1e-3)
        assert found.differing == off


def test_a_group_without_parameters_is_refused_with_the_nearest_name(recipe_file: Path) -> None:
    (problem,) = unmatched_groups(Optim(groups=[{"match": "embd", "lr": 1.0}]), NAMES)
    assert (problem.where, problem.code) == ("optim.groups.0.match", "unknown-name")
    assert "model.embed.weight" in problem.remedy
    (problem,) = unmatched_groups(Optim(groups=[{"match": "bias", "lr": 1.0}, {"match": "1.bias", "lr": 1.0}]), NAMES)
    assert problem.where == "optim.groups.1.match"
    assert not list(unmatched_groups(Optim(groups=GROUPS), NAMES))
    recipe = loaded(recipe_file, "optim.groups=[{match: q_prj, lr: 1.0e-4}]")
    for build in (
        lambda: plan_memory(recipe, load_config(recipe.model.path), 1, 64, 8),
        lambda: build_learner(recipe, Cpu(), World(), CPU),
    ):
        with pytest.raises(Refusal) as caught:
            build()
        (problem,) = caught.value.problems
        assert problem.where == "optim.groups.0.match"
        assert "q_proj.weight" in problem.remedy


@pytest.mark.parametrize(
    ("words", "where", "code"),
    [
        (["optim.momentum=0.5"], "optim.momentum", "unused-key"),
        (["optim.name=lion", "optim.eps=1e-5"], "optim.eps", "unused-key"),
        (["optim.name=muon", "optim.decay_rate=0.5"], "optim.decay_rate", "unused-key"),
        (["optim.name=adafactor", "optim.betas=[0.9, 0.99]"], "optim.betas", "unused-key"),
        (["optim.name=lion", "tape=true"], "tape", "unsupported-combination"),
        (["optim.stochastic_rounding=true"], "optim.stochastic_rounding", "unsupported-combination"),
        (["optim.stochastic_rounding=true", "model.dtype=bf16"], "optim.stochastic_rounding", "conflicting-keys"),
        (["optim.groups=[{match: '('}]"], "optim.groups.0.match", "invalid-regex"),
        (["optim.groups=[{match: a}]"], "optim.groups.0", "not-set"),
        (["optim.groups=[{match: a, lr: 1.0, lr_ratio: 1.0}]"], "optim.groups.0.lr_ratio", "conflicting-keys"),
        (
            ["optim.groups=[{match: a, lr: 1.0, name: x}, {match: b, lr: 1.0, name: x}]"],
            "optim.groups.1.name",
            "invalid-name",
        ),
    ],
)
def test_keys_that_do_not_fit_are_refused(recipe_file: Path, words: list[str], where: str, code: str) -> None:
    found = refused(recipe_file, *words)
    assert found.get(where) == code, found


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "adafactor", "muon", "lion"])
def test_the_plan_counts_the_bytes_of_the_real_state(tmp_path: Path, tiny_folder: Path, name: str) -> None:
    recipe_file = write_sft_recipe(tmp_path, tiny_folder)
    for words in (
        ["model.dtype=bf16"],
        ["model.dtype=bf16", "model.master_weights=false", "optim.stochastic_rounding=true"],
        ["model.lora={rank: 4}"],
    ):
        recipe = loaded(recipe_file, f"optim.name={name}", *words)
        plan = plan_memory(recipe, load_config(recipe.model.path), 1, 64, 8)
        learner = build_learner(recipe, Cpu(), World(), CPU)
        for _, parameter in learner.module.trainable():
            parameter.grad = torch.ones_like(parameter)
        learner.optimizer.collect()
        learner.optim_step(1e-4)
        state = learner.optimizer.full_state()
        real = sum(value.nbytes for key, value in state.items() if not key.startswith("step/"))
        counted = next(phase.optimizer for phase in plan.phases if phase.name == "optimizer step")
        assert counted == real, words
        weights = sum(p.nbytes for _, p in learner.module.trainable())
        assert plan.checkpoint_bytes == real + weights
