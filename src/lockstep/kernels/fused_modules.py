"""Fused kernels in place of transformers modules (norm, MLP, rotary), each tried before use."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.device.base import first_sentence

# Whether a fused kernel gives what a module computes, tried on the device before it takes the module's place.

# Rows of a trial: more than a tile of a device's vector unit.
TOKENS = 64
Answers = Sequence[torch.Tensor]


@dataclass(frozen=True)
class KernelTrial:
    """What a device's kernels are held to. Anything beyond the tolerance is another function."""

    tolerance: Mapping[torch.dtype, float]
    """A share of the largest number."""
    smallest: float
    """Numbers below this are held to its tolerance, not to their own."""
    gradients: bool
    """Whether the backward pass is tried too."""
    wait: Callable[[], None]
    """Until the device has done all: a kernel's own error comes up there, and it must not be a training step's."""
    errors: tuple[type[Exception], ...] = (TypeError, RuntimeError, ValueError)
    """What a kernel that does not work here raises."""

    def alike(self, what: str, kernel: str, own: Callable[[], Answers], fused: Callable[[], Answers]) -> bool:
        """Whether both give the same on the device; where not, a warning says why `what` stays plain torch."""
        try:
            with torch.set_grad_enabled(self.gradients):
                wanted, found = own(), fused()
            self.wait()
            same = all(self.close(one, other) for one, other in zip(wanted, found, strict=True))
        except self.errors as error:
            why = first_sentence(error)
            warnings.warn(f"{what} stays plain torch: {kernel} failed on a trial: {why}", stacklevel=3)
            return False
        if not same:
            warnings.warn(f"{what} stays plain torch: {kernel} gives other numbers", stacklevel=3)
        return same

    def close(self, own: torch.Tensor, fused: torch.Tensor) -> bool:
        if own.shape != fused.shape or own.dtype != fused.dtype:
            return False
        off, largest = float((own.float() - fused.float()).abs().max()), float(own.float().abs().max())
        return off <= self.tolerance[own.dtype] * max(self.smallest, largest)


def drawn(*shape: int, like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Standard normal numbers, drawn on the host, in the type and on the device of `like`."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like.device, like.dtype)


# The modules of transformers that a fused operator may stand for, found by what they look like, not by their names.

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def is_rms_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    known = isinstance(weight, nn.Parameter) and weight.dim() == 1 and not list(module.children())
    return known and getattr(module, "bias", None) is None and epsilon_of(module) is not None


def epsilon_of(module: nn.Module) -> float | None:
    value = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return value if isinstance(value, float) else None


def is_gated(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in PROJECTIONS)


def is_silu_gated(module: nn.Module) -> bool:
    """Nothing else among its parts: dropout would not show in a trial."""
    silu = type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    return is_gated(module) and silu and {name for name, _ in module.named_children()} <= {*PROJECTIONS, "act_fn"}


def fused_feed_forwards(model: nn.Module) -> int:
    """How many feed-forwards a fused kernel takes as a whole, with all three projections."""
    return sum(
        is_silu_gated(module) and all(_without_bias(module, name) for name in PROJECTIONS) for module in model.modules()
    )


def _without_bias(module: nn.Module, name: str) -> bool:
    projection = getattr(module, name)
    return type(projection) is nn.Linear and projection.bias is None


def own_forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the module's class computes, whatever has taken its forward's place."""
    answer: torch.Tensor = type(module).forward(module, x)
    return answer


# A device's rotary kernel in the place of the function that every attention of a modelling file calls.
#
# The function serves every model of its file, the kernel only models that it was tried on: their rotary embeddings
# mark the cosines and sines that they give, and nothing without the mark reaches the kernel.

FUNCTION = "apply_rotary_pos_emb"
SCALE, MARK = "attention_scaling", "for_fused_rotary"


class Heads(NamedTuple):
    """What a call of the rotary embedding looks like: for which of these the kernel has been tried."""

    dtype: torch.dtype
    queries: int
    keys: int
    size: int


class RotaryKernel(NamedTuple):
    """A device's row."""

    name: str
    rotate: Callable[..., Any]
    """As the modelling file's function: q, k, cos, sin, `unsqueeze_dim`."""
    fits: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], bool]
    """Whether it can take these (q, k, cos, sin, `unsqueeze_dim`)."""
    marks: Callable[[nn.Module], bool]
    """Whether it can take what a rotary embedding gives now; asked each time, for some scale by the length."""
    only_tried: bool
    """Heads of another number, size or type than the model's own go to the model's function."""


