"""Runs from folders whose weights are quantised already: the same numbers as from the dequantised folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from commands import lockstep, torchrun
from conftest import run as command
from conftest import write_online_recipe, write_sft_recipe
from lockstep.errors import Refusal
from lockstep.kernels.quantized.quantized_linear import quantized_layers
from lockstep.model.export_folder import merge_adapter
from lockstep.model.load import load_policy
from lockstep.model.quantized.quantized_folder import quantization_of
from lockstep.model.tiny import write_tiny
from lockstep.recipe import load_recipe
from lockstep.recipe.schema import Lora, Model
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.train.offline import train_offline
from lockstep.train.online import train_online
from quantized_folders import set_quantization, write_folder
from runs import difference

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> tuple[Path, Path]:
    """An AWQ folder, and the folder that `lockstep dequantize` makes of it."""
    place = tmp_path_factory.mktemp("awq")
    write_folder("awq", tiny_folder, place / "awq")
    assert command("dequantize", place / "awq", place / "plain", "--dtype", "fp32") == 0
    return place / "awq", place / "plain"


def trained(recipe: Path, *words: str) -> tuple[list[dict[str, float]], Path]:
    loaded = load_recipe(str(recipe), list(words))
    (train_online if loaded.method == "grpo" else train_offline)(loaded, Console.silent())
    run = recipe.parent / "runs" / "run"
    return [metrics for _, metrics in read_metrics(run / "metrics.jsonl")], run


@pytest.mark.daily("['model.lora.rank=4']")
@pytest.mark.parametrize("words", [["model.lora.rank=4"], [], ["model.lora.rank=4", "model.quantize=int8"]], ids=str)
def test_training_is_that_of_the_dequantised_folder(
    folders: tuple[Path, Path], tmp_path: Path, words: list[str]
) -> None:
    """An adapter, all weights, and weights that are quantised again. The merged exports are equal too."""
    losses, exports = [], []
    for folder in folders:
        place = tmp_path / folder.name
        place.mkdir()
        metrics, run = trained(write_sft_recipe(place, folder), "run.steps=3", *words)
        losses.append([one["train/loss"] for one in metrics if "train/loss" in one])
        exports.append(run / "export")
    assert losses[0]
    assert losses[0] == losses[1]
    assert quantization_of(exports[0]) is None
    models = [AutoModelForCausalLM.from_pretrained(one, trust_remote_code=False).state_dict() for one in exports]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.slow
def test_a_policy_generates_from_the_folder(folders: tuple[Path, Path], tmp_path: Path) -> None:
    recipe = write_online_recipe(tmp_path, folders[0])
    metrics, run = trained(recipe, "run.steps=2", "model.lora.rank=4", "optim.lr=1e-2")
    assert all(one["training/rollout_probs_diff_max"] < 1e-4 for one in metrics)
    # The adapter is merged into the dequantised weights; an adapter alone needs a plain base to be merged later.
    assert command("export", run, tmp_path / "adapter", "--adapter") == 0
    with pytest.raises(Refusal) as refused:
        merge_adapter(tmp_path / "adapter", str(folders[0]), tmp_path / "merged", "adapter")
    assert refused.value.problems[0].code == "quantized-weights"
    assert f"lockstep dequantize {folders[0]} DIR" in refused.value.problems[0].remedy
    assert command("export", tmp_path / "adapter", tmp_path / "merged", "--merge", "--base", folders[1]) == 0


def test_codes_of_the_folder_are_kept(tiny_folder: Path, tmp_path: Path) -> None:
    """`model.quantize: int8` on a folder with int8 rows: the same codes and scales, not codes of their values."""
    folder = tmp_path / "int8"
    write_folder("int8", tiny_folder, folder)
    stored = load_file(folder / "model.safetensors")
    settings = Model(path=str(folder), quantize="int8", lora=Lora(rank=4, alpha=8.0))
    policy = load_policy(settings, CPU, "sdpa", 0)
    layers = dict(quantized_layers(policy.causal_lm))
    assert len(layers) == 14
    for name, layer in layers.items():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert torch.equal(layer.get_parameter("codes"), stored[f"{plain}.weight"])
        assert torch.equal(layer.get_parameter("scales"), stored[f"{plain}.weight_scale"].float())


def test_unreadable_folders_are_refused_before_training(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_folder("gptq", tiny_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if "qzeros" not in name}, folder / "model.safetensors")
    recipe = write_sft_recipe(tmp_path, folder)
    for settings, code in ((None, "missing-weight"), ({"quant_method": "quip"}, "quantized-weights")):
        if settings is not None:
            set_quantization(folder, settings)
        with pytest.raises(Refusal) as refused:
            trained(recipe, "model.lora.rank=4")
        assert code in {problem.code for problem in refused.value.problems}
    assert json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.parametrize("layout", [(), ("parallel.tensor_parallel=2",)], ids=["shard", "tensor"])
@pytest.mark.parametrize("quantized", [(), ("model.quantize=int8",)], ids=["values", "codes"])
def test_two_processes_train_what_one_does(tmp_path: Path, layout: tuple[str, ...], quantized: tuple[str, ...]) -> None:
    folder = tmp_path / "int8"
    write_tiny(tmp_path / "plain", hidden=128, layers=2)
    write_folder("int8", tmp_path / "plain", folder)
    recipe = write_sft_recipe(tmp_path, folder)
    # eps above the noise of gradients: Adam's first steps would blow a rounding difference up to a whole step.
    words = ["model.lora.rank=4", "optim.lr=1e-2", "run.steps=3", "optim.eps=1e-4", "run.export=false", *quantized]
    one = lockstep("train", recipe, "run.name=one", *words)
    assert one.returncode == 0, one.stderr
    two = torchrun("train", recipe, "run.name=two", *words, *layout)
    assert two.returncode == 0, two.stderr
    assert difference(tmp_path / "runs" / "two", tmp_path / "runs" / "one", 3) == ""


@pytest.mark.slow
def test_plan_of_a_quantised_folder(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """The plan counts the weights of the model, not the bytes of the files."""
    texts = []
    for folder in folders:
        done = lockstep("plan", write_sft_recipe(tmp_path, folder), "model.lora.rank=4")
        assert done.returncode == 0, done.stderr
        texts.append([line for line in done.stdout.splitlines() if "GiB" in line or "MiB" in line])
    assert texts[0]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_serving_engine_needs_plain_weights(folders: tuple[Path, Path], tmp_path: Path, engine: str) -> None:
    recipe = write_online_recipe(tmp_path, folders[0])
    with pytest.raises(Refusal) as refused:
        trained(recipe, "model.lora.rank=4", f"rollout.engine={engine}")
    remedies = {one.remedy for one in refused.value.problems if one.code == "quantized-weights"}
    assert any(f"lockstep dequantize {folders[0]} DIR" in remedy for remedy in remedies)
