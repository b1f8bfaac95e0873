"""Small stand-ins for the models of a recipe: the same architecture and tokenizer, random weights, few parameters."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import Refusal
from lockstep.model.load import load_config, load_tokenizer
from lockstep.model.miniature import POSITION_COUNTS, miniature_config
from lockstep.model.resolve import model_folder
from lockstep.model.tiny import write_tiny

# What a model must have in common with its tokenizer and its rows; the rest of a configuration is made small.
KEPT = ("vocab_size", "vocab_size_per_layer_input", "bos_token_id", "eos_token_id", "pad_token_id", *POSITION_COUNTS)
TINY = {"hidden": 64, "layers": 2}


def small_model(path: str, folder: Path, seed: int = 0) -> str:
    """Write a small model in the place of `path` to `folder`; returns what it is. Where there is no model at `path`, or
    none of its kind can be made small, it is the embedded tiny one."""
    found = local_folder(path)
    if found is None:
        write_tiny(folder, seed=seed, **TINY)
        return f"the tiny model: there is no folder {path}"
    from transformers import AutoModelForCausalLM

    config = load_config(found)
    try:
        small = small_config(config)
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001  # an architecture that cannot be had with other sizes
        write_tiny(folder, seed=seed, **TINY)
        return f"the tiny model: {config.model_type} cannot be made small ({type(error).__name__})"
    model.save_pretrained(folder)
    load_tokenizer(found).save_pretrained(folder)
    generation = Path(found) / "generation_config.json"
    if generation.is_file():
        shutil.copy(generation, folder / generation.name)
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"a {config.model_type} with {count:,} random weights and the tokenizer of {path}"


def small_config(config: Any) -> Any:
    """A miniature that reads the same tokens at as many positions."""
    small = miniature_config(config)
    for own, of in ((small, config), (small.get_text_config(), config.get_text_config())):
        for name in KEPT:
            if hasattr(of, name) and hasattr(own, name):
                setattr(own, name, getattr(of, name))
    small.architectures = None
    return small


def small_judge(model: Path, folder: Path) -> None:
    """A reward model of the architecture of `model`, with its tokenizer and random weights."""
    from transformers import AutoModelForSequenceClassification

    config = load_config(str(model))
    config.num_labels = 1
    tokenizer = load_tokenizer(str(model))
    config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    torch.manual_seed(0)
    judge = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, trust_remote_code=False)
    judge.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def local_folder(path: str) -> str | None:
    """The model folder behind `path`; None where there is none on this machine."""
    try:
        folder = model_folder(path)
    except Refusal:
        return None
    return folder if (Path(folder) / "config.json").is_file() else None
