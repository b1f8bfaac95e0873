"""Module traces against modules that are run by hand and gradients of torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_models import load
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.data.batching import micro_batch
from lockstep.model.decoder import layout_of
from lockstep.model.load import load_value_model
from lockstep.model.policy import Policy
from lockstep.recipe import load_recipe
from lockstep.recipe.schema import Lora, Model
from lockstep.tape.digest import digest, relative
from lockstep.tape.module_trace import (
    BACKWARD,
    FORWARD,
    ROOT,
    Event,
    Trace,
    public_name,
    trace_modules,
    unmatched_patterns,
)
from lockstep.tape.tape_recorder import answers_of
from lockstep.train.start import run_recipe
from lockstep.types import Example, MicroBatch, Origin
from refusals import refuses


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(6), nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.inner(self.norm(x))).tanh()


class Residual(nn.Module):
    """Two branches read the same tensor, which also goes on past them."""

    def __init__(self, *, recomputed: bool = False) -> None:
        super().__init__()
        self.left, self.right, self.head = Branch(), Branch(), nn.Linear(6, 1)
        self.recomputed = recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputed:
            y = x + checkpoint(self.left, x, use_reentrant=False) * checkpoint(self.right, x, use_reentrant=False)
        else:
            y = x + self.left(x) * self.right(x)
        return self.head(y)[:, 0]


@pytest.fixture
def model() -> Residual:
    torch.manual_seed(0)
    return Residual()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)


def weighted(targets_K: torch.Tensor) -> torch.Tensor:
    """The sum from which a probe goes back."""
    parts = [(1 + 0.5 * math.cos(1.7 * i)) * target for i, target in enumerate(targets_K)]
    return torch.stack(parts).sum()


def events(trace: Trace, phase: str) -> Iterator[Event]:
    return (event for event in trace.events if event.phase == phase)


def only(trace: Trace, phase: str, module: str) -> Event:
    [found] = [event for event in events(trace, phase) if event.module == module]
    return found


def same(found: torch.Tensor, tensor: torch.Tensor) -> bool:
    return relative(found, digest(tensor)) < 1e-5


def test_events_come_in_the_order_of_execution_and_nest(model: Residual, x: torch.Tensor) -> None:
    trace = trace_modules(model, lambda: model(x), ["*"])
    forward = list(events(trace, FORWARD))
    branch = ["norm", "inner", "drop"]
    order = [f"left.{name}" for name in branch] + ["left"] + [f"right.{name}" for name in branch] + ["right", "head"]
    assert [event.module for event in forward] == [*order, ROOT]
    assert [event.left for event in forward] == sorted(event.left for event in forward)
    by_name = {event.module: event for event in forward}
    for name, event in by_name.items():
        for other, inner in by_name.items():
            inside = other.startswith(f"{name}.") or (name == ROOT and other != ROOT)
            assert (event.entered < inner.entered and inner.left < event.left) == inside, (name, other)
    assert [by_name[name].kind for name in ("left", "left.norm", ROOT)] == ["Branch", "LayerNorm", "Residual"]
    back = [event.module for event in events(trace, BACKWARD)]
    assert back.index("head") < back.index("right.inner") < back.index("right.norm") < back.index("right")
    assert back[-1] == ROOT


def test_forward_values_are_those_of_modules_run_by_hand(model: Residual, x: torch.Tensor) -> None:
    trace = trace_modules(model, lambda: model(x), ["*"])
    model.eval()
    normed = model.left.norm(x)
    inner = model.left.inner(normed)
    y = x + inner.tanh() * model.right.inner(model.right.norm(x)).tanh()
    wanted = {
        "left.norm": (x, normed),
        "left.inner": (normed, inner),
        "left.drop": (inner, inner),
        "left": (x, inner.tanh()),
        "head": (y, model.head(y)),
    }
    for name, (given, made) in wanted.items():
        event = only(trace, FORWARD, name)
        assert (event.inputs, event.outputs) == (1, 1)
        assert event.shapes == [list(given.shape), list(made.shape)]
        assert event.dtypes == ["float32", "float32"]
        assert same(trace.inputs(event)[0], given), name
        assert same(trace.outputs(event)[0], made), name


def by_hand(model: Residual, x: torch.Tensor) -> dict[str, tuple[torch.Tensor, ...]]:
    """What arrives at each module's output and leaves at its input, from a graph where every module has an input of
    its own."""
    model.eval()
    own = {name: x.detach().clone().requires_grad_() for name in ("left", "right")}
    made, inner = {}, {}
    for name, branch in (("left", model.left), ("right", model.right)):
        normed = branch.norm(own[name])
        inner[name] = normed, branch.inner(normed)
        made[name] = inner[name][1].tanh()
    y = x.detach() + made["left"] * made["right"]
    out = model.head(y)
    total = weighted(out[:, 0])
    found = {"head": torch.autograd.grad(total, (out, y), retain_graph=True)}
    for name in ("left", "right"):
        found[name] = torch.autograd.grad(total, (made[name], own[name]), retain_graph=True)
        normed, dense = inner[name]
        found[f"{name}.inner"] = torch.autograd.grad(total, (dense, normed), retain_graph=True)
        found[f"{name}.norm"] = torch.autograd.grad(total, (normed, own[name]), retain_graph=True)
    return found


@pytest.mark.parametrize("recomputed", [False, True])
def test_gradients_at_a_module_are_its_own_share_alone(model: Residual, x: torch.Tensor, recomputed: bool) -> None:
    """Past the branches a third way leads back to x; it belongs to neither."""
    wanted = by_hand(model, x)
    model.recomputed = recomputed
    trace = trace_modules(model, lambda: model(x), ["*"])
    for name, (arrives, leaves) in wanted.items():
        event = only(trace, BACKWARD, name)
        assert event.entered < event.left
        assert same(trace.inputs(event)[0], arrives), name
        assert same(trace.outputs(event)[0], leaves), name
    whole = torch.autograd.grad(weighted(model(x)), x)[0]
    assert not same(trace.outputs(only(trace, BACKWARD, "left"))[0], whole)
    assert same(trace.outputs(only(trace, BACKWARD, ROOT))[0], whole)


def test_recomputed_layers_are_seen_once(model: Residual, x: torch.Tensor) -> None:
    plain = trace_modules(model, lambda: model(x), ["*"])
    model.recomputed = True
    again = trace_modules(model, lambda: model(x), ["*"])
    assert [e.module for e in events(again, FORWARD)] == [e.module for e in events(plain, FORWARD)]
    assert sorted(e.module for e in events(again, BACKWARD)) == sorted(e.module for e in events(plain, BACKWARD))


def test_gradients_of_parameters(model: Residual, x: torch.Tensor) -> None:
    named = dict(model.named_parameters())
    trace = trace_modules(model, lambda: model(x), ["*"], parameters=named.items())
    model.eval()
    wanted = torch.autograd.grad(weighted(model(x)), list(named.values()))
    for name, gradient in zip(named, wanted, strict=True):
        assert same(trace.tensors[f"parameter/{name}"], gradient), name
    halves = trace_modules(model, lambda: model(x), ["*"], parameters=named.items(), ranks=2)
    for name, gradient in zip(named, wanted, strict=True):
        assert same(halves.tensors[f"parameter/{name}"], gradient / 2), name


@pytest.mark.parametrize("training", [False, True])
def test_a_probe_leaves_nothing_behind(model: Residual, x: torch.Tensor, training: bool) -> None:
    before = model.eval()(x)
    model.train(training)
    trace_modules(model, lambda: model(x), ["*"], parameters=model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert {module.training for module in model.modules()} == {training}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(model.eval()(x), before)


def test_hooks_go_when_the_forward_pass_fails(model: Residual) -> None:
    model.train()
    with pytest.raises(RuntimeError):
        trace_modules(model, lambda: model(torch.zeros(2, 3)), ["*"])
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_patterns_bound_what_is_looked_at(model: Residual, x: torch.Tensor) -> None:
    trace = trace_modules(model, lambda: model(x), ["left*", "head"], ["head"])
    assert {event.module for event in trace.events} == {"left", "left.norm", "left.inner", "left.drop", "head"}
    kept = {name for name in trace.tensors if name.endswith("/whole")}
    forward, backward = only(trace, FORWARD, "head"), only(trace, BACKWARD, "head")
    assert kept == {f"{event.key}/{side}/0/whole" for event in (forward, backward) for side in ("input", "output")}
    model.eval()
    left, right = model.left(x), model.right(x)
    assert torch.equal(trace.tensors[f"{forward.key}/input/0/whole"], x + left * right)
    slopes = torch.autograd.grad(weighted(model(x)), model.head.bias)[0]
    assert trace.tensors[f"{backward.key}/input/0/whole"].sum() == pytest.approx(float(slopes), rel=1e-5)


def test_a_pattern_that_matches_no_module_is_named(model: Residual) -> None:
    names = [public_name(name) for name, _ in model.named_modules()]
    assert not unmatched_patterns([model], ["*"], [names[-1]])
    found = unmatched_patterns([model], [f"{names[-1]}*", "*.layer.*"], [names[0], f"{names[-1]}s"])
    assert [problem.where for problem in found] == ["tape.modules", "tape.tensors", "tape.tensors"]
    assert "*.layer.*" in found[0].why
    # Whole tensors are kept of modules that are digested, and of no other.
    assert repr(names[0]) in found[1].why
    assert "tape.modules" in found[1].why
    assert names[-1] in found[2].remedy


def test_a_run_with_such_a_pattern_does_not_begin(recipe_file: Path) -> None:
    words = ["tape.record=true", 'tape.modules=["*.layer.0.*"]', "run.steps=3"]
    with refuses("tape.modules", "unknown-module", "'*.layer.0.*'"):
        run_recipe(load_recipe(str(recipe_file), words))


def test_a_module_that_runs_twice_is_two_events(x: torch.Tensor) -> None:
    torch.manual_seed(2)
    shared = nn.Linear(6, 6)
    twice = nn.Sequential(shared, nn.Tanh(), shared)
    trace = trace_modules(twice, lambda: twice(x).sum(1), ["0"])
    first, second = events(trace, FORWARD)
    assert same(trace.outputs(first)[0], shared(x))
    assert same(trace.inputs(second)[0], shared(x).tanh())


def test_names_are_those_of_the_hugging_face_folder() -> None:
    assert public_name("model.model.layers.0") == "model.layers.0"
    assert public_name("decoder.layers.0") == "decoder.layers.0"
    assert public_name("") == ROOT


# -- real models


def some_batch() -> MicroBatch:
    draw = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 256, (length,), generator=draw).tolist() for length in (9, 4, 13)]
    examples = [Example(ids, [0, 0] + [1] * (len(ids) - 2), Origin("here", i)) for i, ids in enumerate(rows)]
    return micro_batch(examples, packed=True, pad_id=0)


def policy_of(folder: Path, kind: str) -> Policy:
    policy = load(folder, Lora(rank=4, alpha=8) if kind == "lora" else None)
    if kind == "recomputed":
        policy.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return policy.train()


@pytest.mark.parametrize("kind", ["plain", "lora", "recomputed"])
def test_a_policy_says_the_same_as_torch(tiny_folder: Path, kind: str) -> None:
    policy, batch = policy_of(tiny_folder, kind), some_batch()
    parameters = dict(policy.trainable())
    trace = trace_modules(policy, lambda: answers_of(policy(batch)), ["*"], parameters=parameters.items())
    assert policy.training
    policy.eval()
    answers = answers_of(policy(batch))
    wanted = torch.autograd.grad(weighted(answers), list(parameters.values()))
    for (name, parameter), gradient in zip(parameters.items(), wanted, strict=True):
        assert parameter.grad is None
        assert same(trace.tensors[f"parameter/{name}"], gradient) or gradient.norm() < 1e-6, name
    layers = [event.module for event in events(trace, FORWARD) if event.kind.endswith("DecoderLayer")]
    assert [name[-8:] for name in layers] == ["layers.0", "layers.1"]
    # A parameter of a blamed module is looked for under the module's own name.
    modules = {event.module for event in trace.events}
    assert {name.rpartition(".")[0] for name in parameters} <= modules | {"lm_head"}


def test_a_critic_is_probed_like_a_policy(tiny_folder: Path) -> None:
    critic = load_value_model(Model(path=str(tiny_folder)), str(tiny_folder), torch.device("cpu"), "sdpa", 0)
    torch.manual_seed(4)
    nn.init.normal_(critic.head.weight)
    batch = some_batch()
    parameters = dict(critic.trainable())
    trace = trace_modules(critic, lambda: answers_of(critic(batch)), ["*"], parameters=parameters.items())
    critic.eval()
    wanted = torch.autograd.grad(weighted(critic(batch)), list(parameters.values()))
    for name, gradient in zip(parameters, wanted, strict=True):
        assert same(trace.tensors[f"parameter/{name}"], gradient) or gradient.norm() < 1e-6, name
    hidden = critic.decoder(
        input_ids=batch.input_ids_NT,
        position_ids=batch.position_ids_NT,
        use_cache=False,
        layout=layout_of(batch, critic.kernel),
    ).last_hidden_state
    assert same(trace.outputs(only(trace, FORWARD, "decoder"))[0], hidden)


class Overwriting(nn.Module):
    """Writes over what a module inside gave, as fused operators do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x).mul_(3.0))[:, 0]


def test_what_is_overwritten_later_is_digested_as_it_was() -> None:
    torch.manual_seed(0)
    model, x = Overwriting(), torch.randn(4, 6)
    trace = trace_modules(model, lambda: model(x), ["*"])
    (event,) = [e for e in trace.events if e.module == "inner" and e.phase == FORWARD]
    torch.testing.assert_close(trace.outputs(event)[0], digest(model.inner(x)))
