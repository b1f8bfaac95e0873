"""Which module left tolerance first, by how an error grows from its input to its output.

A module whose input is already off may be honest. So the first module in the order of execution is named whose input
agrees and whose output does not; where a child's *input* is the first to be off, its parent made it itself. A parent is
judged by what it makes of its children's outputs, not by the rounding that these add up to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lockstep.parity.replay.systematic import NOTHING, Excess, excess_of, slope_excess
from lockstep.parity.replay.tolerance import Tolerance
from lockstep.tape.digest import norm, relative
from lockstep.tape.format import StepRecord
from lockstep.tape.probe import BACKWARD, FORWARD, ROOT, Event, Trace

# Times by which gradients of honest modules are further off than what they compute forwards.
WAY_BACK = 5.0
# Times by which errors may grow further in the model's own answers: log-probs near 0 are small beside their logits.
ANSWERS = 2.0
# Times by which what is systematic in a module's input, within its limit, may come nearer to it in the output.
PASSED_ON = 3.0


@dataclass(frozen=True)
class Blamed:
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
    """Where the module's own computation went wrong: after this child, before that one."""
    parameter: str | None = None
    """Backwards: the parameter whose gradient is off, where the way back itself is not."""
    systematic: str = ""
    """In words: what does not average out, where the distance alone would be rounding."""


def traces_of(record: StepRecord) -> dict[tuple[str, int], Trace]:
    """The probes of a step by learner and rank."""
    found = {}
    for each in record.info.get("probe", {}).get("traces", []):
        learner, rank = each["learner"], each["rank"]
        prefix = f"probe/{learner}/{rank}/"
        tensors = {name.removeprefix(prefix): t for name, t in record.tensors.items() if name.startswith(prefix)}
        found[learner, rank] = Trace([Event(**event) for event in each["events"]], tensors)
    return found


def blame(
    a: StepRecord, b: StepRecord, tolerance: Tolerance, phases: Sequence[str] = (FORWARD, BACKWARD)
) -> Blamed | None:
    """The first module of the first rank at which two probes part: forwards first, then backwards."""
    ours, theirs = traces_of(a), traces_of(b)
    for phase in phases:
        for learner, rank in sorted(theirs):
            # A probe is the same on every rank, so one of a single process stands against each of many.
            mine = ours.get((learner, rank)) or ours.get((learner, 0))
            if mine is None:
                continue
            found = _first(mine, theirs[learner, rank], phase, learner, rank, tolerance)
            if found is not None:
                return found
    return None


@dataclass(frozen=True)
class _Parted:
    """How far off a module's computation was before and after it parted, and between which of its children."""

    before: float
    after: float
    between: tuple[str | None, str | None]
    systematic: str = ""


@dataclass(frozen=True)
class _Pass:
    """One pass through one module on both sides, and how far apart its inputs and outputs are."""

    one: Event
    other: Event
    error_in: float
    error_out: float
    excess_in: Excess = NOTHING
    excess_out: Excess = NOTHING

    def inside(self, outer: _Pass) -> bool:
        return outer.other.entered < self.other.entered and self.other.left < outer.other.left


def _first(a: Trace, b: Trace, phase: str, learner: str, rank: int, tolerance: Tolerance) -> Blamed | None:
    passes = _aligned(a, b, phase, tolerance)
    alone = phase == BACKWARD and _few_are_off(a, b, tolerance)
    for number, each in enumerate(passes):
        children = _direct(passes[:number], each)
        if not children and any(_encloses(each.other, event) for event in b.events):
            continue  # what it is made of cannot be compared, so neither can its own part be told
        parted = _parted(each, children, phase, tolerance)
        parameter = _parameter(a, b, each, tolerance) if parted is None and alone else None
        if parted is None and parameter is None:
            continue
        cut = _cut_off(a, b, each.one) if phase == BACKWARD else None
        if cut is not None:
            norms = norm(a.outputs(cut)[0]), 0.0
            return Blamed(learner, rank, cut.module, cut.kind, phase, 0.0, 1.0, cut.shapes, (cut.dtypes, []), norms)
        parted = parted or _Parted(each.error_in, parameter[0] if parameter else 0.0, (None, None))
        one, other = each.one, each.other
        return Blamed(
            learner,
            rank,
            one.module,
            one.kind or other.kind,
            phase,
            parted.before,
            parted.after,
            other.shapes,
            (one.dtypes, other.dtypes),
            _norms(a.outputs(one), b.outputs(other)),
            parted.between,
            parameter[1] if parameter else None,
            parted.systematic,
        )
    return None


