"""Derives the config of a small model of an architecture: keeps all options, and reduces sizes and limits.

In the small model a few dozen tokens exceed every sliding window, attention chunk and original context length.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lockstep.kernels.mixers import layer_kinds
from lockstep.model.text_model import is_nested, text_config

VOCABULARY = 96
HEADS, HEAD_SIZE = 4, 16
LAYERS = 2
# Maximum of the attention limits (sliding window, chunk size) of the small model.
LIMIT = 8
ORIGINAL_LENGTH = 2 * LIMIT
POSITIONS = 8 * ORIGINAL_LENGTH

WIDTH = HEADS * HEAD_SIZE
# Size of a Mamba head of the small model.
MAMBA_HEAD = 8
# Intermediate width of the small model's MLPs.
INNER = 96
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Maximum of each size in the small model's config.
SIZES: dict[str, int] = {
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size", "ffn_hidden_size"), INNER),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size", "intermediate_size_mlp"), INNER),
    **dict.fromkeys(("expert_ffn_hidden_size", "dense_intermediate_size", "dim_ff", "dff", "encoder_ffn_dim"), INNER),
    **dict.fromkeys(("decoder_ffn_dim", "moe_shared_expert_intermediate_size"), INNER),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_decoder_layers", "num_encoder_layers", "num_layers_per_stack"), LAYERS),
    "layers": LAYERS,
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    "attention_heads": HEADS,
    **dict.fromkeys(
        ("head_dim", "swa_head_dim", "global_head_dim", "v_head_dim", "kv_channels", "dim_head"), HEAD_SIZE
    ),
    **dict.fromkeys(("index_head_dim", "qk_nope_head_dim", "attention_head_size", "query_pre_attn_scalar"), HEAD_SIZE),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), HEAD_SIZE // 2),
    "qk_head_dim": HEAD_SIZE + HEAD_SIZE // 2,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "laurel_rank", "hc_lowrank", "gated_norm_rank"), 16),
    **dict.fromkeys(EXPERTS, 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "zero_expert_num"), 1),
    # A sparse-attention indexer adds up the scores of its heads, of which about half are 0. With few heads, tokens
    # would often have equal sums, and the selection of tokens would be arbitrary.
    "index_n_heads": 16,
    "o_groups": 2,
    **dict.fromkeys(("hidden_size_per_layer_input", "ple_embed_dim", "d_rel", "embedding_size"), 16),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "num_kv_shared_layers"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "model_max_length", "max_seq_len"), POSITIONS),
    **dict.fromkeys(("max_target_positions", "rel_extent"), POSITIONS),
    **dict.fromkeys(("mamba_d_state", "mamba_d_head", "state_size", "mamba_d_conv", "ssm_state_size"), 8),
    # The Mamba width is twice the hidden size, in heads of size 8. A config may have `mamba_n_heads` even if no layer
    # uses it.
    "mamba_n_heads": 2 * WIDTH // MAMBA_HEAD,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "mamba_head_dim"), HEAD_SIZE),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 2),
    "mamba_num_heads": 8,
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "heads_per_ngram": 2,
    "encoder_hash_byte_group_vocab": VOCABULARY,
    "ngram_vocab_size_base": 97,
    "split_ngram_parts": 4,
}
# POSITION_COUNTS and WIDTHS are set exactly, even if the original value is smaller: test sequences must fit, and the
# head size follows from the width.
POSITION_COUNTS = ("max_position_embeddings", "n_positions", "n_ctx")
WIDTHS = ("hidden_size", "d_model", "n_embd", "dim_model_base", "word_embed_proj_dim", "embed_dim", "lru_width")
# Attention limits of the small model, reduced so that the test sequences are longer.
LIMITS: dict[str, int] = {
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_window_size"), LIMIT),
    **dict.fromkeys(
        ("attention_chunk_size", "index_topk", "keep_window_size", "local_attention", "floor_scale"), LIMIT
    ),
    **dict.fromkeys(("index_block_size", "index_topk_blocks"), LIMIT // 4),
    # Chunk sizes of recurrent layers.
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "block_size"), LIMIT),
    "original_max_position_embeddings": ORIGINAL_LENGTH,
}
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_global_key_value_heads")
ATTENTION_HEADS = ("num_attention_heads", "n_head", "n_heads", "attention_heads")
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers")
# Config keys that are lists with one entry for each rotary frequency.
BY_FREQUENCY = ("short_factor", "long_factor")


def miniature_config(config: Any, divisor: int = 1, *, towers: bool = True) -> Any:
    """Returns the config of a small model with the architecture of `config`. The attention limits of the small model
    are at most `LIMIT`. The numbers of heads and experts and the MLP width are divisible by `divisor`. Without
    `towers`, nested configs other than the text config keep their sizes."""
    data = copy.deepcopy(config.to_dict())
    for name in ("_name_or_path", "quantization_config", "dtype", "torch_dtype"):
        data.pop(name, None)
    kept = {} if towers else {name: data.pop(name) for name in _towers(config) if name in data}
    _shrink(data)
    _widen(data, divisor)
    small = type(config).from_dict({**data, **kept})
    _refuse_lost_kinds(config, small)
    return small


def _towers(config: Any) -> list[str]:
    """Returns the names of the nested configs that are not the text config. Without a text config, all nested configs
    belong to the language model."""
    text = text_config(config)
    if not is_nested(config):
        return []
    return [name for name in config.sub_configs if getattr(config, name, None) is not text]


def _refuse_lost_kinds(config: Any, small: Any) -> None:
    """Raises ValueError if the small model lacks a layer kind, because the check of the small model would miss it."""
    try:
        texts = [one.get_text_config(decoder=True) for one in (config, small)]
    except ValueError:
        return  # it has several text configs, and another check refuses it
    lost = layer_kinds(texts[0]) - layer_kinds(texts[1])
    if lost:
        raise ValueError(f"a small model would have no layer of kind {', '.join(sorted(lost))}")


def _shrink(data: dict[str, Any]) -> None:
    total = next((data[name] for name in LAYER_COUNTS if data.get(name)), 0)
    layers = _kept_layers(data, total)
    ropes: list[dict[str, Any]] = []
    sizes = data.get("head_dim") or 0, data.get("v_head_dim") or 0
    heads = next((data[name] for name in ATTENTION_HEADS if data.get(name)), 0)
    # The number of heads is a power of two that divides the hidden size, so that the head size is even.
    few = HEADS if heads >= HEADS else min(heads, 2)
    for name, value in list(data.items()):
        if not isinstance(name, str):
            continue  # a dictionary whose keys are numbers is not a config
        if isinstance(value, dict) and name == "per_layer_config":
            data[name] = {layers.index(int(key)): part for key, part in value.items() if int(key) in layers}
        elif isinstance(value, dict):
            ropes.append(value) if "rope" in name else _shrink(value)
        elif isinstance(value, list):
            data[name] = _shrink_list(name, value, layers, total)
        elif name == "head_dim":
            # The head size is derived from the hidden size, as in some models of transformers.
            data[name] = WIDTH // (few or HEADS)
        elif value is None and name in KEY_VALUE_HEADS[:1]:
            data[name] = HEADS
        elif value is None and name == "num_experts_per_tok" and any(data.get(key) for key in EXPERTS):
            # A model with experts needs `num_experts_per_tok`, but some config classes have no default for it.
            data[name] = SIZES[name]
        elif name in KEY_VALUE_HEADS and value is not None:
            data[name] = few if value == heads else 1 if value == 1 else max(1, few // 2)
        elif name == "max_window_layers" and value is not None:
            # `max_window_layers` is the first layer with sliding-window attention. The small model has sliding-window
            # layers only if the original model has some.
            data[name] = 1 if value < total else len(layers)
        elif isinstance(value, int) and not isinstance(value, bool):
            data[name] = few if value == heads and name in ATTENTION_HEADS else _shrink_number(name, value, len(layers))
    if data.get("qk_rope_head_dim") and data.get("head_dim"):
        # In models with `qk_rope_head_dim`, the config's `head_dim` is the size of the rotary part of a head.
        data["head_dim"] = data["qk_rope_head_dim"]
    elif all(sizes) and sizes[0] != sizes[1]:
        # Value heads stay smaller or larger than key heads, as in the original model.
        data["v_head_dim"] = data["head_dim"] // 2 if sizes[1] < sizes[0] else 2 * data["head_dim"]
    if data.get("index_block_size") and data.get("index_n_heads"):
        # An indexer that selects blocks of tokens has one head per key/value head.
        data["index_n_heads"] = data["num_key_value_heads"]
    _fit_mamba(data)
    for rope in ropes:
        _shrink_rope(rope, data)


def _fit_mamba(data: dict[str, Any]) -> None:
    """Makes the numbers and sizes of Mamba heads consistent with the width of the small model."""
    if data.get("mamba_n_heads") and "mamba_d_head" in data:
        inner = 2 * WIDTH if data.get("mamba_d_ssm") else data["mamba_expand"] * WIDTH
        data["mamba_d_head"], data["mamba_n_heads"] = MAMBA_HEAD, inner // MAMBA_HEAD
        if data.get("mamba_d_ssm"):
            data["mamba_d_ssm"] = inner
    if data.get("state_size") and data.get("num_heads") and data.get("expand"):
        data["num_heads"] = data["expand"] * WIDTH // data["head_dim"]
    if "mamba_headdim" in data:
        # If these keys are removed, the config derives their values from other sizes.
        for name in ("mamba_headdim", "attention_head_dim", "head_dim", "attention_hidden_size", "hybrid_layer_ids"):
            data.pop(name, None)


def _widen(data: dict[str, Any], divisor: int) -> None:
    """Multiplies the numbers of heads and experts and the MLP width, so that `divisor` divides them."""
    counts = [data[name] for name in (*KEY_VALUE_HEADS, *ATTENTION_HEADS) if isinstance(data.get(name), int)]
    times = math.lcm(*(divisor // math.gcd(divisor, count) for count in counts))
    for name, value in data.items():
        if isinstance(value, dict):
            _widen(value, divisor)
        elif name in (*KEY_VALUE_HEADS, *ATTENTION_HEADS, *WIDTHS) and isinstance(value, int):
            data[name] = value * times
        elif (SIZES.get(name) == INNER or name in EXPERTS) and isinstance(value, int):
            data[name] = value * (divisor // math.gcd(divisor, value))


def _kept_layers(data: Mapping[str, Any], total: int) -> list[int]:
    """Returns the indices of the layers to keep: one of each layer type, at least two, and the last layer, because
    experts often begin in late layers."""
    kinds = next((data[name] for name in ("layer_types", "layers_block_type", "block_types") if data.get(name)), None)
    if not kinds:
        return list(range(min(LAYERS, total or LAYERS)))
    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    return sorted({*range(min(LAYERS, len(kinds))), *first.values(), len(kinds) - 1})


def _shrink_list(name: str, value: list[Any], layers: list[int], total: int) -> list[Any]:
    if name == "mrope_section":
        return [HEAD_SIZE // 2 - 2 * (HEAD_SIZE // 6), *[HEAD_SIZE // 6] * 2][: len(value)]
    if name == "attn_layer_indices":
        return [LAYERS - 1] if value else []
    if name == "cross_attention_layers":
        return [len(layers) - 1] if value else value  # the last layer of the small model attends to images
    if len(value) == total and len(value) > max(layers):
        value = [value[index] for index in layers]
    return [
        _shrink_number(name, item, len(layers)) if isinstance(item, int) and not isinstance(item, bool) else item
        for item in value
    ]


def _shrink_number(name: str, value: int, layers: int) -> int:
    if name in LIMITS:
        return min(value, LIMITS[name])
    if name in WIDTHS:
        return WIDTH
    if name in ("vocab_size", *POSITION_COUNTS):
        # The vocabulary size and maximum positions are set exactly, because the test token ids and sequence lengths
        # must fit.
        return SIZES[name]
    if SIZES.get(name) == LAYERS and "layer" in name:
        return min(value, layers)
    if name in SIZES:
        return min(value, SIZES[name])
    if name.endswith(("_pattern", "_interval", "_period", "_step")):
        return min(value, LAYERS)
    if name.endswith("_layer_offset"):
        return min(value, LAYERS - 1)
    if name.endswith("_token_id") and value >= VOCABULARY:
        return value % VOCABULARY
    return value


def _shrink_rope(rope: dict[str, Any], data: dict[str, Any]) -> None:
    for name, value in list(rope.items()):
        if isinstance(value, dict):
            _shrink_rope(value, data)
        elif name == "original_max_position_embeddings" and value:
            rope[name] = min(value, ORIGINAL_LENGTH)
        elif name in BY_FREQUENCY and isinstance(value, list):
            pairs = _rotated_pairs(rope, data)
            rope[name] = [value[index * len(value) // pairs] for index in range(pairs)]
        elif name == "mrope_section":
            pairs = _rotated_pairs(rope, data)
            rope[name] = [pairs - 2 * (pairs // 3), *[pairs // 3] * 2][: len(value)]
        elif name == "rope_type" and value == "dynamic":
            # Dynamic NTK changes only sequences beyond the model's context length, so the test sequences must exceed
            # it.
            data["max_position_embeddings"] = ORIGINAL_LENGTH


def _rotated_pairs(rope: Mapping[str, Any], data: Mapping[str, Any]) -> int:
    """Returns the number of rotary frequencies of a head."""
    share = rope.get("partial_rotary_factor") or data.get("partial_rotary_factor") or 1.0
    head = data.get("head_dim") or data["hidden_size"] // data["num_attention_heads"]
    return int(head * share) // 2


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> None:
    """Sets random weights with which every parameter affects the output. Matrices roughly preserve the norm of their
    input. Norm weights, biases and attention sinks differ from their neutral values."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter.device)
        if parameter.dim() >= 2:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5 * 1.5)
        else:
            parameter.add_((0.3 * noise).to(parameter.dtype))
