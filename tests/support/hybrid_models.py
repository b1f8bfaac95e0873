"""Small configurations of models with recurrent layers, one per way to mix tokens and per class of transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from lockstep.model.miniature import miniature_config, randomise

# What a class needs besides its defaults to have both recurrent and attention layers.
SWITCHES: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 1},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
}
# One of each way to mix tokens: gated delta rule, Mamba-2, short convolution.
DAILY = ("qwen3_next", "bamba", "lfm2")
FURTHER = (
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "kimi_linear",
    "minimax",
    "nemotron_h",
    "granitemoehybrid",
    "jamba",
    "lfm2_moe",
    "falcon_h1",
    "olmo_hybrid",
    "bailing_hybrid",
    "zamba2",
    "zaya",
    "recurrent_gemma",
    "mamba2",
)


def hybrid_config(model_type: str) -> Any:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    return AutoConfig.for_model(model_type, **SWITCHES.get(model_type, {}))


def write_hybrid(folder: Path, model_type: str, tokenizer_from: Path) -> Path:
    """Writes a small random model of the class, with the tokenizer of another folder."""
    config = miniature_config(hybrid_config(model_type))
    config.vocab_size, config.max_position_embeddings = 259, 512
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    randomise(model)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer_from / name, folder)
    return folder
