"""A device's fused kernels inside the modules of transformers, found by what a module computes, not by its name.

A module that looks like a norm or a gated feed-forward is tried first, on numbers in its own type and width; the kernel
takes its place only where both give the same. So no model is edited by hand, and one that differs stays as it is. A
call that a kernel cannot take goes to the module's own forward.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.kernels.fused_rotary import FUNCTION, RotaryKernel, plug_rotary
from lockstep.kernels.plain_modules import epsilon_of, own_forward
from lockstep.kernels.trial import TOKENS, Answers, KernelTrial, drawn

Forward = Callable[..., torch.Tensor]
# Makes what a module holds itself whole for a while, where ranks hold slices of it.
Gather = Callable[[nn.Module], AbstractContextManager[object]]


class ModuleKernel(NamedTuple):
    """A kernel for a kind of module: `looks` says which modules are tried, `forward` takes the place of theirs."""

    name: str
    looks: Callable[[nn.Module], bool]
    forward: Forward


class DeviceKernels(NamedTuple):
    """A device's row: what it has, and what that is held to."""

    modules: tuple[ModuleKernel, ...]
    rotary: RotaryKernel
    trial: KernelTrial


def plug_in(model: nn.Module, kernels: DeviceKernels, gather: Gather = nullcontext) -> list[str]:
    """Put the kernels in; returns what was replaced, for the log. A module is tried while `gather` holds for it and for
    all that it stands in, so that of a model in slices no more than these is whole at a time."""
    found: Counter[str] = Counter()
    for module in _gathered_one_by_one(model, gather, set()):
        for kernel in kernels.modules:
            if kernel.looks(module) and _same(module, kernel, kernels.trial):
                module.forward = KernelForward(kernel.forward, module)
                found[f"{type(module).__name__} by {kernel.name}"] += 1
    for source in plug_rotary(model, kernels.rotary, kernels.trial):
        found[f"{FUNCTION} of {source} by {kernels.rotary.name}"] += 1
    return [f"{count} x {what}" if count > 1 else what for what, count in sorted(found.items())]


class KernelForward:
    """A kernel as the forward of one module, which holds it and is not held by it: a bound method would hold the module
    in turn, and its weights would stay on the device until the garbage collector looks for such circles. A copy of the
    module has one of its own."""

    def __init__(self, forward: Forward, module: nn.Module):
        self._forward, self._module = forward, weakref.ref(module)

    def __call__(self, *given: Any, **named: Any) -> torch.Tensor:
        module = self._module()
        assert module is not None  # it is what is called
        return self._forward(module, *given, **named)

    def __reduce__(self) -> tuple[type[KernelForward], tuple[Forward, nn.Module | None]]:
        return type(self), (self._forward, self._module())


def _gathered_one_by_one(module: nn.Module, gather: Gather, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """As `modules()` walks, each with its parents gathered."""
    if module in seen:
        return
    seen.add(module)
    with gather(module):
        yield module
        for child in module.children():
            yield from _gathered_one_by_one(child, gather, seen)


def _same(module: nn.Module, kernel: ModuleKernel, trial: KernelTrial) -> bool:
    """Whether the module's own forward gives what the kernel does and, where it is tried, the same gradient."""
    parameter = next(module.parameters())
    gate = getattr(module, "gate_proj", None)
    width: int = parameter.shape[-1] if gate is None else gate.in_features
    # Not centred at 0: a norm that subtracts the mean is another function.
    rows = drawn(1, TOKENS, width, like=parameter) + 0.5
    if gate is None:
        # Half of them so small that the epsilon decides.
        rows[:, ::2] *= (epsilon_of(module) or 0.0) ** 0.5
    upstream = drawn(1, TOKENS, width, like=parameter, seed=1)

    def answers(call: Callable[[torch.Tensor], torch.Tensor]) -> Answers:
        if not trial.gradients:
            return [call(rows)]
        given = rows.clone().requires_grad_()
        out = call(given)
        # Gradients of small rows are large: judged by themselves.
        (gradient,) = torch.autograd.grad(out, given, upstream)
        return out.detach(), gradient[:, ::2], gradient[:, 1::2]

    training = module.training
    module.eval()
    try:
        return trial.alike(
            type(module).__name__,
            kernel.name,
            lambda: answers(lambda x: own_forward(module, x)),
            lambda: answers(lambda x: kernel.forward(module, x)),
        )
    finally:
        module.train(training)
