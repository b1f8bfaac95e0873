"""The tolerances of a replay: how far two correct computations may differ, for each pair of dtypes.

Tolerances are relative to the norm of the compared values. Only tolerances of log-probabilities are absolute.

fp32: the tolerances are 5 to 30 times the largest difference of 50 correct replays of small models
(`tests/e2e/test_clean_repeats.py`). The 50 replays changed micro-batches, packing, threads, engines or the precision of
sums, and each step started from recorded weights. The largest differences were: log-probs 2e-6, advantages 2e-6, loss
2e-7, gradients of the loss with respect to log-probs 2e-6 (4e-5 at the second update of a step), parameter gradients
8e-6, a weight's change compared with AdamW's formula 4e-7, weights 3e-3 of their change, module outputs 2e-6 forward
and 5e-6 backward. An error of 1e-4 or 1e-2 that was added to the embedding grew at most 2 times per module forward and
4.4 times backward. Comparisons of fp32 with bf16 showed differences of 0.033 in log-probs, 0.66 in weights and 0.27 in
gradients. The difference of 0.27 occurred in gradients of biases in DPO, because the gradients of a pair of responses
nearly cancel.

bf16: rounding hides wrong computations, so systematic differences have separate limits (below). The output of a module
may differ by 1.5 % or by 2.5 times the error of its input. In correct pairs of runs, the error grew 1.8 times forward,
2.4 times backward, and 3.4 times in the log-probs of trained models. If only one of the two runs uses bf16, the output
of a module may differ by 5 % or by 8 times the error of its input.

Systematic differences. Rounding errors have random signs, so their mean over n values shrinks as 1/sqrt(n). The error
of a wrong computation does not shrink with n. So five statistics of two tensors are compared in addition to their
distance: slope, spread, offset, columns and rows (see `Systematic`). Each statistic is relative to the norm of the
tensor. For example, a tensor that is 1.01 times as large has a slope of 0.01. The tolerance of a statistic is

    floor + DEVIATIONS * rounding / sqrt(min(n, most))

where `rounding` is the difference of the two tensors without the systematic part, and `most` is the number of
independent roundings. The formula limits n to `most`, because a token or weight that occurs several times is rounded in
the same way each time. The values of `floor` and `most` were measured with pairs of correct runs (`docs/replay.md`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lockstep.tape.digest import distance, norm, profiles, size_of, sketch

DEVIATIONS = 5.0
# At least this fraction of a difference is treated as rounding. The fraction is larger for offset, column and row sums,
# which are estimated from a few projections.
LEAST = {"slope": 0.1, "spread": 0.1, "offset": 0.5, "columns": 0.5, "rows": 0.5}
# Tensors with fewer than ENOUGH values are not tested for systematic differences, because their rounding does not
# average out.
ENOUGH = 32


@dataclass(frozen=True)
class Bound:
    floor: float
    most: float = math.inf

    def allowed(self, rounding: float, count: float) -> float:
        return self.floor + DEVIATIONS * rounding / math.sqrt(max(1.0, min(count, self.most)))


@dataclass(frozen=True)
class Limits:
    """The limits of systematic differences in module outputs (for each statistic), gradients, weight changes and
    log-probs."""

    forward: Mapping[str, Bound]
    backward: Mapping[str, Bound]
    gradient: Bound
    """Tolerance of the statistic `slope` (see the top of this file) for the gradient of one parameter."""
    gradients: Bound
    """Tolerance of the statistic `slope` for the gradients of all parameters, as one vector."""
    movement: Bound
    logprob_slope: Bound
    logprob_offset: Bound
    loss: float
    """The allowed difference of the loss's gradients with respect to the log-probs. The differences of
    log-probabilities and advantages are added to this limit."""
    answers: bool = True
    """Whether the model's final outputs (log-probs) are tested for systematic differences like module outputs. In a
    trained model a few unlikely tokens dominate the norm of the log-probs, so rounding hardly averages out. The
    log-prob checks test the final outputs in any case."""


# The floors are 2 to 3 times the largest values in 44 pairs of correct runs of tiny models (bf16 compared with bf16,
# and bf16 compared with fp32).
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

# Limits for fp32 compared with bf16. Rounding the weights to bf16 changes the model itself, so the difference between
# the runs does not average out. Gradients that nearly cancel (of DPO pairs, queries and keys, biases) change most.
# Correct replays of trained tiny models (SFT, DPO and GRPO, on CPU and H200) showed gradient slopes of 0.17 for biases,
# 0.07 for weights and 0.025 for all gradients together.
MIXED = replace(
    BF16,
    backward={**BF16.backward, "slope": Bound(0.15, 50), "columns": Bound(0.25, 100), "rows": Bound(0.3, 100)},
    gradient=Bound(0.35, 50),
    gradients=Bound(6e-2, 50),
    answers=False,
)


@dataclass(frozen=True)
class Tolerance:
    logprob: float
    """The allowed root mean square difference of log-probs over all tokens."""
    advantage: float
    loss: float
    gradient: float
    """The allowed error of a parameter's gradient, relative to its norm."""
    optimizer: float
    """The allowed relative error of a single weight's change, compared with AdamW's formula for the recorded
    gradient."""
    update: float
    """The allowed error of a parameter's weights, relative to their change in the update. The tolerance `update` is
    large, because Adam turns the rounding of a gradient near 0 into a full step."""
    module: float
    """The allowed error of a module's output, relative to its norm."""
    growth: float
    """The factor by which an error may grow from a module's input to its output."""
    systematic: Limits | None = None
    """The limits of systematic differences. `systematic` is None for fp32, which needs no such limits."""


