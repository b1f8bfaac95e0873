"""Operators that do not run on the device's cores: found and counted.

One without a kernel runs on the CPU, with a copy there and back. One whose kernel takes another type on the cores (AI
Core) runs on the AI CPU, the device's own processor, which is slow too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.errors import Refusal

KEY = "PrivateUse1"
# Kernels made of other operators: those are looked at when they run.
COMPOSITE = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")
# Made of the operator's own variant that writes into a given tensor, which nobody sees run.
BY_OUT = "CompositeExplicitAutogradNonFunctional"


def has_kernel(name: str) -> bool:
    """Whether the operator runs on the device: by a kernel of its own, or by others that it is made of."""
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    if any(known(name, key) for key in (KEY, *COMPOSITE)):
        return True
    out = f"{name.split('.')[0].rstrip('_')}.out"
    exists = known(name, BY_OUT) and torch._C._dispatch_has_kernel(out)
    return exists and any(known(out, key) for key in (KEY, *COMPOSITE))


# What runs on the AI CPU: torch_npu 2.13.0 says it itself of integers that are sorted, Ascend's profiler of float64.
WIDE = (torch.float64, torch.complex128)
SORTS = ("aten::sort", "aten::argsort", "aten::msort")
INTEGERS = (torch.int32, torch.int64)
# Nothing is computed by these, whatever the type.
MOVES = ("aten::empty", "aten::_to_copy", "aten::copy_", "aten::clone", "aten::detach")


def on_ai_cpu(name: str, views: bool, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether an operator on the device's tensors of these types is known to run on the AI CPU."""
    if views or name.startswith(MOVES):
        return False
    if any(dtype in WIDE for dtype in dtypes):
        return True
    return name.split(".")[0] in SORTS and any(dtype in INTEGERS for dtype in dtypes[:1])


class FallbackWatch(TorchDispatchMode):
    """Counts what is called on the device's tensors, while it is entered, and does not run on its cores."""

    def __init__(self, device: str, *, allow: bool):
        super().__init__()
        self.device, self.allow = device, allow
        self.counts: Counter[str] = Counter()
        self._known: dict[str, bool] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.name()
        if name not in self._known:
            self._known[name] = has_kernel(name)
        here = [tensor.dtype for tensor in _tensors([*args, kwargs]) if tensor.device.type == self.device]
        if here and not self._known[name]:
            self._count(name, f"the operator {name} has no kernel on this device and would run on the CPU")
        elif here and on_ai_cpu(name, func.is_view, here):
            words = f"the operator {name} runs on the device's AI CPU for {here[0]}, not on its cores"
            self._count(f"{name} (AI CPU)", words)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, why: str) -> None:
        self.counts[name] += 1
        if not self.allow:
            raise Refusal.at(
                "run.allow_fallback",
                why,
                "set it to true to accept that, or use a version of the device's package that has the operator",
            )


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
