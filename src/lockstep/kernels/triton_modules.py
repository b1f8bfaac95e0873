"""Our Triton kernels inside the modules of transformers: RMSNorm, the gated feed-forward, the rotary embedding.

A module that looks like one of them is tried first, on numbers in its own type and width, forwards and backwards; the
kernel takes its place only where both give the same. A call that a kernel cannot take goes to the module's own forward.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from triton.errors import TritonError

from lockstep.device.accelerator import first_sentence
from lockstep.kernels.npu_probe import TOKENS, drawn
from lockstep.kernels.npu_rotary import FUNCTION, Heads, heads_of, scales_of
from lockstep.kernels.plain_modules import PROJECTIONS, epsilon_of, is_rms_norm, is_silu_gated, own_forward
from lockstep.kernels.triton_math import runs_on
from lockstep.kernels.triton_norm import norm_fits, rms_norm
from lockstep.kernels.triton_rotary import rotary_fits, rotate
from lockstep.kernels.triton_swiglu import gated, swiglu

# The kernels round where the modules do; sums are taken in another order. Shares of the largest number.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
MARK = "triton_rotary"
Answers = Sequence[torch.Tensor]


def plug_in(model: nn.Module) -> list[str]:
    """Put the kernels in; returns what was replaced, for the log."""
    first = next(model.parameters(), None)
    if first is None or not runs_on(first):
        return []
    found: Counter[str] = Counter()
    for module in model.modules():
        for fits, forward, name in ((is_rms_norm, _norm, "triton_norm"), (is_silu_gated, _gated, "triton_swiglu")):
            if fits(module) and _same_module(module, forward, name):
                module.forward = MethodType(forward, module)
                found[f"{type(module).__name__} by {name}"] += 1
    for source in _plug_rotary(model):
        found[f"{FUNCTION} of {source} by triton_rotary"] += 1
    return [f"{count} x {what}" if count > 1 else what for what, count in sorted(found.items())]


def _norm(self: Any, *args: Any, **more: Any) -> torch.Tensor:
    if len(args) != 1 or more or torch.is_autocast_enabled(args[0].device.type) or not norm_fits(args[0], self.weight):
        return type(self).forward(self, *args, **more)
    epsilon = epsilon_of(self)
    assert epsilon is not None
    return rms_norm(args[0], self.weight, epsilon)


def _gated(self: Any, *args: Any, **more: Any) -> torch.Tensor:
    if len(args) != 1 or more or not runs_on(args[0]) or torch.is_autocast_enabled(args[0].device.type):
        return type(self).forward(self, *args, **more)
    (x,) = args
    projections = [getattr(self, name) for name in PROJECTIONS]
    if all(_bare(projection, x) for projection in projections):
        return gated(x, *(projection.weight for projection in projections))
    gate, up, down = projections
    return down(swiglu(gate(x), up(x)))


def _bare(module: nn.Module, x: torch.Tensor) -> bool:
    """A plain product with a weight, and nobody listens to what goes in and out: then the module need not be called."""
    if type(module) is not nn.Linear or module.bias is not None or "forward" in vars(module):
        return False
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    heard = any(hooks) or nn.modules.module._has_any_global_hook()
    return not heard and type(module.weight.data) is torch.Tensor and module.weight.dtype == x.dtype


class FusedRotary:
    """The modelling file's own function, and the kernel for models that it was tried on."""

    def __init__(self, own: Callable[..., Any]):
        self.own = own
        self.tried: dict[Heads, bool] = {}

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **more: Any
    ) -> Any:
        marked = getattr(cos, MARK, False) and getattr(sin, MARK, False)
        plain = not rest and (not more or more == {"unsqueeze_dim": 1})
        if marked and plain and rotary_fits(q, k, cos, sin):
            return rotate(q, k, cos, sin)
        return self.own(q, k, cos, sin, *rest, **more)


