"""Loading slice by slice: what a rank holds at its peak, and the weights of what transformers loads."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from transformers.models.qwen2 import modeling_qwen2

from allocated import allocated, marked
from conftest import write_sft_recipe
from host_kernels import HOST
from lockstep.device.cpu import Cpu
from lockstep.errors import Refusal
from lockstep.kernels.fused import FUSED, replaced
from lockstep.kernels.fused_modules import plug_in
from lockstep.model.decoder import decoder_layers
from lockstep.model.load import load_config, load_policy, load_value_model, with_lora
from lockstep.model.load_folder import load_transformers, spread, stream_transformers
from lockstep.model.policy import Policy
from lockstep.model.tiny import write_tiny
from lockstep.parallel import slice_reader
from lockstep.parallel.sharding import Sharding
from lockstep.parallel.world import World
from lockstep.recipe.loader import load_recipe
from lockstep.recipe.schema import Lora, Model
from lockstep.train.models import build_learner

RANKS = 4
DEEP = 8
CPU = torch.device("cpu")


@pytest.fixture
def sharding() -> Iterator[Sharding]:
    """Of rank 1 of four; nothing is exchanged, so one process does."""
    dist.init_process_group("fake", rank=1, world_size=RANKS, store=FakeStore())
    try:
        yield Sharding(init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",)), CPU)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def alone() -> Iterator[Sharding]:
    """Of a rank without others: what it gathers are its own numbers, and not what happens to be in memory."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield Sharding(init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)), CPU)
    finally:
        dist.destroy_process_group()


class Held(TorchDispatchMode):
    """Bytes of the storages that operators made and that still live, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) and not tensor.is_meta:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen:
            return
        self.seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def loaded(path: Path, sharding: Sharding, dtype: str = "fp32", lora: Lora | None = None) -> torch.nn.Module:
    source = stream_transformers(AutoModelForCausalLM, str(path), dtype)
    assert source is not None
    model = with_lora(source.model, lora, seed=3)
    source.shard(model, decoder_layers(source.model), sharding)
    return model


def with_more(folder: Path, out: Path, config: dict[str, Any], **more: torch.Tensor) -> Path:
    """A copy of a model whose config says otherwise, with further tensors in its file."""
    shutil.copytree(folder, out)
    told = json.loads((out / "config.json").read_text())
    told.pop("layer_types", None)
    (out / "config.json").write_text(json.dumps({**told, **config}))
    save_file({**load_file(out / "model.safetensors"), **more}, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.mark.parametrize("load", [stream_transformers, load_transformers])
def test_layers_that_the_config_leaves_out_are_refused(tiny_folder: Path, tmp_path: Path, load: Any) -> None:
    folder = with_more(tiny_folder, tmp_path / "short", {"num_hidden_layers": 1})
    with pytest.raises(Refusal) as refused:
        load(AutoModelForCausalLM, str(folder), "fp32")
    (problem,) = refused.value.problems
    assert "model.layers.1.input_layernorm.weight and 11 more tensors of layers" in problem.why
    assert "num_hidden_layers" in problem.remedy


def test_what_a_config_has_no_use_for_is_told_on_one_rank_and_on_several(
    tiny_folder: Path, tmp_path: Path, alone: Sharding, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"v_head.weight": torch.zeros(1, 2), "vision.blocks.3.weight": torch.zeros(2)}
    # Of old files, which transformers passes over itself.
    more["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    folder = with_more(tiny_folder, tmp_path / "more", {}, **more)
    source = stream_transformers(AutoModelForCausalLM, str(folder), "fp32")
    assert source is not None
    _, info = load_transformers(AutoModelForCausalLM, str(folder), "fp32")
    assert source.unused == info["unused"] == ("v_head.weight", "vision.blocks.3.weight")
    settings = Model(path=str(folder))
    for sharding in (None, alone):
        policy = load_policy(settings, CPU, "sdpa", 0, sharding=sharding)
        assert policy.unused == source.unused
    assert load_value_model(settings, str(folder), CPU, "sdpa", 0, sharding=alone).unused == source.unused
    build_learner(load_recipe(str(write_sft_recipe(tmp_path, folder))), Cpu(), World(), CPU)
    assert "v_head.weight and 1 more tensors" in capsys.readouterr().err


def test_a_layer_that_predicts_further_tokens_is_no_fault_of_the_config(tiny_folder: Path, tmp_path: Path) -> None:
    told = {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    source = stream_transformers(AutoModelForCausalLM, str(with_more(tiny_folder, tmp_path / "mtp", told)), "fp32")
    assert source is not None
    assert all(name.startswith("model.layers.1.") for name in source.unused)
    assert len(source.unused) == 12


def slice_of(whole: torch.Tensor) -> torch.Tensor:
    """What rank 1 of four holds, by hand: its rows of equal runs of rows."""
    each = -(-len(whole) // RANKS)
    return whole[each : 2 * each]


def local(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_rank_holds_its_slices_of_what_transformers_loads(tiny_folder: Path, sharding: Sharding, dtype: str) -> None:
    mine = loaded(tiny_folder, sharding, dtype)
    whole, _ = load_transformers(AutoModelForCausalLM, str(tiny_folder), dtype)
    theirs = dict(whole.named_parameters())
    assert dict(mine.named_parameters()).keys() == theirs.keys()
    for name, parameter in mine.named_parameters():
        assert torch.equal(local(parameter), slice_of(theirs[name].detach())), name
    buffers = dict(mine.named_buffers())
    assert buffers
    for name, buffer in whole.named_buffers():
        assert torch.equal(buffers[name], buffer), name
    assert mine.lm_head.weight is mine.model.embed_tokens.weight
    assert mine.generation_config.to_dict() == whole.generation_config.to_dict()


def test_a_fresh_adapter_starts_as_in_one_process(tiny_folder: Path, sharding: Sharding) -> None:
    lora = Lora(rank=4, alpha=8.0)
    mine = dict(loaded(tiny_folder, sharding, lora=lora).named_parameters())
    whole, _ = load_transformers(AutoModelForCausalLM, str(tiny_folder), "fp32")
    theirs = dict(with_lora(whole, lora, seed=3).named_parameters())
    assert mine.keys() == theirs.keys()
    assert any("lora_A" in name and bool(value.any()) for name, value in theirs.items())
    for name, parameter in mine.items():
        assert torch.equal(local(parameter), slice_of(theirs[name].detach())), name
        assert parameter.requires_grad == theirs[name].requires_grad


def test_no_more_than_a_share_and_a_block_of_each_thread_is_held(
    tiny_folder: Path, sharding: Sharding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_reader, "THREADS", 1)  # the measure sees one thread
    sizes = {name: tensor.nbytes for name, tensor in load_file(tiny_folder / "model.safetensors").items()}
    buffers = 4096
    with Held() as held:
        model = loaded(tiny_folder, sharding)
    share = sum(local(parameter).nbytes for parameter in model.parameters())
    assert share < sum(sizes.values()) / RANKS * 1.1
    assert share <= held.peak <= share + buffers  # the files are read into the share
    with Held() as held:
        loaded(tiny_folder, sharding, "bf16")
    block = max(sizes.values()) // RANKS
    allowed = share // 2 + block + buffers
    assert share // 2 + block <= held.peak <= allowed  # what is converted is read into a buffer
    with Held() as whole:
        AutoModelForCausalLM.from_config(load_config(str(tiny_folder)))
    assert whole.peak > allowed  # the measure sees a whole model


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In files of single tensors: of a file that is mapped all bytes count."""
    folder = tmp_path_factory.mktemp("deep") / "model"
    write_tiny(folder, hidden=64, layers=DEEP)
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="50KB")
    return folder


