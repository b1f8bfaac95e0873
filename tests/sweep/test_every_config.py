"""`plan` accepts or refuses every configuration class of transformers, with a code and a remedy; never a traceback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from conftest import write_online_recipe, write_sft_recipe
from lockstep.commands.plan import show_plan
from lockstep.errors import CODES, Refusal
from lockstep.model.load_folder import config_of
from lockstep.model.text_model import multimodal_class, without_towers
from lockstep.recipe import load_recipe

# Some kinds of configs with the codes of `plan`; the others run under `make test-slow`.
SAMPLE: dict[str, set[str]] = {
    "gemma3": set(),
    "qwen3_5": set(),
    "blip": {"unsupported-model"},
    "clip": {"unsupported-model"},
    "hunyuan_v1_dense": {"unsupported-model"},
}
# Whether a model of the default size fits depends on the machine.
SIZE = {"not-enough-memory", "disk-full"}


def planned(model_type: str, folder: Path, tokenizer_from: Path) -> set[str]:
    """The codes with which `plan` refuses a folder that has only the default config, for SFT and GRPO."""
    model = folder / "m"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer_from / name, model)
    (model / "config.json").write_text(json.dumps({"model_type": model_type}))
    save_file(_tower(model), model / "model.safetensors")
    codes = set()
    for write in (write_sft_recipe, write_online_recipe):
        try:
            show_plan(load_recipe(str(write(folder, model)), []), 1)
        except Refusal as refusal:
            for problem in refusal.problems:
                assert problem.code in CODES
                # The line that counts further rows has no remedy of its own.
                assert problem.remedy or problem.code == "more-problems", problem
                codes.add(problem.code)
    return codes


def _tower(model: Path) -> dict[str, torch.Tensor]:
    """Empty tensors with the names of the towers. A plan reads only the names of tensors."""
    try:
        config = config_of(str(model))
        kind = multimodal_class(config)
        if kind is not None:
            with torch.device("meta"):
                return {
                    name: torch.zeros(0, device="cpu") for name in without_towers(kind)._from_config(config).left_out
                }
    except Exception:  # noqa: BLE001, S110  a class that cannot be built is what plan must refuse
        pass
    return {"x": torch.zeros(0)}


@pytest.mark.daily("blip", "clip", "hunyuan_v1_dense")
@pytest.mark.parametrize("model_type", SAMPLE)
def test_some_configs(model_type: str, tmp_path: Path, tiny_folder: Path) -> None:
    assert planned(model_type, tmp_path, tiny_folder) - SIZE == SAMPLE[model_type]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(set(CONFIG_MAPPING_NAMES) - set(SAMPLE)))
def test_all_configs(model_type: str, tmp_path: Path, tiny_folder: Path) -> None:
    planned(model_type, tmp_path, tiny_folder)
