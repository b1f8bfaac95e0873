"""A PEFT adapter and its base as one Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from lockstep.errors import Refusal, first_line, unwritten
from lockstep.model.adapter import CONFIG, WEIGHTS
from lockstep.model.pretrained import pretrained
from lockstep.model.tokenizer import has_tokenizer, tokenizer_of


def merge_adapter(adapter: Path, base: str, out: Path, where: str) -> None:
    """Merged in fp32 and rounded once to the precision that the base is stored in."""
    from peft import PeftModel

    kind = json.loads((adapter / CONFIG).read_text(encoding="utf-8")).get("task_type")
    if kind not in ("CAUSAL_LM", None):
        raise Refusal.at(where, f"is an adapter for {kind}", "only adapters of language models are read here")
    if not (adapter / WEIGHTS).is_file():
        raise Refusal.at(where, f"has no {WEIGHTS}", "save it with safe_serialization=True")
    from transformers import AutoConfig, AutoModelForCausalLM

    stored: Any = pretrained(AutoConfig, base, where, "the config of its base").dtype or torch.float32
    model = pretrained(AutoModelForCausalLM, base, where, "its base", dtype=torch.float32)
    try:
        merged: Any = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    except (ValueError, RuntimeError, KeyError, OSError, SafetensorError) as error:
        raise Refusal.at(
            where, f"does not fit its base {base}: {first_line(error)}", "name the base it is of"
        ) from error
    tokenizer = tokenizer_of(str(adapter) if has_tokenizer(adapter) else base, where)
    try:
        merged.to(stored).save_pretrained(out)
        tokenizer.save_pretrained(out)
    except (OSError, SafetensorError) as error:
        raise unwritten(out, error) from error
