"""Rounding or fault? What two tensors differ by, taken apart into what averages out and what does not.

Rounding of bf16 is large and without a direction: over n numbers it averages out as 1/sqrt(n). A fault is systematic.
So five sums over many numbers are held together besides the distance. Each is a share of the tensor's size, and is what
a fault of that size makes it: a factor of 1.01 has a slope of 0.01. How far a sum may be off is

    floor + DEVIATIONS * rounding / sqrt(min(n, most))

with the rounding that these two tensors themselves show. `most` is how many roundings are independent: the same token
or weight is rounded in the same way every time. Floors and `most` are from clean pairs (`docs/replay.md`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lockstep.tape.digest import distance, norm, profiles, size_of, sketch

DEVIATIONS = 5.0
# Shares of a difference that always count as rounding: sums by columns and rows are estimates from a few projections.
LEAST = {"slope": 0.1, "spread": 0.1, "offset": 0.5, "columns": 0.5, "rows": 0.5}
# Rounding of fewer numbers does not average out.
ENOUGH = 32


@dataclass(frozen=True)
class Bound:
    floor: float
    most: float = math.inf

    def allowed(self, rounding: float, count: float) -> float:
        return self.floor + DEVIATIONS * rounding / math.sqrt(max(1.0, min(count, self.most)))


@dataclass(frozen=True)
class Limits:
    """By kind of sum, for what modules compute forwards and backwards, and for gradients, movements and log-probs."""

    forward: Mapping[str, Bound]
    backward: Mapping[str, Bound]
    gradient: Bound
    """Of each parameter's."""
    gradients: Bound
    """Of all parameters' together."""
    movement: Bound
    logprob_slope: Bound
    logprob_offset: Bound
    loss: float
    """Of the loss's slopes, besides what log-probabilities and advantages are off by."""
    answers: bool = True
    """Whether the model's own answers are judged as a module's outputs are. Of a model that has learned something a few
    unlikely tokens are most of their size, so that little averages out; log-probs are judged by themselves anyhow."""


# Floors are 2 to 3 times the worst of 44 clean pairs of the tiny models, bf16 against bf16 and against fp32.
BF16 = Limits(
    forward={
        "slope": Bound(3e-3, 1000),
        "spread": Bound(5e-3, 1000),
        "offset": Bound(2e-2, 100),
        "columns": Bound(2e-2, 100),
        "rows": Bound(2e-2, 100),
    },
    backward={
        "slope": Bound(2.5e-2, 50),
        "offset": Bound(2e-2, 100),
        "columns": Bound(8e-2, 100),
        "rows": Bound(0.15, 100),
    },
    gradient=Bound(2e-2, 50),
    gradients=Bound(2e-2, 50),
    movement=Bound(0.1),
    logprob_slope=Bound(2e-3, 1000),
    logprob_offset=Bound(5e-3, 100),
    loss=2e-3,
)

# One side's weights are rounded: that is no rounding of numbers by themselves, but another model, and does not average
# out. Gradients that nearly cancel (pairs of DPO, queries and keys, biases) turn round by more than they are off
# otherwise: clean replays of trained tiny models, SFT, DPO and GRPO, on CPU and H200, showed slopes of 0.17 in biases,
# 0.07 in weights and 0.025 in all gradients together.
MIXED = replace(
    BF16,
    backward={**BF16.backward, "slope": Bound(0.15, 50), "columns": Bound(0.25, 100), "rows": Bound(0.3, 100)},
    gradient=Bound(0.35, 50),
    gradients=Bound(6e-2, 50),
    answers=False,
)


@dataclass(frozen=True)
class Systematic:
    """How B differs from A, as shares of A's size."""

    noise: float
    """The whole difference, rounding and all."""
    values: Mapping[str, float]
    """slope: of B by A, least squares, less 1. spread: the same of both less their means. offset: how far the columns'
    means are apart, columns and rows: how far their sizes are; root mean squares over columns or rows."""
    counts: Mapping[str, float]
    """How many numbers stand behind each."""
    spread_share: float = 1.0
    """The share of the squared size that is not the mean's: the spread is judged as a part of that."""

    def rounding(self, kind: str) -> float:
        """What is left of the difference without this kind of it, and never less than `LEAST` of it."""
        noise = self.noise / math.sqrt(self.spread_share) if kind == "spread" else self.noise
        return _left(noise, self.values[kind], LEAST[kind])

    def excess(self, bounds: Mapping[str, Bound]) -> Excess:
        """The sum that is furthest beyond, or nearest to, what it may be off by."""
        every = [
            Excess(kind, self.values[kind], bound.allowed(self.rounding(kind), self.counts[kind]))
            for kind, bound in bounds.items()
            if kind in self.values
        ]
        return max(every, key=lambda one: one.times)


@dataclass(frozen=True)
class Excess:
    kind: str
    value: float
    allowed: float

    @property
    def times(self) -> float:
        return self.value / self.allowed if self.allowed else 0.0

    def __str__(self) -> str:
        return f"{self.kind} off by {self.value:.2g}, rounding explains {self.allowed:.2g}"


NOTHING = Excess("", 0.0, 0.0)


