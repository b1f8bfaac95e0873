"""Sizes of the states and activations of recurrent layers, computed from the config without weights."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.kernels.mixer_states import StateCache
from lockstep.kernels.mixers import RECURRENT_KINDS, PackedMixer, layer_kinds, recurrent_modules, state_attributes
from lockstep.model.check import RUN_ERRORS
from lockstep.model.decoder import decoder_layers, inner_decoder
from lockstep.model.text_model import LanguageModel, model_on_meta, text_config

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