TOLERANCES = {
    "fp32": Tolerance(2e-5, 1e-4, 1e-5, 2e-4, 1e-3, 0.05, 1e-5, 10.0),
    "fp16": Tolerance(1e-2, 1e-2, 1e-2, 5e-2, 1e-3, 0.5, 1e-2, 8.0, BF16),
    "bf16": Tolerance(5e-2, 5e-2, 2e-2, 5e-1, 1e-3, 1.0, 1.5e-2, 2.5, BF16),
}
ORDER = ("fp32", "fp16", "bf16")
# The tolerances for single operators with identical inputs, which are derived, not measured. A result is rounded by up
# to half of the dtype's spacing (2^-24, 2^-11, 2^-8). The reference implementation rounds two to four times where a
# fused operator rounds once.
OPERATORS = {"fp32": 1e-5, "fp16": 3e-3, "bf16": 2e-2}


def tolerance_of(*dtypes: str) -> Tolerance:
    """Returns the tolerance for the coarsest of the given dtypes, usually those of two runs. For different dtypes the
    tolerance is larger."""
    coarser = TOLERANCES[max(dtypes, key=ORDER.index)]
    if len(set(dtypes)) == 1 or coarser.systematic is None:
        return coarser
    return replace(coarser, module=max(coarser.module, 5e-2), growth=8.0, systematic=MIXED)


def operator_tolerance(dtype: str, *, backwards: bool = False) -> Tolerance:
    """Returns the tolerance for operators with identical inputs. The tolerance for the backward pass, which runs twice
    as many operators, is doubled."""
    return replace(TOLERANCES[dtype], module=OPERATORS[dtype] * (2 if backwards else 1))


def inherited(tolerance: Tolerance, step: int) -> Tolerance:
    """Returns the tolerance for a step that does not start from recorded weights, which detects only abnormal
    differences.

    A tolerance of 0.01 for log-probabilities is a common threshold for abnormal differences. The tolerance of 2 % for
    the loss is from the Ascend documents. The tolerance of the weights grows with the step number.
    """
    return replace(
        tolerance,
        logprob=max(0.01, 2 * tolerance.logprob),
        advantage=max(0.05, tolerance.advantage),
        loss=0.02,
        gradient=max(0.05, tolerance.gradient),
        update=tolerance.update * step,
        systematic=None,
    )


# -- systematic differences


@dataclass(frozen=True)
class Excess:
    """A systematic difference of two tensors and its limit."""

    kind: str
    value: float
    allowed: float

    @property
    def times(self) -> float:
        return self.value / self.allowed if self.allowed else 0.0

    def __str__(self) -> str:
        return f"{self.kind} differs by {self.value:.2g}, but rounding explains only {self.allowed:.2g}"


NOTHING = Excess("", 0.0, 0.0)


@dataclass(frozen=True)
class Systematic:
    """The systematic differences of tensor B from tensor A, relative to the norm of A."""

    noise: float
    """The total difference, including rounding."""
    values: Mapping[str, float]
    """`slope` is the least-squares slope of B as a function of A, minus 1. `spread` is this slope after the means are
    subtracted. `offset` is the difference of the means of the columns. `columns` and `rows` are the differences of the
    norms of columns and rows. `offset`, `columns` and `rows` are root mean squares over all columns or rows."""
    counts: Mapping[str, float]
    """For each statistic, the number of elements over which its rounding averages out."""
    spread_share: float = 1.0
    """The fraction of A's squared norm that remains after the mean is subtracted. `spread` is relative to this
    remainder."""

    def rounding(self, kind: str) -> float:
        """Returns the difference that remains without the systematic difference `kind`, but at least the fraction
        `LEAST` of the total difference."""
        noise = self.noise / math.sqrt(self.spread_share) if kind == "spread" else self.noise
        return _rest(noise, self.values[kind], LEAST[kind])

    def excess(self, bounds: Mapping[str, Bound]) -> Excess:
        """Returns the systematic difference that is largest relative to its limit."""
        every = [
            Excess(kind, self.values[kind], bound.allowed(self.rounding(kind), self.counts[kind]))
            for kind, bound in bounds.items()
            if kind in self.values
        ]
        return max(every, key=lambda one: one.times)


