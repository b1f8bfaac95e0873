"""Finds the first module at which two runs diverge: the error grows too much from its input to its output.

A module whose input already differs may be correct. So the reported module is the first one in the order of execution
whose input agrees between both runs and whose output differs. If a child module's *input* is the first tensor that
differs, its parent module computed that input wrongly. The test of a parent module covers only what it computes from
its children's outputs, so it ignores rounding that the children accumulate.
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

# In the backward pass, the tolerance of a module is larger by this factor than in the forward pass.
BACKWARD_FACTOR = 5.0
# The tolerance for the model's final outputs is larger by this factor, because log-probs near 0 are small compared with
# the logits from which they are computed.
ANSWERS = 2.0
# From a module's input to its output, a systematic difference (relative to its limit) may grow by this factor.
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
    """The error appears in the module's own computation, between these two child modules. None means the start or the
    end of the module."""
    parameter: str | None = None
    """In the backward pass, the parameter whose gradient differs although the gradients that enter and leave the module
    agree."""
    systematic: str = ""
    """A description of the systematic difference, if only the systematic difference exceeds its limit. The description
    is empty if the distance of the tensors exceeds its limit."""


def traces_of(record: StepRecord) -> dict[tuple[str, int], Trace]:
    """Returns the recorded inputs and outputs of all modules in a step, by learner (policy or critic) and rank."""
    found = {}
    for each in record.info.get("probe", {}).get("traces", []):
        learner, rank = each["learner"], each["rank"]
        events = [Event(**event) for event in each["events"]]
        found[learner, rank] = Trace(events, below(record.tensors, f"probe/{learner}/{rank}/"))
    return found


def first_diverged(
    a: StepRecord, b: StepRecord, tolerance: Tolerance, phases: Sequence[str] = (FORWARD, BACKWARD)
) -> DivergedModule | None:
    """Returns the first module at which two traces diverge, first in the forward passes of all ranks, then in the
    backward passes."""
    ours, theirs = traces_of(a), traces_of(b)
    for phase in phases:
        for learner, rank in sorted(theirs):
            # All ranks trace the same sequences, so the trace of a single-process run can be compared with the trace of
            # each rank.
            mine = ours.get((learner, rank)) or ours.get((learner, 0))
            if mine is not None:
                found = _first(mine, theirs[learner, rank], phase, learner, rank, tolerance)
                if found is not None:
                    return found
    return None


@dataclass(frozen=True)
class _Growth:
    """The error before and after the module's own computation, and the two child modules between which the error
    grew."""

    before: float
    after: float
    between: tuple[str | None, str | None]
    systematic: str = ""


@dataclass(frozen=True)
class _ModuleCall:
    """One call of a module in both runs, with the differences of its inputs and outputs."""

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
            continue  # no child of this module can be compared
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
    """Returns where the error grows in a module's own computation (outside its child modules), or None if it does not
    grow.

    The inputs of the module's own computation are the module's inputs and the outputs of the children that have run. So
    rounding that accumulates over many correct children is not attributed to the module.
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
    """Returns the calls of the direct child modules of `outer`, in the order of their start."""
    inner = [each for each in before if each.inside(outer)]
    direct = [each for each in inner if not any(each.inside(other) for other in inner)]
    return sorted(direct, key=lambda each: each.other.entered)


def _encloses(outer: Event, event: Event) -> bool:
    return outer.entered < event.entered and event.left < outer.left


def _aligned(a: Trace, b: Trace, phase: str, tolerance: Tolerance) -> list[_ModuleCall]:
    """Pairs the module calls of A and B by module name and by how often the module was called before, in B's order.
    Calls that only one run has, and calls with different shapes, are skipped."""
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
    """Returns the module calls of the forward or backward pass. The key of a call is the module's name and how often
    the module was called before."""
    seen: Counter[str] = Counter()
    found = []
    for event in trace.events:
        if event.phase == phase:
            found.append(((event.module, seen[event.module]), event))
            seen[event.module] += 1
    return found


def _detached(a: Trace, b: Trace, diverged: Event) -> Event | None:
    """Returns the first submodule of the diverged module that has a backward pass in A and only a forward pass in B."""
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
    """Returns whether the gradients of less than half of the parameters differ. If the gradients of more parameters
    differ, no single module is the cause."""
    names = [name for name in a.tensors if name.startswith("parameter/") and name in b.tensors]
    differing = [name for name in names if _gradient_differs(a.tensors[name], b.tensors[name], tolerance, 0.0)]
    return 2 * len(differing) < len(names)


def _gradient_differs(x: torch.Tensor, y: torch.Tensor, tolerance: Tolerance, error_in: float) -> bool:
    if not relative(x, y) <= max(tolerance.gradient, tolerance.growth * error_in):
        return True
    return tolerance.systematic is not None and slope_excess(x, y, tolerance.systematic.gradient).times > 1


def _parameter(a: Trace, b: Trace, each: _ModuleCall, tolerance: Tolerance) -> tuple[float, str] | None:
    """Returns a parameter of the module (not of its children) whose gradient differs although the gradients at the
    module's outputs agree."""
    for name, ours in below(a.tensors, f"parameter/{each.one.module}.").items():
        theirs = b.tensors.get(f"parameter/{each.one.module}.{name}")
        if "." not in name and theirs is not None and _gradient_differs(ours, theirs, tolerance, each.error_in):
            return relative(ours, theirs), f"{each.one.module}.{name}"
    return None
