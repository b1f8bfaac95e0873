"""MLPs over tiles of the tokens: the same outputs and gradients, and activations of one tile only."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, Qwen2Config
from transformers.activations import ACT2FN
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeConfig, Qwen2MoeDecoderLayer

from conftest import chat_rows, write_sft_recipe
from host_kernels import HOST
from lockstep.algorithms.token_losses import nll
from lockstep.data.batching import micro_batch
from lockstep.data.encode.sft_rows import Encoder, SupervisedColumns
from lockstep.device.select import DEVICES
from lockstep.kernels.fused_modules import plug_in
from lockstep.kernels.tiled_mlp import TiledForward, is_mlp, mlps_of, tile_mlps, untiled
from lockstep.model.load import load_config, load_policy, load_tokenizer, load_value_model
from lockstep.model.tiny import write_tiny
from lockstep.preflight.memory_plan import plan_memory
from lockstep.preflight.model_sizes import LayerKernels, activation_bytes, count_parameters, feed_forward_bytes
from lockstep.recipe import Recipe, load_recipe
from lockstep.recipe.keys_data import Data
from lockstep.recipe.recipe_checks import with_derived_defaults
from lockstep.recipe.schema import Lora, Model
from lockstep.train.start import run_recipe
from lockstep.types import Example, MicroBatch, Origin
from refusals import refuses

CPU = torch.device("cpu")
HIDDEN, INNER, LAYERS = 64, 176, 3
TILE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tiles") / "model"
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


def gated(dtype: torch.dtype = torch.float32, width: int = INNER) -> nn.Module:
    torch.manual_seed(0)
    return Qwen2MLP(Qwen2Config(hidden_size=HIDDEN, intermediate_size=width)).to(dtype)


def with_biases() -> nn.Module:
    torch.manual_seed(0)
    return GPT2MLP(INNER, GPT2Config(n_embd=HIDDEN, resid_pdrop=0.0))


def gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of the input and the trained weights."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    out = module(x)
    out.backward(torch.cos(torch.arange(out.numel(), dtype=torch.float32)).view_as(out).to(out.dtype))
    assert x.grad is not None
    return [out.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def tiles(module: nn.Module, tokens: int = TILE) -> nn.Module:
    """A copy of the module over tiles."""
    copied = copy.deepcopy(module)
    assert tile_mlps([copied], tokens) == 1
    return copied


@pytest.mark.parametrize("build", [gated, with_biases])
@pytest.mark.parametrize("shape", [(1, 50), (3, 16), (2, 40)], ids=str)
def test_outputs_and_gradients_are_those_of_the_module(build: Any, shape: tuple[int, int]) -> None:
    module, x = build(), torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(1))
    for mine, theirs in zip(gradients(tiles(module), x), gradients(module, x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_few_tokens_run_at_once() -> None:
    module, calls = tiles(gated()), []
    module.gate_proj.register_forward_hook(lambda _, inputs, __: calls.append(inputs[0].shape[1]))  # type: ignore
    module(torch.zeros(1, TILE, HIDDEN))
    assert calls == [TILE]
    with torch.no_grad():
        module(torch.zeros(1, 2 * TILE + 1, HIDDEN))
    assert calls == [TILE, TILE, TILE, 1]


def test_an_input_without_gradients_trains_the_weights() -> None:
    module, x = gated(), torch.randn(1, 50, HIDDEN)
    for one in (module, split := tiles(module)):
        one(x).sum().backward()
    for mine, theirs in zip(split.parameters(), module.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-5)


def test_frozen_weights_get_no_gradient() -> None:
    module = gated()
    module.requires_grad_(False)
    split, x = tiles(module), torch.randn(1, 50, HIDDEN)
    for mine, theirs in zip(gradients(split, x), gradients(module, x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert all(p.grad is None for p in split.parameters())


def test_gradients_of_many_tiles_in_bf16_are_as_exact_as_those_of_one_product() -> None:
    """A sum in bf16 over 64 tiles would round 63 times."""
    x = torch.randn(1, 256, HIDDEN, dtype=torch.bfloat16)
    exact = gated()
    module = copy.deepcopy(exact).bfloat16()
    exact.load_state_dict({name: value.float() for name, value in module.state_dict().items()})

    def errors(one: nn.Module) -> list[float]:
        pairs = zip(gradients(one, x)[2:], gradients(exact, x.float())[2:], strict=True)
        return [((mine.float() - theirs).norm() / theirs.norm()).item() for mine, theirs in pairs]

    for mine, theirs in zip(errors(tiles(module, 4)), errors(module), strict=True):
        assert mine <= 1.1 * theirs


def test_dropout_of_adapters_drops_the_same_values_again() -> None:
    """The tiles that are computed again, against tiles whose activations are kept."""
    from peft import LoraConfig, inject_adapter_in_model

    module = inject_adapter_in_model(
        LoraConfig(r=4, lora_dropout=0.5, target_modules=["gate_proj", "down_proj"], init_lora_weights=False), gated()
    )
    split, x = tiles(module), torch.randn(1, 2 * TILE, HIDDEN)

    class Kept(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([module(part) for part in x.split(TILE, dim=1)], dim=1)

    kept = Kept()
    kept.inner = module
    torch.manual_seed(3)
    mine = gradients(split, x)
    after = torch.rand(1)
    torch.manual_seed(3)
    theirs = gradients(kept, x)
    assert torch.equal(torch.rand(1), after)  # the backward pass leaves the generator as it was
    assert len(mine) == 2 + 4
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_fused_kernel_runs_in_the_tiles() -> None:
    holder = nn.ModuleList([gated()])
    assert any("host_gated" in said for said in plug_in(holder, HOST))
    module = holder[0]
    split, x = tiles(module), torch.randn(1, 50, HIDDEN)
    forward = vars(split)["forward"]
    assert isinstance(forward, TiledForward)
    assert forward.kernel is not None
    assert forward.kernel._module() is split  # the copy's own weights
    for mine, theirs in zip(gradients(split, x), gradients(gated(), x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def alike(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal to the rounding of sums in fp32."""
    return bool((mine - theirs).norm() <= 1e-5 * theirs.norm())


