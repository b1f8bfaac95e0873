"""Finds the wrong operator of a module by comparing its operators with float64 results on the host.

Either a *kernel* returns a wrong result for its inputs, or the *code* around the kernels is different: another
constant, dtype or operator. To find wrong code, the operators are compared with those of a clean copy of the module,
which runs on the CPU with standard implementations and the same inputs. A fused operator is compared with the result of
the operators that it replaces.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from lockstep.parity.replay.numpy_modules import Array, NotedValues
from lockstep.parity.replay.numpy_operators import numpy_results
from lockstep.parity.replay.operator_log import Operator, OperatorGraph, OperatorResult, tensors_in
from lockstep.parity.replay.tolerances import TOLERANCES, Tolerance

_PRECISION = {torch.float32: "fp32", torch.float64: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
NONE = torch.zeros(0)


@dataclass(frozen=True)
class WrongOperator:
    """The operator of the replayed module whose result is wrong, and the expected result."""

    fault: Literal["kernel", "code"]
    call: Operator
    clean: Operator | None
    """The corresponding operator call of the clean CPU copy of the module, or None if there is none."""
    error: float
    actual: torch.Tensor
    expected: torch.Tensor
    why: str
    index: int = 0
    """The index of the wrong result among the operator's results."""


def wrong_kernel(calls: Sequence[Operator], tolerance: Tolerance | None = None) -> WrongOperator | None:
    """Returns the first operator call whose result differs from a float64 computation with the same inputs."""
    for call in calls:
        # Operators without tensor inputs cannot be tested.
        expected = in_double(call) if call.inputs and not call.allocates else None
        if expected is None:
            continue
        for index, (actual, wanted) in enumerate(zip(call.outputs, expected, strict=False)):
            if not actual.is_floating_point() or actual.shape != wanted.shape:
                continue
            allowed = (tolerance or TOLERANCES[_PRECISION.get(actual.dtype, "fp32")]).module
            error = relative_difference(actual, wanted)
            if not error <= 4 * allowed:
                why = f"its result on {call.device} differs from a float64 computation on the host with the same inputs"
                return WrongOperator("kernel", call, None, error, actual, wanted, why, index)
    return None


def other_code(calls: Sequence[Operator], clean: Sequence[Operator], tolerance: Tolerance) -> WrongOperator | None:
    """Returns the first operator, or the first group of operators, whose result differs from that of the clean copy of
    the module.

    If results of the module differ, only the operators that contribute to these results are compared. Where both
    modules run the same operators, the operators are compared one by one. Where the modules run different operators
    (such as one fused operator instead of many), only the results that are used outside the group of operators are
    compared.
    """
    ours, theirs = OperatorGraph(calls), OperatorGraph(clean)
    wrong = [(end, near) for end in ours.ends() if (near := _differing_counterpart(end, theirs, tolerance)) is not None]
    if wrong and all(near for _, near in wrong):
        ours, theirs = ours.before([end for end, _ in wrong]), theirs.before([near for _, near in wrong if near])
    # The number of tensor inputs distinguishes multiplication by a scalar from multiplication of two tensors.
    kinds, wanted_kinds = ([(call.name, len(call.inputs)) for call in graph.calls] for graph in (ours, theirs))
    for tag, i, j, k, m in difflib.SequenceMatcher(None, kinds, wanted_kinds, autojunk=False).get_opcodes():
        if tag != "equal":
            found = _other_part(ours, theirs, range(i, j), range(k, m), tolerance)
            if found is not None:
                return found
            continue
        for mine, wanted in zip(range(i, j), range(k, m), strict=True):
            found = _compared(ours.calls[mine], theirs.calls[wanted], theirs, tolerance)
            if found is not None:
                return found
    if not wrong:
        return None
    end, near = wrong[0]
    return _end(end, near, "its result leaves the module and differs from that of the clean CPU copy of the module")


