"""The operators that a module itself runs, with what went in and came out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.tape.probe import public_name


@dataclass(frozen=True)
class Operator:
    """One call. Tensors are copies on the host; everything else is as it was given."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor]
    device: str

    def __reduce__(self) -> tuple[Any, ...]:
        # An operator crosses to other ranks by its name.
        return _named, (str(self.function), self.args, self.kwargs, self.outputs, self.device)

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
    """Records while it is `listening`. What only looks at memory in another way is no operation."""

    def __init__(self) -> None:
        super().__init__()
        self.listening = False
        self.calls: list[Operator] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.listening or _looks_only(func):
            return func(*args, **kwargs)
        device = next((str(leaf.device) for leaf in pytree.tree_leaves((args, kwargs)) if _is_tensor(leaf)), "cpu")
        # Copied before the call: it may write to what it is given.
        given = pytree.tree_map(_copy, (args, kwargs))
        result = func(*args, **kwargs)
        outputs = [_copy(leaf) for leaf in pytree.tree_leaves(result) if _is_tensor(leaf)]
        self.calls.append(Operator(func, tuple(given[0]), given[1], outputs, device))
        return result


@dataclass
class Heard:
    """A module's call: what it gave, and the operators it ran itself (not its children's)."""

    outputs: list[torch.Tensor] | None = None
    calls: list[Operator] | None = None


@torch.no_grad()
def hear(root: nn.Module, module: str, run: Callable[[], Any]) -> Heard:
    """Run and listen to the first call of one module, in evaluation mode."""
    log, heard, training = OperatorLog(), Heard(), root.training
    root.eval()
    try:
        with _listening(root, module, log, heard), log:
            run()
    finally:
        root.train(training)
    heard.calls = log.calls
    return heard


@contextmanager
def _listening(root: nn.Module, wanted: str, log: OperatorLog, heard: Heard) -> Iterator[None]:
    """Switches the log on inside the wanted module, and off inside its children."""
    stack: list[str] = []

    def update() -> None:
        log.listening = bool(stack) and stack[-1] == wanted and heard.outputs is None

    def enter(place: str) -> None:
        log.listening = False
        stack.append(place)
        update()

    def leave(place: str, output: Any) -> None:
        log.listening = False
        if place == wanted and heard.outputs is None:
            heard.outputs = [_copy(leaf) for leaf in pytree.tree_leaves(output) if _is_tensor(leaf)]
        stack.pop()
        update()

    handles: list[Any] = []
    for name, each in root.named_modules():
        place = public_name(name)
        handles.append(each.register_forward_pre_hook(lambda m, a, place=place: enter(place)))
        handles.append(each.register_forward_hook(lambda m, a, o, place=place: leave(place, o)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _looks_only(func: Any) -> bool:
    returns = func._schema.returns
    aliases = [one.alias_info for one in returns if one.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _copy(leaf: Any) -> Any:
    return leaf.detach().cpu().clone() if isinstance(leaf, torch.Tensor) else leaf