class Rotary:
    """The modelling file's own function, and the kernel for what it was tried on and can take."""

    def __init__(self, own: Callable[..., Any], kernel: RotaryKernel):
        self.own, self.kernel = own, kernel
        self.tried: dict[Heads, bool] = {}

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **more: Any
    ) -> Any:
        if rest or set(more) - {"unsqueeze_dim"} or not self.fits(q, k, cos, sin, **more):
            return self.own(q, k, cos, sin, *rest, **more)
        return self.kernel.rotate(q, k, cos, sin, **more)

    def fits(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> bool:
        marked = getattr(cos, MARK, False) and getattr(sin, MARK, False)
        if not (marked and self.kernel.fits(q, k, cos, sin, unsqueeze_dim)):
            return False
        return not self.kernel.only_tried or self.tried.get(Heads(q.dtype, q.shape[1], k.shape[1], q.shape[-1]), False)


def plug_rotary(model: nn.Module, kernel: RotaryKernel, trial: KernelTrial) -> list[str]:
    """Put the kernel in; the names of the modelling files in which it now serves this model."""
    heads = heads_of(model)
    if heads is None:
        return []
    found = []
    for source in sorted({type(module).__module__ for module in model.modules()}):
        file = sys.modules.get(source)
        own = getattr(file, FUNCTION, None)
        if own is None:
            continue
        rotary = own if isinstance(own, Rotary) else Rotary(own, kernel)
        name = source.rsplit(".", 1)[-1]
        if heads not in rotary.tried:
            like = next(model.parameters())
            rotary.tried[heads] = _same(f"{FUNCTION} of {name}", rotary.own, kernel, trial, heads, like)
        if rotary.tried[heads]:
            setattr(file, FUNCTION, rotary)
            found.append(name)
    if found:
        for module in model.modules():
            if scales_of(module) and not any(isinstance(hook, _Marking) for hook in module._forward_hooks.values()):
                module.register_forward_hook(_Marking(kernel))
    return found


class _Marking:
    """A hook on a rotary embedding."""

    def __init__(self, kernel: RotaryKernel):
        self.kernel = kernel

    def __call__(self, module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, tuple) and self.kernel.marks(module):
            for part in output:
                if isinstance(part, torch.Tensor):
                    setattr(part, MARK, True)


def scales_of(module: nn.Module) -> list[float]:
    """One for all layers, or one for each kind of layer; none where the module is no rotary embedding."""
    return [value for name, value in vars(module).items() if name.endswith(SCALE) and isinstance(value, float | int)]


def heads_of(model: nn.Module) -> Heads | None:
    config = getattr(model, "config", None)
    queries = getattr(config, "num_attention_heads", None)
    if queries is None:
        return None
    keys = getattr(config, "num_key_value_heads", None) or queries
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // queries
    return Heads(next(model.parameters()).dtype, queries, keys, size)


def _same(
    what: str, own: Callable[..., Any], kernel: RotaryKernel, trial: KernelTrial, heads: Heads, like: torch.Tensor
) -> bool:
    q, k = (drawn(1, count, TOKENS, heads.size, like=like, seed=count) for count in (heads.queries, heads.keys))
    angles = torch.randn(1, TOKENS, heads.size // 2, generator=torch.Generator().manual_seed(2)).repeat(1, 1, 2)
    cos, sin = (part.to(like.device, like.dtype) for part in (angles.cos(), angles.sin()))
    if not kernel.fits(q, k, cos, sin, 1):
        return False

    def answers(call: Callable[..., Any]) -> Answers:
        if not trial.gradients:
            return list(call(q, k, cos, sin))
        given = [q.clone().requires_grad_(), k.clone().requires_grad_()]
        turned = call(*given, cos, sin)
        return [t.detach() for t in turned] + list(torch.autograd.grad(turned, given, [q.flip(1), k.flip(1)]))

    return trial.alike(what, kernel.name, lambda: answers(own), lambda: answers(kernel.rotate))


# A device's fused kernels inside the modules of transformers, found by what a module computes, not by its name.
#
# A module that looks like a norm or a gated feed-forward is tried first, on numbers in its own type and width; the
# kernel takes its place only where both give the same. So no model is edited by hand, and one that differs stays as
# it is. A call that a kernel cannot take goes to the module's own forward.

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
            if kernel.looks(module) and _same_module(module, kernel, kernels.trial):
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


def _same_module(module: nn.Module, kernel: ModuleKernel, trial: KernelTrial) -> bool:
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
