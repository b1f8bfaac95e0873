"""Which operator of a module is off: its parts run again in double precision on the host, which is the judge.

Two kinds of fault. A *kernel* gives another result than its operator has, on the very inputs it was given. The *code*
around the kernels asks for something else: another constant, another dtype, another operator; then the operators are
held against those of a clean copy of the module, which is given the same inputs. What is fused there and not here is
held against the result of what it stands for, not against the first of its parts.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from lockstep.parity.replay.flow import Flow, Result
from lockstep.parity.replay.host_operators import on_host
from lockstep.parity.replay.oplog import Operator
from lockstep.parity.replay.reference import Array, Noted
from lockstep.parity.replay.tolerance import TOLERANCES, Tolerance

_PRECISION = {torch.float32: "fp32", torch.float64: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Culprit:
    """The operator that is off, and what it should have been."""

    fault: Literal["kernel", "code"]
    call: Operator
    clean: Operator | None
    """The clean module's operator at this point; None where it has none."""
    error: float
    actual: torch.Tensor
    expected: torch.Tensor
    why: str
    index: int = 0
    """Which of the operator's results it is."""


def wrong_kernel(calls: Sequence[Operator], tolerance: Tolerance | None = None) -> Culprit | None:
    """The first operator whose result is not what its inputs give in double precision."""
    for call in calls:
        # What is made from nothing cannot be judged.
        expected = in_double(call) if call.inputs and not call.unset else None
        if expected is None:
            continue
        for index, (actual, wanted) in enumerate(zip(call.outputs, expected, strict=False)):
            if not actual.is_floating_point() or actual.shape != wanted.shape:
                continue
            allowed = (tolerance or TOLERANCES[_PRECISION.get(actual.dtype, "fp32")]).module
            error = relative_difference(actual, wanted)
            if not error <= 4 * allowed:
                why = f"on {call.device} it gives another result than the same inputs do in float64 on the host"
                return Culprit("kernel", call, None, error, actual, wanted, why, index)
    return None


def other_code(calls: Sequence[Operator], clean: Sequence[Operator], tolerance: Tolerance) -> Culprit | None:
    """The first operator, or the first part of the module, whose result is not the clean module's.

    Where results of the module are wrong, only what leads to them is looked at. Operators of the same kind are
    compared one by one. Where the two run others (a fused operator in the place of many), the part as a whole is judged
    by what leaves it: what lies inside has nothing to be compared with.
    """
    ours, theirs = Flow(calls), Flow(clean)
    wrong = [(end, near) for end in ours.ends() if (near := _unlike(end, theirs, tolerance)) is not None]
    if wrong and all(near for _, near in wrong):
        ours, theirs = ours.before([end for end, _ in wrong]), theirs.before([near for _, near in wrong if near])
    # A product with a number is another operator than one of two tensors.
    kinds, wanted_kinds = ([(call.name, len(call.inputs)) for call in flow.calls] for flow in (ours, theirs))
    for tag, i, j, k, m in difflib.SequenceMatcher(None, kinds, wanted_kinds, autojunk=False).get_opcodes():
        if tag != "equal":
            found = _other_part(ours, theirs, range(i, j), range(k, m), tolerance)
            if found is not None:
                return found
            continue
        for mine, wanted in zip(range(i, j), range(k, m), strict=True):
            found = _parted(ours.calls[mine], theirs.calls[wanted], theirs, tolerance)
            if found is not None:
                return found
    if not wrong:
        return None
    end, near = wrong[0]
    return _end(end, near, "what it gives leaves the module, and is not what leaves the clean one")


def other_values(
    calls: Sequence[Operator], noted: Noted, outputs: Sequence[torch.Tensor], tolerance: Tolerance
) -> Culprit | None:
    """The first operator that gives something else than a float64 reference has at that point.

    It finds what neither a kernel nor a clean copy of the module shows: code that is wrong for both, such as a function
    of the library or a modelling file. A right module need not have every value of the reference, so a value that is
    missing counts where an operator of its kind gives another one.
    """
    ours = [one for one in Flow(calls).results() if one.tensor.is_floating_point()]
    known = [value for value, _ in noted.values]
    strange = [one for one in ours if not any(_same(one.tensor, value, tolerance) for value in known)]
    for value, words in noted.values:
        if any(_same(one.tensor, value, tolerance) for one in ours):
            continue
        for word in words:
            found = next((one for one in strange if word in one.call.name and _alike(one, value, word)), None)
            if found is not None:
                return _instead(found, value)
    last = [one for one in strange if any(_same(one.tensor, out.double().numpy(), tolerance) for out in outputs)]
    return _instead(last[-1], known[-1]) if last and known else None


