"""A tiny random Qwen2.5-VL with its image processor: needs no hub and trains on drawn squares on a CPU."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from lockstep.model.tiny import CONTEXT, HEAD_SIZE, initialise, refuse_overwriting, tiny_tokenizer
from lockstep.run.files import share_model
from lockstep.vision.families import FAMILIES

PATCH, MERGE = 14, 2
VISION_HIDDEN = 64

# ChatML with image parts, as the template of Qwen2.5-VL renders them.
CHAT_TEMPLATE = (
    "{%- macro written(content) -%}"
    "{%- if content is string -%}{{- content -}}"
    "{%- else -%}{%- for part in content -%}"
    "{%- if part['type'] == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- else -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- endmacro -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- written(message['content']) + '<|im_end|>' -}}{%- endgeneration -%}"
    "{{- '\n' -}}"
    "{%- else -%}"
    "{{- written(message['content']) + '<|im_end|>\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def write_tiny_vlm(folder: Path, *, seed: int = 0, hidden: int = 128, layers: int = 2) -> None:
    """Writes a random Qwen2.5-VL with a byte tokenizer and an image processor to `folder`. The same arguments give the
    same files. A file with other content is never overwritten."""
    with tempfile.TemporaryDirectory() as aside:
        ids = _save_processor(Path(aside))
        _save_model(Path(aside), ids, seed, hidden, layers)
        share_model(Path(aside))
        refuse_overwriting(Path(aside), folder)
        shutil.copytree(aside, folder, dirs_exist_ok=True)


def _save_processor(folder: Path) -> dict[str, int]:
    """Writes the tokenizer and the image processor. Returns the vocabulary size and the special token ids."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    family = FAMILIES["qwen2_5_vl"]
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE, (family.before, family.after, family.pad, "<|video_pad|>"))
    tokenizer.save_pretrained(folder)
    unit = (PATCH * MERGE) ** 2
    Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, size={"shortest_edge": unit, "longest_edge": 64 * unit}
    ).save_pretrained(folder)
    names = {
        "vision_start_token_id": family.before,
        "vision_end_token_id": family.after,
        "image_token_id": family.pad,
        "video_token_id": "<|video_pad|>",
    }
    ids = {name: int(tokenizer.convert_tokens_to_ids(token)) for name, token in names.items()}
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {"vocab_size": len(tokenizer), **{name: int(getattr(tokenizer, name)) for name in special}, **ids}


def _save_model(folder: Path, ids: dict[str, int], seed: int, hidden: int, layers: int) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig, Qwen2_5_VLForConditionalGeneration

    config = _config(ids, hidden, layers)
    with torch.random.fork_rng(devices=[]):  # the constructor of transformers draws random weights
        model = Qwen2_5_VLForConditionalGeneration(config)
    initialise(model, seed, layers)
    config.save_pretrained(folder)
    special = {name: ids[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(do_sample=False, **special).save_pretrained(folder)
    # `named_parameters` lists a tied weight once, and a tied model must be stored with one copy of it.
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in model.named_parameters()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def _config(ids: dict[str, int], hidden: int, layers: int) -> Any:
    from transformers import Qwen2_5_VLConfig

    heads = hidden // HEAD_SIZE
    special = {name: ids[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    text = {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2 if heads % 2 == 0 else heads,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [HEAD_SIZE // 8, 3 * HEAD_SIZE // 16, 3 * HEAD_SIZE // 16],
        },
        "tie_word_embeddings": True,
        "dtype": "float32",
        **special,
    }
    vision = {
        "depth": 2,
        "hidden_size": VISION_HIDDEN,
        "intermediate_size": 2 * VISION_HIDDEN,
        "num_heads": 2,
        "out_hidden_size": hidden,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "window_size": 4 * PATCH * MERGE,
        "fullatt_block_indexes": [1],
    }
    tokens = {name: value for name, value in ids.items() if name.endswith("_token_id") and name not in special}
    return Qwen2_5_VLConfig(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        dtype="float32",
        **{name: value for name, value in special.items() if name != "vocab_size"},
        **tokens,
    )
