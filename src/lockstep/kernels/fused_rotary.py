"""A device's rotary kernel in the place of the function that every attention of a modelling file calls.

The function serves every model of its file, the kernel only models that it was tried on: their rotary embeddings mark
the cosines and sines that they give, and nothing without the mark reaches the kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.kernels.trial import TOKENS, Answers, KernelTrial, drawn

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
