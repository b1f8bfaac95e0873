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
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

# The config of each small model, without the token ids.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": {**TINY, "rope_parameters": MROPE},
        # `hidden_size` is the width of the language model.
        "vision_config": {**QWEN, "embed_dim": 32, "mlp_ratio": 2},
    },
    "qwen3_vl": {
        "text_config": {**TINY, "rope_parameters": MROPE},
        "vision_config": {**QWEN, "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_vl_moe": {
        "text_config": {**TINY, **EXPERTS, "rope_parameters": MROPE},
        "vision_config": {**QWEN, "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_5": {"text_config": {**TINY, **LINEAR}, "vision_config": QWEN},
    "qwen3_5_moe": {
        "text_config": {**TINY, **EXPERTS, "shared_expert_intermediate_size": 24, **LINEAR},
        "vision_config": QWEN,
    },
}
QWENS = tuple(CONFIGS)
# A tower for images of 32 x 32 pixels: 4 x 4 patches.
SIDE = 32
TOWER: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
}
CLIP = {**TOWER, "model_type": "clip_vision_model"}
LLAMA = {**TINY, "model_type": "llama"}
CONFIGS |= {
    # The window is shorter than an image. The masks of all layers but the last change the log-probs.
    "gemma3": {
        "text_config": {
            **TINY,
            "num_hidden_layers": 3,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "vision_config": {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
        "mm_tokens_per_image": 16,
    },
    # The image tokens see each other only in the first layer.
    "gemma4": {
        "text_config": {
            **TINY,
            "num_hidden_layers": 3,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 270,
            "use_bidirectional_attention": "vision",
        },
        "vision_config": {
            **TOWER,
            "num_hidden_layers": 1,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
        },
        "audio_config": None,
    },
    "llava": {"text_config": LLAMA, "vision_config": CLIP},
    "llava_next": {
        "text_config": LLAMA,
        "vision_config": CLIP,
        "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [96, 32]],
    },
    "idefics3": {"text_config": LLAMA, "vision_config": TOWER, "scale_factor": 2},
    "smolvlm": {"text_config": LLAMA, "vision_config": TOWER, "scale_factor": 2},
    "internvl": {
        "text_config": {**TINY, "model_type": "qwen2"},
        "vision_config": TOWER,
        "image_seq_length": 4,
    },
}
TILES = {f"<row_{row}_col_{column}>": f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)}
IDEFICS = {
    "image_token_id": "<image>",
    "around": "<fake_token_around_image>",
    "global": "<global-img>",
    "end": "<end_of_utterance>",
    **TILES,
}
SPECIAL: dict[str, dict[str, str]] = {
    **dict.fromkeys(QWENS, QWEN_TOKENS),
    "gemma3": {
        "image_token_index": "<image_soft_token>",
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
        "end": "<end_of_turn>",
    },
    "gemma4": {
        "image_token_id": "<image_soft_token>",
        "boi_token_id": "<start_of_image>",
        "eoi_token_id": "<end_of_image>",
        "end": "<end_of_turn>",
    },
    "llava": {"image_token_index": "<image>"},
    "llava_next": {"image_token_index": "<image>"},
    **dict.fromkeys(("idefics3", "smolvlm"), IDEFICS),
    "internvl": {"image_token_id": "<IMG_CONTEXT>", "start": "<img>", "end": "</img>", "video": "<video>"},
}
# The chat templates of published models, shortened to what chats of users and assistants need.
GEMMA = (
    "{{ bos_token }}{%- for message in messages -%}"
    "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{ '<start_of_turn>' + role + '\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- else -%}"
    "{%- for item in message['content'] -%}{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}"
    "{%- else -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}{{ '<end_of_turn>\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
# These take no text as content: LLaVA renders all images first.
LLAVA = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
SMOL = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
INTERN = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}{% else %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    **dict.fromkeys(QWENS, CHAT_TEMPLATE),
    "gemma3": GEMMA,
    "gemma4": GEMMA.replace("<start_of_image>", "<image_soft_token>"),
    "llava": LLAVA,
    "llava_next": LLAVA,
    "idefics3": SMOL,
    "smolvlm": SMOL,
    "internvl": INTERN,
}


def image_processor_of(family: str) -> Any:
    """The image processor of a small model, computed with Pillow and numpy."""
    from transformers.models.auto.image_processing_auto import (
        IMAGE_PROCESSOR_MAPPING_NAMES,
        get_image_processor_class_from_name,
    )

    name = IMAGE_PROCESSOR_MAPPING_NAMES["qwen3_vl" if family in QWENS else family]["pil"]
    kind = get_image_processor_class_from_name(name)
    square = {"height": SIDE, "width": SIDE}
    if family in QWENS:
        unit = (PATCH * 2) ** 2
        return kind(patch_size=PATCH, merge_size=2, size={"shortest_edge": unit, "longest_edge": 64 * unit})
    if family in ("idefics3", "smolvlm"):
        return kind(size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE})
    if family == "gemma4":
        return kind(patch_size=4, max_soft_tokens=70)
    if family == "gemma3":
        return kind(size=square)
    if family == "internvl":
        return kind(size=square, min_patches=1, max_patches=4)
    more = {"image_grid_pinpoints": CONFIGS[family]["image_grid_pinpoints"]} if family == "llava_next" else {}
    return kind(size={"shortest_edge": SIDE}, crop_size=square, **more)


def write_family(family: str, folder: Path) -> Path:
    """Writes a model of the family with random weights, so large that wrong features change the log-probs."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    tokenizer = tiny_tokenizer(TEMPLATES[family], tuple(SPECIAL[family].values()))
    tokenizer.save_pretrained(folder)
    image_processor_of(family).save_pretrained(folder)
    settings = {**CONFIGS[family], "tie_word_embeddings": True}
    named = {name: token for name, token in SPECIAL[family].items() if "_token_" in name}
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in named.items()}
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
