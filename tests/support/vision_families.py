"""Tiny random models of each family that takes images, with tokenizer and image processor, and rows for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from image_rows import example, picture
from lockstep.model.tiny import tiny_tokenizer
from lockstep.model.towers.tiny_vision import CHAT_TEMPLATE
from lockstep.types import Example
from tiny_sizes import TINY

PATCH = 8
QWEN_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
QWEN = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

# The config of each small model, without the token ids.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "text_config": {**TINY, "rope_parameters": MROPE},
        "vision_config": {**QWEN, "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_vl_moe": {
        "text_config": {**TINY, **EXPERTS, "rope_parameters": MROPE},
        "vision_config": {**QWEN, "deepstack_visual_indexes": [0, 1]},
    },
}
SPECIAL: dict[str, dict[str, str]] = dict.fromkeys(CONFIGS, QWEN_TOKENS)


def _save_image_processor(family: str, folder: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    unit = (PATCH * 2) ** 2
    size = {"shortest_edge": unit, "longest_edge": 64 * unit}
    Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, size=size).save_pretrained(folder)


def write_family(family: str, folder: Path) -> Path:
    """Writes a model of the family with random weights, so large that wrong features change the log-probs."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    tokenizer = tiny_tokenizer(CHAT_TEMPLATE, tuple(SPECIAL[family].values()))
    tokenizer.save_pretrained(folder)
    _save_image_processor(family, folder)
    settings = {**CONFIGS[family], "tie_word_embeddings": True}
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in SPECIAL[family].items()}
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = {**settings.pop("text_config"), "vocab_size": len(tokenizer), "tie_word_embeddings": True, **special}
    config = AutoConfig.for_model(family, text_config=text, **settings, **ids, **special)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def rows_of(folder: Path) -> list[Example]:
    """Rows with one, two and no images, of several sizes; the first and the last have the same image."""
    wide, tall = picture(1, 32, 64), picture(2, 80, 32)
    return [
        example(folder, "what is #? it is red", [picture(3, 32, 32)]),
        example(folder, "compare # and #: they differ", [wide, tall], 1),
        example(folder, "only text without any image", [], 2),
        example(folder, "# # two at once, and more", [picture(3, 32, 32), wide], 3),
    ]
