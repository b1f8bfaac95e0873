"""Replaces functions of transformers' recurrent modules by Triton kernels: convolutions, the gated delta rule and
Mamba-2, over whole sequences and in decoding steps.

Recurrent modules call these functions by their names in the modelling file. transformers replaces them itself by the
kernels of flash-linear-attention, causal-conv1d and mamba-ssm if these packages are installed. A kernel, ours or that
of a package, is used only if it passes a trial against the plain-torch function (`rule_trials.py`). A replaced function
runs the original one for calls that the kernel does not support, and for other models of the file.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus

from lockstep.kernels.norm_triton import rms_norm
from lockstep.kernels.recurrent.chunks_triton import chunks_fit, linear_attention
from lockstep.kernels.recurrent.conv_triton import convolution_fits, convolve, convolve_step_
from lockstep.kernels.recurrent.delta_step_triton import LENGTH_EPSILON, delta_step_, delta_step_fits
from lockstep.kernels.recurrent.delta_triton import delta_rule, delta_rule_fits
from lockstep.kernels.recurrent.mamba_step_triton import mamba_step_, mamba_step_fits
from lockstep.kernels.recurrent.package_kernels import (
    CONVOLUTION,
    CONVOLUTION_STEP,
    RULE,
    SCAN,
    SCAN_STEP,
    STEP,
    WHOLE_SCAN,
)
from lockstep.kernels.recurrent.rule_trials import passes, sizes_of
from lockstep.kernels.recurrent.slot_state import SlotState

# Attribute of a replaced function: the function of transformers.
ORIGINAL = "lockstep_original"
Function = Callable[..., Any]
# Attribute of the modules that use kernels: the names of the functions. The names of the module that runs now.
USES_KERNELS = "lockstep_recurrent_kernels"
_RUNNING: ContextVar[frozenset[str]] = ContextVar("recurrent kernels", default=frozenset())

# Functions of whole sequences, which have no kernels in fp32 on a device.
SEQUENCES = (RULE, SCAN)


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
    if tokens == 1 and initial_state is not None and STEP in _RUNNING.get():
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


def _chunk_rule(
    original: Function,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule over whole sequences."""
    if RULE in _RUNNING.get() and use_qk_l2norm_in_kernel and delta_rule_fits(query, key, value):
        # A vector of length 1 is the vector of root mean square 1, divided by the root of its size.
        size = key.shape[-1]
        factor = torch.full((size,), size**-0.5 - 1, dtype=torch.float32, device=key.device)
        query, key = (rms_norm(part, factor, LENGTH_EPSILON / size, True) for part in (query, key))
        out, last = delta_rule(query, key, value, g, beta, initial_state)
        return out, last if output_final_state else None
    result: tuple[torch.Tensor, torch.Tensor | None] = original(
        query,
        key,
        value,
        g=g,
        beta=beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        **more,
    )
    return result


def _scan(
    original: Function,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **more: Any,
) -> Any:
    """Mamba-2 over whole sequences: linear attention with queries C, keys B, values dt x and decays dt A."""
    if SCAN not in _RUNNING.get() or more.get("z") is not None or not chunks_fit(B, hidden_states):
        return original(
            hidden_states, dt, A, B, C, chunk_size=chunk_size, D=D, dt_bias=dt_bias, initial_states=initial_states,
            dt_softplus=dt_softplus, dt_limit=dt_limit, return_final_states=return_final_states, **more,
        )  # fmt: skip
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    first = None if initial_states is None else initial_states.transpose(-1, -2)
    values = (hidden_states * dt[..., None]).to(hidden_states.dtype)
    out, last = linear_attention(C, B, values, A.float() * dt.float(), first)
    if D is not None:
        out = out + (hidden_states * D[..., None]).to(out.dtype)
    return (out, last.transpose(-1, -2).contiguous()) if return_final_states else out


def _scan_step(
    original: Function,
    state: torch.Tensor | SlotState,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    z: torch.Tensor | None = None,
    **more: Any,
) -> torch.Tensor:
    """A step of Mamba-2. The state is updated in place."""
    if isinstance(state, SlotState):
        states, slots = state.states, state.slots_B
    else:
        states, slots = state, torch.arange(len(state), device=state.device)
    runs = SCAN_STEP in _RUNNING.get() and dt_softplus and z is None and mamba_step_fits(hidden_states, B, states)
    # The module expands the numbers of a head to its columns.
    if runs and D is not None and dt_bias is not None and _expanded(dt[0], A[:, 0], A[:, :, 0], D, dt_bias):
        return mamba_step_(hidden_states, dt[..., 0], A[:, 0, 0], B, C, D[:, 0], dt_bias[:, 0], states, slots)
    given = state.gathered() if isinstance(state, SlotState) else state
    out: torch.Tensor = original(
        given, hidden_states, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, **more
    )
    if isinstance(state, SlotState):
        state.store(given)
    return out


