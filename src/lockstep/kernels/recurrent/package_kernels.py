"""The functions of recurrent modules that transformers replaces by kernels of installed packages. Those kernels run on
NVIDIA devices alone: without this guard, a model on a CPU fails where flash-linear-attention is installed.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

STEP, RULE = "torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"
CONVOLUTION, CONVOLUTION_STEP = "causal_conv1d_fn", "causal_conv1d_update"
SCAN, SCAN_STEP, WHOLE_SCAN = (
    "mamba2_chunk_scan",
    "mamba2_selective_state_update",
    "mamba2_split_conv1d_scan_combined",
)
# Attribute of a guarded function.
GUARDED = "lockstep_guarded"


def guard_packages(model: nn.Module) -> None:
    """Makes these functions of the modelling files of the model run plain torch on tensors of other devices."""
    for source in {type(module).__module__ for module in model.modules()}:
        file = sys.modules.get(source)
        for name in (STEP, RULE, CONVOLUTION, CONVOLUTION_STEP, SCAN, SCAN_STEP, WHOLE_SCAN):
            found = getattr(file, name, None)
            if found is not None and hasattr(found, "__wrapped__") and not hasattr(found, GUARDED):
                setattr(file, name, _guarded(found, inspect.unwrap(found)))


def _guarded(found: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def run(*args: Any, **named: Any) -> Any:
        on_device = any(isinstance(given, torch.Tensor) and given.is_cuda for given in (*args, *named.values()))
        return (found if on_device else plain)(*args, **named)

    setattr(run, GUARDED, True)
    return run