def _parted(each: _Pass, children: Sequence[_Pass], phase: str, tolerance: Tolerance) -> _Parted | None:
    """Where a module's own computation, between its children, lets the error grow: before, after, and the children.

    What it computes with is what came in and what its children gave so far, so that the rounding that adds up over
    many honest children is not laid at its door.
    """
    floor = tolerance.module * (WAY_BACK if phase == BACKWARD else 1.0)
    growth = tolerance.growth * (ANSWERS if each.one.module == ROOT else 1.0)
    known, passed_on, last = each.error_in, each.excess_in.times, None
    for child in children:
        between = (last, child.one.module)
        if not child.error_in <= max(floor, growth * known):
            return _Parted(known, child.error_in, between)
        if child.excess_in.times > max(1.0, PASSED_ON * passed_on):
            return _Parted(known, child.error_in, between, str(child.excess_in))
        known, last = max(known, child.error_out), child.one.module
        passed_on = max(passed_on, child.excess_out.times)
    if not each.error_out <= max(floor, growth * known):
        return _Parted(known, each.error_out, (last, None))
    if each.excess_out.times > max(1.0, PASSED_ON * passed_on):
        return _Parted(known, each.error_out, (last, None), str(each.excess_out))
    return None


def _direct(before: Sequence[_Pass], outer: _Pass) -> list[_Pass]:
    """The passes that the outer one is made of, without those inside them, in the order of their beginning."""
    inner = [each for each in before if each.inside(outer)]
    direct = [each for each in inner if not any(each.inside(other) for other in inner)]
    return sorted(direct, key=lambda each: each.other.entered)


def _encloses(outer: Event, event: Event) -> bool:
    return event.phase == outer.phase and outer.entered < event.entered and event.left < outer.left


def _aligned(a: Trace, b: Trace, phase: str, tolerance: Tolerance) -> list[_Pass]:
    """Events of both sides by module and occurrence, as B ran them. What one side alone has cannot be compared, nor
    what has another shape there."""
    seen: Counter[str] = Counter()
    known: dict[tuple[str, int], Event] = {}
    for event in a.events:
        if event.phase == phase:
            known[event.module, seen[event.module]] = event
            seen[event.module] += 1
    seen.clear()
    pairs = []
    for event in b.events:
        if event.phase == phase:
            one = known.get((event.module, seen[event.module]))
            seen[event.module] += 1
            if one is not None and (one.inputs, one.outputs, one.shapes) == (event.inputs, event.outputs, event.shapes):
                sides = (a.inputs(one), b.inputs(event)), (a.outputs(one), b.outputs(event))
                shapes = one.shapes[: one.inputs], one.shapes[one.inputs :]
                errors = [_apart(*side) for side in sides]
                judged = (
                    tolerance if event.module != ROOT or _answers(tolerance) else replace(tolerance, systematic=None)
                )
                excess = [_excess(*side, there, phase, judged) for side, there in zip(sides, shapes, strict=True)]
                pairs.append(_Pass(one, event, errors[0], errors[1], excess[0], excess[1]))
    return pairs


def _answers(tolerance: Tolerance) -> bool:
    return tolerance.systematic is not None and tolerance.systematic.answers


def _cut_off(a: Trace, b: Trace, blamed: Event) -> Event | None:
    """Inside the blamed module: the first on A's way back that B ran forwards and never came back to."""
    forward = {event.module for event in b.events if event.phase == FORWARD}
    back = {event.module for event in b.events if event.phase == BACKWARD}
    inside = f"{blamed.module}."
    missing = [
        event
        for event in a.events
        if event.phase == BACKWARD and event.module.startswith(inside) and event.module in forward - back
    ]
    return min(missing, key=lambda event: event.entered, default=None)


def _apart(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    return max((relative(x, y) for x, y in zip(a, b, strict=True)), default=0.0)


def _excess(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    shapes: Sequence[Sequence[int]],
    phase: str,
    tolerance: Tolerance,
) -> Excess:
    limits = tolerance.systematic
    if limits is None:
        return NOTHING
    return excess_of(a, b, shapes, limits.forward if phase == FORWARD else limits.backward)


def _norms(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> tuple[float, float]:
    return (norm(a[0]), norm(b[0])) if a and b else (0.0, 0.0)


def _few_are_off(a: Trace, b: Trace, tolerance: Tolerance) -> bool:
    """Whether gradients are off in single parameters. Where most of them are, no module made them so."""
    names = [name for name in a.tensors if name.startswith("parameter/") and name in b.tensors]
    off = [name for name in names if _gradient_off(a.tensors[name], b.tensors[name], tolerance, 0.0)]
    return 2 * len(off) < len(names)


def _gradient_off(x: torch.Tensor, y: torch.Tensor, tolerance: Tolerance, error_in: float) -> bool:
    if not relative(x, y) <= max(tolerance.gradient, tolerance.growth * error_in):
        return True
    return tolerance.systematic is not None and slope_excess(x, y, tolerance.systematic.gradient).times > 1


def _parameter(a: Trace, b: Trace, each: _Pass, tolerance: Tolerance) -> tuple[float, str] | None:
    """A parameter of the module itself whose gradient is off although what arrived agrees."""
    prefix = f"parameter/{each.one.module}."
    for key, ours in a.tensors.items():
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or "." in name or key not in b.tensors:
            continue
        if _gradient_off(ours, b.tensors[key], tolerance, each.error_in):
            return relative(ours, b.tensors[key]), f"{each.one.module}.{name}"
    return None
