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

# Rows of a trial: more than one tile of a device's vector unit.
TOKENS = 64
Answers = Sequence[torch.Tensor]


@dataclass(frozen=True)
class KernelTrial:
    """Tolerances of the trial in which a fused kernel is compared with the module it replaces."""

    tolerance: Mapping[torch.dtype, float]
    """Relative to the largest value."""
    smallest: float
    """Values below this use its tolerance."""
    gradients: bool
    """Whether the backward pass is compared too."""
    wait: Callable[[], None]
    """Synchronises the device, so that a kernel's error is raised in the trial and not in a training step."""
    errors: tuple[type[Exception], ...] = (TypeError, RuntimeError, ValueError)
    """Exceptions of a kernel that does not work here."""

    def alike(self, what: str, kernel: str, reference: Callable[[], Answers], fused: Callable[[], Answers]) -> bool:
        """Whether both outputs match; if not, warn that `what` stays plain torch."""
        try:
            with torch.set_grad_enabled(self.gradients):
                expected, actual = reference(), fused()
            self.wait()
            same = all(self.close(a, b) for a, b in zip(expected, actual, strict=True))
        except self.errors as error:
            why = first_sentence(error)
            warnings.warn(f"{what} stays plain torch: {kernel} failed on a trial: {why}", stacklevel=3)
            return False
        if not same:
            warnings.warn(f"{what} stays plain torch: {kernel} gives other numbers", stacklevel=3)
        return same

    def close(self, reference: torch.Tensor, fused: torch.Tensor) -> bool:
        if reference.shape != fused.shape or reference.dtype != fused.dtype:
            return False
        error, largest = float((reference.float() - fused.float()).abs().max()), float(reference.float().abs().max())
        return error <= self.tolerance[reference.dtype] * max(self.smallest, largest)


def drawn(*shape: int, like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Standard normal values drawn on the host, in the dtype and on the device of `like`."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like.device, like.dtype)


# Modules of transformers that a fused operator may replace, recognised by their structure.

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def is_rms_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    is_norm = isinstance(weight, nn.Parameter) and weight.dim() == 1 and not list(module.children())
    return is_norm and getattr(module, "bias", None) is None and epsilon_of(module) is not None


def epsilon_of(module: nn.Module) -> float | None:
    value = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return value if isinstance(value, float) else None


def is_gated(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in PROJECTIONS)


def is_silu_gated(module: nn.Module) -> bool:
    """Whether the module is a SiLU-gated MLP without other submodules: dropout would not show in a trial."""
    silu = type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    return is_gated(module) and silu and {name for name, _ in module.named_children()} <= {*PROJECTIONS, "act_fn"}


def fused_feed_forwards(model: nn.Module) -> int:
    """Number of feed-forwards that run as one fused kernel with all three projections."""
    return sum(
        is_silu_gated(module) and all(_without_bias(module, name) for name in PROJECTIONS) for module in model.modules()
    )


def _without_bias(module: nn.Module, name: str) -> bool:
    projection = getattr(module, name)
    return type(projection) is nn.Linear and projection.bias is None


def own_forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The forward of the module's class, even if it was replaced."""
    answer: torch.Tensor = type(module).forward(module, x)
    return answer


# The rotary kernel replaces a function that every attention of a modelling file calls. The function serves every model
# of the file, the kernel only the models it was tried on. Their rotary embeddings mark the cos and sin they return, and
# unmarked ones go to the original function.

FUNCTION = "apply_rotary_pos_emb"
SCALE, MARK = "attention_scaling", "for_fused_rotary"


class Heads(NamedTuple):
    """Shapes and dtype of a rotary call; the key of the trial results."""

    dtype: torch.dtype
    queries: int
    keys: int
    size: int


class RotaryKernel(NamedTuple):
    """A device's rotary kernel."""

    name: str
    rotate: Callable[..., Any]
    """Same signature as the modelling file's function: q, k, cos, sin, `unsqueeze_dim`."""
    fits: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], bool]
    """Whether it supports these inputs (q, k, cos, sin, `unsqueeze_dim`)."""
    marks: Callable[[nn.Module], bool]
    """Whether it supports the current output of a rotary embedding. Checked on each call: some scale by the length."""
    only_tried: bool
    """Trial results. Heads of another number, size or dtype go to the original function."""