def systematic(a: torch.Tensor, b: torch.Tensor, shape: Sequence[int]) -> Systematic | None:
    """Computes the systematic differences of two tensors from their digests. Returns None if a digest has no row and
    column profiles, or if a tensor is 0, not finite or has too few elements."""
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


def excess_of(
    a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], bounds: Mapping[str, Bound]
) -> Excess:
    """Returns the systematic difference that is largest relative to its limit, over several pairs of tensors."""
    found = [systematic(x, y, shape) for x, y, shape in zip(a, b, shapes, strict=True)]
    return max((one.excess(bounds) for one in found if one is not None), key=lambda one: one.times, default=NOTHING)


def slope(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the least-squares slope of tensor B as a function of tensor A, minus 1, from their digests.

    |b|^2 = |a|^2 + 2 <a, b - a> + |b - a|^2, and the slope is 1 + <a, b - a> / |a|^2.
    """
    return (norm(b) ** 2 - norm(a) ** 2 - distance(a, b) ** 2) / (2 * norm(a) ** 2)


def _spread(a: torch.Tensor, b: torch.Tensor, count: int) -> tuple[float, float] | None:
    """Returns the deviation of the slope from 1 after the means are subtracted, and the fraction of A's squared norm
    that then remains. Returns None if this fraction is below 1 %."""
    means = float(a[1]), float(b[1])
    inner = (norm(a) ** 2 + norm(b) ** 2 - distance(a, b) ** 2) / 2
    variance = norm(a) ** 2 - count * means[0] ** 2
    share = variance / norm(a) ** 2
    if share < 0.01:
        return None
    return abs((inner - count * means[0] * means[1]) / variance - 1), share


def slope_excess(a: torch.Tensor, b: torch.Tensor, bound: Bound, inherited: float = 0.0) -> Excess:
    """Returns the slope of one pair of gradients and its limit. `inherited` is added to the limit."""
    return overall_slope([(a, b)], bound, inherited)


def overall_slope(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], bound: Bound, inherited: float) -> Excess:
    """Returns the slope and its limit for many pairs of tensors, treated as one pair of long vectors."""
    usable = [(a, b) for a, b in pairs if profiles(a) is not None and profiles(b) is not None]
    size = sum(norm(a) ** 2 for a, _ in usable)
    difference = sum(distance(a, b) ** 2 for a, b in usable)
    if not size or not math.isfinite(size + difference):
        return NOTHING
    off = abs(sum(slope(a, b) * norm(a) ** 2 for a, b in usable if norm(a)) / size)
    rounding = _rest(math.sqrt(difference / size), off, LEAST["slope"])
    return Excess("slope", off, bound.allowed(rounding, bound.most) + inherited)


def movement_slope(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> tuple[float, float, int] | None:
    """Compares how an update changed a parameter in run A and run B, from the digests before and after the update.
    Returns the slope of B's change as a function of A's change minus 1, the rounding, and the number of projections.

    The sketch (random projections) in a digest is linear, so the sketch of a change is the difference of two sketches.
    """
    ours, theirs = (sketch(y) - sketch(x) for x, y in zip(before, after, strict=True))
    size = float(ours.square().sum())
    if not size or not math.isfinite(size) or not bool(torch.isfinite(theirs).all()):
        return None
    off = float((ours * theirs).sum()) / size - 1
    rounding = float((theirs - (1 + off) * ours).norm()) / math.sqrt(size)
    return off, rounding, len(ours)


@dataclass(frozen=True)
class Line:
    """The least-squares line of the values of vector B as a function of those of vector A."""

    slope: float
    offset: float
    rounding: float
    spread: float
    count: int


def line(a: torch.Tensor, b: torch.Tensor) -> Line | None:
    """Fits a line to B as a function of A. Returns None if a vector is not finite or too short, or if A is constant."""
    if a.shape != b.shape or len(a) < ENOUGH or not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return None
    x, y = a.double() - a.double().mean(), b.double() - b.double().mean()
    spread = float(x.square().mean().sqrt())
    if not spread:
        return None
    off = float((x * y).mean()) / spread**2 - 1
    rounding = _root_mean_square(y - (1 + off) * x)
    return Line(off, float((b.double() - a.double()).mean()), rounding, spread, len(a))


def _rest(noise: float, value: float, least: float) -> float:
    return math.sqrt(max(noise**2 - value**2, (least * noise) ** 2))


def _root_mean_square(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())
