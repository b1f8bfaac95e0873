"""Which module left tolerance first, by how an error grows from its input to its output.

A module whose input is already off may be honest. So the first module in the order of execution is named whose input
agrees and whose output does not; where a child's *input* is the first to be off, its parent made it itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.parity.tolerance import Tolerance
from lockstep.tape.digest import norm, relative
from lockstep.tape.format import StepRecord
from lockstep.tape.probe import BACKWARD, FORWARD, Event, Trace


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


def traces_of(record: StepRecord) -> dict[tuple[str, int], Trace]:
    """The probes of a step by learner and rank."""
    found = {}
    for each in record.info.get("probe", {}).get("traces", []):
        learner, rank = each["learner"], each["rank"]
        prefix = f"probe/{learner}/{rank}/"
        tensors = {name.removeprefix(prefix): t for name, t in record.tensors.items() if name.startswith(prefix)}
        found[learner, rank] = Trace([Event(**event) for event in each["events"]], tensors)
    return found


def blame(a: StepRecord, b: StepRecord, tolerance: Tolerance) -> Blamed | None:
    """The first module of the first rank at which two probes part: forwards first, then backwards."""
    ours, theirs = traces_of(a), traces_of(b)
    for phase in (FORWARD, BACKWARD):
        for learner, rank in sorted(theirs):
            # A probe is the same on every rank, so one of a single process stands against each of many.
            mine = ours.get((learner, rank)) or ours.get((learner, 0))
            if mine is None:
                continue
            found = _first(mine, theirs[learner, rank], phase, learner, rank, tolerance)
            if found is not None:
                return found
    return None


def _first(a: Trace, b: Trace, phase: str, learner: str, rank: int, tolerance: Tolerance) -> Blamed | None:
    pairs = _aligned(a, b, phase)
    for number, (one, other) in enumerate(pairs):
        error_in = _apart(a.inputs(one), b.inputs(other))
        error_out = _apart(a.outputs(one), b.outputs(other))
        if not _grew(error_in, error_out, tolerance):
            parameter = _parameter(a, b, one, error_in, tolerance) if phase == BACKWARD else None
            if parameter is None:
                continue
            error_out, parameter_name = parameter
        else:
            parameter_name = None
        return Blamed(
            learner,
            rank,
            one.module,
            one.kind or other.kind,
            phase,
            error_in,
            error_out,
            other.shapes,
            (one.dtypes, other.dtypes),
            _norms(a.outputs(one), b.outputs(other)),
            _between(a, b, pairs[:number], one, tolerance) if parameter_name is None else (None, None),
            parameter_name,
        )
    return None


def _aligned(a: Trace, b: Trace, phase: str) -> list[tuple[Event, Event]]:
    """Events of both sides by module and occurrence, as B ran them. What one side alone has cannot be compared."""
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
            if one is not None and (one.inputs, one.outputs) == (event.inputs, event.outputs):
                pairs.append((one, event))
    return pairs


def _apart(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    return max((relative(x, y) for x, y in zip(a, b, strict=True)), default=0.0)


def _grew(error_in: float, error_out: float, tolerance: Tolerance) -> bool:
    return not error_out <= max(tolerance.module, tolerance.growth * error_in)


def _norms(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> tuple[float, float]:
    return (norm(a[0]), norm(b[0])) if a and b else (0.0, 0.0)


def _parameter(a: Trace, b: Trace, event: Event, error_in: float, tolerance: Tolerance) -> tuple[float, str] | None:
    """A parameter of the module itself whose gradient is off although what arrived agrees."""
    prefix = f"parameter/{event.module}."
    for key, ours in a.tensors.items():
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and "." not in name and key in b.tensors:
            error = relative(ours, b.tensors[key])
            if not error <= max(tolerance.gradient, tolerance.growth * error_in):
                return error, f"{event.module}.{name}"
    return None


def _between(
    a: Trace, b: Trace, before: Sequence[tuple[Event, Event]], blamed: Event, tolerance: Tolerance
) -> tuple[str | None, str | None]:
    """The module's children around the place where its own computation went wrong."""
    last = following = None
    inside = [(one, other) for one, other in before if blamed.entered < one.entered and one.left < blamed.left]
    for one, other in inside:
        if _apart(a.inputs(one), b.inputs(other)) > tolerance.module:
            following = one.module
            break
        last = one.module
    return last, following