LORA = Lora(rank=4, alpha=8.0)


@pytest.mark.daily("packed", "adapters and checkpointing")
@pytest.mark.parametrize(
    ("settings", "packed"),
    [
        ({}, True),
        ({}, False),
        ({"gradient_checkpointing": True}, True),
        ({"gradient_checkpointing": True, "activation_offload": True}, True),
        ({"lora": LORA}, False),
        ({"lora": LORA, "gradient_checkpointing": True}, True),
    ],
    ids=["packed", "padded", "checkpointing", "activations on the host", "adapters", "adapters and checkpointing"],
)
def test_a_policy_has_the_same_gradients(
    folder: Path, batches: dict[bool, MicroBatch], settings: dict[str, object], packed: bool
) -> None:
    found = []
    for tokens in (None, TILE):
        policy = load_policy(Model(path=str(folder), tiled_mlp=tokens, **settings), CPU, "sdpa", seed=0)  # type: ignore
        policy.train()
        loss = nll(policy(batches[packed]).logprobs_K).loss
        loss.backward()
        tiled = [module for module in policy.modules() if isinstance(vars(module).get("forward"), TiledForward)]
        assert len(tiled) == (0 if tokens is None else LAYERS)
        found.append([loss.detach(), *(p.grad for _, p in policy.trainable())])
    assert len(found[0]) > LAYERS
    assert all(alike(mine, theirs) for theirs, mine in zip(*found, strict=True))


