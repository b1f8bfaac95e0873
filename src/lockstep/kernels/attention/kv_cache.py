"""The paged KV cache, with a layout per attention call: numbers of heads and sizes of keys and values may differ.

A plane holds one tensor per token, for example the keys of a layer. An attention call of the model reads its keys from
one plane and its values from another. Calls may share planes: layers that reuse the keys and values of an earlier
layer, and calls of one layer that have the same keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lockstep.device.base import sent
from lockstep.kernels.quantized.token_products import token_codes


class Plane(NamedTuple):
    """The shape of one tensor per token: (heads, size)."""

    heads: int
    size: int


@dataclass(frozen=True)
class CachedCall:
    """The planes of one attention call. The call writes a plane only if no earlier call of the pass has written it.

    If `latent` is set, keys and values are in one plane: the values are the first `latent` numbers of the keys.
    """

    keys: int
    values: int
    writes_keys: bool = True
    writes_values: bool = True
    latent: int | None = None


@dataclass(frozen=True)
class CacheLayout:
    """The planes of a KV cache, and the attention calls of a forward pass in the order in which they run."""

    planes: tuple[Plane, ...]
    calls: tuple[CachedCall, ...]

    @property
    def token_elements(self) -> int:
        """Number of cached elements per token."""
        return sum(heads * size for heads, size in self.planes)


def uniform_layout(layers: int, heads: int, size: int) -> CacheLayout:
    """Returns the layout of a model with one attention call per layer and equal sizes everywhere."""
    planes = tuple(Plane(heads, size) for _ in range(2 * layers))
    return CacheLayout(planes, tuple(CachedCall(2 * layer, 2 * layer + 1) for layer in range(layers)))


class Fp8Plane(NamedTuple):
    """A plane in fp8: codes (slots, heads, size) in e4m3, and a scale per slot and head (slots, heads) in fp32. `dtype`
    is the type that reading returns."""

    codes: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def index_copy_(self, dim: int, slots_T: torch.Tensor, rows_TGD: torch.Tensor) -> None:
        """Quantises rows and stores them."""
        codes, scales = token_codes(rows_TGD, "fp8")
        # Bytes are copied, because not every device indexes tensors in fp8.
        self.codes.view(torch.uint8).index_copy_(dim, slots_T, codes.view(torch.uint8))
        self.scales.index_copy_(dim, slots_T, scales[..., 0])

    def index_select(self, dim: int, slots: torch.Tensor) -> torch.Tensor:
        """Returns the dequantised rows of these slots."""
        codes = self.codes.view(torch.uint8).index_select(dim, slots).view(torch.float8_e4m3fn)
        return (codes.float() * self.scales.index_select(dim, slots)[..., None]).to(self.dtype)

    def rounded(self, rows_TGD: torch.Tensor) -> torch.Tensor:
        """Returns what reading these rows from the plane would return."""
        codes, scales = token_codes(rows_TGD, "fp8")
        return (codes.float() * scales).to(self.dtype)


def token_bytes(layout: CacheLayout, element_size: int, *, fp8: bool) -> int:
    """Returns the bytes of one token in all planes."""
    return sum(heads * ((size + 4) if fp8 else size * element_size) for heads, size in layout.planes)


class KVCache:
    """Keys and values of every attention call, indexed by slot. `spare` is the index of a block that no sequence uses.
    With `fp8`, keys and values are stored in fp8 with a scale per token and head."""

    def __init__(self, layout: CacheLayout, blocks: int, block: int, like: torch.Tensor, *, fp8: bool = False):
        self.layout, self.blocks, self.block, self.spare = layout, blocks, block, blocks
        self.fp8, self.element_size = fp8, like.element_size()
        self.states: Any = None
        """The states of recurrent layers (`StateSlots`), or None if the model has no such layers."""
        self.routes_LSK: torch.Tensor | None = None
        """The experts of the tokens in each slot (`model/routing.py`), or None if they are not recorded."""
        # Planes of the same shape are in one tensor (planes, slots, heads, size), so that few operations copy blocks.
        # The tensors are zero-filled, because a masked slot is multiplied by 0, and 0 * inf would be NaN.
        counts: dict[Plane, int] = {}
        places = []
        for plane in layout.planes:
            places.append((plane, counts.get(plane, 0)))
            counts[plane] = counts.get(plane, 0) + 1
        slots, dtype = (blocks + 1) * block, torch.float8_e4m3fn if fp8 else like.dtype
        tensors = {
            plane: torch.zeros(count, slots, *plane, dtype=dtype, device=like.device) for plane, count in counts.items()
        }
        scales = {
            plane: torch.zeros(count, slots, plane.heads, dtype=torch.float32, device=like.device)
            for plane, count in counts.items()
            if fp8
        }
        self.tensors: Sequence[torch.Tensor] = (*tensors.values(), *scales.values())
        self._planes: list[Any] = [tensors[plane][place] for plane, place in places]
        if fp8:
            self._planes = [
                Fp8Plane(codes, scales[plane][place], like.dtype)
                for codes, (plane, place) in zip(self._planes, places, strict=True)
            ]

    def keep_routes(self, layers: int, top_k: int, dtype: torch.dtype) -> None:
        """Adds room for the experts of each token."""
        slots = (self.blocks + 1) * self.block
        self.routes_LSK = torch.zeros(layers, slots, top_k, dtype=dtype, device=self.device)
        self.tensors = (*self.tensors, self.routes_LSK)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def nbytes(self) -> int:
        states = 0 if self.states is None else int(self.states.nbytes)
        return sum(tensor.nbytes for tensor in self.tensors) + states

    def plane(self, index: int) -> torch.Tensor:
        return self._planes[index]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys and values (slots, heads, size) of an attention call."""
        call = self.layout.calls[index]
        keys, values = self._planes[call.keys], self._planes[call.values]
        return keys, values if call.latent is None else values[..., : call.latent]

    def fp8_layer(self, index: int) -> tuple[Fp8Plane, Fp8Plane]:
        """Returns the keys and values of an attention call in fp8."""
        call = self.layout.calls[index]
        return self._planes[call.keys], self._planes[call.values]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copies KV cache blocks in every plane. `pairs` lists (source, target) block indices."""
        # The indices are copied without synchronising, because the device may be one decoding round behind the host.
        source, target = (sent(torch.tensor(side), self.device) for side in zip(*pairs, strict=True))
        for tensor in self.tensors:
            bits = tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor
            blocks = bits.unflatten(1, (self.blocks + 1, self.block))
            blocks[:, target] = blocks[:, source]
