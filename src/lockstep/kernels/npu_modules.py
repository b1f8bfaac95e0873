"""torch_npu's fused operators inside the modules of transformers, found by what a module computes, not by its name.

A module that looks like a norm or a gated feed-forward is tried on a few numbers first; the fused operator takes its
place only where both give the same. So no model is edited by hand, and one that differs stays as it is.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

# Fused operators round in other places; anything beyond this is another function.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
ROTARY = "apply_rotary_pos_emb"


def plug_in(model: nn.Module) -> list[str]:
    """Put the operators in; returns what was replaced, for the log."""
    found: Counter[str] = Counter()
    for module in model.modules():
        for fits, forward, name in (
            (_is_rms_norm, _rms_norm, "npu_rms_norm"),
            (_is_gated, _gated, "npu_swiglu"),
        ):
            if fits(module) and _same(module, forward):
                module.forward = MethodType(forward, module)
                found[f"{type(module).__name__} by {name}"] += 1
    for source in {type(module).__module__ for module in model.modules()}:
        if _plug_rotary(sys.modules.get(source)):
            found[f"{ROTARY} of {source.rsplit('.', 1)[-1]} by npu_rotary_mul"] += 1
    return [f"{count} x {what}" if count > 1 else what for what, count in sorted(found.items())]


def _is_rms_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    known = isinstance(weight, nn.Parameter) and weight.dim() == 1 and not list(module.children())
    return known and getattr(module, "bias", None) is None and _epsilon(module) is not None


def _epsilon(module: nn.Module) -> float | None:
    value = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return value if isinstance(value, float) else None


def _rms_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    import torch_npu

    return torch_npu.npu_rms_norm(hidden_states, self.weight, epsilon=_epsilon(self))[0]


def _is_gated(module: nn.Module) -> bool:
    linears = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return all(isinstance(linear, nn.Module) for linear in linears)


def _gated(self: Any, x: torch.Tensor) -> torch.Tensor:
    import torch_npu

    both = torch.cat([self.gate_proj(x), self.up_proj(x)], dim=-1)
    return self.down_proj(torch_npu.npu_swiglu(both, dim=-1))


@torch.no_grad()
def _same(module: nn.Module, forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> bool:
    """Whether the module's own forward gives what the fused one does, on a few rows drawn on the host."""
    parameter = next(module.parameters())
    gate = getattr(module, "gate_proj", None)
    width: int = parameter.shape[-1] if gate is None else gate.in_features
    rows = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(0))
    rows = rows.to(parameter.device, parameter.dtype)
    training = module.training
    module.eval()
    try:
        own, fused = module(rows), forward(module, rows)
    except (TypeError, RuntimeError):
        return False
    finally:
        module.train(training)
    return _close(own, fused)


def _close(own: torch.Tensor, fused: torch.Tensor) -> bool:
    tolerance = TOLERANCE[own.dtype]
    largest = float(own.abs().max())
    return own.shape == fused.shape and float((own - fused).abs().max()) <= tolerance * max(1.0, largest)


def _plug_rotary(source: Any) -> bool:
    """The function that every attention of a modelling file calls; on tensors of other devices it stays what it was."""
    own = getattr(source, ROTARY, None)
    if own is None or getattr(own, "fused", False):
        return False

    def fused(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if q.device.type != "npu" or rest or set(more) - {"unsqueeze_dim"}:
            return own(q, k, cos, sin, *rest, **more)
        return _rotate(q, k, cos, sin, **more)

    if not _rotates_alike(own):
        return False
    fused.fused = True  # type: ignore[attr-defined]
    setattr(source, ROTARY, fused)
    return True


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch_npu

    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return torch_npu.npu_rotary_mul(q, cos, sin), torch_npu.npu_rotary_mul(k, cos, sin)


@torch.no_grad()
def _rotates_alike(own: Callable[..., Any]) -> bool:
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 3, 8, generator=draw).to("npu") for heads in (4, 2))
    cos, sin = (torch.randn(1, 3, 8, generator=draw).to("npu") for _ in range(2))
    try:
        wanted, found = own(q, k, cos, sin), _rotate(q, k, cos, sin)
    except (TypeError, RuntimeError, ValueError):
        return False
    return all(_close(a, b) for a, b in zip(wanted, found, strict=True))
