"""The memory plan of a model with a vision tower: its weights, activations, pixels and features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from image_rows import example, picture
from lockstep.model.load import load_config
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.preflight.memory_plan import plan_memory
from lockstep.preflight.model_sizes import count_parameters
from lockstep.preflight.tower_sizes import ImageLoad, image_load
from lockstep.recipe.loader import checked_recipe
from lockstep.types import Ranking
from vision_families import write_family

GRID = (1, 16, 16)  # 256 patches, 64 features
LOAD = ImageLoad(0.5, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vlm") / "model"
    write_tiny_vlm(made, hidden=64, layers=1)
    return made


def recipe_of(folder: Path, vision: str | None, **model: Any) -> Any:
    data, batch = {"train": "rows.jsonl"}, {"rows_per_update": 2, "tokens": 128}
    return checked_recipe(
        {"method": "sft", "model": {"path": str(folder), "vision": vision, **model}, "data": data, "batch": batch}
    )


def saved_bytes(config: Any, dtype: torch.dtype) -> int:
    """The bytes that the towers keep for the backward pass, counted by torch, with their outputs."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation="sdpa")
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    pixels = torch.randn(256, 1176, dtype=dtype)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model.get_image_features(pixels, torch.tensor([GRID]), return_dict=True)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), pytest.param("bf16", 2, marks=pytest.mark.slow)])
def test_the_activations_of_a_trained_tower_are_those_that_torch_keeps(folder: Path, dtype: str, size: int) -> None:
    """A tower with the proportions of a published one. The plan may count up to 15 % more, but not less."""
    config = load_config(str(folder))
    vision = {"hidden_size": 320, "intermediate_size": 856, "depth": 4, "num_heads": 5}
    for name, value in vision.items():
        setattr(config.vision_config, name, value)
    recipe = recipe_of(folder, "train", dtype=dtype)
    counted = count_parameters(recipe, config)
    assert counted.tower is not None
    planned = counted.tower.bytes(recipe.model, config, 128, LOAD)
    measured = saved_bytes(config, {4: torch.float32, 2: torch.bfloat16}[size])
    features = 64 * 64 * size  # joined features; those in the order of the placeholders are not part of the tower
    assert 1 <= (planned.training - features) / measured <= 1.15


def test_the_buffers_of_a_frozen_tower_by_hand(folder: Path) -> None:
    """One image of 64 features at a time: its pixels in fp32 twice, one layer of 64 values and 4 linear layers, the
    merger, and two copies of the features of 128 x 0.5 tokens."""
    recipe, config = recipe_of(folder, "freeze"), load_config(str(folder))
    tower = count_parameters(recipe, config).tower
    assert tower is not None
    # qkv 64 -> 192, projection 64 -> 64, gate and up 64 -> 128, down 128 -> 64
    linear = (64 + 192) + (64 + 64) + 2 * (64 + 128) + (128 + 64)
    layer = 4 * linear + 64 * (16 + 12)
    merger = 4 * ((256 + 256) + (256 + 64))
    wanted = 256 * (layer + 1176 * 8) + 64 * merger + 2 * 64 * 64 * 4
    assert tower.bytes(recipe.model, config, 128, LOAD) == (wanted, wanted)


def test_the_plan_counts_the_tower(folder: Path) -> None:
    config = load_config(str(folder))
    plans = {
        vision: plan_memory(recipe_of(folder, vision), config, 1, 64, 2, images=LOAD)
        for vision in (None, "freeze", "train")
    }
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        full = AutoModelForImageTextToText.from_config(config)
    visual = sum(p.numel() for p in full.model.visual.parameters())
    phases = {vision: {one.name: one for one in plan.phases} for vision, plan in plans.items()}
    text, frozen, trained = (phases[vision] for vision in (None, "freeze", "train"))
    assert frozen["validation"].weights - text["validation"].weights == 4 * visual
    assert plans["freeze"].trained == plans[None].trained == plans["train"].trained - visual
    tower = count_parameters(recipe_of(folder, "freeze"), config).tower
    assert tower is not None
    sizes = [one["forward and backward"].activations for one in (text, frozen, trained)]
    assert sizes[0] < sizes[1] < sizes[2]
    assert (
        frozen["validation"].activations - text["validation"].activations
        == tower.bytes(recipe_of(folder, "freeze").model, config, 128, LOAD).forward
    )


def test_the_images_of_rows(folder: Path) -> None:
    """Of a pair, the response with the larger share of image tokens counts."""
    rows = [example(folder, "see # " + end, [picture(0)], trained=len(end)) for end in ("red", "blue and green")]
    load = image_load([Ranking(tuple(rows)), example(folder, "no image", [])], recipe_of(folder, "freeze").model)
    assert load == ImageLoad(4 / len(rows[0]), 4)


def test_a_tower_without_a_convolution(tmp_path: Path) -> None:
    """The tower of Gemma 4 embeds patches of 4 x 4 pixels with a linear layer, and pools 3 x 3 patches."""
    folder = write_family("gemma4", tmp_path)
    tower = count_parameters(recipe_of(folder, "train"), load_config(str(folder))).tower
    assert tower is not None
    assert (tower.hidden, tower.pixels, tower.patches) == (32, 3 * 4 * 4, 3 * 3)