def other_values(
    calls: Sequence[Operator], noted: NotedValues, outputs: Sequence[torch.Tensor], tolerance: Tolerance
) -> WrongOperator | None:
    """Returns the first operator whose result differs from the float64 reference of the module.

    This comparison finds code that is also wrong in the clean copy, such as a library function or a modelling file. A
    correct module may skip some intermediate values of the reference. So a missing value is reported only if an
    operator that usually computes such a value has a different result.
    """
    ours = [one for one in OperatorGraph(calls).results() if one.tensor.is_floating_point()]
    expected = [value for value, _ in noted.values]
    strange = [one for one in ours if not any(_same(one.tensor, value, tolerance) for value in expected)]
    for value, words in noted.values:
        if any(_same(one.tensor, value, tolerance) for one in ours):
            continue
        for word in words:
            found = next((one for one in strange if word in one.call.name and _alike(one, value, word)), None)
            if found is not None:
                return _instead(found, value)
    last = [one for one in strange if any(_same(one.tensor, out.double().numpy(), tolerance) for out in outputs)]
    return _instead(last[-1], expected[-1]) if last and expected else None


def _alike(one: OperatorResult, value: Array, word: str) -> bool:
    """Returns whether an operator's result may correspond to this value of the reference. Sizes must be equal, except
    for attention, which may pad sequences."""
    return one.tensor.numel() == value.size or word == "attention"


def _same(tensor: torch.Tensor, value: Array, tolerance: Tolerance) -> bool:
    if tensor.numel() != value.size:
        return False
    layouts = [value, value.swapaxes(0, 1)] if value.ndim == 3 else [value]
    return any(
        relative_difference(tensor.flatten(), torch.from_numpy(layout.reshape(-1))) <= tolerance.module
        for layout in layouts
    )


def _instead(found: OperatorResult, value: Array) -> WrongOperator:
    """Returns the description of an operator whose result differs from a value of the float64 reference."""
    why = "the float64 reference of the module has a different value here"
    if found.tensor.numel() != value.size:
        return WrongOperator("code", found.call, None, math.inf, found.tensor, NONE, why, found.index)
    layouts = [value, value.swapaxes(0, 1)] if value.ndim == 3 else [value]
    expected = [torch.from_numpy(layout.reshape(-1).copy()).reshape(found.tensor.shape) for layout in layouts]
    errors = [relative_difference(found.tensor, one) for one in expected]
    best = errors.index(min(errors))
    wanted = expected[best].to(found.tensor.dtype)
    return WrongOperator("code", found.call, None, errors[best], found.tensor, wanted, why, found.index)


def _differing_counterpart(
    end: OperatorResult, theirs: OperatorGraph, tolerance: Tolerance
) -> OperatorResult | Literal[False] | None:
    """Returns the result of the module's clean copy that the replayed result `end` should equal. Returns None if the
    two results agree, or False if the clean copy has no corresponding result."""
    error, near = _nearest(end.tensor, theirs.ends())
    if near is None:
        error, _ = _nearest(end.tensor, theirs.results())
    return None if error <= tolerance.module else near or False


def _compared(call: Operator, clean: Operator, theirs: OperatorGraph, tolerance: Tolerance) -> WrongOperator | None:
    errors = [relative_difference(x, y) for x, y in zip(call.inputs, clean.inputs, strict=True)]
    error_in = max(errors, default=0.0)
    for index, (actual, expected) in enumerate(zip(call.outputs, clean.outputs, strict=False)):
        error = relative_difference(actual, expected)
        if not error <= max(tolerance.module, tolerance.growth * error_in):
            found, wanted = _differing_settings(call, clean)
            why = f"with {found} instead of {wanted}" if found else "its inputs agree, but its result differs"
            return WrongOperator("code", call, clean, error, actual, expected, why, index)
    if call.writes or error_in <= tolerance.module:
        return None
    index = errors.index(error_in)
    alone = len(errors) == 1 or min(errors) <= tolerance.module
    if not alone or _source(call, index) or _source(clean, index):
        return None  # the two calls of the operator are unrelated
    if all(_nearest(made, theirs.results())[0] <= tolerance.module for made in call.outputs):
        return None  # the clean copy of the module also computes this result
    # No operator produced this input: it is a weight, a buffer or a constant.
    why = (
        f"its input number {index + 1} (a weight, a buffer or a constant) differs from that of the clean CPU copy of "
        "the module"
    )
    return WrongOperator("code", call, clean, error_in, call.inputs[index], clean.inputs[index], why)


