"""Module traces: digests of the inputs and outputs of every module in a forward and backward pass.

A trace runs a few sequences in one packed micro-batch. The trace does not depend on the micro-batches and devices of
the run, so the traces of two runs can be compared module by module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lockstep.errors import Problem
from lockstep.model.towers.feature_cache import recomputing
from lockstep.tape.digest import digests, on_host

ROOT = "(root)"
# When the copied tensors use this many bytes, their digests are computed together and the copies are freed.
WAITING = 2**29
FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Event:
    """One call of one module. `entered` and `left` are the values of an event counter at the beginning and the end of
    the call. The values of the counter give the order and the nesting of calls. `inputs` and `outputs` are the numbers
    of input and output tensors whose digests `Trace.tensors` has under `key`. In a backward event, the digests are
    those of gradients."""

    module: str
    kind: str
    phase: str
    entered: int
    left: int
    inputs: int
    outputs: int
    shapes: list[list[int]]
    dtypes: list[str]

    @property
    def key(self) -> str:
        return f"{self.phase}/{self.left:05d}"

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Trace:
    """The digests of a trace. The names in `tensors` are `<event>/input/<i>`, `<event>/output/<i>`, and
    `parameter/<name>` for parameter gradients."""

    events: list[Event]
    tensors: dict[str, torch.Tensor]

    def inputs(self, event: Event) -> list[torch.Tensor]:
        return [self.tensors[f"{event.key}/input/{i}"] for i in range(event.inputs)]

    def outputs(self, event: Event) -> list[torch.Tensor]:
        return [self.tensors[f"{event.key}/output/{i}"] for i in range(event.outputs)]


class _Tracer:
    def __init__(self, wanted: Callable[[str], bool], kept: Callable[[str], bool]):
        self.wanted, self.kept = wanted, kept
        self.clock = 0
        self.events: list[Event] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.open: dict[str, list[tuple[int, list[torch.Tensor]]]] = {}
        self.arrived: dict[str, list[tuple[int, torch.Tensor]]] = {}
        self.seen: dict[tuple[Any, ...], tuple[torch.Tensor, str]] = {}
        self.named: dict[str, str] = {}
        self.waiting: dict[str, torch.Tensor] = {}
        self.bytes = 0
        self.done: dict[str, torch.Tensor] = {}
        self.backwards = False

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def request(self, name: str, tensor: torch.Tensor) -> None:
        """Requests a digest of `tensor` under `name`. If several modules read a tensor, its digest is computed once.
        Tensors are identified by address, shape and version. Requested tensors are kept alive, so that no other tensor
        gets the same address. The digest is computed later from a copy, because the tensor itself may be
        overwritten."""
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key not in self.seen:
            self.seen[key] = tensor, name
            self.waiting[name] = tensor.detach().clone()
            self.bytes += tensor.nbytes
            if self.bytes > WAITING:
                self._digest()
        self.named[name] = self.seen[key][1]

    def _digest(self) -> None:
        self.done |= digests(self.waiting)
        self.waiting.clear()
        self.bytes = 0

    def digested(self) -> dict[str, torch.Tensor]:
        """Returns all requested digests by name."""
        self._digest()
        return {name: self.done[first] for name, first in self.named.items()}

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.backwards:
            return None  # gradient checkpointing recomputes a layer that is already traced
        entered = self.tick()
        tensors: list[torch.Tensor] = []

        def seen(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.numel():
                tensors.append(tensor)
            # Each module gets a separate alias of the tensor, whose gradient contains only the contribution of this
            # module.
            return self._aliased(name, tensor, self._left_backwards)

        given = mapped((args, kwargs), seen)
        self.open.setdefault(name, []).append((entered, tensors))
        return given

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if self.backwards:
            return None
        entered, inputs = self.open[name].pop()
        tensors: list[torch.Tensor] = []
        mapped(output, lambda tensor: tensors.append(tensor) if tensor.numel() else None)
        self._store(name, module, FORWARD, entered, inputs, tensors)
        return mapped(output, lambda tensor: self._aliased(name, tensor, self._arrived_backwards))

    def _aliased(self, name: str, tensor: torch.Tensor, then: Callable[[str, torch.Tensor], None]) -> torch.Tensor:
        if not (tensor.requires_grad and tensor.is_floating_point()):
            return tensor
        alias = tensor.view_as(tensor)
        alias.register_hook(lambda gradient: then(name, gradient))
        return alias

    def _arrived_backwards(self, name: str, gradient: torch.Tensor) -> None:
        self.arrived.setdefault(name, []).append((self.tick(), gradient))

    def _left_backwards(self, name: str, gradient: torch.Tensor) -> None:
        came = self.arrived.get(name, [])
        entered = came[-1][0] if came else self.tick()
        self._store(name, None, BACKWARD, entered, [gradient for _, gradient in came], [gradient])

    def _store(
        self,
        name: str,
        module: nn.Module | None,
        phase: str,
        entered: int,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        left = self.tick()
        kind = type(module).__name__ if module is not None else ""
        shapes = [list(tensor.shape) for tensor in (*inputs, *outputs)]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in (*inputs, *outputs)]
        event = Event(name, kind, phase, entered, left, len(inputs), len(outputs), shapes, dtypes)
        self.events.append(event)
        for side, tensors in (("input", inputs), ("output", outputs)):
            for i, tensor in enumerate(tensors):
                self.request(f"{event.key}/{side}/{i}", tensor)
                if self.kept(name):
                    self.tensors[f"{event.key}/{side}/{i}/whole"] = tensor.detach().clone()


def mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Applies `change` to every tensor in `value`. Lists, tuples and dicts are handled without pytree, which is
    slow."""
    if isinstance(value, torch.Tensor):
        return change(value)
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is tuple or kind is list:
        return kind([mapped(one, change) for one in value])
    if kind is dict:
        return {key: mapped(one, change) for key, one in value.items()}
    leaves, spec = pytree.tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return value  # pytree treats the value as a leaf
    return pytree.tree_unflatten([mapped(leaf, change) for leaf in leaves], spec)


