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


class KVCache:
    """Keys and values of every attention call, indexed by slot. `spare` is the index of a block that no sequence
    uses."""

    def __init__(self, layout: CacheLayout, blocks: int, block: int, like: torch.Tensor):
        self.layout, self.blocks, self.block, self.spare = layout, blocks, block, blocks
        self.states: Any = None
        """The states of recurrent layers (`StateSlots`), or None if the model has no such layers."""
        # Planes of the same shape are in one tensor (planes, slots, heads, size), so that few operations copy blocks.
        # The tensors are zero-filled, because a masked slot is multiplied by 0, and 0 * inf would be NaN.
        counts: dict[Plane, int] = {}
        places = []
        for plane in layout.planes:
            places.append((plane, counts.get(plane, 0)))
            counts[plane] = counts.get(plane, 0) + 1
        tensors = {
            plane: torch.zeros(count, (blocks + 1) * block, *plane, dtype=like.dtype, device=like.device)
            for plane, count in counts.items()
        }
        self.tensors: Sequence[torch.Tensor] = tuple(tensors.values())
        self._planes = [tensors[plane][place] for plane, place in places]

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def element_size(self) -> int:
        return self.tensors[0].element_size()

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

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copies KV cache blocks in every plane. `pairs` lists (source, target) block indices."""
        # The indices are copied without synchronising, because the device may be one decoding round behind the host.
        source, target = (sent(torch.tensor(side), self.device) for side in zip(*pairs, strict=True))
        for tensor in self.tensors:
            blocks = tensor.unflatten(1, (self.blocks + 1, self.block))
            blocks[:, target] = blocks[:, source]
