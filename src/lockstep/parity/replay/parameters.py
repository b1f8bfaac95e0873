"""Digests of every parameter's gradient or weights, held against each other, and whose rows are off."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.parity.replay.checks import finite
from lockstep.parity.replay.systematic import Bound, Excess, overall_slope, slope_excess
from lockstep.tape.digest import BLOCKS, distance, distances, norm
from lockstep.tape.format import StepRecord

# A gradient far below the others is rounding: it is held to this share of the average one.
NEGLIGIBLE = 1e-3


@dataclass(frozen=True)
class Worst:
    """The parameter that is off most, as a share of its size."""

    name: str
    error: float
    where: str


def worst_parameter(
    one: StepRecord,
    other: StepRecord,
    prefix: str,
    allowed: float,
    *,
    total: float = 0.0,
    sizes: Mapping[str, float] | None = None,
) -> Worst | None:
    """Of the digests below `prefix`; the size is a parameter's own norm (of all, `total`), or that in `sizes`."""
    names = [name for name in one.tensors if name.startswith(prefix)]
    errors: dict[str, float] = {}
    floor = NEGLIGIBLE * total / max(1, len(names)) ** 0.5
    for name in names:
        short = name.removeprefix(prefix)
        if name not in other.tensors:
            return Worst(short, math.inf, "on one side only")
        x, y = one.tensors[name], other.tensors[name]
        size = max(norm(x), norm(y), floor) if sizes is None else sizes.get(short, 0.0)
        errors[short] = finite(distance(x, y) / size) if size else 0.0
    if not errors:
        return None
    worst = max(errors, key=lambda name: errors[name])
    off = sum(not error <= allowed for error in errors.values())
    x, y = one.tensors[prefix + worst], other.tensors[prefix + worst]
    where = f"norm {norm(x):.6g} against {norm(y):.6g}{_rows(x, y)}"
    return Worst(worst, errors[worst], f"{where}; {off} of {len(errors)} parameters are off" if off else where)


def worst_slope(
    one: StepRecord, other: StepRecord, prefix: str, bound: Bound, inherited: float
) -> tuple[str, Excess, str] | None:
    """The parameter whose digests below `prefix` differ most by a factor: its name, how far, and where it lies."""
    found = {
        name.removeprefix(prefix): slope_excess(one.tensors[name], other.tensors[name], bound, inherited)
        for name in one.tensors
        if name.startswith(prefix) and name in other.tensors
    }
    if not any(excess.allowed for excess in found.values()):
        return None
    worst = max(found, key=lambda name: found[name].times)
    x, y = one.tensors[prefix + worst], other.tensors[prefix + worst]
    off = sum(excess.times > 1 for excess in found.values())
    return worst, found[worst], f"norm {norm(x):.6g} against {norm(y):.6g}; {off} of {len(found)} parameters are off"


def overall(one: StepRecord, other: StepRecord, prefix: str, bound: Bound, inherited: float) -> Excess:
    """A factor by which all digests below `prefix` differ together."""
    names = [name for name in one.tensors if name.startswith(prefix) and name in other.tensors]
    return overall_slope([(one.tensors[name], other.tensors[name]) for name in names], bound, inherited)


def _rows(x: torch.Tensor, y: torch.Tensor) -> str:
    """In which eighths of the rows the difference lies, where it is not everywhere."""
    errors = distances(x, y)
    off = [i for i, error in enumerate(errors) if error > 0.05 * max(errors)]
    if not off or len(off) == BLOCKS or math.isinf(max(errors)):
        return ""
    return f", in eighths {off[0] + 1} to {off[-1] + 1} of its rows"


def whose_rows(indices: Iterable[int], shape: Sequence[int], ranks: int) -> str:
    """The rank that holds all of these weights of a parameter, where the parameter is divided by rows."""
    if ranks == 1 or not shape:
        return ""
    wide, each = math.prod(shape[1:]), -(-shape[0] // ranks)
    found = {index // wide // each for index in indices}
    return f" (rank {found.pop()} alone)" if len(found) == 1 else ""