def test_a_critic_is_tiled_too(folder: Path, batches: dict[bool, MicroBatch]) -> None:
    found = []
    for tokens in (None, TILE):
        critic = load_value_model(Model(path=str(folder), tiled_mlp=tokens), str(folder), CPU, "sdpa", seed=0)
        torch.manual_seed(1)
        nn.init.normal_(critic.head.weight)
        loss = critic(batches[True]).square().sum()
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in critic.parameters())])
    assert all(alike(mine, theirs) for theirs, mine in zip(*found, strict=True))


def test_checkpointing_runs_each_mlp_no_more_often_than_without_tiles(
    folder: Path, batches: dict[bool, MicroBatch]
) -> None:
    """Once in the forward pass and once in the backward pass; the recomputed layer ends before its MLP."""
    counts = []
    for tokens in (None, TILE):
        settings = Model(path=str(folder), tiled_mlp=tokens, gradient_checkpointing=True)
        policy = load_policy(settings, CPU, "sdpa", seed=0).train()
        seen = [0]

        def count(_: nn.Module, inputs: tuple[torch.Tensor], seen: list[int] = seen) -> None:
            seen[0] += inputs[0].shape[:-1].numel()

        for module in policy.modules():
            if is_mlp(module):
                module.gate_proj.register_forward_pre_hook(count)  # type: ignore
        nll(policy(batches[True]).logprobs_K).loss.backward()
        counts.append(seen[0])
    assert counts == [2 * LAYERS * batches[True].input_ids_NT.numel()] * 2


# -- memory


@contextmanager
def saved_bytes() -> Iterator[dict[str, int]]:
    """Counts the bytes of all storages that autograd keeps at a time: `now`, and the largest value `peak`."""
    count = {"now": 0, "peak": 0}
    storages: dict[int, int] = {}

    class Saved:
        def __init__(self, tensor: torch.Tensor):
            self.tensor, self.storage = tensor, tensor.untyped_storage()
            key = self.storage.data_ptr()
            storages[key] = storages.get(key, 0) + 1
            if storages[key] == 1:
                count["now"] += self.storage.nbytes()
                count["peak"] = max(count["peak"], count["now"])
            weakref.finalize(self, self.forget, key, self.storage.nbytes())

        @staticmethod
        def forget(key: int, size: int) -> None:
            storages[key] -= 1
            count["now"] -= size if not storages[key] else 0

    def pack(tensor: torch.Tensor) -> Any:
        return tensor if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter) else Saved(tensor)

    def unpack(saved: Any) -> torch.Tensor:
        return saved.tensor if isinstance(saved, Saved) else saved

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield count


def mlp_bytes(module: nn.Module, tokens: int) -> int:
    """The most bytes that autograd keeps for the MLP, beside its input."""
    x = torch.randn(1, tokens, HIDDEN, requires_grad=True)
    with saved_bytes() as count:
        module(x).sum().backward()
    assert count["now"] == 0
    return count["peak"] - x.nbytes


def test_the_memory_of_a_tiled_mlp_does_not_grow_with_the_sequence() -> None:
    module = gated()
    split = tiles(module)
    found = [mlp_bytes(split, tokens) for tokens in (128, 512, 2048)]
    assert found[0] == found[1] == found[2]
    assert mlp_bytes(module, 2048) == 2048 // 128 * mlp_bytes(module, 128)
    # Gate, its activation, up and their product.
    assert found[0] == 4 * TILE * INNER * 4


def kept_bytes(folder: Path, tokens: int, tile: int | None) -> int:
    """The most bytes that autograd keeps for the layers of a policy."""
    settings = Model(path=str(folder), tiled_mlp=tile, lora=LORA)
    policy = load_policy(settings, CPU, "sdpa", seed=0).train()
    row = Example([5] * tokens, [1] * tokens, Origin("row", 0))
    batch = micro_batch([row], packed=True, pad_id=0)
    with saved_bytes() as count:
        policy.states(batch).sum().backward()
    return count["peak"]


