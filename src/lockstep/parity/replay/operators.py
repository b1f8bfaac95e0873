"""Which operator of a module is off: its parts run again in double precision on the CPU, which is the judge.

Two kinds of fault. A *kernel* gives another result than its operator has, on the very inputs it was given. The *code*
around the kernels asks for something else: another constant, another dtype, another operator; then the operators are
held against those of a clean copy of the module, which is given the same inputs.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from lockstep.parity.replay.oplog import Operator
from lockstep.parity.replay.tolerance import TOLERANCES, Tolerance

_PRECISION = {torch.float32: "fp32", torch.float64: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Culprit:
    """The operator that is off, and what it should have been."""

    fault: Literal["kernel", "code"]
    call: Operator
    clean: Operator | None
    """The clean module's operator at this place; None where it has none."""
    error: float
    actual: torch.Tensor
    expected: torch.Tensor
    why: str


def wrong_kernel(calls: Sequence[Operator], tolerance: Tolerance | None = None) -> Culprit | None:
    """The first operator whose result is not what its inputs give in double precision."""
    for call in calls:
        # What is made from nothing cannot be judged.
        expected = in_double(call) if call.inputs and not call.unset else None
        if expected is None:
            continue
        for actual, wanted in zip(call.outputs, expected, strict=False):
            if not actual.is_floating_point() or actual.shape != wanted.shape:
                continue
            allowed = (tolerance or TOLERANCES[_PRECISION.get(actual.dtype, "fp32")]).module
            error = apart(actual, wanted)
            if not error <= 4 * allowed:
                why = f"on {call.device} it gives another result than the same inputs do in float64 on the CPU"
                return Culprit("kernel", call, None, error, actual, wanted, why)
    return None


def other_code(calls: Sequence[Operator], clean: Sequence[Operator], tolerance: Tolerance) -> Culprit | None:
    """The first operator that is not the clean module's, or that parts from it although its inputs agree."""
    calls, clean = ([call for call in some if not call.unset] for some in (calls, clean))
    names, wanted = [call.name for call in calls], [call.name for call in clean]
    for tag, i, j, k, m in difflib.SequenceMatcher(None, names, wanted, autojunk=False).get_opcodes():
        if tag == "equal":
            for call, other in zip(calls[i:j], clean[k:m], strict=True):
                found = _parted(call, other, tolerance)
                if found is not None:
                    return found
        else:
            return _unlike(calls[i:j], clean[k:m])
    return None


def _parted(call: Operator, clean: Operator, tolerance: Tolerance) -> Culprit | None:
    error_in = max((apart(x, y) for x, y in zip(call.inputs, clean.inputs, strict=False)), default=0.0)
    for actual, wanted in zip(call.outputs, clean.outputs, strict=False):
        error = apart(actual, wanted)
        if not error <= max(tolerance.module, tolerance.growth * error_in):
            theirs, ours = _settings_apart(call, clean)
            why = f"with {theirs} instead of {ours}" if theirs else "its inputs agree, its result does not"
            return Culprit("code", call, clean, error, actual, wanted, why)
    pairs = list(zip(call.inputs, clean.inputs, strict=False))
    if pairs and not call.writes and not error_in <= tolerance.module:
        # Something that is no operator brought it in: a weight, a buffer, a constant.
        place = max(range(len(pairs)), key=lambda i: apart(*pairs[i]))
        actual, wanted = pairs[place]
        why = f"its input number {place + 1} is not the clean module's: a weight, a buffer or a constant"
        return Culprit("code", call, clean, error_in, actual, wanted, why)
    return None


def _unlike(calls: Sequence[Operator], clean: Sequence[Operator]) -> Culprit | None:
    """Other operators than the clean module's: which of the two has more to say depends on who has any."""
    call, other = (calls[0] if calls else None), (clean[0] if clean else None)
    if call is None and other is None:
        return None
    named = call or other
    assert named is not None
    nothing = torch.zeros(0)
    actual = call.outputs[0] if call and call.outputs else nothing
    if call is not None and (other is None or _cast(call)):
        # What it was before an operator that should not be there changed it.
        expected = next((one for one in call.inputs if one.shape == actual.shape), nothing)
    else:
        expected = other.outputs[0] if other and other.outputs else nothing
    if call is None:
        why = f"the clean module runs {named.name} here, this one does not"
    elif other is None:
        why = f"the clean module does not run it{_cast(call)}"
    else:
        why = f"the clean module runs {other.name} instead{_cast(call)}"
    return Culprit("code", named, other, float("inf"), actual, expected, why)


def _cast(call: Operator) -> str:
    kinds = [str(setting) for setting in call.settings if isinstance(setting, torch.dtype)]
    return f" (to {kinds[0]})" if kinds else ""


def _settings_apart(call: Operator, clean: Operator) -> tuple[str, str]:
    ours, theirs = call.settings, clean.settings
    for mine, wanted in zip(ours, theirs, strict=False):
        if not isinstance(mine, torch.device | torch.layout) and mine != wanted:
            return repr(mine), repr(wanted)
    return "", ""


@torch.no_grad()
def in_double(call: Operator) -> list[torch.Tensor] | None:
    """The same call on the same inputs in float64 on the CPU; None where it cannot be asked there."""
    try:
        args, kwargs = pytree.tree_map(_doubled, (call.args, call.kwargs))
        result = call.function(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return None  # an operator of the device alone, or one without float64
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _doubled(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        # Always a copy: the operator may write to it.
        return leaf.to(torch.float64 if leaf.is_floating_point() else leaf.dtype, copy=True)
    if isinstance(leaf, torch.dtype) and leaf.is_floating_point:
        return torch.float64
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return leaf


def apart(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """The difference as a share of the larger one's size; infinite of other shapes, or where one alone is finite."""
    if actual.shape != wanted.shape:
        return math.inf
    x, y = actual.double(), wanted.double()
    differ = (x != y) & ~(x.isnan() & y.isnan())
    difference = float((x - y)[differ].norm())
    size = max(float(one[one.isfinite()].norm()) for one in (x, y))
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else 0.0
