"""Records the operators of one module in its forward or backward pass, without those of its child modules.

Every tensor that enters the module (crosses its "border") is recorded too: its inputs and its children's outputs, and
in the backward pass the gradients at its outputs and at its children's inputs. A clean copy of the module can be run
with the same tensors at its border. The operators of the module and of its clean copy then have equal inputs, so
rounding before the module has no effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.tape.digest import digest
from lockstep.tape.module_trace import BACKWARD, FORWARD, fixed_sum, module_hooks, public_name

# The name under which the log counts calls of the logged module itself. No child module has an empty name.
SELF = ""
CallResult = tuple[int, int]
"""The index of a call in the log, and the index of one of its results."""


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def copied(leaf: Any) -> Any:
    return leaf.detach().cpu().clone() if isinstance(leaf, torch.Tensor) else leaf


@dataclass(frozen=True)
class Operator:
    """One operator call. Tensor arguments and results are stored as copies on the host. Arguments that are not tensors
    are stored unchanged."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor]
    device: str
    sources: tuple[CallResult | None, ...] = ()
    """For each tensor in `inputs`, the logged call and the result index that produced it, or None if no logged call
    produced it."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickling stores the operator's name, so that operator calls can be sent to other ranks.
        return _named, (str(self.function), self.args, self.kwargs, self.outputs, self.device, self.sources)

    @property
    def name(self) -> str:
        return str(self.function).removesuffix(".default")

    @property
    def allocates(self) -> bool:
        """Whether the operator only allocates uninitialized memory."""
        return "empty" in self.name

    @property
    def writes(self) -> bool:
        """Whether the operator changes an input in place. The input's previous content may be uninitialized."""
        return bool(self.function._schema.is_mutable)

    @property
    def inputs(self) -> list[torch.Tensor]:
        return tensors_in((self.args, self.kwargs))

    @property
    def settings(self) -> list[Any]:
        """The arguments that are not tensors."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if not isinstance(leaf, torch.Tensor)]


def _named(function: str, *rest: Any) -> Operator:
    return Operator(attrgetter(function)(torch.ops), *rest)


class OperatorLog(TorchDispatchMode):
    """Records operator calls while `wanted()` is true. Operators that only create views are not recorded."""

    def __init__(self, wanted: Callable[[], bool]) -> None:
        super().__init__()
        self.wanted = wanted
        self.calls: list[Operator] = []
        self.makers: dict[int, CallResult] = {}
        """The logged call that last wrote each tensor, keyed by the tensor's memory address."""
        self.alive: list[torch.Tensor] = []
        """References to all results, which keep PyTorch from reusing their memory addresses."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_view(func) or not self.wanted():
            return func(*args, **kwargs)
        inputs = tensors_in((args, kwargs))
        device = str(inputs[0].device) if inputs else "cpu"
        sources = tuple(self.makers.get(_address(tensor)) for tensor in inputs)
        # Inputs are copied before the operator runs, because it may change them in place.
        given = pytree.tree_map(copied, (args, kwargs))
        result = func(*args, **kwargs)
        made = tensors_in(result)
        self.makers |= {_address(tensor): (len(self.calls), index) for index, tensor in enumerate(made)}
        self.alive += made
        outputs = [copied(tensor) for tensor in made]
        self.calls.append(Operator(func, tuple(given[0]), given[1], outputs, device, sources))
        return result


def _address(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's storage, which its views share. For a tensor without storage, returns a unique
    number."""
    return tensor.untyped_storage().data_ptr() or -id(tensor)


