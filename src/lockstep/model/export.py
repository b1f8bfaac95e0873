"""A trained model as a Hugging Face folder that plain transformers loads (or a PEFT folder of the adapter)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from lockstep.errors import Refusal
from lockstep.model.load import DTYPES, load_tokenizer, with_lora
from lockstep.model.weights import restore_weights
from lockstep.recipe.schema import Model
from lockstep.run.folder import sync_path


def export_model(
    settings: Model,
    weights: dict[str, torch.Tensor],
    out: Path,
    *,
    where: str,
    adapter: bool = False,
    end_tokens: Sequence[int] = (),
    replace: bool = False,
) -> None:
    """Write `out` aside and rename it. `adapter` keeps a LoRA run's adapter apart instead of merging it."""
    if adapter and settings.lora is None:
        raise Refusal.at("--adapter", "the run trained all weights, so it has no adapter", "export without --adapter")
    if out.exists() and not out.is_dir():
        raise Refusal.at(str(out), "is a file, not a folder", "choose a new folder")
    if out.exists() and any(out.iterdir()) and not replace:
        raise Refusal.at(str(out), "is not empty", "choose a new folder")
    transformers_logging.disable_progress_bar()
    dtype = DTYPES[settings.dtype]
    # An adapter is merged in fp32 and rounded once.
    working = torch.float32 if settings.lora and not adapter else dtype
    base = AutoModelForCausalLM.from_pretrained(settings.path, dtype=working)
    model = with_lora(base, settings.lora, seed=0)
    restore_weights(model, weights, where)
    aside = out.with_name(f".writing-{out.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.parent.mkdir(parents=True, exist_ok=True)
    if adapter:
        model.save_pretrained(aside)
    else:
        merged = model.merge_and_unload() if settings.lora else model
        merged.to(dtype)
        _stop_at(merged, end_tokens)
        merged.save_pretrained(aside)
    load_tokenizer(settings.path).save_pretrained(aside)
    # Weights are written for their owner alone; an exported model is as open as the other files.
    mode = (aside / "tokenizer_config.json").stat().st_mode
    for file in aside.iterdir():
        file.chmod(mode)
    if out.exists():
        shutil.rmtree(out)
    aside.rename(out)
    sync_path(out.parent)


def _stop_at(model: PreTrainedModel, end_tokens: Sequence[int]) -> None:
    """Generation must stop at what training ended rows with, also where the base model stopped at something else."""
    config = model.generation_config
    own = config.eos_token_id
    known = own if isinstance(own, list) else [] if own is None else [own]
    ends = [*known, *[token for token in end_tokens if token not in known]]
    config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
