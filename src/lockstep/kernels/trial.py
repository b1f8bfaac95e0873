"""Whether a fused kernel gives what a module computes, tried on the device before it takes the module's place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.device.base import first_sentence

# Rows of a trial: more than a tile of a device's vector unit.
TOKENS = 64
Answers = Sequence[torch.Tensor]


@dataclass(frozen=True)
class KernelTrial:
    """What a device's kernels are held to. Anything beyond the tolerance is another function."""

    tolerance: Mapping[torch.dtype, float]
    """A share of the largest number."""
    smallest: float
    """Numbers below this are held to its tolerance, not to their own."""
    gradients: bool
    """Whether the backward pass is tried too."""
    wait: Callable[[], None]
    """Until the device has done all: a kernel's own error comes up there, and it must not be a training step's."""
    errors: tuple[type[Exception], ...] = (TypeError, RuntimeError, ValueError)
    """What a kernel that does not work here raises."""

    def alike(self, what: str, kernel: str, own: Callable[[], Answers], fused: Callable[[], Answers]) -> bool:
        """Whether both give the same on the device; where not, a warning says why `what` stays plain torch."""
        try:
            with torch.set_grad_enabled(self.gradients):
                wanted, found = own(), fused()
            self.wait()
            same = all(self.close(one, other) for one, other in zip(wanted, found, strict=True))
        except self.errors as error:
            why = first_sentence(error)
            warnings.warn(f"{what} stays plain torch: {kernel} failed on a trial: {why}", stacklevel=3)
            return False
        if not same:
            warnings.warn(f"{what} stays plain torch: {kernel} gives other numbers", stacklevel=3)
        return same

    def close(self, own: torch.Tensor, fused: torch.Tensor) -> bool:
        if own.shape != fused.shape or own.dtype != fused.dtype:
            return False
        off, largest = float((own.float() - fused.float()).abs().max()), float(own.float().abs().max())
        return off <= self.tolerance[own.dtype] * max(self.smallest, largest)


def drawn(*shape: int, like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Standard normal numbers, drawn on the host, in the type and on the device of `like`."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like.device, like.dtype)
