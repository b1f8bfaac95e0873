"""npu_rotary_mul in the place of the function that every attention of a modelling file calls.

The operator takes cosines and sines within [-1, 1] only. Some rotary embeddings scale theirs (YaRN does, by its
`attention_scaling`), so each embedding marks what it gave unscaled, and nothing without the mark reaches the operator.
Looking at the numbers themselves would wait for the device in every layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.kernels.npu_limits import rotary_problem
from lockstep.kernels.npu_probe import TOKENS, alike, drawn

FUNCTION, OPERATOR = "apply_rotary_pos_emb", "npu_rotary_mul"
SCALE, MARK = "attention_scaling", "unscaled_rotary"


class Heads(NamedTuple):
    """What a call of the rotary embedding looks like: for which of these the operator has been tried."""

    dtype: torch.dtype
    queries: int
    keys: int
    size: int


class Rotary:
    """The modelling file's own function, and the operator for what it was tried on and what its documents allow."""

    def __init__(self, own: Callable[..., Any]):
        self.own = own
        self.tried: dict[Heads, bool] = {}

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **more: Any
    ) -> Any:
        if rest or set(more) - {"unsqueeze_dim"} or not self.fits(q, k, cos, sin, **more):
            return self.own(q, k, cos, sin, *rest, **more)
        return rotate(q, k, cos, sin, **more)

    def fits(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> bool:
        if q.device.type != "npu" or not (getattr(cos, MARK, False) and getattr(sin, MARK, False)):
            return False
        wide_cos, wide_sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        if any(rotary_problem(x, wide_cos, wide_sin) is not None for x in (q, k)):
            return False
        return self.tried.get(Heads(q.dtype, q.shape[1], k.shape[1], q.shape[-1]), False)


def plug_rotary(model: nn.Module) -> list[str]:
    """Put the operator in; the names of the modelling files in which it now serves this model."""
    _watch(model)
    heads = heads_of(model)
    if heads is None:
        return []
    found = []
    for source in sorted({type(module).__module__ for module in model.modules()}):
        file = sys.modules.get(source)
        own = getattr(file, FUNCTION, None)
        if own is None:
            continue
        rotary = own if isinstance(own, Rotary) else Rotary(own)
        name = source.rsplit(".", 1)[-1]
        if heads not in rotary.tried:
            rotary.tried[heads] = _same(f"{FUNCTION} of {name}", rotary.own, heads, next(model.parameters()))
        if rotary.tried[heads]:
            setattr(file, FUNCTION, rotary)
            found.append(name)
    return found


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch_npu

    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return torch_npu.npu_rotary_mul(q, cos, sin), torch_npu.npu_rotary_mul(k, cos, sin)


def _watch(model: nn.Module) -> None:
    """Every rotary embedding of the model marks what it gives; asked again each time, for some scale by the length."""
    for module in model.modules():
        if scales_of(module) and _mark not in module._forward_hooks.values():
            module.register_forward_hook(_mark)


def _mark(module: nn.Module, _: Any, output: Any) -> None:
    if isinstance(output, tuple) and all(abs(scale) <= 1 for scale in scales_of(module)):
        for part in output:
            if isinstance(part, torch.Tensor):
                setattr(part, MARK, True)


def scales_of(module: nn.Module) -> list[float]:
    """One for all layers, or one for each kind of layer."""
    return [value for name, value in vars(module).items() if name.endswith(SCALE) and isinstance(value, float | int)]


def heads_of(model: nn.Module) -> Heads | None:
    config = getattr(model, "config", None)
    queries = getattr(config, "num_attention_heads", None)
    if queries is None:
        return None
    keys = getattr(config, "num_key_value_heads", None) or queries
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // queries
    return Heads(next(model.parameters()).dtype, queries, keys, size)


def _same(what: str, own: Callable[..., Any], heads: Heads, like: torch.Tensor) -> bool:
    q, k = (drawn(1, count, TOKENS, heads.size, like=like, seed=count) for count in (heads.queries, heads.keys))
    angles = torch.randn(1, TOKENS, heads.size // 2, generator=torch.Generator().manual_seed(2)).repeat(1, 1, 2)
    cos, sin = (part.to(like.device, like.dtype) for part in (angles.cos(), angles.sin()))
    problem = rotary_problem(q, cos[:, None], sin[:, None])
    return problem is None and alike(what, OPERATOR, lambda: own(q, k, cos, sin), lambda: rotate(q, k, cos, sin))
