"""What the layers and the head of a model keep on a device, from shapes alone."""

from __future__ import annotations

from typing import Any, NamedTuple

from lockstep.device.base import Device
from lockstep.kernels.logprob import FUSED_CHUNK_BYTES
from lockstep.model.load import DTYPES
from lockstep.recipe import Recipe
from lockstep.train.plan_counts import Counted


class LayerKernels(NamedTuple):
    """By which kernels a device computes the layers, as far as it decides what they keep."""

    lean: bool = False
    """Norms, rotary and attention of the device's own."""
    fused: bool = False
    """And its own feed-forward."""


def kernels_of(recipe: Recipe, counted: Counted, device: Device | type[Device], devices: int) -> LayerKernels:
    model = recipe.model
    # In fp32 attention is torch's own, which copies what it is given.
    half = DTYPES[model.dtype].itemsize < 4
    lean = device.lean_layers and devices == 1 and counted.fused and half and not (model.lora and model.lora.dropout)
    return LayerKernels(lean, lean and model.lora is None)


def activation_bytes(
    config: Any, tokens: int, size: int, checkpointing: bool, kernels: LayerKernels | None = None, *, tensor: int = 1
) -> int:
    """What the decoder layers keep for the backward pass, counted over the tensors of a Llama-like layer.

    Per token: the inputs of two norms and of the projections, queries, keys, values, the attention's output, and
    four tensors as wide as the feed-forward; the norms also keep fp32 copies of their input. Lean layers keep no such
    copies, and queries, keys and values once; a fused feed-forward keeps two tensors of its width.
    """
    hidden, inner = config.hidden_size, getattr(config, "intermediate_size", 4 * config.hidden_size)
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", heads) or heads
    head_size = getattr(config, "head_dim", None) or hidden // heads
    lean, fused = kernels or LayerKernels()
    attention = (1 if lean else 3) * (heads + 2 * key_heads) * head_size + heads * head_size
    copies = 0 if lean else 2 * 2 * 4 * hidden
    # Heads and feed-forward are divided over a tensor group, the stream between them is not.
    layer = tokens * (size * (4 * hidden + (attention + (2 if fused else 4) * inner) // tensor) + copies)
    if checkpointing:
        return config.num_hidden_layers * tokens * hidden * size + layer
    return config.num_hidden_layers * layer


def kept_by_layer(
    config: Any, tokens: int, size: int, checkpointing: bool, kernels: LayerKernels, *, tensor: int = 1
) -> int:
    """Of what the layers keep until the backward pass reaches them, the part of one: with checkpointing its input."""
    if checkpointing:
        return tokens * int(config.hidden_size) * size
    return activation_bytes(config, tokens, size, False, kernels, tensor=tensor) // max(1, config.num_hidden_layers)


def head_bytes(config: Any, tokens: int, head_trained: bool) -> int:
    """A chunk of logits with its working copies, and the head's fp32 gradient."""
    chunk = min(FUSED_CHUNK_BYTES, 3 * 4 * config.vocab_size * tokens)
    return chunk + (4 * config.vocab_size * config.hidden_size if head_trained else 0)


def kv_bytes(config: Any, size: int) -> int:
    """Keys and values of one token in all layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_size * size
