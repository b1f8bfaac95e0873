"""Models whose tensors transformers makes of others in the files: a rank reads its own experts, and has their bits."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from allocated import allocated, marked
from lockstep.errors import Refusal
from lockstep.model import export_folder as export
from lockstep.model import streamed as conversion
from lockstep.model.decoder import decoder_layers
from lockstep.model.division.tensor_plan import styles_of
from lockstep.model.load import with_lora
from lockstep.model.load_folder import ModelDivision, ModelFolders, divide_model, stream_transformers
from lockstep.model.miniature import miniature_config, randomise
from lockstep.model.resolve import folders_of
from lockstep.model.streamed import Made, Streamed
from lockstep.model.weights import digits_of
from lockstep.parallel.sharded_files import StoredTensors
from lockstep.parallel.sharding import Sharding
from lockstep.parallel.tensor import TensorGroup
from lockstep.recipe.schema import Lora, Model

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Merged experts, with shared ones, renamed parts, buffers in fp32, other merged projections; two as their files are.
FAMILIES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "phimoe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "hunyuan_v1_moe",
    "minimax_m2",
    "afmoe",
    "exaone_moe",
    "flex_olmo",
    "qwen3_next",
    "granitemoe",
    "gpt_oss",
)
ALIKE = ("granitemoe", "gpt_oss")


def write(folder: Path, kind: str, **more: Any) -> Path:
    model = AutoModelForCausalLM.from_config(miniature_config(AutoConfig.for_model(kind, **more)))
    randomise(model)
    for name, buffer in model.named_buffers():
        if name in model.state_dict() and buffer.is_floating_point():
            buffer.copy_(torch.randn(buffer.shape))
    model.save_pretrained(folder)
    return folder


@contextmanager
def rank_of(rank: int, ranks: int = 2) -> Iterator[None]:
    """This process as one of several that never answer: slices are cut and filled without them."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def stream(folder: Path, dtype: str = "fp32") -> Streamed:
    source = stream_transformers(AutoModelForCausalLM, str(folder), dtype)
    assert source is not None
    return source


def sharded(source: Streamed, rank: int, root: Any = None) -> dict[str, torch.Tensor]:
    """What that rank of two holds. torch remembers slices by mesh, so each rank's has a name of its own."""
    root = root or source.model
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(f"rank{rank}",))
    source.shard(root, decoder_layers(source.model), Sharding(mesh, CPU))
    return {name: one.to_local().detach().clone() for name, one in root.named_parameters()}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    folder = write(tmp_path_factory.mktemp("experts") / "mixtral", "mixtral")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_folder / name, folder)
    return folder


# For every day one of each form in which files hold experts; the others differ in what is around them.
DAILY = ("mixtral", "deepseek_v3", "qwen3_next", *ALIKE)


@pytest.mark.daily("mixtral", "gpt_oss")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in DAILY else pytest.mark.slow) for kind in FAMILIES]
)
def test_slices_have_the_bits_of_from_pretrained(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind)
    for name, dtype in DTYPES.items():
        wanted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        slices = []
        for rank in range(2):
            with rank_of(rank):
                source = stream(tmp_path, name)
                assert any(isinstance(place, Made) for place in source.places.values()) == (kind not in ALIKE)
                slices.append(sharded(source, rank))
        for parameter, value in wanted.named_parameters():
            found = torch.cat([one[parameter] for one in slices])
            assert found.dtype == value.dtype, parameter
            assert torch.equal(found, value), parameter
        own = dict(source.model.named_buffers())
        for buffer, value in wanted.named_buffers():
            assert own[buffer].dtype == value.dtype, buffer
            assert torch.equal(own[buffer], value), buffer


def test_a_rank_reads_its_own_experts_only(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    fill = StoredTensors.fill
    monkeypatch.setattr(StoredTensors, "fill", lambda self, targets: (read.extend(targets), fill(self, targets))[1])
    # An expert at a time, and what does not fill the last block.
    for block, rank in ((1, 0), (2**26, 1)):
        monkeypatch.setattr(conversion, "BLOCK_BYTES", block)
        read.clear()
        with rank_of(rank):
            sharded(stream(mixtral), rank)
        numbers = {name.split(".experts.")[1][0] for name in read if ".experts." in name}
        assert numbers == ({"0", "1"} if rank == 0 else {"2", "3"})
        assert len(read) == len(set(read))


@pytest.mark.slow
def test_experts_of_a_tensor_group_are_its_own(mixtral: Path) -> None:
    """Four ranks: two halves of the experts, each in two slices."""
    wanted = dict(AutoModelForCausalLM.from_pretrained(mixtral).named_parameters())
    for rank in range(4):
        with rank_of(rank, 4):
            names = (f"shard{rank}", f"tensor{rank}")
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            every = init_device_mesh("cpu", (4,), mesh_dim_names=(f"every{rank}",))
            sharding = Sharding(mesh[names[0]], CPU, tensor=TensorGroup(mesh[names[1]]), every=every)
            source = stream(mixtral)
            divide_model(source.model, ModelDivision(styles_of(source.model, 2), []), source, sharding, "sdpa")
            source.shard(source.model, decoder_layers(source.model), sharding)
            for name, one in source.model.named_parameters():
                if "experts" in name:
                    part = wanted[name].chunk(2)[rank % 2].chunk(2)[rank // 2]
                    assert torch.equal(one.to_local(), part), name


def test_an_adapter_stands_on_streamed_experts(mixtral: Path) -> None:
    wanted = dict(AutoModelForCausalLM.from_pretrained(mixtral).named_parameters())
    with rank_of(1):
        source = stream(mixtral)
        adapted = with_lora(source.model, Lora(rank=2, alpha=4, targets=["q_proj", "v_proj"]), seed=0)
        found = sharded(source, 1, adapted)
    base = {name: one for name, one in found.items() if "lora" not in name}
    assert len(base) == len(wanted) < len(found)
    for name, one in base.items():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert torch.equal(one, wanted[plain].chunk(2)[1]), name


def test_masters_have_the_digits_of_single_experts(mixtral: Path) -> None:
    """In one process too, where transformers loads the model."""
    wanted = dict(AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.float32).named_parameters())
    model = AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.bfloat16)

    class Trained:
        def trainable(self) -> Any:
            return model.named_parameters()

    digits = digits_of(Trained(), model, None, str(mixtral), torch.bfloat16)
    masters = {name: one.detach().float() for name, one in model.named_parameters()}
    assert not all(torch.equal(masters[name], one) for name, one in wanted.items())
    digits.into(masters)
    for name, one in wanted.items():
        assert torch.equal(masters[name], one), name


