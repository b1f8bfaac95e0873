"""What lives on the host: the same updates, written back; a frozen model that comes and goes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from conftest import write_sft_recipe
from lockstep.errors import Refusal
from lockstep.model.export_folder import export_value_model
from lockstep.model.load import load_value_model
from lockstep.model.resolve import folders_of
from lockstep.model.tiny import write_tiny
from lockstep.model.weights import trained_weights
from lockstep.parallel.offload import HOME, keep_on_host, resident
from lockstep.recipe import load_recipe
from lockstep.recipe.keys_optim import Optim
from lockstep.recipe.schema import Model
from lockstep.reward.model import ModelPart
from lockstep.run.console import Console
from lockstep.train import optim_offload as host_optim
from lockstep.train.offline import train_offline
from lockstep.train.optim import Optimizer
from lockstep.train.optim_offload import HostOptimizer
from preference_rows import write_recipe
from runs import facts, stored

CPU = torch.device("cpu")


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def trained(kind: str, dtype: torch.dtype, steps: int, state: dict[str, torch.Tensor] | None = None) -> tuple:
    """Weights, state and norms after some updates of two micro-batches each, with a clip that bites."""
    model, masters = network(dtype), dtype != torch.float32
    settings, how = Optim(lr=1e-2, clip=0.3, weight_decay=0.1), {"masters": masters, "fused": True, "kernel": "torch"}
    optimizer: Optimizer
    if kind == "device":
        optimizer = Optimizer(model.named_parameters(), settings, **how)
    else:
        place = {"device": CPU, "state_on_host": kind == "host"}
        optimizer = HostOptimizer(model.named_parameters(), settings, **how, **place)
    if state is not None:
        optimizer.restore(state)
    draw, norms = torch.Generator().manual_seed(1), []
    for step in range(steps):
        for _ in range(2):
            model(torch.randn(4, 5, generator=draw).to(dtype)).float().square().sum().backward()
            optimizer.collect()
        norms.append(optimizer.gradient_norm(2.0))
        optimizer.step(1e-2 / (step + 1), norms[-1])
    return {name: p.detach().clone() for name, p in model.named_parameters()}, optimizer.full_state(), norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["device", "host"])
def test_a_state_from_before_the_first_update_is_restored(kind: str, dtype: torch.dtype) -> None:
    """As that of the policy while the critic warms up. AdamW has no moments then."""
    _, before, _ = trained("device", dtype, 0)
    assert not any(name.startswith("exp_avg") for name in before)
    weights, state, _ = trained(kind, dtype, 2)
    again = trained(kind, dtype, 2, before)
    assert all(torch.equal(again[0][name], weights[name]) for name in weights)
    assert all(torch.equal(again[1][name], state[name]) for name in state)
    # Moments of an abandoned run do not stay.
    model = network(dtype)
    how = {"masters": dtype != torch.float32, "fused": True, "kernel": "torch"}
    place = {"device": CPU, "state_on_host": True}
    optimizer = (
        Optimizer(model.named_parameters(), Optim(), **how)
        if kind == "device"
        else HostOptimizer(model.named_parameters(), Optim(), **how, **place)
    )
    optimizer.restore(state)
    optimizer.restore(before)
    left = {name: value for name, value in optimizer.full_state().items() if not name.startswith("master/")}
    assert not any(value.any() for value in left.values())


def test_half_a_state_is_no_state() -> None:
    _, state, _ = trained("device", torch.float32, 1)
    del state["exp_avg/0.weight"]
    with pytest.raises(KeyError, match=r"exp_avg/0\.weight"):
        trained("device", torch.float32, 1, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["host", "only weights there"])
@pytest.mark.parametrize("together", [2**27, 20])
def test_the_update_is_bit_for_bit_that_of_the_device(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype, together: int
) -> None:
    monkeypatch.setattr(host_optim, "TOGETHER", together)
    weights, state, norms = trained("device", dtype, 3)
    again = trained(kind, dtype, 3)
    assert again[1].keys() == state.keys()
    for mine, theirs in ((again[0], weights), (again[1], state)):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert again[2] == norms
    # And from a stored state.
    further, wanted = (trained(one, dtype, 2, state)[1] for one in (kind, "device"))
    assert all(torch.equal(further[name], wanted[name]) for name in wanted)
    assert not all(torch.equal(further[name], state[name]) for name in state)


def test_a_frozen_model_is_there_during_its_passes_only() -> None:
    model = network(torch.float32).requires_grad_(False)
    model[2].weight = nn.Parameter(model[2].weight.detach(), requires_grad=False)
    rows = torch.randn(3, 5)
    before = model(rows)
    keep_on_host(model, CPU)
    home = [p.data_ptr() for p in model.parameters()]
    with resident(model):
        inside = [p.data_ptr() for p in model.parameters()]
        with resident(model):
            assert torch.equal(model(rows), before)
        # The inner pass was not the last.
        assert [p.data_ptr() for p in model.parameters()] == inside
        kept = model[2].weight.detach()
    assert not set(inside) & set(home)
    assert [p.data_ptr() for p in model.parameters()] == home
    assert torch.equal(kept, model[2].weight)


@pytest.mark.slow
def test_a_run_with_its_optimizer_on_the_host_is_the_same_run(tmp_path: Path, tiny_folder: Path) -> None:
    recipe = write_sft_recipe(tmp_path, tiny_folder)
    words = ["model.dtype=bf16", "run.steps=4", "checkpoint.every=2", "checkpoint.keep_last=9"]
    for name, more in (("device", []), ("host", ["parallel.offload=optimizer"])):
        train_offline(load_recipe(str(recipe), [f"run.name={name}", *words, *more]), Console.silent())
    runs = tmp_path / "runs"
    assert facts(runs / "host") == facts(runs / "device")
    for part in ("weights", "optimizer"):
        mine, theirs = stored(runs / "host", 4, part), stored(runs / "device", 4, part)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    # It may be switched on in the middle: the state is the same.
    more = ["run.name=device", "parallel.offload=optimizer", "run.steps=5"]
    train_offline(load_recipe(str(recipe), [*words, *more]), Console.silent())


# Every day the variations of invariance/test_recipes.py run with the optimizer, frozen models and activations there.
@pytest.mark.slow
@pytest.mark.parametrize(("method", "key"), [("dpo", "offload_reference"), ("distill", "offload_teacher")])
def test_a_frozen_model_on_the_host_says_the_same(tmp_path: Path, tiny_folder: Path, method: str, key: str) -> None:
    recipe = write_recipe(tmp_path, tiny_folder, method)
    write_tiny(tmp_path / "teacher", hidden=64, layers=2, seed=5)
    words = ["run.steps=2", *([f"distill.teacher={tmp_path / 'teacher'}"] if method == "distill" else [])]
    for name, more in (("device", []), ("host", [f"parallel.{key}=true"])):
        train_offline(load_recipe(str(recipe), [f"run.name={name}", *words, *more]), Console.silent())
    assert len(facts(tmp_path / "runs" / "host")) == 2
    assert facts(tmp_path / "runs" / "host") == facts(tmp_path / "runs" / "device")


def test_a_reward_model_on_the_host_scores_the_same(tmp_path: Path, tiny_folder: Path) -> None:
    settings = Model(path=str(tiny_folder))
    module = load_value_model(settings, str(tiny_folder), CPU, "sdpa", seed=0, key="model.path")
    torch.manual_seed(2)
    nn.init.normal_(module.head.weight)
    export_value_model(
        settings, trained_weights(module.stored), tmp_path / "judge", where="test", folders=folders_of(settings)
    )
    device = ModelPart(str(tmp_path / "judge"), CPU)
    host = ModelPart(str(tmp_path / "judge"), CPU, offload=True)
    rows = [[5, 6, 7], [9, 8, 7, 6, 5]]
    found = host._reward_model.score(rows)
    assert found == device._reward_model.score(rows)
    assert len(set(found)) == 2
    assert vars(host._reward_model.model)[HOME].visits == 0
    assert HOME not in vars(device._reward_model.model)


@pytest.mark.parametrize(
    ("words", "where", "why"),
    [
        (["parallel.offload=params"], "parallel.offload", "params needs several processes"),
        (["parallel.offload_reference=true"], "parallel.offload_reference", "the run has no separate reference"),
        (["parallel.offload_critic=optimizer"], "parallel.offload_critic", "the run has no separate critic"),
        (["parallel.offload=optimizer", "tape=true"], "parallel.offload", "a tape cannot record"),
        (["parallel.shard=2"], "parallel.shard", "2 does not divide 1 processes"),
    ],
)
def test_what_cannot_be_is_refused_before_training(recipe_file: Path, words: list[str], where: str, why: str) -> None:
    with pytest.raises(Refusal) as caught:
        train_offline(load_recipe(str(recipe_file), words), Console.silent())
    assert [problem.where for problem in caught.value.problems] == [where]
    assert why in caught.value.problems[0].why
