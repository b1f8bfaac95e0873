"""Finds the first module that diverges, by how the error grows from its input to its output.

A module whose input already differs may be correct. So the first module in the order of execution whose input agrees
and whose output does not is reported. If a child's *input* is the first to differ, its parent computed it wrongly. A
parent is tested by what it computes from its children's outputs, not by the rounding that its children accumulate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.parity.replay.tolerances import NOTHING, Excess, Tolerance, excess_of, slope_excess
from lockstep.tape.digest import norm, relative
from lockstep.tape.module_trace import BACKWARD, FORWARD, ROOT, Event, Trace
from lockstep.tape.tape_format import StepRecord, below

# The gradients of correct modules may differ by this factor more than forward outputs.
BACKWARD_FACTOR = 5.0
# Errors may grow by this factor more in the model's final outputs: log-probs near 0 are small compared with logits.
ANSWERS = 2.0
# If the input has a systematic difference within its limit, the output may be closer to its limit by this factor.
PASSED_ON = 3.0


@dataclass(frozen=True)
class DivergedModule:
    learner: str
    rank: int
    module: str
    kind: str
    phase: str
    error_in: float
    error_out: float
    shapes: list[list[int]]
    dtypes: tuple[list[str], list[str]]
    norms: tuple[float, float]
    between: tuple[str | None, str | None] = (None, None)
    """The error appears in the module's computation outside its children, after this child and before that one."""
    parameter: str | None = None
    """In the backward pass: the parameter whose gradient differs although the gradients through the module agree."""
    systematic: str = ""
    """The systematic difference as text, if rounding could explain the distance."""


def traces_of(record: StepRecord) -> dict[tuple[str, int], Trace]:
    """Returns the module traces of a step by learner and rank."""
    found = {}
    for each in record.info.get("probe", {}).get("traces", []):
        learner, rank = each["learner"], each["rank"]
        events = [Event(**event) for event in each["events"]]
        found[learner, rank] = Trace(events, below(record.tensors, f"probe/{learner}/{rank}/"))
    return found


def first_diverged(
    a: StepRecord, b: StepRecord, tolerance: Tolerance, phases: Sequence[str] = (FORWARD, BACKWARD)
) -> DivergedModule | None:
    """Returns the first module at which two traces diverge: forward first, then backward, rank by rank."""
    ours, theirs = traces_of(a), traces_of(b)
    for phase in phases:
        for learner, rank in sorted(theirs):
            # All ranks trace the same sequences, so a trace of one process can be compared with each rank's.
            mine = ours.get((learner, rank)) or ours.get((learner, 0))
            if mine is not None:
                found = _first(mine, theirs[learner, rank], phase, learner, rank, tolerance)
                if found is not None:
                    return found
    return None


@dataclass(frozen=True)
class _Growth:
    """The error before and after a module's computation outside its children, and between which children it grew."""

    before: float
    after: float
    between: tuple[str | None, str | None]
    systematic: str = ""


@dataclass(frozen=True)
class _ModuleCall:
    """One call of a module on both sides, with the differences of its inputs and outputs."""

    one: Event
    other: Event
    error_in: float
    error_out: float
    excess_in: Excess = NOTHING
    excess_out: Excess = NOTHING

    def inside(self, outer: _ModuleCall) -> bool:
        return _encloses(outer.other, self.other)


def _first(a: Trace, b: Trace, phase: str, learner: str, rank: int, tolerance: Tolerance) -> DivergedModule | None:
    calls = _aligned(a, b, phase, tolerance)
    check_parameters = phase == BACKWARD and _few_gradients_differ(a, b, tolerance)
    for number, each in enumerate(calls):
        children = _direct(calls[:number], each)
        if not children and any(event.phase == phase and _encloses(each.other, event) for event in b.events):
            continue  # its children cannot be compared, so the computation outside them cannot either
        growth = _growth(each, children, phase, tolerance)
        parameter = _parameter(a, b, each, tolerance) if growth is None and check_parameters else None
        if growth is None and parameter is None:
            continue
        one, other = each.one, each.other
        detached = _detached(a, b, one) if phase == BACKWARD else None
        if detached is not None:
            norms = norm(a.outputs(detached)[0]), 0.0
            shapes = detached.shapes
            dtypes: tuple[list[str], list[str]] = (detached.dtypes, [])
            return DivergedModule(learner, rank, detached.module, detached.kind, phase, 0.0, 1.0, shapes, dtypes, norms)
        growth = growth or _Growth(each.error_in, parameter[0] if parameter else 0.0, (None, None))
        return DivergedModule(
            learner,
            rank,
            one.module,
            one.kind or other.kind,
            phase,
            growth.before,
            growth.after,
            other.shapes,
            (one.dtypes, other.dtypes),
            _norms(a.outputs(one), b.outputs(other)),
            growth.between,
            parameter[1] if parameter else None,
            growth.systematic,
        )
    return None


