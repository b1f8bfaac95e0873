"""Checkpoints in the layouts of verl and DeepSpeed, written here by hand, become the model that they were made of."""

from __future__ import annotations

import shutil
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, Qwen2ForTokenClassification

from lockstep.compat.checkpoints import convert_checkpoint
from lockstep.errors import Refusal
from lockstep.model.load import load_value_model
from lockstep.recipe.schema import Model
from refusals import refuses

RANKS = 3


@pytest.fixture
def weights(tiny_folder: Path) -> dict[str, torch.Tensor]:
    return load_file(tiny_folder / "model.safetensors")


def same(folder: Path, weights: dict[str, torch.Tensor]) -> bool:
    found = load_file(folder / "model.safetensors")
    return found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


def write_fsdp(folder: Path, weights: dict[str, torch.Tensor], model: Path, ranks: int = RANKS) -> Path:
    """Shards as FSDP2 saves them: distributed tensors, rows over the ranks, a vector of norms on all of them."""
    actor = folder / "global_step_10" / "actor"
    (actor / "huggingface").mkdir(parents=True)
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, actor / "huggingface" / file.name)
    for rank in range(ranks):
        torch.distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (ranks,))
            state: dict[str, Any] = {}
            for name, tensor in weights.items():
                if tensor.ndim == 1:
                    state[name] = DTensor.from_local(tensor.clone(), mesh, [Replicate()], run_check=False)
                    continue
                parts = tensor.chunk(ranks)
                part = parts[rank] if rank < len(parts) else tensor[:0]
                state[name] = DTensor.from_local(
                    part.clone(), mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
                )
            torch.save(state, actor / f"model_world_size_{ranks}_rank_{rank}.pt")
        finally:
            torch.distributed.destroy_process_group()
    return folder / "global_step_10"


def test_shards_of_fsdp(tiny_folder: Path, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Three ranks: rows do not divide, so that the last shard is smaller."""
    told = convert_checkpoint(write_fsdp(tmp_path, weights, tiny_folder), tmp_path / "out")
    assert same(tmp_path / "out", weights)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert f"{sum(tensor.numel() for tensor in weights.values()):,} parameters of FSDP shards of verl" in told


def test_a_critic_of_verl_keeps_its_head(tiny_folder: Path, tmp_path: Path) -> None:
    """verl stores a token classification model, with the config of the language model that it started from."""
    config = AutoConfig.from_pretrained(tiny_folder, num_labels=1, classifier_dropout=0.0)
    torch.manual_seed(3)
    library = Qwen2ForTokenClassification(config).eval()
    torch.nn.init.constant_(library.score.bias, -0.25)
    out = tmp_path / "out"
    convert_checkpoint(write_fsdp(tmp_path, dict(library.state_dict()), tiny_folder), out)
    critic = load_value_model(Model(path=str(out)), str(out), torch.device("cpu"), "sdpa", seed=0)
    assert torch.equal(critic.head.weight, library.score.weight)
    assert critic.head.bias.tolist() == [-0.25]
    stored = dict(critic.decoder.state_dict())
    assert stored.keys() == library.model.state_dict().keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in library.model.state_dict().items())


def test_a_missing_shard_is_told(tiny_folder: Path, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    folder = write_fsdp(tmp_path, weights, tiny_folder)
    (folder / "actor" / "model_world_size_3_rank_1.pt").unlink()
    with refuses("", "missing-shard"):
        convert_checkpoint(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class _Foreign:
    """A class of another program, which is not there when its checkpoint is read."""


@pytest.fixture
def foreign() -> Any:
    module = types.ModuleType("deepspeed_of_another_machine")
    _Foreign.__module__, _Foreign.__qualname__ = module.__name__, "_Foreign"
    module._Foreign = _Foreign  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield _Foreign
    sys.modules.pop(module.__name__, None)


def test_a_deepspeed_checkpoint_of_whole_weights(
    tiny_folder: Path, weights: dict[str, torch.Tensor], tmp_path: Path, foreign: Any
) -> None:
    step = tmp_path / "ckpt" / "_actor" / "global_step20"
    step.mkdir(parents=True)
    (tmp_path / "ckpt" / "_actor" / "latest").write_text("global_step20")
    torch.save({"module": OrderedDict(weights), "scaler": foreign()}, step / "mp_rank_00_model_states.pt")
    sys.modules.pop(foreign.__module__)
    with pytest.raises(Refusal, match=r"no config\.json"):
        convert_checkpoint(tmp_path / "ckpt", tmp_path / "out")
    convert_checkpoint(tmp_path / "ckpt", tmp_path / "out", tiny_folder)
    assert same(tmp_path / "out", weights)


def write_zero3(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    names = list(weights)
    shapes = [OrderedDict((name, weights[name].shape) for name in names)]
    for rank in range(RANKS):
        runs = []
        for name in names:
            flat = weights[name].flatten()
            run = -(-len(flat) // RANKS)
            padded = torch.cat([flat, torch.full((run * RANKS - len(flat),), 9.0)])
            runs.append(padded[rank * run : (rank + 1) * run])
        # Two groups of the optimizer: their borders do not matter, the runs follow one another.
        groups = [torch.cat(runs[:2]), torch.cat(runs[2:])]
        model = {"module": {}, "param_shapes": shapes, "buffer_names": [], "shared_params": []}
        torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        torch.save(
            {"optimizer_state_dict": {"fp32_flat_groups": groups, "partition_count": RANKS}},
            folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )


def test_a_checkpoint_of_zero_3(tiny_folder: Path, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    write_zero3(tmp_path / "step", weights)
    convert_checkpoint(tmp_path / "step", tmp_path / "out", tiny_folder)
    assert same(tmp_path / "out", weights)


def test_weights_of_another_model_are_refused(
    tiny_folder: Path, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    name = next(iter(weights))
    wrong = {**weights, name: weights[name][:-1], "extra.weight": weights[name]}
    (tmp_path / "step").mkdir()
    torch.save({"module": wrong}, tmp_path / "step" / "mp_rank_00_model_states.pt")
    with pytest.raises(Refusal) as refused:
        convert_checkpoint(tmp_path / "step", tmp_path / "out", tiny_folder)
    assert [problem.why.split(" ")[0] for problem in refused.value.problems] == ["extra.weight", name]


def test_nothing_that_a_file_names_is_run(tiny_folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (mark,))

    (tmp_path / "step").mkdir()
    torch.save({"module": {"a": Trap()}}, tmp_path / "step" / "mp_rank_00_model_states.pt")
    with pytest.raises(Refusal):
        convert_checkpoint(tmp_path / "step", tmp_path / "out", tiny_folder)
    assert not mark.exists()


def test_megatrons_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "actor" / "dist_ckpt").mkdir(parents=True)
    with pytest.raises(Refusal, match="Megatron"):
        convert_checkpoint(tmp_path, tmp_path / "out")
    with pytest.raises(Refusal, match="contains no checkpoint"):
        convert_checkpoint(tmp_path / "actor" / "dist_ckpt", tmp_path / "out")