@pytest.mark.slow
def test_the_plan_predicts_what_tiles_save(folder: Path) -> None:
    config, tokens, kernels = load_config(str(folder)), 1024, LayerKernels(tile=128)
    counted = kept_bytes(folder, tokens, None) - kept_bytes(folder, tokens, 128)
    planned = [activation_bytes(config, tokens, 4, False, each) for each in (LayerKernels(), kernels)]
    assert planned[0] - planned[1] == pytest.approx(counted, rel=0.1)
    # One tile, whatever the number of tokens.
    assert feed_forward_bytes(config, tokens, 4, kernels) == feed_forward_bytes(config, 8 * tokens, 4, kernels)
    assert feed_forward_bytes(config, tokens, 4, kernels) == mlp_bytes(tiles(gated(width=4 * HIDDEN), 128), tokens)


@pytest.mark.slow
def test_the_plan_of_a_7b_model_with_long_rows() -> None:
    """32k tokens within 80 GB, and 128k with activations on the host and tiles."""
    sizes = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064}
    config = Qwen2Config(**sizes, num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False)
    counted = None
    peaks = {}
    for tokens, tile, offload in ((2**15, None, False), (2**15, 4096, False), (2**17, None, True), (2**17, 4096, True)):
        model = {
            "path": "-",
            "dtype": "bf16",
            "lora": {"rank": 16},
            "gradient_checkpointing": True,
            "tiled_mlp": tile,
            "activation_offload": offload,
        }
        recipe = with_derived_defaults(
            Recipe.model_validate(
                {"model": model, "data": {"train": "-"}, "batch": {"tokens": tokens, "rows_per_update": 1}}
            )
        )
        counted = counted or count_parameters(recipe, config)
        plan = plan_memory(recipe, config, 1, tokens, 1, device=DEVICES["cuda"], counted=counted)
        peaks[tokens, tile] = plan.peak.total / 1e9
    assert peaks[2**15, 4096] < peaks[2**15, None] < 80
    # The wide tensors of one MLP are 20 GB, those of a tile 0.6 GB; attention and its gradients remain.
    assert peaks[2**17, 4096] < peaks[2**17, None] - 12
    assert peaks[2**17, 4096] < 40


# -- refusals


def test_other_modules_are_not_tiled() -> None:
    assert is_mlp(gated())
    assert is_mlp(with_biases())
    assert not is_mlp(nn.Linear(4, 4))
    assert not is_mlp(nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 3), nn.Linear(4, 4)))
    own = gated()
    own.mix = nn.Parameter(torch.ones(HIDDEN))
    assert not is_mlp(own)
    assert mlps_of(nn.ModuleDict({"mlp": gated(), "act": ACT2FN["silu"]}))
    assert untiled([]) is not None
    assert untiled([nn.ModuleDict({"mlp": gated()}), nn.Linear(4, 4)]) is not None


def test_experts_are_refused(tmp_path: Path) -> None:
    layer = Qwen2MoeDecoderLayer(
        Qwen2MoeConfig(hidden_size=32, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16), 0
    )
    assert untiled([layer]) is not None
    write_tiny(tmp_path / "model")
    policy = load_policy(Model(path=str(tmp_path / "model")), CPU, "sdpa", seed=0)
    policy.decoder.layers = [layer]
    with refuses("model.tiled_mlp", "unsupported-model", "experts"):
        policy.decoder.tile_mlps(4)


@pytest.mark.slow
def test_a_run_trains_the_same(folder: Path, tmp_path: Path) -> None:
    from runs import facts

    recipe = write_sft_recipe(tmp_path, folder)
    for name, more in (("whole", []), ("tiles", [f"model.tiled_mlp={TILE}"])):
        run_recipe(load_recipe(str(recipe), [f"run.name={name}", "run.steps=2", "optim.warmup=0", *more]))
    whole, tiled = (facts(tmp_path / "runs" / name) for name in ("whole", "tiles"))
    assert len(tiled) == 2
    for (_, theirs), (_, mine) in zip(whole, tiled, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
