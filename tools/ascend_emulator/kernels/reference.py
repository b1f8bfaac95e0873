"""How a function on CPU tensors becomes the NPU kernel of a fused operator.

It is installed at the operator's real schema. torch_npu's argument check, autograd node and Meta function stay in
force: a backward pass runs torch_npu's own node, and that calls the reference of the gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

calls: Counter[str] = Counter()
_references: dict[str, Reference] = {}


class NotInReference(NotImplementedError):
    """A use of a fused operator that the emulation does not know: better no answer than a wrong one."""


@dataclass(frozen=True)
class Reference:
    """What an operator computes, the arguments that it writes to, and those that must be contiguous, by position."""

    function: Callable[..., Any]
    written: tuple[int, ...] = ()
    contiguous: tuple[int, ...] = ()


def reference(
    name: str, written: tuple[int, ...] = (), contiguous: tuple[int, ...] = ()
) -> Callable[[Function], Function]:
    """Marks a function as what npu::NAME computes."""

    def mark(function: Function) -> Function:
        _references[name] = Reference(function, written, contiguous)
        return function

    return mark


def names() -> list[str]:
    return sorted(_references)


def install(library: torch.library.Library) -> None:
    for name, entry in _references.items():
        library.impl(name, kernel_of(name, entry), "PrivateUse1")


def kernel_of(name: str, entry: Reference) -> Callable[..., Any]:
    """The function between device memory and host memory. A device kernel would not accept tensors from elsewhere."""

    def kernel(*arguments: Any, **named: Any) -> Any:
        calls[name] += 1
        device = common_device(name, [*arguments, *named.values()])
        for position in entry.contiguous:
            limit(name, arguments[position].is_contiguous(), f"argument {position} is not contiguous")
        on_host = [_to_host(value) for value in arguments]
        answer = entry.function(*on_host, **{key: _to_host(value) for key, value in named.items()})
        for position in entry.written:
            arguments[position].copy_(on_host[position])
            if answer is on_host[position]:
                return arguments[position]
        if isinstance(answer, tuple):
            return tuple(_to_device(value, device) for value in answer)
        return _to_device(answer, device)

    return kernel


def common_device(name: str, values: list[Any]) -> torch.device:
    """The device of all tensors among the values."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device:
            raise RuntimeError(f"{name}: expected all tensors to be on {device}, found one on {tensor.device}")
    return device


def limit(name: str, kept: bool, words: str) -> None:
    """Stops where a documented limit is not kept: the device would fail, or compute something else."""
    if not kept:
        raise RuntimeError(f"{name}: outside the documented limits: {words}")


def refuse(name: str, **unknown: Any) -> None:
    """Stops when an argument that the reference does not know is set to anything."""
    given = [key for key, value in unknown.items() if isinstance(value, torch.Tensor) or value]
    if given:
        raise NotInReference(f"the emulated {name} has no {', '.join(given)}")


def _to_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _to_device(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
