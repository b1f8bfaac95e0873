"""The features of images that a frozen tower has computed, kept in host memory for later passes and epochs.

A frozen tower computes the same features for an image in every pass, if it computes each image alone: then the shapes
of its matmuls, and so its rounding, do not depend on the other images of a micro-batch. So a run gives the same bits
with and without kept features, and when it continues after a kill.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

Parameters = Sequence[nn.Parameter]


class FeatureCache:
    """The features of the last images of a tower, by model folder and image. Towers with equal weights, such as those
    of a policy and its reference, have one cache."""

    def __init__(self, parameters: Parameters, bound: float):
        self._parameters, self._bound = parameters, bound
        self._kept: OrderedDict[tuple[str, str], torch.Tensor] = OrderedDict()
        self._bytes = 0
        self.hits = self.misses = 0

    @classmethod
    def of(cls, towers: Sequence[nn.Module], bound: float) -> FeatureCache:
        """Returns the cache of frozen towers, which may be that of other towers with equal weights. All caches of a
        process together keep at most `bound` bytes, if every cache has this bound."""
        parameters = [parameter for tower in towers for parameter in tower.parameters()]
        found = next((one for one in _CACHES if _equal(one._parameters, parameters)), None)
        if found is None:
            found = cls(parameters, bound)
            _CACHES.add(found)
        found._bound = bound
        found._trim()
        return found

    def get(self, key: tuple[str, str]) -> torch.Tensor | None:
        found = None if _RECOMPUTING else self._kept.get(key)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self._kept.move_to_end(key)
        return found

    def put(self, key: tuple[str, str], features: torch.Tensor) -> None:
        """Keeps the features of an image in host memory."""
        if features.nbytes > self._bound or key in self._kept:
            return
        kept = features.detach().to("cpu", copy=True)
        self._kept[key] = kept
        self._bytes += kept.nbytes
        self._trim()

    def clear(self) -> None:
        """Forgets all images and counts."""
        self._kept.clear()
        self._bytes = self.hits = self.misses = 0

    def _trim(self) -> None:
        """Forgets the images that were not used for the longest time, while all caches of the process together are over
        the bound."""
        while sum(one._bytes for one in _CACHES) > self._bound:
            fullest = max(_CACHES, key=lambda one: one._bytes)
            fullest._bytes -= fullest._kept.popitem(last=False)[1].nbytes


_CACHES: weakref.WeakSet[FeatureCache] = weakref.WeakSet()
_RECOMPUTING: list[bool] = []


@contextmanager
def recomputing() -> Iterator[None]:
    """Makes frozen towers compute all features again inside the `with` block, so that a trace of modules always has the
    towers."""
    _RECOMPUTING.append(True)
    try:
        yield
    finally:
        _RECOMPUTING.pop()


def _equal(one: Parameters, other: Parameters) -> bool:
    """Returns whether two towers have equal weights. Sharded weights are not compared."""
    from torch.distributed.tensor import DTensor  # takes long to import

    if len(one) != len(other) or any(isinstance(part, DTensor) for part in (*one, *other)):
        return False
    pairs = list(zip(one, other, strict=True))
    alike = all((a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape) for a, b in pairs)
    return alike and all(torch.equal(a, b) for a, b in pairs)
