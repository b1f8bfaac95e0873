"""The least time that a device needs for a step, by its matrix FLOP/s and its memory bandwidth.

F FLOP/s, BW bytes/s, N multiplied weights in two bytes each, B sequences, S tokens, L layers, Hq query and Hkv key
heads of size d.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ModelCost:
    """What the work of a decoder follows from."""

    multiplied: int
    """N: weights that a token is multiplied with. All but norms, biases, an embedding that is no head, and the experts
    that a token does not go to."""
    head: int
    """Those of the projection to the vocabulary, among them."""
    read: int
    """Weights that are read where many tokens are computed at once: of all experts."""
    attended: int
    """L Hq d."""
    cached: int
    """Numbers of the KV cache for a token in all layers: 2 L Hkv d."""
    layers: int
    vocabulary: int


def model_cost(config: Any) -> ModelCost:
    """Counted over the parameters of the model, which is built without storage."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    text = config.get_text_config()
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    head = text.vocab_size * text.hidden_size
    experts, chosen = _experts(text)
    # Tied or not, the head is counted once.
    apart = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    multiplied = read = head
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or id(parameter) in apart:
            continue
        count = parameter.numel()
        read += count
        multiplied += count * chosen // experts if re.search(r"\bexperts\b", name) else count
    layers = text.num_hidden_layers
    return ModelCost(
        multiplied, head, read, layers * heads * size, 2 * layers * key_heads * size, layers, text.vocab_size
    )


def _experts(config: Any) -> tuple[int, int]:
    """How many a layer has, and how many of them a token goes to."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if getattr(config, name, None):
            return getattr(config, name), config.num_experts_per_tok
    return 1, 1


def weights_seconds(cost: ModelCost, batch: int, flops: float, bandwidth: float, size: int = 2) -> float:
    """A token of each of `batch` sequences through all weights: max(2 N / BW, 2 N B / F)."""
    return max(size * cost.read / bandwidth, 2 * cost.multiplied * batch / flops)


def cache_seconds(cost: ModelCost, batch: int, context: float, bandwidth: float, size: int = 2) -> float:
    """Keys and values of `batch` sequences of `context` tokens: B S kv / BW."""
    return batch * context * size * cost.cached / bandwidth


def decode_seconds(cost: ModelCost, batch: int, context: float, flops: float, bandwidth: float) -> float:
    """A token for each of `batch` sequences: max(2 N / BW, 2 N B / F) + B S kv / BW."""
    return weights_seconds(cost, batch, flops, bandwidth) + cache_seconds(cost, batch, context, bandwidth)


def generation_seconds(
    cost: ModelCost, batch: int, prompt: int, response: int, flops: float, bandwidth: float
) -> float:
    """Decoding alone, at the mean context of a response: what is before it has other limits."""
    return response * decode_seconds(cost, batch, prompt + response / 2, flops, bandwidth)


def product_flops(cost: ModelCost, tokens: float, *, frozen: bool = False) -> float:
    """Forward and backward of weights: 6 N T; 4 N T where they are frozen and have no gradients of their own."""
    return (4 if frozen else 6) * cost.multiplied * tokens


def attention_flops(cost: ModelCost, squares: float) -> float:
    """Forward and backward of causal attention: 6 L Hq d S^2 a sequence; `squares` is the sum of S^2."""
    return 6 * cost.attended * squares


def training_flops(cost: ModelCost, lengths: Sequence[int], *, frozen: bool = False) -> float:
    """Forward and backward of causal sequences: 6 N S + 6 L Hq d S^2 each."""
    squares = sum(length**2 for length in lengths)
    return float(product_flops(cost, sum(lengths), frozen=frozen) + attention_flops(cost, squares))


def forward_flops(cost: ModelCost, lengths: Sequence[int]) -> float:
    return training_flops(cost, lengths) / 3
