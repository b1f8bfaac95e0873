"""The embedded model as a GGUF file, written by the format's own package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

PLACES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(model: Path, file: Path, *, head: float | None = None) -> Path:
    """fp32. `head`: with an output head of its own, which is the embedding with noise of this share of it."""
    from gguf import GGUFWriter, TokenType

    config: Any = AutoConfig.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    writer = GGUFWriter(file, "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = set(tokenizer.all_special_ids)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([word for word, _ in words])
    writer.add_token_types([TokenType.CONTROL if number in special else TokenType.NORMAL for _, number in words])
    writer.add_token_scores([0.0] * len(words))  # of these its reader makes merges: here there are none
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    weights = {name: weight.float().numpy() for name, weight in load_file(model / "model.safetensors").items()}
    for name, weight in weights.items():
        writer.add_tensor(_place(name), np.ascontiguousarray(weight))
    if head is not None:
        own = weights["model.embed_tokens.weight"]
        noise = np.random.default_rng(0).standard_normal(own.shape).astype(np.float32)
        writer.add_tensor("output.weight", own + head * noise * np.linalg.norm(own) / np.linalg.norm(noise))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _place(name: str) -> str:
    if name in ("model.embed_tokens.weight", "model.norm.weight"):
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
    _, _, number, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{number}.{PLACES[part]}.{kind}"
