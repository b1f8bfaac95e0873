"""Sizes of KV caches, and of the states and activations of recurrent layers, from the config without weights."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.kernels.mixer_states import StateCache
from lockstep.kernels.mixers import RECURRENT_KINDS, PackedMixer, layer_kinds, recurrent_modules, state_attributes
from lockstep.model.check import RUN_ERRORS
from lockstep.model.decoder import decoder_layers, inner_decoder
from lockstep.model.text_model import LanguageModel, model_on_meta, text_config, text_sizes

_BYTES: dict[tuple[str, torch.dtype], int] = {}
_KEPT: dict[str, list[RecurrentActivations | None]] = {}
CHUNK = 64
"""The tokens of a chunk of the gated delta rule, in our kernels and in transformers."""


class RecurrentActivations(NamedTuple):
    """Numbers per token that the recurrent module of a layer keeps for the backward pass: in the dtype of the model,
    with fused kernels and without, and in fp32 without. `scratch`: what the backward pass of the kernels allocates."""

    fused: int
    plain: int
    plain_fp32: int
    scratch: int
    with_attention: bool
    """The layer has an attention module too."""

    def kept(self, size: int, lean: bool) -> int:
        """Bytes per token, if a number of the model has `size` bytes."""
        return size * self.fused if lean else size * self.plain + 4 * self.plain_fp32


def recurrent_activations(config: Any) -> list[RecurrentActivations | None]:
    """Returns what the recurrent module of each layer keeps. None stands for a layer without such a module, or with one
    whose sizes are not known; the list is empty for models without recurrent layers."""
    if not layer_kinds(text_config(config)) & RECURRENT_KINDS:
        return []
    key = config.to_json_string(use_diff=False)
    if key not in _KEPT:
        _KEPT[key] = [_kept_by(layer) for layer in decoder_layers(inner_decoder(model_on_meta(config)))]
    return _KEPT[key]


def _kept_by(layer: nn.Module) -> RecurrentActivations | None:
    modules = list(layer.modules())
    attention = any(hasattr(module, "k_proj") for module in modules)
    for module in modules:
        convolution = getattr(module, "conv1d", None)
        if not isinstance(convolution, nn.Conv1d):
            continue
        channels = convolution.in_channels
        delta = _sizes(module, "num_v_heads", "head_k_dim", "head_v_dim")
        if delta:
            heads, key, value = delta
            keys, values = heads * key, heads * value
            # The inverse of the triangular system has CHUNK numbers per token and head, in plain torch five times.
            fused = channels + 5 * keys + 5 * values + heads * CHUNK
            states = 2 * keys * value // CHUNK
            exact = 7 * keys + 3 * values + 5 * heads * CHUNK
            return RecurrentActivations(fused, channels + 3 * values, exact, states + 5 * keys + 3 * values, attention)
        mamba = _sizes(module, "num_heads", "n_groups", "ssm_state_size", "head_dim")
        if mamba and isinstance(projection := getattr(module, "in_proj", None), nn.Linear):
            heads, groups, state, width = mamba
            # The projection holds the gate and the input of the convolution.
            kept = projection.out_features + channels + 2 * groups * state + 4 * heads * width
            return RecurrentActivations(kept, kept, 0, 2 * heads * width * state // CHUNK, attention)
    return None


def _sizes(module: nn.Module, *names: str) -> list[int]:
    found = [getattr(module, name, None) for name in names]
    return [size for size in found if isinstance(size, int)] if all(isinstance(one, int) for one in found) else []


def state_bytes(config: Any, dtype: torch.dtype) -> int:
    """Returns the bytes of the states of one sequence in all recurrent layers. Returns 0 for a model without recurrent
    layers."""
    if not layer_kinds(text_config(config)) & RECURRENT_KINDS:
        return 0
    key = config.to_json_string(use_diff=False), dtype
    if key not in _BYTES:
        _BYTES[key] = _measured_bytes(config, dtype)
    return _BYTES[key]


@torch.inference_mode()
def _measured_bytes(config: Any, dtype: torch.dtype) -> int:
    with torch.device("meta"):
        model = LanguageModel.from_config(config, dtype=dtype, trust_remote_code=False).eval()
        hidden = torch.empty(1, 2, text_config(config).hidden_size, dtype=dtype)
        sizes: dict[type[nn.Module], int] = {}
        total = 0
        for module in recurrent_modules(inner_decoder(model)):
            # All layers with a module of one class have states of the same size.
            if type(module) not in sizes:
                sizes[type(module)] = _module_bytes(module, hidden)
            total += sizes[type(module)]
    return total


def _module_bytes(module: nn.Module, hidden: torch.Tensor) -> int:
    """Returns the bytes of the states that a module writes to its cache or to its attributes. Attention modules write
    no states."""
    mixer, cache = PackedMixer(module), StateCache()
    if mixer.cache_name is None and not state_attributes(module):
        return 0
    needed: dict[str, Any] = {
        name: None
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
    if "position_ids" in needed:
        needed["position_ids"] = torch.arange(hidden.shape[1])[None]
    try:
        mixer.run({**needed, mixer.input_name: hidden}, cache)
    except RUN_ERRORS:
        # An attention module fails here, because it needs position embeddings or another type of cache.
        return 0
    return sum(state.nbytes for state in cache.states.values())


# The KV cache.


def kv_bytes(config: Any, size: int, tensor: int = 1) -> int:
    """Returns the KV cache bytes of one token in all layers, on one of `tensor` tensor-parallel ranks."""
    found = cached_elements(config)
    return (found.by_head // tensor + found.common) * size


class CachedElements(NamedTuple):
    """The number of elements per token in the KV cache. `by_head` counts keys and values of heads, which tensor
    parallelism divides. `common` counts latents and indexer keys, which every rank stores."""

    by_head: int
    common: int


def cached_elements(config: Any) -> CachedElements:
    """Counts the cached elements of each attention module, because module sizes may differ. If no known key projection
    is found, all layers are assumed to be equal."""
    key = config.to_json_string(use_diff=False)
    if key not in _ELEMENTS:
        found = _projected_elements(config)
        equal = CachedElements(_equal_elements(config), 0)
        # Sequences of a model without attention own blocks of the smallest size.
        _ELEMENTS[key] = next((one for one in (found, equal) if any(one)), CachedElements(0, 2))
    return _ELEMENTS[key]


_ELEMENTS: dict[str, CachedElements] = {}
# Substrings of `layer_types` in a config. Layers of these types cache no keys and values, but another state.
WITHOUT_KEYS = ("linear", "mamba", "conv", "recurrent")


def _equal_elements(config: Any) -> int:
    sizes = text_sizes(config)
    return 2 * sizes.layers * sizes.key_heads * sizes.head_size


def _projected_elements(config: Any) -> CachedElements:
    model = model_on_meta(config)
    text = text_config(model.config)
    kinds = getattr(text, "layer_types", None) or ()
    modules = [
        module
        for module in inner_decoder(model).modules()
        if not any(other in _kind(module, kinds) for other in WITHOUT_KEYS)
    ]
    found = [elements for elements in map(_module_elements, modules) if any(elements)]
    if getattr(text, "H_cycles", None):
        # Recurrent stacks run their layers several times and cache every run.
        found = found[:1] * int(text.num_layers_per_stack * text.H_cycles * (text.L_cycles + 1))
    return CachedElements(sum(each.by_head for each in found), sum(each.common for each in found))


def _kind(module: Any, kinds: Sequence[str]) -> str:
    index = getattr(module, "layer_idx", None)
    return str(kinds[index]) if isinstance(index, int) and index < len(kinds) else ""


def indexed_latents() -> bool:
    """Returns whether modules with an indexer cache latents. In transformers 5.17 they cache the keys and values of
    every head."""
    major, minor = version("transformers").split(".")[:2]
    return (int(major), int(minor)) >= (5, 18)


def _module_elements(module: Any) -> CachedElements:
    """Returns how many elements per token one module caches: the latent, or the keys and values, of an attention
    module, or the keys of an indexer."""
    if hasattr(module, "kv_a_proj_with_mqa"):
        if hasattr(module, "indexer") and not indexed_latents():
            return CachedElements(module.num_heads * (module.qk_head_dim + module.v_head_dim), 0)
        return CachedElements(0, int(module.kv_a_proj_with_mqa.out_features))
    key = getattr(module, "k_proj", None) or getattr(module, "wk", None)
    if key is None or getattr(module, "is_kv_shared_layer", False):
        return CachedElements(0, 0)
    if not hasattr(module, "v_proj"):
        return CachedElements(0, int(key.out_features))
    # A module without a projection of values computes the values from its keys. Differential attention (`lambda_q1`)
    # reads the values in two arrangements and caches both.
    value = int((module.v_proj or key).out_features)
    return CachedElements(int(key.out_features) + value * (2 if hasattr(module, "lambda_q1") else 1), 0)
