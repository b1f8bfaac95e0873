"""Operators without a kernel on the device, which run on the CPU with a copy there and back: found and counted."""

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


class FallbackWatch(TorchDispatchMode):
    """Counts the operators without a kernel that are called on the device's tensors while it is entered."""

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
        if not self._known[name] and any(tensor.device.type == self.device for tensor in _tensors([*args, kwargs])):
            self.counts[name] += 1
            if not self.allow:
                raise Refusal.at(
                    "run.allow_fallback",
                    f"the operator {name} has no kernel on this device and would run on the CPU",
                    "set it to true to accept that, or use a version of the device's package that has the operator",
                )
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
