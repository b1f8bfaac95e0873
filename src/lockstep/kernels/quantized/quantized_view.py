"""A quantised view of trained linear layers, which only generation uses.

The trainer computes with the trained weights. The view holds a quantised copy of each weight. While the view is in use,
the linear layers compute with this copy. `refresh` quantises the current weights into the same memory, so that captured
graphs stay valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lockstep.kernels.quantized.formats import Quantized, quantize
from lockstep.kernels.quantized.token_products import TokenCodes, quantized_product


class QuantizedForward:
    """The forward of a linear layer while the view is in use. Fused kernels read the weight of a module only if its
    forward is not replaced."""

    def __init__(self, weight: Quantized, bias: torch.Tensor | None):
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor | TokenCodes) -> torch.Tensor:
        return quantized_product(x, self.weight, self.bias)


def _side_by_side(weights: dict[str, Quantized]) -> dict[str, Quantized]:
    """Places the codes and the scales of several weights in one buffer each, so that fused layers can multiply by all
    of them at once."""
    rows = [len(weight.codes) for weight in weights.values()]
    bits = torch.cat([weight.codes.view(torch.uint8) for weight in weights.values()]).split(rows)
    scales = torch.cat([weight.block_scales() for weight in weights.values()]).split(rows)
    return {
        name: replace(weight, codes=codes.view(weight.codes.dtype), scales=scale)
        for (name, weight), codes, scale in zip(weights.items(), bits, scales, strict=True)
    }


class QuantizedView:
    """The quantised weights of `modules` in `format` (fp8 or int8)."""

    def __init__(self, modules: Mapping[str, nn.Linear], format: str):
        self.modules, self.format = dict(modules), format
        self._weights: dict[str, Quantized] = {}

    @property
    def parameters(self) -> int:
        """Number of weights that have low precision in generation."""
        return sum(module.in_features * module.out_features for module in self.modules.values())

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self._weights.values())

    @property
    def addresses(self) -> tuple[int, ...]:
        """The memory addresses of the view, which captured graphs use."""
        return tuple(tensor.data_ptr() for weight in self._weights.values() for tensor in weight.tensors().values())

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantises the current weights. A frozen weight (the base of an adapter) is quantised only once."""
        if not self._weights:
            for names in self._groups():
                self._weights |= _side_by_side({name: self._quantized(name) for name in names})
            return
        for name, held in self._weights.items():
            if self.modules[name].weight.requires_grad:
                weight = self._quantized(name)
                assert held.scales is not None
                assert weight.scales is not None
                held.codes.copy_(weight.codes)
                held.scales.copy_(weight.scales)

    def _quantized(self, name: str) -> Quantized:
        return quantize(self.modules[name].weight.detach(), self.format)

    def _groups(self) -> list[list[str]]:
        """Returns the names of projections of one module that may have the same input, in their order."""
        groups: dict[tuple[str, int], list[str]] = {}
        for name, module in self.modules.items():
            parent = name.removesuffix(".base_layer").rpartition(".")[0]
            groups.setdefault((parent, module.in_features), []).append(name)
        return list(groups.values())

    def free(self) -> None:
        """Frees the memory. The next `refresh` quantises all weights."""
        self._weights.clear()

    def weight(self, name: str) -> Quantized:
        return self._weights[name]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside the `with` block, the modules compute with the quantised weights."""
        before: dict[str, Any] = {}
        for name, module in self.modules.items():
            # Assigning through `__dict__` is ten times as fast as through the module, and this runs in every pass.
            before[name] = module.__dict__.get("forward")
            module.__dict__["forward"] = QuantizedForward(self._weights[name], module.bias)
        try:
            yield
        finally:
            for name, module in self.modules.items():
                if before[name] is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = before[name]