def _is_view(func: Any) -> bool:
    aliases = [one.alias_info for one in func._schema.returns if one.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


# -- one module's operators


@dataclass
class ModuleLog:
    """The operators of the first call of a module, and the tensors that entered the module (border tensors)."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    """The module's outputs. For the backward pass, these are the gradients at the module's inputs in the order of their
    computation."""
    calls: list[Operator] = field(default_factory=list)
    border: dict[str, torch.Tensor] = field(default_factory=dict)
    """The tensors that entered the module, from outside and from its children."""
    children: set[str] = field(default_factory=set)
    """The names of the child modules that the module called directly."""
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    """For the backward pass, digests of the gradients of the module's own parameters."""


def log_module(
    root: nn.Module,
    module: str,
    run: Callable[[], Any],
    *,
    phase: str = FORWARD,
    given: Mapping[str, torch.Tensor] | None = None,
    through: Collection[str] = (),
    ranks: int = 1,
) -> ModuleLog:
    """Runs the model in evaluation mode and logs the first call of one module.

    `run` does the forward pass. To log the backward pass, `run` must return one number per target token. `given`
    contains the border tensors of another log (the tensors that enter the module), which replace those of this run. The
    operators of child modules in `through` are logged as part of the module.
    """
    training = root.training
    root.eval()
    logger = _ModuleLogger(root, module, phase, given or {}, frozenset(through))
    try:
        hooks = module_hooks(root, logger.enter, logger.leave)
        with torch.set_grad_enabled(phase == BACKWARD), hooks, logger.operators:
            answer = run()
            if phase == BACKWARD:
                logger.returning = True
                fixed_sum(answer).backward()
        if phase == BACKWARD:
            logger.digest_gradients(ranks)
    finally:
        root.train(training)
        if phase == BACKWARD:
            for parameter in root.parameters():
                parameter.grad = None
    logger.log.calls = logger.operators.calls
    return logger.log


class _ModuleLogger:
    """Tracks when the module's own code runs (outside its child modules), and records the tensors that enter it."""

    def __init__(
        self, root: nn.Module, wanted: str, phase: str, given: Mapping[str, torch.Tensor], through: frozenset[str]
    ):
        self.wanted, self.phase, self.given, self.through = wanted, phase, given, through
        self.log = ModuleLog()
        self.operators = OperatorLog(self._is_own)
        self.stack: list[str] = []
        self.seen: Counter[str] = Counter()
        self.open, self.returning = False, False
        self.spans: list[tuple[int, int]] = []
        """Ranges of sequence numbers of the autograd nodes that the module's own code created."""
        self.began: int | None = None
        module = {public_name(name): each for name, each in root.named_modules()}.get(wanted)
        self.weights = {} if module is None else dict(module.named_parameters(recurse=False))
        self.weight_ids = {id(weight) for weight in self.weights.values()}

    def _is_own(self) -> bool:
        """Returns whether the running operator belongs to the module's own code."""
        if not self.returning:
            return self.phase == FORWARD and self.began is not None
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return False
        variable = getattr(node, "variable", None)
        if variable is not None:
            return id(variable) in self.weight_ids  # this node accumulates a parameter's gradient
        number = node._sequence_nr()
        return any(first <= number < last for first, last in self.spans)

    def digest_gradients(self, ranks: int) -> None:
        """Computes digests of the gradients of the module's parameters. The gradients are divided by `ranks`, because a
        sharded model sums them over all ranks."""
        for name, weight in self.weights.items():
            if weight.grad is not None:
                self.log.parameters[name] = digest(weight.grad / ranks).cpu()

    def enter(self, module: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        outer = self._in_module()
        self._pause()
        if module == self.wanted and not self.open and not self.seen[SELF]:
            self.open, self.seen[SELF] = True, 1
            args, kwargs = self._cross((args, kwargs), "input", self._replace, None, self._keep_gradient)
        elif outer and module not in self.through:
            self.log.children.add(module)
            prefix = f"{module}/{self.seen[module]}/input"
            args, kwargs = self._cross((args, kwargs), prefix, None, self._replace_gradient, None)
        self.stack.append(module)
        self._resume()
        return args, kwargs

    def leave(self, module: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        self._pause()
        self.stack.pop()
        if module == self.wanted and self.open and self.wanted not in self.stack:
            self.open = False
            if self.phase == FORWARD:
                self.log.outputs = [copied(tensor) for tensor in tensors_in(output)]
            output = self._cross(output, "output", None, self._replace_gradient, None)
        elif self._in_module() and module not in self.through:
            output = self._cross(output, f"{module}/{self.seen[module]}/output", self._replace, None, None)
            self.seen[module] += 1
        self._resume()
        return output

    def _in_module(self) -> bool:
        """Returns whether the module's own code is running, outside its child modules."""
        inner = [module for module in self.stack if module not in self.through]
        return self.open and bool(inner) and inner[-1] == self.wanted

    def _pause(self) -> None:
        if self.began is not None:
            self.spans.append((self.began, torch.autograd._get_sequence_nr()))
            self.began = None

    def _resume(self) -> None:
        if self._in_module():
            self.began = torch.autograd._get_sequence_nr()

    def _cross(self, values: Any, prefix: str, change: Any, change_gradient: Any, keep_gradient: Any) -> Any:
        """Records or replaces tensors that enter the module's own code, and their gradients."""
        leaves, spec = pytree.tree_flatten(values)
        for number, leaf in enumerate(leaves):
            if not (isinstance(leaf, torch.Tensor) and leaf.is_floating_point()):
                continue
            name = f"{prefix}/{number}"
            if change is not None:
                leaf = change(name, leaf)
            if leaf.requires_grad and (change_gradient or keep_gradient):
                leaf = leaf.view_as(leaf)  # the gradient of this view is only this module's contribution
                if change_gradient is not None:
                    leaf.register_hook(lambda g, name=name: change_gradient(f"{name}/gradient", g))
                if keep_gradient is not None:
                    leaf.register_hook(keep_gradient)
            leaves[number] = leaf
        return pytree.tree_unflatten(leaves, spec)

    def _given(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Records the tensor. Returns the tensor in `given` that replaces this tensor, or None if `given` has no tensor
        with this name and shape."""
        self.log.border[name] = copied(tensor)
        value = self.given.get(name)
        return None if value is None or value.shape != tensor.shape else value.to(tensor.device, tensor.dtype)

    def _replace(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        value = self._given(name, tensor)
        if value is None:
            return tensor
        return _Replaced.apply(tensor, value) if tensor.requires_grad else value

    def _replace_gradient(self, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        return self._given(name, gradient)

    def _keep_gradient(self, gradient: torch.Tensor) -> None:
        self.log.outputs.append(copied(gradient))


class _Replaced(torch.autograd.Function):
    """Replaces a tensor's value in the forward pass. In the backward pass the gradient flows to the original tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


# -- data flow between operators


@dataclass(frozen=True)
class OperatorResult:
    """One result of an operator call, or one of its tensor inputs if `given` is true."""

    call: Operator
    index: int
    given: bool = False

    @property
    def tensor(self) -> torch.Tensor:
        return (self.call.inputs if self.given else self.call.outputs)[self.index]


class OperatorGraph:
    """The data flow between logged operators: the calls in their order, without allocations, and the calls that read
    each result."""

    def __init__(self, calls: Sequence[Operator]):
        self.calls = _selected(calls, [number for number, call in enumerate(calls) if not call.allocates])
        self.readers: dict[CallResult, list[int]] = {}
        for number, call in enumerate(self.calls):
            for source in call.sources:
                if source is not None:
                    self.readers.setdefault(source, []).append(number)

    def results(self) -> list[OperatorResult]:
        return self.made(range(len(self.calls)))

    def made(self, part: range) -> list[OperatorResult]:
        return [OperatorResult(self.calls[number], index) for number in part for index in _floats(self.calls[number])]

    def given(self, part: range) -> list[OperatorResult]:
        """Returns the tensors that the calls in `part` read and that calls outside `part` produced."""
        return [
            OperatorResult(self.calls[number], index, given=True)
            for number in part
            for index, (_, source) in enumerate(zip_longest(self.calls[number].inputs, self.calls[number].sources))
            if source is None or source[0] not in part
        ]

    def ends(self) -> list[OperatorResult]:
        """Returns the results that no logged operator reads. Unread results go to the module's caller or to its child
        modules."""
        return self.leaving(range(len(self.calls)))

    def leaving(self, part: range) -> list[OperatorResult]:
        """Returns the results of the calls in `part` that a call outside `part` reads, or that no call reads.

        If an operator has several results and some are read, its unread results are ignored. If no result of an
        operator is read, only its first result is returned.
        """
        found = []
        for number in part:
            indices = _floats(self.calls[number])
            read = [index for index in indices if (number, index) in self.readers]
            found += [
                OperatorResult(self.calls[number], index)
                for index in read or indices[:1]
                if any(reader not in part for reader in self.readers.get((number, index), [-1]))
            ]
        return found

    def before(self, ends: Sequence[OperatorResult]) -> OperatorGraph:
        """Returns a graph that contains only the operators that contribute to the results in `ends`."""
        wanted = {number for number, call in enumerate(self.calls) if any(call is end.call for end in ends)}
        for number in reversed(range(len(self.calls))):
            if number in wanted:
                wanted |= {source[0] for source in self.calls[number].sources if source is not None}
        return OperatorGraph(_selected(self.calls, sorted(wanted)))


def _floats(call: Operator) -> list[int]:
    """Returns the indices of a call's floating-point results. If a call has no floating-point results, returns the
    indices of all its results."""
    floats = [index for index, tensor in enumerate(call.outputs) if tensor.is_floating_point() and tensor.numel()]
    return floats or list(range(len(call.outputs)))


def _selected(calls: Sequence[Operator], numbers: Sequence[int]) -> list[Operator]:
    """Returns the calls with the indices `numbers`. The `sources` of the returned calls refer to their new indices."""
    places = {number: place for place, number in enumerate(numbers)}

    def moved(source: CallResult | None) -> CallResult | None:
        return (places[source[0]], source[1]) if source is not None and source[0] in places else None

    return [replace(calls[number], sources=tuple(map(moved, calls[number].sources))) for number in numbers]
