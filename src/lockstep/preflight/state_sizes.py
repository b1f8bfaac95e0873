"""Sizes of the states of recurrent layers, computed from the config without weights."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from lockstep.kernels.mixer_states import StateCache
from lockstep.kernels.mixers import RECURRENT_KINDS, PackedMixer, layer_kinds, recurrent_modules, state_attributes
from lockstep.model.check import RUN_ERRORS
from lockstep.model.decoder import inner_decoder
from lockstep.model.text_model import LanguageModel, text_config

_BYTES: dict[tuple[str, torch.dtype], int] = {}


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