def _growth(each: _ModuleCall, children: Sequence[_ModuleCall], phase: str, tolerance: Tolerance) -> _Growth | None:
    """Returns where the error grows in a module's computation outside its children; None if it does not.

    The computation's inputs are the module's inputs and the outputs of the children so far. So rounding that
    accumulates over many correct children is not attributed to the module.
    """
    floor = tolerance.module * (BACKWARD_FACTOR if phase == BACKWARD else 1.0)
    growth = tolerance.growth * (ANSWERS if each.one.module == ROOT else 1.0)
    error, times = each.error_in, each.excess_in.times
    last: str | None = None

    def grown(now: float, excess: Excess, child: str | None) -> _Growth | None:
        if not now <= max(floor, growth * error):
            return _Growth(error, now, (last, child))
        if excess.times > max(1.0, PASSED_ON * times):
            return _Growth(error, now, (last, child), str(excess))
        return None

    for child in children:
        found = grown(child.error_in, child.excess_in, child.one.module)
        if found is not None:
            return found
        error, last = max(error, child.error_out), child.one.module
        times = max(times, child.excess_out.times)
    return grown(each.error_out, each.excess_out, None)


def _direct(before: Sequence[_ModuleCall], outer: _ModuleCall) -> list[_ModuleCall]:
    """Returns the outer call's direct children, in the order of their start."""
    inner = [each for each in before if each.inside(outer)]
    direct = [each for each in inner if not any(each.inside(other) for other in inner)]
    return sorted(direct, key=lambda each: each.other.entered)


def _encloses(outer: Event, event: Event) -> bool:
    return outer.entered < event.entered and event.left < outer.left


def _aligned(a: Trace, b: Trace, phase: str, tolerance: Tolerance) -> list[_ModuleCall]:
    """Pairs events by module and occurrence, in B's order. Events of one side only, and events with different shapes,
    cannot be compared."""
    ours, limits = dict(_occurrences(a, phase)), tolerance.systematic
    pairs = []
    for key, event in _occurrences(b, phase):
        one = ours.get(key)
        if one is None or (one.inputs, one.outputs, one.shapes) != (event.inputs, event.outputs, event.shapes):
            continue
        sides = (a.inputs(one), b.inputs(event)), (a.outputs(one), b.outputs(event))
        shapes = one.shapes[: one.inputs], one.shapes[one.inputs :]
        errors = [max((relative(x, y) for x, y in zip(*side, strict=True)), default=0.0) for side in sides]
        excess = [NOTHING, NOTHING]
        if limits is not None and (event.module != ROOT or limits.answers):
            bounds = limits.forward if phase == FORWARD else limits.backward
            excess = [excess_of(*side, there, bounds) for side, there in zip(sides, shapes, strict=True)]
        pairs.append(_ModuleCall(one, event, errors[0], errors[1], excess[0], excess[1]))
    return pairs


def _occurrences(trace: Trace, phase: str) -> list[tuple[tuple[str, int], Event]]:
    """Returns the events of a phase, each with its module and how often the module was called before."""
    seen: Counter[str] = Counter()
    found = []
    for event in trace.events:
        if event.phase == phase:
            found.append(((event.module, seen[event.module]), event))
            seen[event.module] += 1
    return found


def _detached(a: Trace, b: Trace, diverged: Event) -> Event | None:
    """Returns the first module inside the diverged one that A ran backward and B ran only forward."""
    forward, backward = ({e.module for e in b.events if e.phase == phase} for phase in (FORWARD, BACKWARD))
    inside = f"{diverged.module}."
    missing = [
        event
        for event in a.events
        if event.phase == BACKWARD and event.module.startswith(inside) and event.module in forward - backward
    ]
    return min(missing, key=lambda event: event.entered, default=None)


def _norms(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> tuple[float, float]:
    return (norm(a[0]), norm(b[0])) if a and b else (0.0, 0.0)


def _few_gradients_differ(a: Trace, b: Trace, tolerance: Tolerance) -> bool:
    """Returns whether only some parameters' gradients differ. If most do, no single module is the cause."""
    names = [name for name in a.tensors if name.startswith("parameter/") and name in b.tensors]
    differing = [name for name in names if _gradient_differs(a.tensors[name], b.tensors[name], tolerance, 0.0)]
    return 2 * len(differing) < len(names)


def _gradient_differs(x: torch.Tensor, y: torch.Tensor, tolerance: Tolerance, error_in: float) -> bool:
    if not relative(x, y) <= max(tolerance.gradient, tolerance.growth * error_in):
        return True
    return tolerance.systematic is not None and slope_excess(x, y, tolerance.systematic.gradient).times > 1


def _parameter(a: Trace, b: Trace, each: _ModuleCall, tolerance: Tolerance) -> tuple[float, str] | None:
    """Returns a parameter of the module itself whose gradient differs although the incoming gradients agree."""
    for name, ours in below(a.tensors, f"parameter/{each.one.module}.").items():
        theirs = b.tensors.get(f"parameter/{each.one.module}.{name}")
        if "." not in name and theirs is not None and _gradient_differs(ours, theirs, tolerance, each.error_in):
            return relative(ours, theirs), f"{each.one.module}.{name}"
    return None