@pytest.mark.parametrize("kind", ["mixtral", "glm4_moe"])
def test_an_export_has_the_names_and_bits_of_the_files(
    mixtral: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(mixtral, tmp_path / "model")
    if kind != "mixtral":
        write(folder, kind)
    weights = {name: one.detach() for name, one in AutoModelForCausalLM.from_pretrained(folder).named_parameters()}
    # No model is put together.
    monkeypatch.setattr(export, "whole_model", None)
    export.export_model(
        Model(path=str(folder)), weights, tmp_path / "out", where="here", folders=ModelFolders(str(folder))
    )
    before, after = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("adapted", [False, True])
def test_an_export_keeps_the_digits_that_transformers_keeps(mixtral: Path, tmp_path: Path, adapted: bool) -> None:
    """The bias by which a router chooses is fp32 in a model of bf16: rounded, other experts are chosen."""
    folder = shutil.copytree(mixtral, tmp_path / "model")
    write(folder, "glm4_moe")
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    own.save_pretrained(tmp_path / "own")
    settings = Model(path=str(folder), dtype="bf16")
    if adapted:
        settings = settings.model_copy(update={"lora": Lora(rank=2, alpha=4, targets=["q_proj"])})
        own = with_lora(own, settings.lora, seed=0)
    weights = {name: one.detach() for name, one in own.named_parameters() if not adapted or "lora" in name}
    export.export_model(settings, weights, tmp_path / "out", where="here", folders=folders_of(settings))
    wanted, found = (load_file(tmp_path / one / "model.safetensors") for one in ("own", "out"))
    assert {one.dtype for one in wanted.values()} == {torch.bfloat16, torch.float32}
    assert wanted.keys() == found.keys()
    for name, one in wanted.items():
        assert found[name].dtype == one.dtype, name
        assert torch.equal(found[name], one), name


def test_a_rank_holds_its_share_and_a_tensor(tmp_path: Path) -> None:
    """Of a model of many tensors; its files are of single ones, since all bytes of a mapped one count."""
    config = miniature_config(AutoConfig.for_model("mixtral"))
    config.num_hidden_layers = 12
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    whole = sum(one.nbytes for one in model.parameters())
    largest = max(one.nbytes for one in model.parameters())
    del model
    load = marked("load", lambda: sharded(stream(tmp_path), 0).keys())
    with allocated() as held, rank_of(0):
        load()
    # `sharded` copies the slices once more.
    assert whole <= held["load"] <= whole + 2 * largest
    assert 2 * largest < whole / 4


def test_files_that_are_not_as_expected_are_left_to_transformers(mixtral: Path, tmp_path: Path) -> None:
    tensors = load_file(mixtral / "model.safetensors")
    for number, gone in enumerate(("experts.3.w1", "experts.3", "layers.1.input_layernorm")):
        folder = shutil.copytree(mixtral, tmp_path / str(number))
        kept = {name: one for name, one in tensors.items() if gone not in name}
        assert len(kept) < len(tensors)
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        assert stream_transformers(AutoModelForCausalLM, str(folder), "fp32") is None


def test_an_expert_that_is_no_number_is_refused(mixtral: Path, tmp_path: Path) -> None:
    """By name: a few tokens may never choose it."""
    folder = shutil.copytree(mixtral, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    next(one for name, one in tensors.items() if "experts.3.w2" in name)[0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with rank_of(1), pytest.raises(Refusal, match=r"layers\.0\.mlp\.experts\.down_proj holds NaN"):
        sharded(stream(folder), 1)
    with rank_of(0):
        sharded(stream(folder), 0)


def test_tied_weights_that_differ_in_the_files_are_left_to_transformers(tmp_path: Path) -> None:
    """transformers ties them only where they are the same."""
    write(tmp_path, "mixtral", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    for change, tied in ((0.0, True), (1.0, False)):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + change
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        own = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert (own.lm_head.weight is own.model.embed_tokens.weight) == tied
        assert (stream_transformers(AutoModelForCausalLM, str(tmp_path), "fp32") is not None) == tied
