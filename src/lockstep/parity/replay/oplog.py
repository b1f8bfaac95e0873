"""A log of the operators that are run while somebody listens, with what went in and came out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

CallResult = tuple[int, int]
"""A call in the log, and which of its results."""


@dataclass(frozen=True)
class Operator:
    """One call. Tensors are copies on the host; everything else is as it was given."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor]
    device: str
    sources: tuple[CallResult | None, ...] = ()
    """For each of `inputs` the call in the log that made it, and which of its results; None: it came from outside."""

    def __reduce__(self) -> tuple[Any, ...]:
        # An operator crosses to other ranks by its name.
        return _named, (str(self.function), self.args, self.kwargs, self.outputs, self.device, self.sources)

    @property
    def name(self) -> str:
        return str(self.function).removesuffix(".default")

    @property
    def unset(self) -> bool:
        """Whether it only takes memory, whatever stands in it."""
        return "empty" in self.name

    @property
    def writes(self) -> bool:
        """Whether it changes what it is given, which may hold anything before."""
        return bool(self.function._schema.is_mutable)

    @property
    def inputs(self) -> list[torch.Tensor]:
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]

    @property
    def settings(self) -> list[Any]:
        """Arguments that are not tensors."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if not isinstance(leaf, torch.Tensor)]


def _named(function: str, *rest: Any) -> Operator:
    return Operator(attrgetter(function)(torch.ops), *rest)


class OperatorLog(TorchDispatchMode):
    """Records while `wanted()` says so. What only looks at memory in another way is no operation."""

    def __init__(self, wanted: Callable[[], bool]) -> None:
        super().__init__()
        self.wanted = wanted
        self.calls: list[Operator] = []
        self.makers: dict[int, CallResult] = {}
        """By the address of its memory: which call wrote a tensor last."""
        self.alive: list[torch.Tensor] = []
        """Kept, so that nobody else gets their memory while the log is written."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _looks_only(func) or not self.wanted():
            return func(*args, **kwargs)
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_tensor(leaf)]
        device = str(inputs[0].device) if inputs else "cpu"
        sources = tuple(self.makers.get(memory_of(tensor)) for tensor in inputs)
        # Copied before the call: it may write to what it is given.
        given = pytree.tree_map(copied, (args, kwargs))
        result = func(*args, **kwargs)
        made = [leaf for leaf in pytree.tree_leaves(result) if _is_tensor(leaf)]
        self.makers |= {memory_of(tensor): (len(self.calls), index) for index, tensor in enumerate(made)}
        self.alive += made
        outputs = [copied(tensor) for tensor in made]
        self.calls.append(Operator(func, tuple(given[0]), given[1], outputs, device, sources))
        return result


def memory_of(tensor: torch.Tensor) -> int:
    """Where its numbers lie. A view has its base's address; what has no memory of its own has one by itself."""
    return tensor.untyped_storage().data_ptr() or -id(tensor)


def _looks_only(func: Any) -> bool:
    returns = func._schema.returns
    aliases = [one.alias_info for one in returns if one.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def copied(leaf: Any) -> Any:
    return leaf.detach().cpu().clone() if isinstance(leaf, torch.Tensor) else leaf
