"""Whether a fused operator gives what a module computes, tried on the device before it takes the module's place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

from lockstep.device.accelerator import first_sentence

# Fused operators round in other places; anything beyond this is another function.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# Rows of a probe: more than a tile of the device's vector unit.
TOKENS = 64
Answers = Sequence[torch.Tensor]


def alike(what: str, operator: str, own: Callable[[], Answers], fused: Callable[[], Answers]) -> bool:
    """Whether both give the same on the device; where not, a warning says why `what` stays plain torch."""
    import torch_npu

    try:
        with torch.no_grad():
            wanted, found = own(), fused()
        # A kernel's own error comes up at the next wait, which must not be a training step's.
        torch_npu.npu.synchronize()
        same = all(close(one, other) for one, other in zip(wanted, found, strict=True))
    except (TypeError, RuntimeError, ValueError) as error:
        warnings.warn(f"{what} stays plain torch: {operator} failed on a trial: {first_sentence(error)}", stacklevel=3)
        return False
    if not same:
        warnings.warn(f"{what} stays plain torch: {operator} gives other numbers", stacklevel=3)
    return same


def close(own: torch.Tensor, fused: torch.Tensor) -> bool:
    if own.shape != fused.shape or own.dtype != fused.dtype:
        return False
    largest = float(own.abs().max())
    return float((own - fused).abs().max()) <= TOLERANCE[own.dtype] * max(1.0, largest)


def drawn(*shape: int, like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Standard normal numbers, drawn on the host, in the type and on the device of `like`."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like.device, like.dtype)
