"""What every module does with a few sequences: digests of its inputs and outputs, forwards and backwards.

The same sequences go through the model in one canonical micro-batch, whatever micro-batches and devices the run itself
uses, so that two probes can be held against each other module by module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lockstep.errors import Problem
from lockstep.tape.digest import digests

ROOT = "(root)"
# Bytes of copies that wait to be digested together.
WAITING = 2**29
FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Event:
    """One pass through one module. `entered` and `left` count all events, so that order and nesting can be told.

    Digests stand under `key` in the trace's tensors: `inputs` and `outputs` of them; backwards these are gradients.
    """

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
    """`tensors` hold `<event>/input/<i>`, `<event>/output/<i>` and, of parameters' gradients, `parameter/<name>`."""

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
        self.known: dict[tuple[Any, ...], tuple[torch.Tensor, str]] = {}
        self.named: dict[str, str] = {}
        self.waiting: dict[str, torch.Tensor] = {}
        self.bytes = 0
        self.done: dict[str, torch.Tensor] = {}
        self.backwards = False

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def ask(self, name: str, tensor: torch.Tensor) -> None:
        """A digest under `name`: of numbers that one module makes and others read, one for all.

        They are kept alive, so that their address stays theirs; an alias has the same, what is written there later
        another version. What waits to be digested with others is a copy, which nobody writes to.
        """
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key not in self.known:
            self.known[key] = tensor, name
            self.waiting[name] = tensor.detach().clone()
            self.bytes += tensor.nbytes
            if self.bytes > WAITING:
                self._digest()
        self.named[name] = self.known[key][1]

    def _digest(self) -> None:
        self.done |= digests(self.waiting)
        self.waiting.clear()
        self.bytes = 0

    def digested(self) -> dict[str, torch.Tensor]:
        """By the names that were asked for."""
        self._digest()
        return {name: self.done[first] for name, first in self.named.items()}

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.backwards:
            return None  # a checkpointed layer computes again what was seen before
        entered = self.tick()
        tensors: list[torch.Tensor] = []

        def seen(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.numel():
                tensors.append(tensor)
            # An alias of its own for each module, so that the gradient at it is this module's share alone.
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
                self.ask(f"{event.key}/{side}/{i}", tensor)
                if self.kept(name):
                    self.tensors[f"{event.key}/{side}/{i}/whole"] = tensor.detach().clone()


def mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The value with every tensor in it changed. Plain containers first: torch's own way is slow for so many hooks."""
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
        return value  # nothing that torch can look into
    return pytree.tree_unflatten([mapped(leaf, change) for leaf in leaves], spec)


def public_name(name: str) -> str:
    """The name that a Hugging Face folder has for the module: ours wraps its model as `model`."""
    return name.removeprefix("model.") or ROOT


@contextmanager
def traced(root: nn.Module, tracer: _Tracer) -> Iterator[None]:
    handles = []
    for name, module in root.named_modules():
        public = public_name(name)
        if not tracer.wanted(public):
            continue
        handles.append(
            module.register_forward_pre_hook(
                lambda m, a, k, public=public: tracer.enter(public, m, a, k),
                with_kwargs=True,
            )
        )
        handles.append(
            module.register_forward_hook(
                lambda m, a, k, o, public=public: tracer.leave(public, m, a, k, o),
                with_kwargs=True,
            )
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_probe(
    root: nn.Module,
    forward: Callable[[], torch.Tensor],
    patterns: Iterable[str],
    whole_patterns: Iterable[str] = (),
    parameters: Iterable[tuple[str, nn.Parameter]] = (),
    ranks: int = 1,
) -> Trace:
    """Trace `forward`, which ends in one number for each target, and the way back from a fixed sum of these.

    Parameters' gradients are cleared afterwards: a probe stands between two updates. With several `ranks` each probes
    the same, and a sharded model has added their gradients up.
    """
    patterns, whole_patterns = list(patterns), list(whole_patterns)
    tracer = _Tracer(lambda name: _matches(name, patterns), lambda name: _matches(name, whole_patterns))
    training = root.training
    root.eval()
    try:
        with traced(root, tracer):
            targets_K = forward()
            tracer.backwards = True
            fixed_sum(targets_K).backward()
        tensors = tracer.tensors | tracer.digested()
    finally:
        root.train(training)
        # The hooks in the graph know the tracer, and the tracer the tensors that hold the graph: nobody would free it.
        tracer.known.clear()
        tracer.arrived.clear()
    parameters = list(parameters)
    gradients = {
        # Of one rank they are not copied: all of them are as large as the model.
        name: parameter.grad if ranks == 1 else parameter.grad / ranks
        for name, parameter in parameters
        if parameter.grad is not None
    }
    tensors |= {f"parameter/{name}": one for name, one in digests(gradients).items()}
    for _, parameter in parameters:
        parameter.grad = None
    return Trace(tracer.events, on_host(tensors))


def fixed_sum(targets_K: torch.Tensor) -> torch.Tensor:
    """What a probe goes back from. Targets have unlike weights, so that they cannot stand in for each other."""
    weights_K = 1 + 0.5 * torch.cos(1.7 * torch.arange(len(targets_K), dtype=torch.float32))
    return (targets_K * weights_K.to(targets_K.device)).sum()


def on_host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of one shape cross to the host together: a wait for the device a shape, not one for each."""
    alike: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        alike.setdefault((tensor.shape, tensor.dtype), []).append(name)
    found: dict[str, torch.Tensor] = {}
    for names in alike.values():
        found |= zip(names, torch.stack([tensors[name] for name in names]).cpu().unbind(), strict=True)
    return {name: found[name] for name in tensors}


def unmatched_patterns(roots: Iterable[nn.Module], modules: Sequence[str], tensors: Sequence[str]) -> list[Problem]:
    """Patterns of the recipe by which no module would be recorded. Tensors are kept of modules that are digested."""
    names = list(dict.fromkeys(public_name(name) for root in roots for name, _ in root.named_modules()))
    digested = [name for name in names if _matches(name, modules)]
    wanted = [("tape.modules", entry, names) for entry in modules]
    wanted += [("tape.tensors", entry, digested or names) for entry in tensors]
    problems = []
    for key, entry, known in wanted:
        if not any(fnmatch(name, entry) for name in known):
            near = get_close_matches(entry, known, n=1, cutoff=0.5) or known[-1:]
            why = f"{entry!r} matches the name of no module" + (" that tape.modules has" if known is digested else "")
            problems.append(Problem(key, why, f"a name is {near[0]}; `*` stands for any part"))
    return problems


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
