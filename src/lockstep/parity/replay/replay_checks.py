"""A check of a replay: what was compared, how much it differs, and the tolerance. All stages yield `Check`s."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch

Stage = Literal["generation", "reward", "batch", "log-probs", "advantages", "loss", "gradient", "optimizer", "weights"]
# The stages in the order in which a step runs them.
STAGES: tuple[Stage, ...] = get_args(Stage)
# The first failing stage in this order is reported as the cause. The log-probs stage scores the recorded tokens without
# the rollout engine, and the generation stage runs the same model in the engine. So a wrong model fails the log-probs
# stage and the generation stage, and a wrong engine fails only the generation stage.
CAUSE_ORDER: tuple[Stage, ...] = (
    "batch",
    "log-probs",
    "generation",
    "reward",
    "advantages",
    "loss",
    "gradient",
    "optimizer",
    "weights",
)


@dataclass(frozen=True)
class Check:
    stage: Stage
    step: int
    what: str
    error: float
    allowed: float
    where: str = ""
    """A text with the index of the largest difference and both values."""
    update: int = 0

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"error": self.error if math.isfinite(self.error) else None, "passed": self.passed}


def worst_of(checks: Sequence[Check]) -> Check:
    """Returns the check with the largest error relative to its tolerance."""
    return max(checks, key=lambda check: check.error / check.allowed if check.allowed else check.error)


def first_cause(checks: Sequence[Check]) -> Check | None:
    """Returns the failed check that is reported as the cause: the first one in `CAUSE_ORDER` among the failed checks of
    the earliest update."""
    failed = [check for check in checks if not check.passed]
    return min(failed, key=lambda check: (check.update, CAUSE_ORDER.index(check.stage)), default=None)


def verdicts(checks: Sequence[Check]) -> dict[str, dict[str, Any]]:
    """Returns for each stage whether all its checks passed, and the check with the largest error relative to its
    tolerance."""
    table: dict[str, dict[str, Any]] = {}
    for stage in STAGES:
        mine = [check for check in checks if check.stage == stage]
        if mine:
            table[stage] = {**worst_of(mine).as_json(), "passed": all(check.passed for check in mine)}
    return table


# -- differences


def finite(error: float) -> float:
    """Returns infinity if the error is NaN or infinite, otherwise the error."""
    return error if math.isfinite(error) else math.inf


def root_mean_square(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the root mean square of the difference of two tensors, or infinity if the shapes differ or a value is not
    finite."""
    if a.shape != b.shape:
        return math.inf
    return finite(float((a.double() - b.double()).square().mean().sqrt())) if a.numel() else 0.0


def share(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the norm of the difference of two tensors divided by the larger of their norms."""
    if a.shape != b.shape:
        return math.inf
    size = max(float(a.double().norm()), float(b.double().norm()))
    difference = float((a.double() - b.double()).norm())
    if not math.isfinite(difference) or not math.isfinite(size):
        return math.inf
    return difference / size if size else 0.0


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the largest absolute difference of two tensors, or infinity if the shapes differ or a value is NaN."""
    if a.shape != b.shape:
        return math.inf
    return float(_absolute(a, b).max()) if a.numel() else 0.0


def worst_difference(a: torch.Tensor, b: torch.Tensor, unit: str) -> str:
    """Returns a text with the index of the largest difference and both values."""
    if a.shape != b.shape:
        return f"{len(a)} {unit}s against {len(b)}"
    if not a.numel():
        return ""
    index = int(_absolute(a, b).argmax())
    return f"{unit} {index}: {float(a[index]):.6g} against {float(b[index]):.6g}"


def _absolute(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num((a.double() - b.double()).abs(), nan=math.inf)


def worst_named(errors: Mapping[str, float], allowed: float) -> tuple[str, float, int]:
    """Returns the name with the largest error, this error, and the number of names whose error exceeds the
    tolerance."""
    worst = max(errors, key=lambda name: errors[name])
    return worst, errors[worst], sum(not error <= allowed for error in errors.values())


def rank_of_rows(indices: Collection[int], shape: Sequence[int], ranks: int) -> str:
    """Returns a text with the rank that holds all weights with these indices, or "" if several ranks hold them. Each
    rank holds a block of rows of the parameter."""
    if ranks == 1 or not shape:
        return ""
    row_size, rows_per_rank = math.prod(shape[1:]), -(-shape[0] // ranks)
    found = {index // row_size // rows_per_rank for index in indices}
    return f" (rank {found.pop()} alone)" if len(found) == 1 else ""
