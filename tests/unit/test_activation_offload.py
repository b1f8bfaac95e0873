"""Activations that wait on the host: the same bits, what travels and what does not, and how much is left."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from conftest import chat_rows, write_online_recipe, write_sft_recipe
from lockstep.algorithms.token_losses import nll
from lockstep.data.batching import micro_batch
from lockstep.data.encode.sft_rows import Encoder, SupervisedColumns
from lockstep.model.load import load_policy, load_tokenizer, load_value_model
from lockstep.model.tiny import write_tiny
from lockstep.parallel import offload as activations
from lockstep.parallel.offload import ActivationOffload
from lockstep.recipe import load_recipe
from lockstep.recipe.keys_data import Data
from lockstep.recipe.schema import Lora, Model
from lockstep.train.start import run_recipe
from lockstep.types import MicroBatch, Origin
from preference_rows import write_recipe
from refusals import refuses
from runs import facts, samples, stored

CPU = torch.device("cpu")
LAYERS, HIDDEN = 4, 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("layers") / "model"
    write_tiny(found, hidden=HIDDEN, layers=LAYERS)
    return found


@pytest.fixture(scope="module")
def batches(folder: Path) -> dict[bool, MicroBatch]:
    """The same rows, packed and padded."""
    encoder = Encoder(
        load_tokenizer(str(folder)), SupervisedColumns("messages", messages="messages"), Data(train=["-"])
    )
    rows = [encoder(row, Origin("rows", i))[0] for i, row in enumerate(chat_rows(6))]
    return {packed: micro_batch(rows, packed=packed, pad_id=0) for packed in (True, False)}


@pytest.fixture(autouse=True)
def everything_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "LEAST", 1)


@dataclass
class Travelled:
    """Numbers and address of what went to the host, how many came back, and which wait there now."""

    out: list[tuple[int, int]] = field(default_factory=list)
    back: int = 0
    waiting: weakref.WeakSet[activations._Storage] = field(default_factory=weakref.WeakSet)

    def on_device(self) -> int:
        """Of those that wait."""
        return sum(storage.device_tensor is not None for storage in self.waiting)


@pytest.fixture
def travelled(monkeypatch: pytest.MonkeyPatch) -> Travelled:
    seen = Travelled()
    begin, bring = activations._Storage.__init__, activations._KeepingPass._bring

    def begun(self: activations._Storage, beside: Any, host: torch.Tensor, here: torch.Tensor) -> None:
        begin(self, beside, host, here)
        seen.out.append((here.numel(), here.data_ptr()))
        seen.waiting.add(self)

    def brought(self: activations._KeepingPass, storages: Sequence[activations._Storage]) -> None:
        bring(self, storages)
        seen.back += len(storages)

    monkeypatch.setattr(activations._Storage, "__init__", begun)
    monkeypatch.setattr(activations._KeepingPass, "_bring", brought)
    return seen


def learned(module: nn.Module, run: Callable[[nn.Module], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Loss and gradients."""
    module.zero_grad()
    loss = run(module)
    loss.backward()
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def alike(mine: dict[Any, torch.Tensor], theirs: dict[Any, torch.Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)


LORA = Lora(rank=4, alpha=8.0, dropout=0.1)


@pytest.mark.daily("packed", "adapters and checkpointing")
@pytest.mark.parametrize(
    ("settings", "packed"),
    [
        ({}, True),
        ({}, False),
        ({"gradient_checkpointing": True}, True),
        ({"lora": LORA}, False),
        ({"lora": LORA, "gradient_checkpointing": True}, True),
    ],
    ids=["packed", "padded", "checkpointing", "adapters, padded", "adapters and checkpointing"],
)
def test_gradients_are_bit_for_bit_those_without(
    folder: Path, batches: dict[bool, MicroBatch], travelled: Travelled, settings: dict[str, object], packed: bool
) -> None:
    def gradients(offload: bool) -> dict[str, torch.Tensor]:
        model = Model(path=str(folder), activation_offload=offload, **settings)  # type: ignore[arg-type]
        policy = load_policy(model, CPU, "sdpa", seed=0).train()
        weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
        torch.manual_seed(3)  # for the adapters' dropout
        found = learned(policy, lambda module: nll(module(batches[packed]).logprobs_K).loss)
        # No weight is carried about.
        assert not weights & {address for _, address in travelled.out}
        return found

    theirs = gradients(offload=False)
    assert not travelled.out
    assert alike(gradients(offload=True), theirs)
    assert len(theirs) > LAYERS
    tokens = batches[packed].input_ids_NT.numel()
    states = [size for size, _ in travelled.out if size == tokens * HIDDEN]
    if "gradient_checkpointing" in settings:
        # The inputs of all layers but the last; with adapters the first one needs no gradient and is kept all the same.
        assert [size for size, _ in travelled.out] == states
        assert len(states) == LAYERS - 1
    else:
        assert len(states) > LAYERS
    assert travelled.back == len(travelled.out)  # each comes back once, however many have kept it


@pytest.mark.slow
def test_a_critic_in_bf16_is_the_same_too(folder: Path, batches: dict[bool, MicroBatch], travelled: Travelled) -> None:
    found = []
    for offload in (False, True):
        settings = Model(path=str(folder), dtype="bf16", activation_offload=offload)
        critic = load_value_model(settings, str(folder), CPU, "sdpa", seed=0)
        torch.manual_seed(1)
        nn.init.normal_(critic.head.weight)
        found.append(learned(critic, lambda module: module(batches[True]).square().sum()))
    assert travelled.out
    assert alike(*found)


@pytest.mark.slow
def test_a_handle_trains_to_the_same_bits(folder: Path, tmp_path: Path, travelled: Travelled) -> None:
    """Its reference keeps nothing, and takes nothing to the host."""
    steps, ends = [], []
    for offload in (False, True):
        model = lockstep.load(folder, device="cpu", lr=1e-3, reference=True, activation_offload=offload)
        rows = [model.example("2+3=", "5"), model.example("10+20=", "thirty, I think")]
        assert [row.shape for row in model.logprobs(rows, reference=True)] != []
        assert not travelled.out
        model.forward_backward(rows, "nll")
        steps.append(model.optim_step())
        ends.append(dict(enumerate(model.logprobs(rows))))
    assert travelled.out
    assert travelled.back == len(travelled.out)
    assert steps[0] == steps[1]
    assert alike(*ends)  # of the weights after the step


def test_what_does_not_train_keeps_nothing(folder: Path, batches: dict[bool, MicroBatch], travelled: Travelled) -> None:
    settings = Model(path=str(folder), activation_offload=True)
    frozen = load_policy(settings, CPU, "sdpa", seed=0, frozen=True)
    frozen(batches[True])
    assert frozen.decoder._activations is None
    policy = load_policy(settings, CPU, "sdpa", seed=0)
    with torch.no_grad():
        policy(batches[True])
    assert not travelled.out


class Layers(nn.Module):
    """A row of layers, each of which is a function, with an offload of their own."""

    def __init__(self, *functions: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.layers = nn.ModuleList(Layer(function) for function in functions)
        self.offload = ActivationOffload(list(self.layers), CPU)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.offload.waiting_on_host():
            for layer in self.layers:
                x = layer(x)
        return x


class Layer(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def gradient(*functions: Callable[[torch.Tensor], torch.Tensor], size: int = 8) -> torch.Tensor:
    x = torch.arange(1.0, size + 1).requires_grad_()
    Layers(*functions)(x).sum().backward()
    assert x.grad is not None
    return x.grad


def same(x: torch.Tensor) -> torch.Tensor:
    return x * 1.0


def test_what_lay_at_the_same_address_before_is_not_mistaken_for_it() -> None:
    """Each factor is gone from the device before the next is made, often at its address."""

    def factors(x: torch.Tensor) -> torch.Tensor:
        return x * torch.full((8,), 2.0)

    def more(x: torch.Tensor) -> torch.Tensor:
        for number in (3.0, 5.0):
            x = x * torch.full((8,), number)
        return x

    # 2 * 3 * 5 * 3 * 5
    assert gradient(factors, more, more, same).tolist() == [450.0] * 8


def test_what_is_changed_in_place_is_kept_as_it_was() -> None:
    factor = torch.full((8,), 2.0)

    def twice(x: torch.Tensor) -> torch.Tensor:
        y = x * factor
        factor.add_(1)
        return y + x * factor

    assert gradient(twice, same).tolist() == [5.0] * 8


def test_views_come_back_as_views_of_one_storage(travelled: Travelled) -> None:
    """With their strides and offsets: kernels may compute other bits with others."""
    seen: list[tuple[tuple[int, ...], tuple[int, ...], int, int]] = []

    class Shown(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *views):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(*views)
            return x.clone()

        @staticmethod
        def backward(ctx, upstream):  # type: ignore[no-untyped-def]
            tensors = ctx.saved_tensors
            seen.extend((tuple(t.shape), t.stride(), t.storage_offset(), t.data_ptr()) for t in tensors)
            assert [t.flatten()[-1].item() for t in tensors] == [11.0, 11.0, 6.0]
            return upstream, None, None, None

    table = torch.arange(12.0).view(3, 4)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return Shown.apply(x, table.t(), table[1:, 2:], table[1, 2].expand(5))  # type: ignore[no-any-return]

    gradient(layer, same)
    base = seen[0][3]
    assert seen == [((4, 3), (1, 4), 0, base), ((2, 2), (4, 1), 6, base + 24), ((5,), (0,), 6, base + 24)]
    assert [size for size, _ in travelled.out].count(12) == 1


def test_two_layers_at_most_are_on_the_device(monkeypatch: pytest.MonkeyPatch, travelled: Travelled) -> None:
    """A layer keeps a factor of its own of 1000 numbers; how many of them are on the device is counted in each."""
    monkeypatch.setattr(activations, "LEAST", 4000)
    forward: list[int] = []
    backward: list[int] = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(factor)
            return x * 2

        @staticmethod
        def backward(ctx, upstream):  # type: ignore[no-untyped-def]
            (factor,) = ctx.saved_tensors
            assert factor.sum() == 3000
            backward.append(travelled.on_device())
            return upstream * 2, None

    def layer(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Counted.apply(x, torch.full((1000,), 3.0))
        forward.append(travelled.on_device())
        return y

    assert gradient(*[layer] * 6).tolist() == [64.0] * 8
    # The last layer's own stays without travelling: in it there is that of the layer before, on its way.
    assert (forward, backward) == ([1, 2, 2, 2, 2, 1], [1, 2, 2, 2, 2, 1])
    assert not travelled.waiting


def test_a_model_without_layers_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.Qwen2ForCausalLM._no_split_modules", [])
    monkeypatch.setattr("transformers.Qwen2Model._no_split_modules", [])
    with refuses("model.activation_offload", "unsupported-model", "Qwen2"):
        load_policy(Model(path=str(folder), activation_offload=True), CPU, "sdpa", seed=0)


ONLINE = ["batch.prompts_per_update=2", "log.samples=99"]
RUNS: dict[str, list[str]] = {
    "sft": ["batch.tokens=null", "batch.micro_batch_size=3"],
    "dpo": [],
    "grpo": [*ONLINE, "algorithm.kl.where=loss", "model.gradient_checkpointing=true"],
    "ppo": [*ONLINE, "method=ppo", "rollout.n=1", "critic.lr=1e-3", "algorithm.kl.where=reward"],
}


# Every day the variation "activations-host" of invariance/test_recipes.py runs.
@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", "grpo", "dpo", "ppo"])
def test_a_run_is_the_same_run(folder: Path, tmp_path: Path, travelled: Travelled, method: str) -> None:
    if method == "dpo":
        recipe = write_recipe(tmp_path, folder, method)
    else:
        recipe = (write_sft_recipe if method == "sft" else write_online_recipe)(tmp_path, folder)
    common = ["run.steps=2", "run.export=false", "optim.warmup=0", *RUNS[method]]
    for name, more in (("device", []), ("host", ["model.activation_offload=true"])):
        assert not travelled.out
        run_recipe(load_recipe(str(recipe), [f"run.name={name}", *common, *more]))
    assert travelled.out
    device, host = (tmp_path / "runs" / name for name in ("device", "host"))
    assert len(facts(host)) == 2
    assert facts(host) == facts(device)
    assert samples(host) == samples(device)
    for part in ("weights", "optimizer", *(["critic"] if method == "ppo" else [])):
        mine, theirs = stored(host, 2, part), stored(device, 2, part)
        assert mine
        assert alike(dict(mine), dict(theirs))
