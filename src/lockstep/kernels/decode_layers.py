"""Decoder layers while the engine generates: by the model's own modules, or by what a device has for known models."""

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
        """Whether they still stand for the model's modules: nobody has changed these or listens to them."""

    def lay(self) -> None:
        """Put weights where the layers want them; before passes are recorded, which remember where they lie."""

    def prefill(self, ids_T: torch.Tensor, positions_T: torch.Tensor, step: PrefillPass) -> None:
        """Keys and values of the tokens to the cache."""

    def decode(self, ids_T: torch.Tensor, positions_T: torch.Tensor, step: DecodePass) -> torch.Tensor:
        """The same, and the decoder's output for each token."""


def _by_triton(decoder: nn.Module) -> GeneratingLayers | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from lockstep.kernels import decode_layers_triton as triton_layers

    return triton_layers.fused_layers(decoder)


# By the name that a device says in its `generating_layers`; what is not here are the modules.
GENERATING: dict[str, Callable[[nn.Module], GeneratingLayers | None]] = {"triton": _by_triton}


def generating_layers(decoder: nn.Module, kernel: str) -> GeneratingLayers | None:
    """Of a decoder whose masks were read; None where its modules do it themselves."""
    return GENERATING[kernel](decoder) if kernel in GENERATING else None
