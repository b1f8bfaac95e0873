"""Folders of models with a vision tower train on text: the tower is in the export, byte by byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText

from commands import torchrun
from conftest import write_online_recipe, write_sft_recipe
from lockstep.commands.export import export_run
from lockstep.model.load_folder import config_of
from lockstep.model.towers.tower import tower_tensors
from lockstep.recipe import load_recipe
from lockstep.train.start import run_recipe
from vision_models import CONFIGS, small_vision_model, stored, write_vision_model

IDS = torch.tensor([[257, 65, 66, 43, 49, 50, 51, 10]])


def trained(recipe_file: Path, *overrides: str) -> Path:
    return Path(run_recipe(load_recipe(str(recipe_file), ["optim.warmup=0", "optim.lr=1e-2", *overrides])))


def tower_of(folder: Path) -> list[str]:
    return tower_tensors(config_of(str(folder)), str(folder), "model.path")


def loaded(folder: Path) -> Any:
    """The class that `architectures` names, loaded by transformers alone."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(AutoModelForImageTextToText.from_pretrained(folder)) is type(model)
    return model.eval()


def assert_only_the_text_changed(model: Path, export: Path) -> None:
    before, after, tower = stored(model), stored(export), tower_of(model)
    assert before.keys() == after.keys()
    for name in tower:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name], before[name]), name
    assert all(not torch.equal(after[name], before[name]) for name in before.keys() - set(tower))
    loaded(export)
    assert (export / "preprocessor_config.json").read_text() == (model / "preprocessor_config.json").read_text()
    assert json.loads((export / "config.json").read_text())["vision_config"]


SLOW = pytest.mark.slow
SFT = [(name, tied) for name in CONFIGS for tied in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tied"),
    [pytest.param(*case, marks=[] if case in (("gemma3", True), ("qwen2_5_vl", False)) else SLOW) for case in SFT],
)
def test_sft_and_its_resumed_half_end_alike(tmp_path: Path, tiny_folder: Path, family: str, tied: bool) -> None:
    model = write_vision_model(tmp_path / "m", family, tiny_folder, tied=tied)
    recipe, settings = write_sft_recipe(tmp_path, model), ("optim.schedule=constant",)
    whole = trained(recipe, *settings, "run.name=whole", "run.steps=4")
    assert_only_the_text_changed(model, whole / "export")
    trained(recipe, *settings, "run.steps=2")
    resumed = trained(recipe, *settings, "run.steps=4")
    one, other = stored(whole / "export"), stored(resumed / "export")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "family", ["qwen3_vl", *(pytest.param(one, marks=SLOW) for one in CONFIGS if one != "qwen3_vl")]
)
def test_grpo(tmp_path: Path, tiny_folder: Path, family: str) -> None:
    model = write_vision_model(tmp_path / "m", family, tiny_folder)
    run = trained(write_online_recipe(tmp_path, model), "run.steps=2")
    told = [json.loads(line)["data"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    apart = [row["training/rollout_probs_diff_max"] for row in told if "training/rollout_probs_diff_max" in row]
    assert len(apart) == 2
    assert max(apart) < 1e-5  # the engine samples from the distribution that is trained
    assert_only_the_text_changed(model, run / "export")


@pytest.mark.slow
def test_an_adapter_fits_the_full_class(tmp_path: Path, tiny_folder: Path) -> None:
    from peft import PeftModel

    model = write_vision_model(tmp_path / "m", "gemma3", tiny_folder, tied=True)
    run = trained(write_sft_recipe(tmp_path, model), "run.steps=2", "model.lora.rank=4")
    before, after = stored(model), stored(run / "export")
    assert all(torch.equal(before[name], after[name]) for name in tower_of(model))
    export_run(run, tmp_path / "adapter", step=None, best=False, adapter=True)
    with torch.no_grad():
        merged = loaded(run / "export")(input_ids=IDS).logits
        adapted = PeftModel.from_pretrained(loaded(model), tmp_path / "adapter")(input_ids=IDS).logits
        assert (loaded(model)(input_ids=IDS).logits - merged).abs().max() > 1e-3
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_an_export_trains_on_in_bf16_with_another_tower_dtype(tmp_path: Path, tiny_folder: Path) -> None:
    """The text is exported in the dtype of the recipe, and the tower keeps its own. The files have module names."""
    model = write_vision_model(tmp_path / "m", "llava", tiny_folder)
    tensors = {name: tensor.clone() for name, tensor in small_vision_model("llava").state_dict().items()}
    tensors = {name: tensor.half() if "vision_tower" in name else tensor for name, tensor in tensors.items()}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    first = trained(write_sft_recipe(tmp_path, model), "run.steps=2", "model.dtype=bf16")
    after = stored(first / "export")
    assert after.keys() == tensors.keys()
    tower = set(tower_of(model))
    assert {tensor.dtype for name, tensor in after.items() if name not in tower} == {torch.bfloat16}
    assert all(after[name].dtype == tensors[name].dtype and torch.equal(after[name], tensors[name]) for name in tower)
    second = trained(write_sft_recipe(tmp_path, first), "run.steps=2", "run.name=second")
    again = stored(second / "export")
    assert all(torch.equal(again[name], tensors[name]) for name in tower)


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.parametrize("how", ["parallel.shard=2", "parallel.tensor_parallel=2"])
def test_two_processes_train_as_one(tmp_path: Path, tiny_folder: Path, how: str) -> None:
    model = write_vision_model(tmp_path / "m", "gemma3", tiny_folder)
    recipe, steps = write_sft_recipe(tmp_path, model), ("run.steps=3", "optim.warmup=0", "optim.eps=1e-4")
    one = trained(recipe, *steps, "run.name=one", "optim.lr=1e-3")
    done = torchrun("train", recipe, *steps, "run.name=two", "optim.lr=1e-3", how)
    assert done.returncode == 0, done.stderr
    wanted, found = stored(one / "export"), stored(tmp_path / "runs" / "two" / "export")
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=0)
