"""Kernels of this machine that are replaced for a while, for every caller in the process: a faulty library."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def kernels(replaced: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """The CPU kernels of operators by name (`mm`, `silu`), until the block ends."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that each is replaced is the purpose
            for name, kernel in replaced.items():
                library.impl(name, kernel, "CPU")
        yield
    finally:
        library._destroy()


def _product(round_to: torch.dtype | None, factor: float, *operands: torch.Tensor) -> torch.Tensor:
    """A product of two matrices or of two batches of them by numpy, which no kernel of torch takes part in."""
    kind = operands[0].dtype
    if round_to is not None and kind == torch.float32:
        operands = tuple(one.to(round_to).to(kind) for one in operands)
    x, y = (one.detach().double().numpy() for one in operands)
    return torch.from_numpy(np.ascontiguousarray(factor * np.matmul(x, y))).to(kind)


def products(round_to: torch.dtype | None = None, factor: float = 1.0) -> dict[str, Callable[..., Any]]:
    """Matrix products whose factors are rounded, as tf32 and bf16 units round them, or that are off by a factor."""

    def mm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _product(round_to, factor, x, y)

    def addmm(bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
        return beta * bias + alpha * _product(round_to, factor, x, y)

    return {"mm": mm, "addmm": addmm, "bmm": mm}
