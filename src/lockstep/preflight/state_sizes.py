"""Sizes of the states of recurrent layers, computed from the config without weights."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from lockstep.kernels.mixer_states import StateCache
from lockstep.kernels.mixers import CACHE_PARAMETERS, RECURRENT_KINDS, layer_kinds, recurrent_modules
from lockstep.model.check import RUN_ERRORS
from lockstep.model.decoder import inner_decoder
from lockstep.model.text_model import text_config

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
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()
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
    """Returns the bytes of the states that a module writes to its cache. Attention modules write no states."""
    parameters = inspect.signature(module.forward).parameters
    cache = StateCache()
    cache_name = next((name for name in CACHE_PARAMETERS if name in parameters), None)
    if cache_name is None:
        return 0
    needed = {
        name: None
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
    try:
        module(**{**needed, next(iter(parameters)): hidden, cache_name: cache})
    except RUN_ERRORS:
        # An attention module fails here, because it needs position embeddings or another type of cache.
        return 0
    return sum(state.nbytes for state in cache.states.values())