def systematic(a: torch.Tensor, b: torch.Tensor, shape: Sequence[int]) -> Systematic | None:
    """Of two digests of tensors of this shape; None where one has no profiles, is 0, not finite or too small."""
    ours, theirs = profiles(a), profiles(b)
    size, difference = norm(a), distance(a, b)
    if ours is None or theirs is None or not size or not math.isfinite(norm(b)) or not math.isfinite(size + difference):
        return None
    rows, columns = size_of(shape)
    if rows * columns < ENOUGH:
        return None
    by = {name: _root_mean_square(theirs[name] - ours[name]) for name in ours}
    of = {name: _root_mean_square(ours[name]) for name in ours}
    values = {
        "slope": abs(slope(a, b)),
        "offset": by["column_sums"] / (size * rows**0.5),
        "columns": by["column_squares"] / (2 * of["column_squares"]) if of["column_squares"] else 0.0,
        "rows": by["row_squares"] / (2 * of["row_squares"]) if of["row_squares"] else 0.0,
    }
    counts: dict[str, float] = {"slope": rows * columns, "offset": rows, "columns": rows, "rows": columns}
    spread = _spread(a, b, rows * columns)
    if spread is None:
        return Systematic(difference / size, values, counts)
    values["spread"], counts["spread"] = spread[0], rows * columns
    return Systematic(difference / size, values, counts, spread[1])


def slope(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of B by A, least squares, less 1.

    |b|^2 = |a|^2 + 2 <a, b - a> + |b - a|^2, and the slope is 1 + <a, b - a> / |a|^2.
    """
    return (norm(b) ** 2 - norm(a) ** 2 - distance(a, b) ** 2) / (2 * norm(a) ** 2)


def _spread(a: torch.Tensor, b: torch.Tensor, count: int) -> tuple[float, float] | None:
    """The slope without the means, and the share of the size that is not the mean; None where that is little."""
    means = float(a[1]), float(b[1])
    inner = (norm(a) ** 2 + norm(b) ** 2 - distance(a, b) ** 2) / 2
    variance = norm(a) ** 2 - count * means[0] ** 2
    share = variance / norm(a) ** 2
    if share < 0.01:
        return None
    return abs((inner - count * means[0] * means[1]) / variance - 1), share


def movement_slope(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> tuple[float, float, int] | None:
    """Of B's movement by A's, from the digests before and after of each: the slope less 1, the rounding, the count.

    A digest's sketch is linear, so that of a movement is the difference of two.
    """
    ours, theirs = (sketch(y) - sketch(x) for x, y in zip(before, after, strict=True))
    size = float(ours.square().sum())
    if not size or not math.isfinite(size) or not bool(torch.isfinite(theirs).all()):
        return None
    off = float((ours * theirs).sum()) / size - 1
    rounding = float((theirs - (1 + off) * ours).norm()) / math.sqrt(size)
    return off, rounding, len(ours)


def _left(noise: float, value: float, least: float) -> float:
    return math.sqrt(max(noise**2 - value**2, (least * noise) ** 2))


def _root_mean_square(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def slope_excess(a: torch.Tensor, b: torch.Tensor, bound: Bound, inherited: float = 0.0) -> Excess:
    """Of a parameter's gradient or the like; `inherited` is what it may be off by besides."""
    if profiles(a) is None or profiles(b) is None or not norm(a) or not math.isfinite(norm(a) + distance(a, b)):
        return NOTHING
    off = abs(slope(a, b))
    rounding = _left(distance(a, b) / norm(a), off, LEAST["slope"])
    return Excess("slope", off, bound.allowed(rounding, bound.most) + inherited)


def overall_slope(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], bound: Bound, inherited: float) -> Excess:
    """Of many tensors as one."""
    known = [(a, b) for a, b in pairs if profiles(a) is not None and profiles(b) is not None]
    size = sum(norm(a) ** 2 for a, _ in known)
    difference = sum(distance(a, b) ** 2 for a, b in known)
    if not size or not math.isfinite(size + difference):
        return NOTHING
    off = abs(sum(slope(a, b) * norm(a) ** 2 for a, b in known if norm(a)) / size)
    rounding = _left(math.sqrt(difference / size), off, LEAST["slope"])
    return Excess("slope", off, bound.allowed(rounding, bound.most) + inherited)


def excess_of(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    shapes: Sequence[Sequence[int]],
    bounds: Mapping[str, Bound],
) -> Excess:
    """The worst of several tensors."""
    found = [systematic(x, y, shape) for x, y, shape in zip(a, b, shapes, strict=True)]
    return max((one.excess(bounds) for one in found if one is not None), key=lambda one: one.times, default=NOTHING)


@dataclass(frozen=True)
class Line:
    """The line by which B's numbers follow A's, least squares: whole vectors, so nothing is estimated."""

    slope: float
    offset: float
    rounding: float
    spread: float
    count: int


def line(a: torch.Tensor, b: torch.Tensor) -> Line | None:
    """None of vectors that are not finite, too short, or constant."""
    if a.shape != b.shape or len(a) < ENOUGH or not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return None
    x, y = a.double() - a.double().mean(), b.double() - b.double().mean()
    spread = float(x.square().mean().sqrt())
    if not spread:
        return None
    off = float((x * y).mean()) / spread**2 - 1
    rounding = _root_mean_square(y - (1 + off) * x)
    return Line(off, float((b.double() - a.double()).mean()), rounding, spread, len(a))