def _plug_rotary(model: nn.Module) -> list[str]:
    """The names of the modelling files in which the kernel now serves this model."""
    heads = heads_of(model)
    if heads is None:
        return []
    found = []
    for source in sorted({type(module).__module__ for module in model.modules()}):
        file = sys.modules.get(source)
        own = getattr(file, FUNCTION, None)
        if own is None:
            continue
        rotary = own if isinstance(own, FusedRotary) else FusedRotary(own)
        name = source.rsplit(".", 1)[-1]
        if heads not in rotary.tried:
            rotary.tried[heads] = _same_rotary(f"{FUNCTION} of {name}", rotary.own, heads, next(model.parameters()))
        if rotary.tried[heads]:
            setattr(file, FUNCTION, rotary)
            found.append(name)
    if found:
        # The function serves every model of the file; the kernel only those whose embeddings mark what they give.
        for module in model.modules():
            if scales_of(module) and _mark not in module._forward_hooks.values():
                module.register_forward_hook(_mark)
    return found


def _mark(module: nn.Module, _: Any, output: Any) -> None:
    if isinstance(output, tuple):
        for part in output:
            if isinstance(part, torch.Tensor):
                setattr(part, MARK, True)


def _same_module(module: nn.Module, forward: Callable[..., torch.Tensor], kernel: str) -> bool:
    """Whether the module's own forward gives what the kernel does, and the same gradient of its input."""
    parameter = next(module.parameters())
    gate = getattr(module, "gate_proj", None)
    width: int = parameter.shape[-1] if gate is None else gate.in_features
    # Not centred at 0: a norm that subtracts the mean is another function.
    rows = drawn(1, TOKENS, width, like=parameter) + 0.5
    if gate is None:
        # Half of them so small that the epsilon decides.
        rows[:, ::2] *= (epsilon_of(module) or 0.0) ** 0.5
    upstream = drawn(1, TOKENS, width, like=parameter, seed=1)

    def both(call: Callable[[torch.Tensor], torch.Tensor]) -> Answers:
        given = rows.clone().requires_grad_()
        out = call(given)
        # Gradients of small rows are large: judged by themselves.
        (gradient,) = torch.autograd.grad(out, given, upstream)
        return out.detach(), gradient[:, ::2], gradient[:, 1::2]

    training = module.training
    module.eval()
    try:
        return alike(
            type(module).__name__,
            kernel,
            lambda: both(lambda x: own_forward(module, x)),
            lambda: both(lambda x: forward(module, x)),
        )
    finally:
        module.train(training)


def _same_rotary(what: str, own: Callable[..., Any], heads: Heads, like: torch.Tensor) -> bool:
    if heads.size % 2:
        return False
    q, k = (drawn(1, count, TOKENS, heads.size, like=like, seed=count) for count in (heads.queries, heads.keys))
    angles = torch.randn(1, TOKENS, heads.size // 2, generator=torch.Generator().manual_seed(2)).repeat(1, 1, 2)
    cos, sin = (part.to(like.device, like.dtype) for part in (angles.cos(), angles.sin()))

    def both(call: Callable[..., Any]) -> Answers:
        given = [q.clone().requires_grad_(), k.clone().requires_grad_()]
        turned = call(*given, cos, sin)
        return [t.detach() for t in turned] + list(torch.autograd.grad(turned, given, [q.flip(1), k.flip(1)]))

    return alike(what, "triton_rotary", lambda: both(own), lambda: both(rotate))


def alike(what: str, kernel: str, own: Callable[[], Answers], fused: Callable[[], Answers]) -> bool:
    """Whether both give the same on the device; where not, a warning says why `what` stays plain torch."""
    try:
        with torch.enable_grad():
            wanted, found = own(), fused()
        # A kernel's own error comes up where its numbers are read.
        same = all(_close(one, other) for one, other in zip(wanted, found, strict=True))
    except (TypeError, RuntimeError, ValueError, OSError, subprocess.SubprocessError, TritonError) as error:
        warnings.warn(f"{what} stays plain torch: {kernel} failed on a trial: {first_sentence(error)}", stacklevel=3)
        return False
    if not same:
        warnings.warn(f"{what} stays plain torch: {kernel} gives other numbers", stacklevel=3)
    return same


def _close(own: torch.Tensor, fused: torch.Tensor) -> bool:
    if own.shape != fused.shape or own.dtype != fused.dtype:
        return False
    far, largest = float((own.float() - fused.float()).abs().max()), float(own.float().abs().max())
    return far <= TOLERANCE[own.dtype] * max(1e-20, largest)
