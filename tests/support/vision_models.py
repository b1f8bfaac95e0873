"""Small random models with a vision tower, saved as full classes of transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tiny_sizes import TINY

TEXT = TINY
MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
TOWER: dict[str, Any] = {"num_hidden_layers": 1, "intermediate_size": 24, "num_attention_heads": 2}
SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "hidden_size": 16, "image_size": 28, "patch_size": 14}
CLIP = {**SIGLIP, "model_type": "clip_vision_model", "num_hidden_layers": 2}
QWEN = {"depth": 1, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32, "spatial_merge_size": 1}
QWEN3 = {**QWEN, "hidden_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

# The config of each small model. Ids of placeholders are inside the vocabulary, but not used by the tokenizer's text.
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": SIGLIP,
        "mm_tokens_per_image": 1,
        "image_token_index": 258,
    },
    "llava": {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": CLIP, "image_token_index": 258},
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": MROPE},
        "vision_config": {**QWEN, "hidden_size": 16, "fullatt_block_indexes": [0]},
        "image_token_id": 258,
    },
    "qwen3_vl": {"text_config": {**TEXT, "rope_parameters": MROPE}, "vision_config": QWEN3, "image_token_id": 258},
    "qwen3_vl_moe": {
        "text_config": {**TEXT, **EXPERTS, "rope_parameters": MROPE},
        "vision_config": QWEN3,
        "image_token_id": 258,
    },
}


def small_vision_model(model_type: str, *, tied: bool = False) -> Any:
    """The full class of a model type with its tower, with random weights that tell samples apart."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    settings = {**CONFIGS[model_type], "tie_word_embeddings": tied}
    settings["text_config"] = {**settings["text_config"], "tie_word_embeddings": tied}
    config = AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=1.2 / parameter.shape[-1] ** 0.5)
    return model.eval()


def write_vision_model(folder: Path, model_type: str, tokenizer_from: Path, *, tied: bool = False) -> Path:
    small_vision_model(model_type, tied=tied).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer_from / name, folder)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor"}')
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in the files of a folder."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found
