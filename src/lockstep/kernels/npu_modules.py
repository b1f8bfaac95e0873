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
from lockstep.kernels.plain_modules import epsilon_of, is_gated, is_rms_norm, own_forward

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


def plug_in(model: nn.Module) -> list[str]:
    """Put the operators in; returns what was replaced, for the log."""
    found: Counter[str] = Counter()
    for module in model.modules():
        for fits, forward, name in (
            (is_rms_norm, _rms_norm, "npu_rms_norm"),
            (is_gated, _gated, "npu_swiglu"),
        ):
            if fits(module) and _same(module, forward, name):
                module.forward = MethodType(forward, module)
                found[f"{type(module).__name__} by {name}"] += 1
    for source in plug_rotary(model):
        found[f"{FUNCTION} of {source} by {OPERATOR}"] += 1
    return [f"{count} x {what}" if count > 1 else what for what, count in sorted(found.items())]


def _rms_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    import torch_npu

    if norm_problem(hidden_states, self.weight) is not None:
        return own_forward(self, hidden_states)
    return torch_npu.npu_rms_norm(hidden_states, self.weight, epsilon=epsilon_of(self))[0]


def _gated(self: Any, x: torch.Tensor) -> torch.Tensor:
    import torch_npu

    both = torch.cat([self.gate_proj(x), self.up_proj(x)], dim=-1)
    if swiglu_problem(both) is not None:
        return own_forward(self, x)
    return self.down_proj(torch_npu.npu_swiglu(both, dim=-1))


def _same(module: nn.Module, forward: Forward, operator: str) -> bool:
    """Whether the module's own forward gives what the fused one does."""
    parameter = next(module.parameters())
    gate = getattr(module, "gate_proj", None)
    width: int = parameter.shape[-1] if gate is None else gate.in_features
    rows = drawn(1, TOKENS, width, like=parameter)
    if gate is None:
        # Half of them so small that the epsilon decides.
        rows[:, ::2] *= (epsilon_of(module) or 0.0) ** 0.5
    training = module.training
    module.eval()
    try:
        return alike(
            type(module).__name__, operator, lambda: [own_forward(module, rows)], lambda: [forward(module, rows)]
        )
    finally:
        module.train(training)
