"""The operators that one module itself runs, forwards or backwards, not its children's.

Everything that crosses the module's border is kept: its inputs and its children's outputs, and backwards the gradients
at its outputs and at its children's inputs. A clean copy can be given the same, so that the operators of both are held
against each other on equal numbers, whatever rounding lies before the module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lockstep.parity.replay.oplog import Operator, OperatorLog, copied
from lockstep.tape.digest import digest
from lockstep.tape.probe import BACKWARD, FORWARD, fixed_sum, public_name

# A name that no child has: the module itself.
SELF = ""


@dataclass
class Heard:
    """A module's first call."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    """What it gave; backwards the gradients that it gave to its inputs, in the order in which they were ready."""
    calls: list[Operator] = field(default_factory=list)
    border: dict[str, torch.Tensor] = field(default_factory=dict)
    """What came in: from outside, and from its children."""
    children: set[str] = field(default_factory=set)
    """The modules that it called itself."""
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    """Backwards: digests of its own parameters' gradients."""


def hear(
    root: nn.Module,
    module: str,
    run: Callable[[], Any],
    *,
    phase: str = FORWARD,
    given: Mapping[str, torch.Tensor] | None = None,
    through: Collection[str] = (),
    ranks: int = 1,
) -> Heard:
    """Run in evaluation mode and listen to the first call of one module.

    `run` goes forward; backwards it must return a number for each target, whose way back is a probe's. With `given`,
    another hearing's border, those numbers take the place of what crosses the border here. Children named in `through`
    are listened to as if they were parts of the module.
    """
    training = root.training
    root.eval()
    listener = _Listener(root, module, phase, given or {}, frozenset(through))
    try:
        with torch.set_grad_enabled(phase == BACKWARD), listener.hooked(), listener.log:
            answer = run()
            if phase == BACKWARD:
                listener.returning = True
                fixed_sum(answer).backward()
        if phase == BACKWARD:
            listener.weigh(ranks)
    finally:
        root.train(training)
        if phase == BACKWARD:
            for parameter in root.parameters():
                parameter.grad = None
    listener.heard.calls = listener.log.calls
    return listener.heard


class _Listener:
    """Knows when the code of the wanted module itself is running, and what crosses its border."""

    def __init__(
        self, root: nn.Module, wanted: str, phase: str, given: Mapping[str, torch.Tensor], through: frozenset[str]
    ):
        self.root, self.wanted, self.phase, self.given, self.through = root, wanted, phase, given, through
        self.heard = Heard()
        self.log = OperatorLog(self.own)
        self.stack: list[str] = []
        self.seen: Counter[str] = Counter()
        self.open, self.returning = False, False
        self.spans: list[tuple[int, int]] = []
        """Numbers of the nodes that the module's own code put into autograd's graph."""
        self.began: int | None = None
        self.module = {public_name(name): each for name, each in root.named_modules()}.get(wanted)
        self.mine = {id(weight): name for name, weight in self._weights()}

    def own(self) -> bool:
        """Whether what is running now belongs to the module itself."""
        if not self.returning:
            return self.phase == FORWARD and self.began is not None
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return False
        variable = getattr(node, "variable", None)
        if variable is not None:
            return id(variable) in self.mine  # a gradient on its way into the parameter
        number = node._sequence_nr()
        return any(first <= number < last for first, last in self.spans)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        handles: list[Any] = []
        for name, each in self.root.named_modules():
            module = public_name(name)
            enter = each.register_forward_pre_hook(
                lambda m, a, k, module=module: self._enter(module, a, k),
                with_kwargs=True,
            )
            leave = each.register_forward_hook(
                lambda m, a, k, o, module=module: self._leave(module, o),
                with_kwargs=True,
            )
            handles += [enter, leave]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def weigh(self, ranks: int) -> None:
        """Digest the gradients of the module's own parameters. A sharded model has added up those of all ranks."""
        for name, weight in self._weights():
            if weight.grad is not None:
                self.heard.parameters[name] = digest(weight.grad / ranks).cpu()

    def _weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(()) if self.module is None else self.module.named_parameters(recurse=False)

    def _enter(self, module: str, args: Any, kwargs: Any) -> Any:
        outer = self._outer()
        self._pause()
        if module == self.wanted and not self.open and not self.seen[SELF]:
            self.open, self.seen[SELF] = True, 1
            args, kwargs = self._cross((args, kwargs), "input", self._give, None, self._gave)
        elif outer and module not in self.through:
            self.heard.children.add(module)
            prefix = f"{module}/{self.seen[module]}/input"
            args, kwargs = self._cross((args, kwargs), prefix, None, self._return, None)
        self.stack.append(module)
        self._resume()
        return args, kwargs

    def _leave(self, module: str, output: Any) -> Any:
        self._pause()
        self.stack.pop()
        if module == self.wanted and self.open and self.wanted not in self.stack:
            self.open = False
            if self.phase == FORWARD:
                self.heard.outputs = [copied(leaf) for leaf in pytree.tree_leaves(output) if _is_tensor(leaf)]
            output = self._cross(output, "output", None, self._return, None)
        elif self._outer() and module not in self.through:
            output = self._cross(output, f"{module}/{self.seen[module]}/output", self._give, None, None)
            self.seen[module] += 1
        self._resume()
        return output

    def _outer(self) -> bool:
        """Whether the code that runs now is the module's own."""
        if not self.open:
            return False
        inner = [module for module in self.stack if module not in self.through]
        return bool(inner) and inner[-1] == self.wanted

    def _pause(self) -> None:
        if self.began is not None:
            self.spans.append((self.began, torch.autograd._get_sequence_nr()))
            self.began = None

    def _resume(self) -> None:
        if self._outer():
            self.began = torch.autograd._get_sequence_nr()

    def _cross(self, values: Any, prefix: str, give: Any, back: Any, gave: Any) -> Any:
        """Keep the tensors that cross the border and the gradients that come back, or put others in their place."""
        leaves, spec = pytree.tree_flatten(values)
        for number, leaf in enumerate(leaves):
            if not (_is_tensor(leaf) and leaf.is_floating_point()):
                continue
            name = f"{prefix}/{number}"
            if give is not None:
                leaf = give(name, leaf)
            if leaf.requires_grad and (back or gave):
                leaf = leaf.view_as(leaf)  # an alias: the gradient at it is this module's share alone
                if back is not None:
                    leaf.register_hook(lambda g, name=name: back(f"{name}/gradient", g))
                if gave is not None:
                    leaf.register_hook(gave)
            leaves[number] = leaf
        return pytree.tree_unflatten(leaves, spec)

    def _give(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        value = self.given.get(name)
        self.heard.border[name] = copied(tensor)
        if value is None or value.shape != tensor.shape:
            return tensor
        value = value.to(tensor.device, tensor.dtype)
        return _Instead.apply(tensor, value) if tensor.requires_grad else value

    def _return(self, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        self.heard.border[name] = copied(gradient)
        value = self.given.get(name)
        if value is None or value.shape != gradient.shape:
            return None
        return value.to(gradient.device, gradient.dtype)

    def _gave(self, gradient: torch.Tensor) -> None:
        self.heard.outputs.append(copied(gradient))


class _Instead(torch.autograd.Function):
    """Another value in a tensor's place, whose gradient goes the tensor's way."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)
