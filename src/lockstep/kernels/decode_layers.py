"""Decoder layers for generation: the model's modules, or a device's fused layers for supported models."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from lockstep.kernels.attention.layout import DecodePass
from lockstep.kernels.attention.paged import PrefillPass


class GeneratingLayers(Protocol):
    @property
    def ready(self) -> bool:
        """Whether these layers may replace the model's modules: the modules must be unchanged and have no hooks."""

    def lay(self) -> None:
        """Arranges the weights in memory. Call this method before CUDA graph capture, because a captured graph fixes
        the addresses of the weights."""

    def prefill(self, ids_T: torch.Tensor, positions_T: torch.Tensor, step: PrefillPass) -> None:
        """Writes the tokens' keys and values to the KV cache."""

    def decode(self, ids_T: torch.Tensor, positions_T: torch.Tensor, step: DecodePass) -> torch.Tensor:
        """Writes the tokens' keys and values to the KV cache. Returns the decoder's output for each token."""


def _by_triton(decoder: nn.Module) -> GeneratingLayers | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from lockstep.kernels import decode_layers_triton as triton_layers

    return triton_layers.fused_layers(decoder)


# Maps values of `Device.generating_layers` to functions that create fused layers. For other values of
# `Device.generating_layers`, the model's modules are used.
GENERATING: dict[str, Callable[[nn.Module], GeneratingLayers | None]] = {"triton": _by_triton}


def generating_layers(decoder: nn.Module, kernel: str) -> GeneratingLayers | None:
    """Returns the fused layers of a decoder whose attention windows are set, or None if the decoder's modules must be
    used."""
    return GENERATING[kernel](decoder) if kernel in GENERATING else None
