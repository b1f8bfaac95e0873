"""Replaces functions of transformers' recurrent modules by Triton kernels: convolutions, and steps of the gated delta
rule in decoding. Over whole sequences the rule runs in plain torch.

Recurrent modules call these functions by their names in the modelling file. transformers replaces them itself by the
kernels of flash-linear-attention and causal-conv1d if these packages are installed; then nothing is replaced here. A
replaced function runs the original one for calls that the kernel does not support, and for other models of the file.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.kernels.recurrent.conv_triton import convolution_fits, convolve, convolve_step_
from lockstep.kernels.recurrent.delta_step_triton import delta_step_, delta_step_fits
from lockstep.kernels.recurrent.slot_state import SlotState

# Attribute of a replaced function: the function of transformers.
ORIGINAL = "lockstep_original"
Function = Callable[..., Any]
# Attribute of the modules that use the kernels, and whether such a module runs now.
USES_KERNELS = "lockstep_recurrent_kernels"
_RUNNING: ContextVar[bool] = ContextVar("recurrent kernels", default=False)


def _recurrent_rule(
    original: Function,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | SlotState | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **more: Any,
) -> tuple[torch.Tensor, Any]:
    """The gated delta rule token by token. A state in slots is updated in place and returned."""
    rows, tokens = key.shape[:2]
    slotted = isinstance(initial_state, SlotState)
    if tokens == 1 and initial_state is not None and _RUNNING.get():
        if isinstance(initial_state, SlotState):
            states, slots = initial_state.states, initial_state.slots_B
        else:
            states, slots = initial_state.float().clone(), torch.arange(rows, device=key.device)
        if states.dtype == torch.float32 and delta_step_fits(key[:, 0], states):
            q, k, v, decay, rate = (part[:, 0] for part in (query, key, value, g, beta))
            out = delta_step_(q, k, v, decay, rate, states, slots, use_qk_l2norm_in_kernel)
            return out[:, None], initial_state if slotted else states if output_final_state else None
    given = initial_state.gathered() if isinstance(initial_state, SlotState) else initial_state
    out, last = original(
        query,
        key,
        value,
        g=g,
        beta=beta,
        initial_state=given,
        output_final_state=output_final_state or slotted,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        **more,
    )
    if isinstance(initial_state, SlotState):
        initial_state.store(last)
        last = initial_state
    return out, last


def _convolution(
    original: Function,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **more: Any,
) -> torch.Tensor:
    if _RUNNING.get() and activation in (None, "silu") and convolution_fits(hidden_states, weight, bias):
        return convolve(hidden_states, weight, bias, activation == "silu")
    result: torch.Tensor = original(hidden_states, weight, bias, activation=activation, **more)
    return result


def _convolution_step(
    original: Function,
    hidden_states: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    fits = _RUNNING.get() and activation in (None, "silu") and convolution_fits(hidden_states, weight, bias)
    kept = conv_state.shape[-1] >= weight.shape[-1] and not torch.is_grad_enabled()
    if fits and kept and hidden_states.shape[-1] == 1:
        return convolve_step_(hidden_states, conv_state, weight, bias, activation == "silu")
    result: torch.Tensor = original(hidden_states, conv_state, weight, bias, activation)
    return result


# The functions of transformers' modelling files by name, with the package whose kernels transformers uses instead.
FUNCTIONS: dict[str, tuple[Function, str]] = {
    "torch_recurrent_gated_delta_rule": (_recurrent_rule, "fla"),
    "causal_conv1d_fn": (_convolution, "causal_conv1d"),
    "causal_conv1d_update": (_convolution_step, "causal_conv1d"),
}


def plug_rules(model: nn.Module) -> list[str]:
    """Replaces the functions in the modelling files of the model. Returns their names, for the log."""
    replaced = []
    for source in sorted({type(module).__module__ for module in model.modules()}):
        file = sys.modules.get(source)
        for name, (function, package) in FUNCTIONS.items():
            original = getattr(file, name, None)
            if original is None or importlib.util.find_spec(package) is not None:
                continue
            if not hasattr(original, ORIGINAL):
                ours = partial(function, original)
                setattr(ours, ORIGINAL, original)
                setattr(file, name, ours)
            replaced.append(f"{name} of {source.rsplit('.', 1)[-1]} by Triton")
            for module in model.modules():
                if type(module).__module__ == source and hasattr(module, "conv1d"):
                    _use_kernels(module)
    return replaced


def _use_kernels(module: nn.Module) -> None:
    """Makes the functions run their kernels while this module runs."""
    if not hasattr(module, USES_KERNELS):
        setattr(module, USES_KERNELS, True)
        module.register_forward_pre_hook(_begin)
        module.register_forward_hook(_end, always_call=True)


def _begin(*_: Any) -> None:
    _RUNNING.set(True)


def _end(*_: Any) -> None:
    _RUNNING.set(False)