def _source(call: Operator, index: int) -> bool:
    return index < len(call.sources) and call.sources[index] is not None


def _other_part(
    ours: OperatorGraph, theirs: OperatorGraph, mine: range, wanted: range, tolerance: Tolerance
) -> WrongOperator | None:
    """Compares a group of operators of the replayed module with a different group of operators of its clean copy. The
    difference is harmless if the results that are used outside the groups agree."""
    if not mine:
        # At this point only the clean copy of the module runs operators. A missing operator is harmless if it changes
        # nothing, or if the replayed module computes its result elsewhere.
        candidates = theirs.given(wanted) + ours.results()
        if _first_missing(theirs.leaving(wanted), candidates, tolerance) is None:
            return None
        clean = theirs.calls[wanted[0]]
        why = f"the clean CPU copy of the module runs {clean.name} here, and the replayed module does not"
        ends = [
            (end, near) for end in ours.ends() if (near := _differing_counterpart(end, theirs, tolerance)) is not None
        ]
        if ends:
            # The reported operator is the one whose result should have passed through the missing operator.
            return _end(*ends[0], why)
        expected = clean.outputs[0] if clean.outputs else NONE
        return WrongOperator("code", clean, clean, math.inf, NONE, expected, why)
    if not wanted:
        candidates = ours.given(mine) + theirs.results()
        if _first_missing(ours.leaving(mine), candidates, tolerance) is None:
            return None
        # The reported operator is the first one whose result the clean copy of the module does not have.
        return _needless(_first_missing(ours.made(mine), candidates, tolerance))
    found = _first_missing(ours.leaving(mine), theirs.results(), tolerance)
    if found is None:
        return None
    part = [one for one in ours.made(mine) if _first_missing([one], theirs.results(), tolerance)]
    call = _suspect([one.call for one in part if one.index == 0], found.call)
    instead = f"the clean CPU copy of the module runs {_list(theirs, wanted)} instead"
    if _coarser(call):
        return _needless(OperatorResult(call, 0), instead)
    near = _nearest(found.tensor, theirs.leaving(wanted))[1] or _nearest(found.tensor, theirs.results())[1]
    if call is found.call:
        return _end(found, near or False, instead)
    why = (
        f"{_list(ours, mine)} run where the clean CPU copy of the module runs {_list(theirs, wanted)}; the results "
        "differ"
    )
    return WrongOperator("code", call, near.call if near else None, math.inf, call.outputs[0], NONE, why)


def _first_missing(
    results: Sequence[OperatorResult], candidates: Sequence[OperatorResult], tolerance: Tolerance
) -> OperatorResult | None:
    """Returns the first of `results` that equals none of the candidates within the tolerance."""
    return next((one for one in results if not _nearest(one.tensor, candidates)[0] <= tolerance.module), None)


def _nearest(tensor: torch.Tensor, candidates: Sequence[OperatorResult]) -> tuple[float, OperatorResult | None]:
    """Returns the candidate that is closest to the tensor, and its error. Shapes may differ if the number of elements
    is equal. Among equally close candidates the last one is returned."""
    best: tuple[float, OperatorResult | None] = (math.inf, None)
    for one in reversed(candidates):
        if one.tensor.numel() == tensor.numel():
            error = relative_difference(tensor.flatten(), one.tensor.flatten())
            best = (error, one) if best[1] is None or error < best[0] else best
    return best


