"""bf16 matmuls on a CPU without bf16 instructions, computed in fp32.

On a CPU without bf16 instructions, torch multiplies bf16 matrices element by element, about two hundred times slower
than in fp32. Torch first tries oneDNN's bf16 matmul, which fails without bf16 instructions. After the failed bf16
matmul, torch does not use oneDNN for the rest of the process, which changes the rounding of fp32 matmuls. The operators
of this module compute in fp32 instead and round once at the end, as chips with bf16 units do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_FUNCTIONAL = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
_INTO = ("mm", "bmm", "addmm", "baddbmm")
_IN_PLACE = ("addmm_", "baddbmm_")


def prepare_products(dtype: torch.dtype) -> None:
    """Installs the fp32 operators if `dtype` is bf16 and the CPU has no bf16 instructions. Call this function before a
    bf16 model runs."""
    if dtype is torch.bfloat16 and not _has_bf16():
        _install()


def _has_bf16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def _install() -> torch.library.Library:
    """Registers the operators once per process. `@cache` keeps the returned library alive, and with it the
    registration."""
    library = torch.library.Library("aten", "IMPL")
    wide = {name: _wide(torch.library.get_kernel(f"aten::{name}", "CPU")) for name in _FUNCTIONAL}
    wide |= {f"{name}.out": _into(torch.library.get_kernel(f"aten::{name}.out", "CPU"), wide[name]) for name in _INTO}
    wide |= {name: _in_place(torch.library.get_kernel(f"aten::{name}", "CPU"), wide[name[:-1]]) for name in _IN_PLACE}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name, run in wide.items():
            library.impl(name, run, "CPU", with_keyset=True, allow_override=True)
    return library


def _wide(kernel: Any) -> Callable[..., Any]:
    def run(keys: Any, *arguments: Any, **named: Any) -> Any:
        if not _is_bf16(arguments[0]):
            return kernel.call_boxed(keys, *arguments, **named)
        widened = {name: _widened(value) for name, value in named.items()}
        result = kernel.call_boxed(keys, *(_widened(value) for value in arguments), **widened)
        if isinstance(result, torch.Tensor):
            return result.bfloat16()
        # The second output of attention (the lse) is fp32 even for bf16 queries. The three gradients of attention are
        # bf16.
        return tuple(part if len(result) == 2 and index else part.bfloat16() for index, part in enumerate(result))

    return run


def _into(kernel: Any, functional: Callable[..., Any]) -> Callable[..., Any]:
    def run(keys: Any, *arguments: Any, out: torch.Tensor, **named: Any) -> torch.Tensor:
        if not _is_bf16(arguments[0]):
            return kernel.call_boxed(keys, *arguments, out=out, **named)
        result = functional(keys, *arguments, **named)
        return out.resize_(result.shape).copy_(result)

    return run


def _in_place(kernel: Any, functional: Callable[..., Any]) -> Callable[..., Any]:
    def run(keys: Any, target: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        if not _is_bf16(target):
            return kernel.call_boxed(keys, target, *arguments, **named)
        return target.copy_(functional(keys, target, *arguments, **named))

    return run


def _widened(value: Any) -> Any:
    return value.float() if _is_bf16(value) else value


def _is_bf16(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16
