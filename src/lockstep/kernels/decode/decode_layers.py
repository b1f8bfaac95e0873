"""Decoder layers for generation: the model's modules, or a device's fused layers for supported models."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from lockstep.kernels.attention.kv_cache import CacheLayout
from lockstep.kernels.attention.layout import DecodePass
from lockstep.kernels.attention.paged import PrefillPass


class GeneratingLayers(Protocol):
    """Fused layers. A projection whose forward is that of a view (`quantized_view.py`) uses the quantised weights."""

    @property
    def ready(self) -> bool:
        """Whether these layers may replace the model's modules: the modules must be unchanged and have no hooks."""

    @property
    def prefills(self) -> bool:
        """Whether these layers support prefill passes. Otherwise the model's modules run prefill passes."""

    def lay(self) -> None:
        """Arranges the weights in memory. Call this method before CUDA graph capture, because a captured graph fixes
        the addresses of the weights."""

    def prefill(self, ids_T: torch.Tensor, positions_T: torch.Tensor, step: PrefillPass) -> None:
        """Writes the tokens' keys and values to the KV cache."""

    def decode(self, ids_T: torch.Tensor, positions_T: torch.Tensor, step: DecodePass) -> torch.Tensor:
        """Writes the tokens' keys and values to the KV cache. Returns the decoder's output for each token."""


def _by_triton(decoder: nn.Module, layout: CacheLayout) -> GeneratingLayers | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from lockstep.kernels.decode import decode_layers_triton as triton_layers

    return triton_layers.fused_layers(decoder, layout)


# Functions that create fused layers, by the value of `Device.generating_layers`. For values that are not listed, the
# model's modules are used.
GENERATING: dict[str, Callable[[nn.Module, CacheLayout], GeneratingLayers | None]] = {"triton": _by_triton}


def generating_layers(decoder: nn.Module, kernel: str, layout: CacheLayout) -> GeneratingLayers | None:
    """Returns the fused layers of a decoder whose attention windows are set, or None if the decoder's modules must be
    used. `layout` is that of the KV cache."""
    return GENERATING[kernel](decoder, layout) if kernel in GENERATING else None
