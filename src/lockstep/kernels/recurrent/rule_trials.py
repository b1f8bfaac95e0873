"""Trials of the kernels that replace functions of recurrent modules: a kernel must give the numbers of the plain-torch
function of transformers on random input, with the head counts and sizes of the module. Compilers have bugs: Triton 3.4
to 3.7 gives wrong gradients for some kernels of the gated delta rule on Hopper.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import sigmoid
from triton.errors import TritonError

from lockstep.kernels.fused_modules import KernelTrial, drawn

Function = Callable[..., Any]
# Runs a function on the input of a trial, and returns what is compared.
TrialRun = Callable[[Function], Sequence[torch.Tensor]]
# More tokens than a chunk has.
TOKENS = 70
ROWS = 2

# The kernels of whole sequences multiply numbers in the dtype of the model, the plain functions in fp32.
TRIAL = KernelTrial(
    {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2},
    smallest=1e-20,
    gradients=True,
    wait=lambda: None,
    errors=(
        TypeError,
        RuntimeError,
        ValueError,
        AttributeError,
        AssertionError,
        OSError,
        subprocess.SubprocessError,
        TritonError,
    ),
)
# Results by function, kernel, sizes, dtype and device.
PASSED: dict[tuple[Any, ...], bool] = {}


def sizes_of(name: str, module: Any) -> tuple[int, ...] | None:
    """Returns the sizes that the inputs of a trial need, or None if the module does not have them."""
    if name.startswith("causal_conv1d"):
        parts = [module, getattr(module, "conv1d", None), getattr(module, "conv", None)]
        found = next((part for part in parts if isinstance(part, nn.Conv1d)), None)
        return None if found is None else (*found.weight.shape[::2], int(found.bias is not None))
    mamba = ("num_heads", "n_groups", "ssm_state_size", "head_dim")
    names = mamba if name.startswith("mamba2") else ("num_v_heads", "head_k_dim", "head_v_dim")
    sizes = tuple(size for each in names if isinstance(size := getattr(module, each, None), int))
    return sizes if len(sizes) == len(names) else None


def passes(
    name: str,
    what: str,
    kernel: str,
    plain: Function,
    function: Function,
    sizes: tuple[int, ...],
    like: torch.Tensor,
) -> bool:
    """Returns whether the function gives the numbers of the plain one on inputs of these sizes. Warns if not."""
    if like.dtype not in TRIAL.tolerance:
        return False
    key = (what, kernel, sizes, like.dtype, like.device)
    if key not in PASSED:
        run = EXAMPLES[name](like, *sizes)
        PASSED[key] = TRIAL.alike(what, kernel, lambda: run(plain), lambda: run(function))
    return PASSED[key]


def _with_gradients(
    function: Callable[..., Sequence[torch.Tensor]], given: Sequence[torch.Tensor], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Returns outputs and gradients in one dtype, which selects the tolerance."""
    inputs = [tensor.clone().requires_grad_() for tensor in given]
    outputs = function(*inputs)
    upstream = [drawn(*out.shape, like=out, seed=90 + number) for number, out in enumerate(outputs)]
    gradients = torch.autograd.grad(outputs, inputs, upstream)
    return [tensor.detach().to(dtype) for tensor in (*outputs, *gradients)]


def _delta_inputs(like: torch.Tensor, tokens: int, heads: int, size: int, width: int) -> list[torch.Tensor]:
    query, key = (drawn(ROWS, tokens, heads, size, like=like, seed=seed) for seed in (1, 2))
    # Similar keys: then the system of a chunk is far from the unit matrix.
    key = key + 2 * drawn(1, 1, heads, size, like=like, seed=3)
    value = drawn(ROWS, tokens, heads, width, like=like, seed=4)
    exact = like.new_zeros(1, dtype=torch.float32)
    decay = -0.2 * drawn(ROWS, tokens, heads, like=exact, seed=5).abs()
    beta = sigmoid(drawn(ROWS, tokens, heads, like=like, seed=6))
    return [query, key, value, decay, beta, drawn(ROWS, heads, size, width, like=exact, seed=7)]


def _rule(like: torch.Tensor, heads: int, size: int, width: int) -> TrialRun:
    given = _delta_inputs(like, TOKENS, heads, size, width)

    def run(function: Function) -> Sequence[torch.Tensor]:
        def call(q: Any, k: Any, v: Any, g: Any, b: Any, first: Any) -> Sequence[torch.Tensor]:
            more: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
            out: Sequence[torch.Tensor] = function(q, k, v, g=g, beta=b, initial_state=first, **more)
            return out

        return _with_gradients(call, given, like.dtype)

    return run


