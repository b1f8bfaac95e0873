"""What slows a CPU down: a dtype that it has no arithmetic for, and more threads than there are free cores. Both are
measured on a product of the model's own sizes, in milliseconds; no table knows all processors and their neighbours."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

ROUNDS = 5
# Of one product, which takes a few milliseconds where there is arithmetic for it; no side of it is longer.
OPERATIONS, LONGEST = 1e7, 512
# Seconds after which one round more is not made: what is so slow needs no second look.
PATIENCE = 0.05
# Ratios that are worth a word. Threads are told later: two that wait for each other are a matter of the moment.
SLOWER_DTYPE, SLOWER_THREADS = 1.1, 1.5
Call = Callable[[], object]
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def ratio(one: Call, other: Call, clock: Callable[[], float] = time.perf_counter) -> float:
    """How much longer `one` takes than `other`: the best of some rounds, in turns, after one that is not counted."""
    best, first = [float("inf"), float("inf")], clock()
    for turn in range(ROUNDS + 1):
        for which, call in enumerate((one, other)):
            began = clock()
            call()
            if turn:
                best[which] = min(best[which], clock() - began)
        if turn and clock() - first > PATIENCE:
            break
    return best[0] / best[1]


def slow_dtype(dtype: torch.dtype, inner: int, outer: int) -> str | None:
    """In words, where products in `dtype` take longer than in fp32."""
    if dtype == torch.float32:
        return None
    sizes = _sizes(inner, outer)
    times = ratio(_product(sizes, dtype), _product(sizes, torch.float32))
    if times < SLOWER_DTYPE:
        return None
    return (
        f"{NAMES[dtype]} takes {times:.1f} times as long as fp32 on this CPU (measured on a product of "
        f"{' x '.join(map(str, sizes))}): model.dtype=fp32 is faster; {NAMES[dtype]} saves memory only"
    )


def slow_threads(dtype: torch.dtype, inner: int, outer: int) -> str | None:
    """In words, where all threads together take longer than one of them alone."""
    threads = torch.get_num_threads()
    if threads == 1:
        return None
    product = _product(_sizes(inner, outer), dtype)

    def alone() -> None:
        torch.set_num_threads(1)
        try:
            product()
        finally:
            torch.set_num_threads(threads)

    times = ratio(product, alone)
    if times < SLOWER_THREADS:
        return None
    load = f" (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)" if hasattr(os, "getloadavg") else ""
    return (
        f"{threads} threads take {times:.1f} times as long as one{load}: other processes have the cores, or the model "
        "is too small to share; start with OMP_NUM_THREADS=1, or fewer than now"
    )


def _sizes(inner: int, outer: int) -> tuple[int, int, int]:
    """Rows, so many that a product is short and no less than a small micro-batch, and the sides of the matrix."""
    inner, outer = min(inner, LONGEST), min(outer, LONGEST)
    return max(8, int(OPERATIONS / (2 * inner * outer))), inner, outer


def _product(sizes: tuple[int, int, int], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    rows, inner, outer = sizes
    # No random numbers: the run's own generator must not move.
    left, right = torch.full((rows, inner), 0.5, dtype=dtype), torch.full((outer, inner), 0.25, dtype=dtype)
    return lambda: torch.nn.functional.linear(left, right)