class Rotary:
    """The modelling file's function, with the kernel for inputs that passed the trial and are supported."""

    def __init__(self, original: Callable[..., Any], kernel: RotaryKernel):
        self.original, self.kernel = original, kernel
        self.tried: dict[Heads, bool] = {}

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **more: Any
    ) -> Any:
        if rest or set(more) - {"unsqueeze_dim"} or not self.fits(q, k, cos, sin, **more):
            return self.original(q, k, cos, sin, *rest, **more)
        return self.kernel.rotate(q, k, cos, sin, **more)

    def fits(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> bool:
        marked = getattr(cos, MARK, False) and getattr(sin, MARK, False)
        if not (marked and self.kernel.fits(q, k, cos, sin, unsqueeze_dim)):
            return False
        return not self.kernel.only_tried or self.tried.get(Heads(q.dtype, q.shape[1], k.shape[1], q.shape[-1]), False)


def plug_rotary(model: nn.Module, kernel: RotaryKernel, trial: KernelTrial) -> list[str]:
    """Install the kernel; returns the names of the modelling files in which it serves this model."""
    heads = heads_of(model)
    if heads is None:
        return []
    files = []
    for source in sorted({type(module).__module__ for module in model.modules()}):
        file = sys.modules.get(source)
        original = getattr(file, FUNCTION, None)
        if original is None:
            continue
        rotary = original if isinstance(original, Rotary) else Rotary(original, kernel)
        name = source.rsplit(".", 1)[-1]
        if heads not in rotary.tried:
            like = next(model.parameters())
            rotary.tried[heads] = _same(f"{FUNCTION} of {name}", rotary.original, kernel, trial, heads, like)
        if rotary.tried[heads]:
            setattr(file, FUNCTION, rotary)
            files.append(name)
    if files:
        for module in model.modules():
            if scales_of(module) and not any(isinstance(hook, _Marking) for hook in module._forward_hooks.values()):
                module.register_forward_hook(_Marking(kernel))
    return files


class _Marking:
    """Forward hook of a rotary embedding that marks its output."""

    def __init__(self, kernel: RotaryKernel):
        self.kernel = kernel

    def __call__(self, module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, tuple) and self.kernel.marks(module):
            for part in output:
                if isinstance(part, torch.Tensor):
                    setattr(part, MARK, True)


def scales_of(module: nn.Module) -> list[float]:
    """One scale for all layers, or one per layer type; empty if the module is no rotary embedding."""
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
    what: str, original: Callable[..., Any], kernel: RotaryKernel, trial: KernelTrial, heads: Heads, like: torch.Tensor
) -> bool:
    q, k = (drawn(1, count, TOKENS, heads.size, like=like, seed=count) for count in (heads.queries, heads.keys))
    angles = torch.randn(1, TOKENS, heads.size // 2, generator=torch.Generator().manual_seed(2)).repeat(1, 1, 2)
    cos, sin = (part.to(like.device, like.dtype) for part in (angles.cos(), angles.sin()))
    if not kernel.fits(q, k, cos, sin, 1):
        return False

    def outputs(call: Callable[..., Any]) -> Answers:
        if not trial.gradients:
            return list(call(q, k, cos, sin))
        inputs = [q.clone().requires_grad_(), k.clone().requires_grad_()]
        rotated = call(*inputs, cos, sin)
        return [t.detach() for t in rotated] + list(torch.autograd.grad(rotated, inputs, [q.flip(1), k.flip(1)]))

    return trial.alike(what, kernel.name, lambda: outputs(original), lambda: outputs(kernel.rotate))


# A module that looks like a norm or a gated feed-forward is tried on random input in its dtype and width. The kernel
# replaces its forward only if both match. So no model needs a manual list, and a different model stays unchanged. Calls
# that a kernel does not support go to the module's original forward.

Forward = Callable[..., torch.Tensor]
# Gathers a module's sharded parameters for a while.
Gather = Callable[[nn.Module], AbstractContextManager[object]]


class ModuleKernel(NamedTuple):
    """A kernel for one kind of module: `looks` selects the modules to try, `forward` replaces theirs."""

    name: str
    looks: Callable[[nn.Module], bool]
    forward: Forward


class DeviceKernels(NamedTuple):
    """A device's kernels and the tolerances of their trial."""

    modules: tuple[ModuleKernel, ...]
    rotary: RotaryKernel
    trial: KernelTrial


def plug_in(model: nn.Module, kernels: DeviceKernels, gather: Gather = nullcontext) -> list[str]:
    """Installs the kernels; returns the replaced modules, for the log. `gather` gathers only a module and its parents
    during the trial, so that no more of a sharded model is gathered at a time."""
    replaced: Counter[str] = Counter()
    for module in _gathered_one_by_one(model, gather, set()):
        for kernel in kernels.modules:
            if kernel.looks(module) and _same_module(module, kernel, kernels.trial):
                module.forward = KernelForward(kernel.forward, module)
                replaced[f"{type(module).__name__} by {kernel.name}"] += 1
    for source in plug_rotary(model, kernels.rotary, kernels.trial):
        replaced[f"{FUNCTION} of {source} by {kernels.rotary.name}"] += 1
    return [f"{count} x {what}" if count > 1 else what for what, count in sorted(replaced.items())]


class KernelForward:
    """A kernel as the forward of one module. It holds a weak reference: a bound method would form a cycle and keep the
    weights on the device until garbage collection. A copy of the module gets its copy of this."""

    def __init__(self, forward: Forward, module: nn.Module):
        self._forward, self._module = forward, weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        module = self._module()
        assert module is not None  # the caller holds it
        return self._forward(module, *args, **kwargs)

    def __reduce__(self) -> tuple[type[KernelForward], tuple[Forward, nn.Module | None]]:
        return type(self), (self._forward, self._module())


def _gathered_one_by_one(module: nn.Module, gather: Gather, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Like `modules()`, with each module's parents gathered."""
    if module in seen:
        return
    seen.add(module)
    with gather(module):
        yield module
        for child in module.children():
            yield from _gathered_one_by_one(child, gather, seen)


def _same_module(module: nn.Module, kernel: ModuleKernel, trial: KernelTrial) -> bool:
    """Whether the module's forward matches the kernel and, if `gradients`, its gradient too."""
    parameter = next(module.parameters())
    gate = getattr(module, "gate_proj", None)
    width: int = parameter.shape[-1] if gate is None else gate.in_features
    # Not centred at 0: this detects a norm that subtracts the mean.
    rows = drawn(1, TOKENS, width, like=parameter) + 0.5
    if gate is None:
        # Half of the rows are so small that epsilon matters.
        rows[:, ::2] *= (epsilon_of(module) or 0.0) ** 0.5
    upstream = drawn(1, TOKENS, width, like=parameter, seed=1)

    def outputs(call: Callable[[torch.Tensor], torch.Tensor]) -> Answers:
        if not trial.gradients:
            return [call(rows)]
        x = rows.clone().requires_grad_()
        out = call(x)
        # Gradients of small rows are large, so they are compared separately.
        (gradient,) = torch.autograd.grad(out, x, upstream)
        return out.detach(), gradient[:, ::2], gradient[:, 1::2]

    training = module.training
    module.eval()
    try:
        return trial.alike(
            type(module).__name__,
            kernel.name,
            lambda: outputs(lambda x: own_forward(module, x)),
            lambda: outputs(lambda x: kernel.forward(module, x)),
        )
    finally:
        module.train(training)
