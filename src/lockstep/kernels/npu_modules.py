"""torch_npu's fused operators inside the modules of transformers, found by what a module computes, not by its name.

A module that looks like a norm or a gated feed-forward is tried first, on numbers in its own type and width; the fused
operator takes its place only where both give the same. So no model is edited by hand, and one that differs stays as it
is. A call outside the operator's documented limits goes to the module's own forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from lockstep.kernels.npu_limits import norm_problem, swiglu_problem
from lockstep.kernels.npu_probe import TOKENS, alike, drawn
from lockstep.kernels.npu_rotary import FUNCTION, OPERATOR, plug_rotary

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


def plug_in(model: nn.Module) -> list[str]:
    """Put the operators in; returns what was replaced, for the log."""
    found: Counter[str] = Counter()
    for module in model.modules():
        for fits, forward, name in (
            (_is_rms_norm, _rms_norm, "npu_rms_norm"),
            (_is_gated, _gated, "npu_swiglu"),
        ):
            if fits(module) and _same(module, forward, name):
                module.forward = MethodType(forward, module)
                found[f"{type(module).__name__} by {name}"] += 1
    for source in plug_rotary(model):
        found[f"{FUNCTION} of {source} by {OPERATOR}"] += 1
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

    if norm_problem(hidden_states, self.weight) is not None:
        return _own(self, hidden_states)
    return torch_npu.npu_rms_norm(hidden_states, self.weight, epsilon=_epsilon(self))[0]


def _is_gated(module: nn.Module) -> bool:
    linears = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return all(isinstance(linear, nn.Module) for linear in linears)


def _gated(self: Any, x: torch.Tensor) -> torch.Tensor:
    import torch_npu

    both = torch.cat([self.gate_proj(x), self.up_proj(x)], dim=-1)
    if swiglu_problem(both) is not None:
        return _own(self, x)
    return self.down_proj(torch_npu.npu_swiglu(both, dim=-1))


def _own(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the module's class computes, whatever has taken its forward's place."""
    answer: torch.Tensor = type(module).forward(module, x)
    return answer


def _same(module: nn.Module, forward: Forward, operator: str) -> bool:
    """Whether the module's own forward gives what the fused one does."""
    parameter = next(module.parameters())
    gate = getattr(module, "gate_proj", None)
    width: int = parameter.shape[-1] if gate is None else gate.in_features
    rows = drawn(1, TOKENS, width, like=parameter)
    if gate is None:
        # Half of them so small that the epsilon decides.
        rows[:, ::2] *= (_epsilon(module) or 0.0) ** 0.5
    training = module.training
    module.eval()
    try:
        return alike(type(module).__name__, operator, lambda: [_own(module, rows)], lambda: [forward(module, rows)])
    finally:
        module.train(training)