def public_name(name: str) -> str:
    """Returns the name of a module in the Hugging Face model. The classes of lockstep wrap the Hugging Face model as
    the attribute `model`."""
    return name.removeprefix("model.") or ROOT


@contextmanager
def module_hooks(
    root: nn.Module,
    enter: Callable[[str, nn.Module, Any, Any], Any],
    leave: Callable[[str, nn.Module, Any, Any, Any], Any],
    wanted: Callable[[str], bool] = lambda name: True,
) -> Iterator[None]:
    """Registers forward hooks that call `enter` before and `leave` after each wanted module. The results of `enter` and
    `leave` replace the inputs and outputs of the module."""
    handles: list[Any] = []
    for name, module in root.named_modules():
        if wanted(public := public_name(name)):
            before, after = partial(enter, public), partial(leave, public)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        with recomputing():
            yield
    finally:
        for handle in handles:
            handle.remove()


def trace_modules(
    root: nn.Module,
    forward: Callable[[], torch.Tensor],
    patterns: Iterable[str],
    whole_patterns: Iterable[str] = (),
    parameters: Iterable[tuple[str, nn.Parameter]] = (),
    ranks: int = 1,
) -> Trace:
    """Traces `forward` and a backward pass. `forward` returns one number per target token. The backward pass starts at
    the `fixed_sum` of the numbers that `forward` returns.

    After tracing, the parameter gradients are cleared, because tracing happens between two updates. All ranks trace the
    same sequences, and a sharded model sums the gradients of the ranks, so the sums are divided by `ranks`.
    """
    patterns, whole_patterns = list(patterns), list(whole_patterns)
    tracer = _Tracer(lambda name: _matches(name, patterns), lambda name: _matches(name, whole_patterns))
    training = root.training
    root.eval()
    try:
        with module_hooks(root, tracer.enter, tracer.leave, tracer.wanted):
            targets_K = forward()
            tracer.backwards = True
            fixed_sum(targets_K).backward()
        tensors = tracer.tensors | tracer.digested()
    finally:
        root.train(training)
        # Breaks the reference cycle autograd graph -> hooks -> tracer -> tensors -> autograd graph, which would leak
        # memory.
        tracer.seen.clear()
        tracer.arrived.clear()
    parameters = list(parameters)
    gradients = {
        # With one rank, the gradients are not divided, because that would copy them and they are as large as the model.
        name: parameter.grad if ranks == 1 else parameter.grad / ranks
        for name, parameter in parameters
        if parameter.grad is not None
    }
    tensors |= {f"parameter/{name}": one for name, one in digests(gradients).items()}
    for _, parameter in parameters:
        parameter.grad = None
    return Trace(tracer.events, on_host(tensors))


def fixed_sum(targets_K: torch.Tensor) -> torch.Tensor:
    """Returns the scalar at which the backward pass of a trace starts. The scalar is a weighted sum. The weights of the
    targets differ, so that swapped targets change the sum."""
    weights_K = 1 + 0.5 * torch.cos(1.7 * torch.arange(len(targets_K), dtype=torch.float32))
    return (targets_K * weights_K.to(targets_K.device)).sum()


def unmatched_patterns(roots: Iterable[nn.Module], modules: Sequence[str], tensors: Sequence[str]) -> list[Problem]:
    """Returns a problem for each recipe pattern that matches no module. A pattern of `tape.tensors` can only match
    modules that `tape.modules` matches."""
    names = list(dict.fromkeys(public_name(name) for root in roots for name, _ in root.named_modules()))
    digested = [name for name in names if _matches(name, modules)]
    wanted = [("tape.modules", entry, names) for entry in modules]
    wanted += [("tape.tensors", entry, digested or names) for entry in tensors]
    problems = []
    for key, entry, candidates in wanted:
        if not any(fnmatch(name, entry) for name in candidates):
            near = get_close_matches(entry, candidates, n=1, cutoff=0.5) or candidates[-1:]
            why = f"{entry!r} matches no module name" + (" of tape.modules" if candidates is digested else "")
            problems.append(
                Problem(key, why, f"one module name is {near[0]}; `*` matches any characters", code="unknown-module")
            )
    return problems


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