def _expanded(*matrices: torch.Tensor) -> bool:
    """Returns whether all columns of each matrix are the same memory."""
    return all(matrix.stride(1) == 0 or matrix.shape[1] == 1 for matrix in matrices)


def _convolution(
    original: Function,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **more: Any,
) -> torch.Tensor:
    runs = CONVOLUTION in _RUNNING.get() and activation in (None, "silu")
    if runs and convolution_fits(hidden_states, weight, bias):
        return convolve(hidden_states, weight, bias, activation == "silu")
    result: torch.Tensor = original(hidden_states, weight, bias, activation=activation, **more)
    return result


def _convolution_step(
    original: Function,
    hidden_states: torch.Tensor,
    conv_state: torch.Tensor | SlotState,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """The convolution of one new token. The state, which keeps the last inputs, is updated in place."""
    if isinstance(conv_state, SlotState):
        states, slots = conv_state.states, conv_state.slots_B
    else:
        states, slots = conv_state, None
    runs = CONVOLUTION_STEP in _RUNNING.get() and activation in (None, "silu")
    kept = states.shape[-1] >= weight.shape[-1] and not torch.is_grad_enabled()
    if runs and kept and hidden_states.shape[-1] == 1 and convolution_fits(hidden_states, weight, bias):
        return convolve_step_(hidden_states, states, weight, bias, activation == "silu", slots)
    given = conv_state.gathered() if isinstance(conv_state, SlotState) else conv_state
    result: torch.Tensor = original(hidden_states, given, weight, bias, activation)
    if isinstance(conv_state, SlotState):
        conv_state.store(given)
    return result


# The functions of transformers' modelling files by name, with the package whose kernels transformers uses instead.
FUNCTIONS: dict[str, tuple[Function, str]] = {
    STEP: (_recurrent_rule, "fla"),
    RULE: (_chunk_rule, "fla"),
    CONVOLUTION: (_convolution, "causal_conv1d"),
    CONVOLUTION_STEP: (_convolution_step, "causal_conv1d"),
    SCAN: (_scan, "mamba_ssm"),
    SCAN_STEP: (_scan_step, "mamba_ssm"),
}


def plug_rules(model: nn.Module) -> list[str]:
    """Replaces the functions in the modelling files of the model. Returns their names, for the log."""
    like = next(model.parameters())
    replaced = []
    for source in sorted({type(module).__module__ for module in model.modules()}):
        file, title = sys.modules.get(source), source.rsplit(".", 1)[-1]
        functions = [name for name in FUNCTIONS if hasattr(file, name)]
        if hasattr(file, WHOLE_SCAN):
            # In training this function of mamba-ssm computes a whole module, and nothing it could be compared with. The
            # plain function does nothing, so that the module calls the functions that are compared.
            setattr(file, WHOLE_SCAN, inspect.unwrap(getattr(file, WHOLE_SCAN)))
        used: set[str] = set()
        for module in model.modules() if functions else ():
            if type(module).__module__ == source:
                names = {name for name in functions if _plug(file, name, f"{name} of {title}", module, like)}
                used |= names
                if names:
                    _use_kernels(module, frozenset(names))
        replaced += [f"{name} of {title} by Triton" for name in FUNCTIONS if name in used]
    return replaced


def _plug(file: Any, name: str, what: str, module: nn.Module, like: torch.Tensor) -> bool:
    """Returns whether the module uses our kernel: its package is not installed or fails the trial, and our kernel
    passes it."""
    sizes = sizes_of(name, module)
    if sizes is None:
        return False
    function, package = FUNCTIONS[name]
    now = getattr(file, name)
    original = getattr(now, ORIGINAL, now)
    plain = inspect.unwrap(original)
    if importlib.util.find_spec(package) is not None:
        if original is not plain and passes(name, what, package, plain, original, sizes, like):
            return False
        original = plain
    ours = partial(function, original)
    setattr(ours, ORIGINAL, original)
    setattr(file, name, ours)
    if name in SEQUENCES and like.is_cuda and like.dtype == torch.float32:
        return False
    return passes(name, what, "Triton", plain, running(name, ours), sizes, like)


def running(name: str, function: Function) -> Function:
    """Returns the replaced function as a module calls it that uses its kernel."""

    def run(*args: Any, **named: Any) -> Any:
        before = _RUNNING.set(frozenset({name}))
        try:
            return function(*args, **named)
        finally:
            _RUNNING.reset(before)

    return run


def _use_kernels(module: nn.Module, names: frozenset[str]) -> None:
    """Makes these functions run their kernels while this module runs."""
    if not hasattr(module, USES_KERNELS):
        module.register_forward_pre_hook(_begin)
        module.register_forward_hook(_end, always_call=True)
    setattr(module, USES_KERNELS, names)


def _begin(module: nn.Module, _: Any) -> None:
    _RUNNING.set(getattr(module, USES_KERNELS))


def _end(*_: Any) -> None:
    _RUNNING.set(frozenset())