def _alike(one: Result, value: Array, word: str) -> bool:
    """Whether it may stand for the value. Attention may lay sequences out with padding."""
    return one.tensor.numel() == value.size or word == "attention"


def _same(tensor: torch.Tensor, value: Array, tolerance: Tolerance) -> bool:
    if tensor.numel() != value.size:
        return False
    layouts = [value, value.swapaxes(0, 1)] if value.ndim == 3 else [value]
    return any(
        relative_difference(tensor.flatten(), torch.from_numpy(layout.reshape(-1))) <= tolerance.module
        for layout in layouts
    )


def _instead(found: Result, value: Array) -> Culprit:
    """An operator's result beside the reference's value."""
    why = "the float64 reference of the module has another value here"
    if found.tensor.numel() != value.size:
        return Culprit("code", found.call, None, math.inf, found.tensor, torch.zeros(0), why, found.index)
    layouts = [value, value.swapaxes(0, 1)] if value.ndim == 3 else [value]
    expected = [torch.from_numpy(layout.reshape(-1).copy()).reshape(found.tensor.shape) for layout in layouts]
    errors = [relative_difference(found.tensor, one) for one in expected]
    best = errors.index(min(errors))
    wanted = expected[best].to(found.tensor.dtype)
    return Culprit("code", found.call, None, errors[best], found.tensor, wanted, why, found.index)


def _unlike(end: Result, theirs: Flow, tolerance: Tolerance) -> Result | Literal[False] | None:
    """What leaves the clean module in the place of this result; None where it is the same, False where nothing is."""
    error, near = _nearest(end.tensor, theirs.ends())
    if near is None:
        error, _ = _nearest(end.tensor, theirs.results())
    return None if error <= tolerance.module else near or False


def _parted(call: Operator, clean: Operator, theirs: Flow, tolerance: Tolerance) -> Culprit | None:
    errors = [relative_difference(x, y) for x, y in zip(call.inputs, clean.inputs, strict=True)]
    error_in = max(errors, default=0.0)
    for index, (actual, expected) in enumerate(zip(call.outputs, clean.outputs, strict=False)):
        error = relative_difference(actual, expected)
        if not error <= max(tolerance.module, tolerance.growth * error_in):
            other, own = _differing_settings(call, clean)
            why = f"with {other} instead of {own}" if other else "its inputs agree, its result does not"
            return Culprit("code", call, clean, error, actual, expected, why, index)
    if call.writes or error_in <= tolerance.module:
        return None
    index = errors.index(error_in)
    alone = len(errors) == 1 or min(errors) <= tolerance.module
    if not alone or _source(call, index) or _source(clean, index):
        return None  # of the same kind by chance: it works on something else
    if all(_nearest(made, theirs.results())[0] <= tolerance.module for made in call.outputs):
        return None  # the clean module does this as well, elsewhere
    # Something that is no operator brought it in: a weight, a buffer, a constant.
    why = f"its input number {index + 1} is not the clean module's: a weight, a buffer or a constant"
    return Culprit("code", call, clean, error_in, call.inputs[index], clean.inputs[index], why)


def _source(call: Operator, index: int) -> bool:
    return index < len(call.sources) and call.sources[index] is not None


