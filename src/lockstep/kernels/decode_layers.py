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
        """Whether they still match the model's modules: unchanged and without hooks."""

    def lay(self) -> None:
        """Arrange the weights for the layers. Call before CUDA graph capture, which fixes their addresses."""

    def prefill(self, ids_T: torch.Tensor, positions_T: torch.Tensor, step: PrefillPass) -> None:
        """Write the tokens' keys and values to the cache."""

    def decode(self, ids_T: torch.Tensor, positions_T: torch.Tensor, step: DecodePass) -> torch.Tensor:
        """Same as `prefill`, and return the decoder's output for each token."""


def _by_triton(decoder: nn.Module) -> GeneratingLayers | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from lockstep.kernels import decode_layers_triton as triton_layers

    return triton_layers.fused_layers(decoder)


# Layers by the name in a device's `generating_layers`; other names use the modules.
GENERATING: dict[str, Callable[[nn.Module], GeneratingLayers | None]] = {"triton": _by_triton}


def generating_layers(decoder: nn.Module, kernel: str) -> GeneratingLayers | None:
    """Fused layers of a decoder whose masks were read; None if its modules run instead."""
    return GENERATING[kernel](decoder) if kernel in GENERATING else None
