"""Small configurations of models with recurrent layers, one per way to mix tokens and per class of transformers."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

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
    return AutoConfig.for_model(model_type, **SWITCHES.get(model_type, {}))
