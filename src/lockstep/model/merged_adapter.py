"""Merges a PEFT adapter and its base model into one Hugging Face folder."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lockstep.errors import Problem, Refusal, first_line, refuse_all, unwritten
from lockstep.model.adapter import CONFIG, WEIGHTS
from lockstep.model.check import tokens
from lockstep.model.export_check import Verification, probe_of_transformers, verify_export
from lockstep.model.pretrained import has_tokenizer, pretrained, rounded, save_model, tokenizer_of, whole_model

# Number of test tokens, and the allowed difference between merged and unmerged logits, relative to the largest logit.
PROBE, MERGED_ERROR = 16, 1e-3


def merge_adapter(adapter: Path, base: str, out: Path, where: str) -> Verification:
    """Merge in fp32 and round to the dtype of the stored base. The result is compared with the unmerged adapter."""
    from peft import PeftModel

    kind = json.loads((adapter / CONFIG).read_text(encoding="utf-8")).get("task_type")
    if kind not in ("CAUSAL_LM", None):
        raise Refusal.at(
            where, f"is an adapter for {kind}", "only adapters of language models are supported", code="unfit-adapter"
        )
    if not (adapter / WEIGHTS).is_file():
        raise Refusal.at(where, f"has no {WEIGHTS}", "save it with safe_serialization=True", code="missing-file")
    from transformers import AutoConfig, AutoModelForCausalLM

    stored: Any = pretrained(AutoConfig, base, where, "the config of its base").dtype or torch.float32
    model = whole_model(AutoModelForCausalLM, base, where, "its base", dtype=torch.float32)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # PEFT warns about tied weights; the outputs are compared instead
            adapted = PeftModel.from_pretrained(model, str(adapter))
            _refuse_other_keys(adapted, adapter, where)
            unmerged, probe = _logits(adapted), probe_of_transformers(adapted)
            _untie(adapted)
            merged: Any = adapted.merge_and_unload()
            off = float((_logits(merged) - unmerged).abs().max() / unmerged.abs().max())
    except (ValueError, RuntimeError, KeyError, OSError, SafetensorError) as error:
        raise Refusal.at(
            where, f"does not fit its base {base}: {first_line(error)}", "name its base model", code="unfit-adapter"
        ) from error
    if not off <= MERGED_ERROR:
        why = f"merged into {base} it gives other logits than unmerged: off by {off:.2g} of the largest"
        raise Refusal.at(where, why, "merge it with the library that created it", code="unfit-adapter")
    tokenizer = tokenizer_of(str(adapter) if has_tokenizer(adapter) else base, where)
    try:
        save_model(rounded(merged, stored), out)
        tokenizer.save_pretrained(out)
    except (OSError, SafetensorError) as error:
        raise unwritten(out, error) from error
    del model, adapted, merged  # free memory before the next load
    return verify_export(out, probe, "policy", stored, where)


def _logits(adapted: Any) -> torch.Tensor:
    ids = tokens(PROBE, adapted.get_input_embeddings().weight.shape[0])
    found: torch.Tensor = adapted(input_ids=torch.tensor([ids])).logits
    return found


def _untie(adapted: Any) -> None:
    """Untie embedding and head if the adapter changes one of them: merging would otherwise change both."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = adapted.get_base_model()
    layers = model.get_input_embeddings(), model.get_output_embeddings()
    if not any(isinstance(layer, BaseTunerLayer) for layer in layers):
        return
    plain = [layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer for layer in layers]
    if plain[0].weight is plain[1].weight:
        plain[1].weight = torch.nn.Parameter(plain[0].weight.detach().clone())
        model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False


def _refuse_other_keys(adapted: Any, adapter: Path, where: str) -> None:
    """Refuse missing and unexpected weights, which PEFT ignores."""
    from peft import get_peft_model_state_dict

    with safe_open(adapter / WEIGHTS, "pt") as file:
        stored = set(file.keys())
    expected = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    # Full weights of the model, which an adapter with new tokens contains.
    full = {f"base_model.model.{name}" for name in adapted.get_base_model().state_dict()}
    problems = [
        Problem(where, f"the adapter has no {name}", code="missing-weight") for name in sorted(expected - stored)
    ]
    problems += [
        Problem(where, f"its base has no place for {name}", code="unknown-weight")
        for name in sorted(stored - expected - full)
    ]
    refuse_all(problems, "weights")