def _suspect(part: Sequence[Operator], end: Operator) -> Operator:
    """Returns the operator of the group `part` that most likely caused a differing result. A cast to lower precision is
    the first choice. The second choice is an operator that exists only on the device and cannot be tested. The last
    choice is `end`, which computed the differing result."""
    casts = [call for call in part if _coarser(call)]
    foreign = [call for call in part if call.inputs and in_double(call) is None]
    return next(iter(casts or foreign), end)


def _coarser(call: Operator) -> bool:
    kinds = [one.dtype for one in (*call.inputs[:1], *call.outputs[:1]) if one.is_floating_point()]
    return bool(_cast(call)) and len(kinds) == 2 and torch.finfo(kinds[1]).eps > torch.finfo(kinds[0]).eps


def _end(end: OperatorResult, near: OperatorResult | Literal[False], why: str) -> WrongOperator:
    """Returns the description of the operator that computed a differing result of the module. `near` is the expected
    result."""
    if near is False:
        return WrongOperator("code", end.call, None, math.inf, end.tensor, NONE, why, end.index)
    expected = near.tensor.reshape(end.tensor.shape)
    return WrongOperator(
        "code", end.call, near.call, relative_difference(end.tensor, expected), end.tensor, expected, why, end.index
    )


def _needless(
    made: OperatorResult | None, instead: str = "the clean CPU copy of the module does not run it"
) -> WrongOperator | None:
    """Returns the description of an operator that should not run. The input of this operator is already the expected
    result."""
    if made is None:
        return None
    expected = next((one for one in made.call.inputs if one.shape == made.tensor.shape), NONE)
    why = instead + _cast(made.call)
    return WrongOperator("code", made.call, None, math.inf, made.tensor, expected, why, made.index)


def _list(graph: OperatorGraph, part: range) -> str:
    names = [graph.calls[index].name for index in part]
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, ... and {names[-1]} ({len(names)} operators)"


def _cast(call: Operator) -> str:
    kinds = [str(setting) for setting in call.settings if isinstance(setting, torch.dtype)]
    return f" (to {kinds[0]})" if kinds else ""


def _differing_settings(call: Operator, clean: Operator) -> tuple[str, str]:
    ours, theirs = call.settings, clean.settings
    for mine, wanted in zip(ours, theirs, strict=False):
        if not isinstance(mine, torch.device | torch.layout) and mine != wanted:
            return repr(mine), repr(wanted)
    return "", ""


def in_double(call: Operator) -> list[torch.Tensor] | None:
    """Runs an operator call in float64 on the host, in numpy if `numpy_operators.py` has the operator, otherwise in
    torch. Returns None if the call cannot run on the host.

    numpy is preferred, so that a faulty torch operator is not checked by itself.
    """
    found = numpy_results(call)
    return in_torch(call) if found is None else found


def in_torch(call: Operator) -> list[torch.Tensor] | None:
    """Runs the call in torch's float64 on the CPU."""
    return run_on_cpu(call, _doubled)


def run_on_cpu(call: Operator, convert: Callable[[Any], Any]) -> list[torch.Tensor] | None:
    """Runs an operator call on the CPU with converted arguments. Returns None if the CPU has no such operator or does
    not support the dtype."""
    try:
        args, kwargs = pytree.tree_map(convert, (call.args, call.kwargs))
        with torch.no_grad():
            return tensors_in(call.function(*args, **kwargs))
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return None


def _doubled(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        # Always copies, because the operator may write to its input.
        return leaf.to(torch.float64 if leaf.is_floating_point() else leaf.dtype, copy=True)
    if isinstance(leaf, torch.dtype) and leaf.is_floating_point:
        return torch.float64
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def relative_difference(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """Returns the norm of the difference of two tensors, divided by the larger of their norms. The result is infinite
    if the shapes differ or if a value is finite in only one tensor."""
    if actual.shape != wanted.shape:
        return math.inf
    x, y = actual.double(), wanted.double()
    differ = (x != y) & ~(x.isnan() & y.isnan())
    difference = float((x - y)[differ].norm())
    size = max(float(one[one.isfinite()].norm()) for one in (x, y))
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else 0.0