def deep_sizes(folder: Path) -> tuple[int, int]:
    """Bytes of a layer, and of what no layer has."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    return layer, sum(p.nbytes for p in model.parameters()) - DEEP * layer


@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True])
def test_kernels_are_tried_layer_by_layer(
    deep_folder: Path, alone: Sharding, monkeypatch: pytest.MonkeyPatch, merged: bool
) -> None:
    """A rank alone holds all of the model, and never a second one; also of a model that was loaded whole."""
    monkeypatch.setitem(FUSED, "sdpa", lambda model, gather: plug_in(model, HOST, gather))
    monkeypatch.setattr(modeling_qwen2, "apply_rotary_pos_emb", modeling_qwen2.apply_rotary_pos_emb)
    layer, outside = deep_sizes(deep_folder)
    whole = DEEP * layer + outside
    source = None if merged else stream_transformers(AutoModelForCausalLM, str(deep_folder), "fp32")
    with allocated() as held:
        model = source.model if source else load_transformers(AutoModelForCausalLM, str(deep_folder), "fp32")[0]
        policy = Policy(model, "sdpa")
        marked("spread", spread)(policy, source, alone, model, "sdpa")
    assert replaced(policy) == [
        f"{DEEP} x Qwen2MLP by host_gated",
        f"{2 * DEEP + 1} x Qwen2RMSNorm by host_norm",
        "apply_rotary_pos_emb of modeling_qwen2 by host_rotary",
    ]
    assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())  # what was gathered is gone
    # A layer, and beside it what no layer has; then a trial's 64 tokens, in a model as narrow as this one.
    assert whole + outside + layer <= held["spread"] <= whole + outside + DEEP // 2 * layer


def test_other_names_or_shapes_are_left_to_transformers(tiny_folder: Path, tmp_path: Path) -> None:
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tiny_folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    moved = {("transformer." if key == name else "") + key: value for key, value in tensors.items()}
    save_file(moved, tmp_path / "model.safetensors", {"format": "pt"})
    assert stream_transformers(AutoModelForCausalLM, str(tmp_path), "fp32") is None
    save_file({**tensors, name: tensors[name][:-1].clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    assert stream_transformers(AutoModelForCausalLM, str(tmp_path), "fp32") is None
