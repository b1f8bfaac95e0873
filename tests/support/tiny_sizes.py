"""The sizes of a tiny language model: four heads in two groups, and the vocabulary of the byte tokenizer."""

from __future__ import annotations

from typing import Any

TINY: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