def _other_part(ours: Flow, theirs: Flow, mine: range, wanted: range, tolerance: Tolerance) -> Culprit | None:
    """Operators that the other module does not have here: harmless where the same results leave."""
    if not mine:
        # What the clean module does here must change nothing, or be done elsewhere.
        known = theirs.given(wanted) + ours.results()
        if _first_unknown(theirs.leaving(wanted), known, tolerance) is None:
            return None
        clean = theirs.calls[wanted[0]]
        why = f"the clean module runs {clean.name} here, this one does not"
        ends = [(end, near) for end in ours.ends() if (near := _unlike(end, theirs, tolerance)) is not None]
        if ends:
            # What was not done shows in the result that lacks it.
            return _end(*ends[0], why)
        expected = clean.outputs[0] if clean.outputs else torch.zeros(0)
        return Culprit("code", clean, clean, math.inf, torch.zeros(0), expected, why)
    if not wanted:
        known = ours.given(mine) + theirs.results()
        if _first_unknown(ours.leaving(mine), known, tolerance) is None:
            return None
        # The first that makes something which nobody else has.
        return _needless(_first_unknown(ours.made(mine), known, tolerance))
    found = _first_unknown(ours.leaving(mine), theirs.results(), tolerance)
    if found is None:
        return None
    part = [one for one in ours.made(mine) if _first_unknown([one], theirs.results(), tolerance)]
    call = _suspect([one.call for one in part if one.index == 0], found.call)
    instead = f"the clean module runs {_list(theirs, wanted)} instead"
    if _coarser(call):
        return _needless(Result(call, 0), instead)
    near = _nearest(found.tensor, theirs.leaving(wanted))[1] or _nearest(found.tensor, theirs.results())[1]
    if call is found.call:
        return _end(found, near or False, instead)
    why = f"{_list(ours, mine)} stand where the clean module runs {_list(theirs, wanted)}, and give something else"
    nothing = torch.zeros(0)
    return Culprit("code", call, near.call if near else None, math.inf, call.outputs[0], nothing, why)


def _first_unknown(results: Sequence[Result], known: Sequence[Result], tolerance: Tolerance) -> Result | None:
    """The first of the results that is not among the known ones."""
    return next((one for one in results if not _nearest(one.tensor, known)[0] <= tolerance.module), None)


def _nearest(tensor: torch.Tensor, known: Sequence[Result]) -> tuple[float, Result | None]:
    """The same numbers may stand in another shape. Last ones first: a part's result is what it ends with."""
    best: tuple[float, Result | None] = (math.inf, None)
    for one in reversed(known):
        if one.tensor.numel() == tensor.numel():
            error = relative_difference(tensor.flatten(), one.tensor.flatten())
            best = (error, one) if best[1] is None or error < best[0] else best
    return best


def _suspect(part: Sequence[Operator], end: Operator) -> Operator:
    """Of a part whose results the clean module does not have: a cast to less precision, an operator that only the
    device has and nobody could judge, or its end."""
    casts = [call for call in part if _coarser(call)]
    foreign = [call for call in part if call.inputs and in_double(call) is None]
    return next(iter(casts or foreign), end)


def _coarser(call: Operator) -> bool:
    kinds = [one.dtype for one in (*call.inputs[:1], *call.outputs[:1]) if one.is_floating_point()]
    return bool(_cast(call)) and len(kinds) == 2 and torch.finfo(kinds[1]).eps > torch.finfo(kinds[0]).eps


def _end(end: Result, near: Result | Literal[False], why: str) -> Culprit:
    """A result against what should stand in its place."""
    if near is False:
        return Culprit("code", end.call, None, math.inf, end.tensor, torch.zeros(0), why, end.index)
    expected = near.tensor.reshape(end.tensor.shape)
    return Culprit(
        "code", end.call, near.call, relative_difference(end.tensor, expected), end.tensor, expected, why, end.index
    )


def _needless(made: Result | None, instead: str = "the clean module does not run it") -> Culprit | None:
    """An operator that should not be there: what it was given is what is wanted."""
    if made is None:
        return None
    expected = next((one for one in made.call.inputs if one.shape == made.tensor.shape), torch.zeros(0))
    why = instead + _cast(made.call)
    return Culprit("code", made.call, None, math.inf, made.tensor, expected, why, made.index)


def _list(flow: Flow, part: range) -> str:
    names = [flow.calls[index].name for index in part]
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
    """The same call on the same inputs in float64 on the host, by numpy where it has the operator: a library that is
    wrong must not judge itself. None where it cannot be asked there."""
    found = on_host(call)
    return in_torch(call) if found is None else found


@torch.no_grad()
def in_torch(call: Operator) -> list[torch.Tensor] | None:
    """By torch's own float64 on the CPU."""
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


def relative_difference(actual: torch.Tensor, wanted: torch.Tensor) -> float:
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