def _rule_step(like: torch.Tensor, heads: int, size: int, width: int) -> TrialRun:
    given = _delta_inputs(like, 1, heads, size, width)

    @torch.no_grad()
    def run(function: Function) -> Sequence[torch.Tensor]:
        q, k, v, g, b, first = given
        more: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        outputs = function(q, k, v, g=g, beta=b, initial_state=first.clone(), **more)
        return [tensor.to(like.dtype) for tensor in outputs]

    return run


def _convolution(like: torch.Tensor, channels: int, length: int, biased: int) -> TrialRun:
    given = [drawn(ROWS, TOKENS, channels, like=like, seed=1), drawn(channels, length, like=like, seed=2)]
    given += [drawn(channels, like=like, seed=3)] if biased else []

    def run(function: Function) -> Sequence[torch.Tensor]:
        def call(x: Any, weight: Any, bias: Any = None) -> Sequence[torch.Tensor]:
            return [function(x.transpose(1, 2), weight, bias, activation="silu")]

        return _with_gradients(call, given, like.dtype)

    return run


def _convolution_step(like: torch.Tensor, channels: int, length: int, biased: int) -> TrialRun:
    x, state = drawn(ROWS, channels, 1, like=like, seed=1), drawn(ROWS, channels, length, like=like, seed=2)
    weight = drawn(channels, length, like=like, seed=3)
    bias = drawn(channels, like=like, seed=4) if biased else None

    @torch.no_grad()
    def run(function: Function) -> Sequence[torch.Tensor]:
        kept = state.clone()
        return [function(x, kept, weight, bias, "silu"), kept]

    return run


def _scan_inputs(
    like: torch.Tensor, tokens: int, heads: int, groups: int, size: int, width: int
) -> dict[str, torch.Tensor]:
    exact = like.new_zeros(1, dtype=torch.float32)
    key, query = (drawn(ROWS, tokens, groups, size, like=like, seed=seed) * size**-0.5 for seed in (1, 2))
    return {
        "hidden_states": drawn(ROWS, tokens, heads, width, like=like, seed=3),
        "dt": drawn(ROWS, tokens, heads, like=like, seed=4) - 2,
        "A": -drawn(heads, like=exact, seed=5).abs() - 0.1,
        "B": key,
        "C": query,
        "D": drawn(heads, like=like, seed=6),
        "dt_bias": drawn(heads, like=like, seed=7),
        "initial_states": drawn(ROWS, heads, width, size, like=exact, seed=8),
    }


def _scan(like: torch.Tensor, heads: int, groups: int, size: int, width: int) -> TrialRun:
    given = _scan_inputs(like, TOKENS, heads, groups, size, width)

    def run(function: Function) -> Sequence[torch.Tensor]:
        def call(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            named: dict[str, Any] = dict(zip(given, tensors, strict=True))
            more: dict[str, Any] = {"chunk_size": 64, "dt_softplus": True, "return_final_states": True}
            first = [named.pop(name) for name in ("hidden_states", "dt", "A", "B", "C")]
            out: Sequence[torch.Tensor] = function(*first, **named, **more)
            return [part.to(like.dtype) for part in out]

        return _with_gradients(call, list(given.values()), like.dtype)

    return run


def _scan_step(like: torch.Tensor, heads: int, groups: int, size: int, width: int) -> TrialRun:
    given = _scan_inputs(like, 1, heads, groups, size, width)
    x, dt, key, query = (given[name][:, 0] for name in ("hidden_states", "dt", "B", "C"))
    decay = given["A"][:, None, None].expand(-1, width, size)
    skip, bias = (given[name][:, None].expand(-1, width) for name in ("D", "dt_bias"))

    @torch.no_grad()
    def run(function: Function) -> Sequence[torch.Tensor]:
        state = given["initial_states"].clone()
        steps = dt[..., None].expand(-1, -1, width)
        out = function(state, x, steps, decay, key, query, skip, z=None, dt_bias=bias, dt_softplus=True)
        return [out, state.to(like.dtype)]

    return run


EXAMPLES: dict[str, Callable[..., TrialRun]] = {
    "torch_chunk_gated_delta_rule": _rule,
    "torch_recurrent_gated_delta_rule": _rule_step,
    "causal_conv1d_fn": _convolution,
    "causal_conv1d_update": _convolution_step,
    "mamba2_chunk_scan": _scan,
    "mamba2_selective_state_update": _scan_step,
}
