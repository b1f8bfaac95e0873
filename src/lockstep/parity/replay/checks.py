"""One thing held against another: what, how far apart, how far it may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

Stage = Literal["generation", "reward", "batch", "log-probs", "advantages", "loss", "gradient", "optimizer", "weights"]
# As a step runs.
STAGES: tuple[Stage, ...] = (
    "generation",
    "reward",
    "batch",
    "log-probs",
    "advantages",
    "loss",
    "gradient",
    "optimizer",
    "weights",
)
# As blame falls: generation runs the same model as log-probs, which see recorded tokens and nothing of the engine, so
# a wrong model shows in both and a wrong engine in the first alone.
BLAME: tuple[Stage, ...] = (
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
    """In words: the worst index, with both values."""
    update: int = 0

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        values["error"] = None if math.isinf(self.error) or math.isnan(self.error) else self.error
        return values | {"passed": self.passed}


def root_mean_square(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of the difference; infinite where a number is missing on one side or not finite."""
    if a.shape != b.shape:
        return math.inf
    if not a.numel():
        return 0.0
    value = float((a.double() - b.double()).square().mean().sqrt())
    return value if math.isfinite(value) else math.inf


def share(a: torch.Tensor, b: torch.Tensor) -> float:
    """The difference as a share of the larger vector's size."""
    if a.shape != b.shape:
        return math.inf
    size = max(float(a.double().norm()), float(b.double().norm()))
    difference = float((a.double() - b.double()).norm())
    if not math.isfinite(difference) or not math.isfinite(size):
        return math.inf
    return difference / size if size else 0.0


def worst_difference(a: torch.Tensor, b: torch.Tensor, unit: str) -> str:
    if a.shape != b.shape:
        return f"{len(a)} {unit}s against {len(b)}"
    if not a.numel():
        return ""
    difference = torch.nan_to_num((a.double() - b.double()).abs(), nan=math.inf)
    index = int(difference.argmax())
    return f"{unit} {index}: {float(a[index]):.6g} against {float(b[index]):.6g}"


def finite(error: float) -> float:
    """What is not a number is infinitely far off."""
    return error if math.isfinite(error) else math.inf


def worst_of(checks: Sequence[Check]) -> Check:
    """The one that is furthest beyond, or nearest to, what it may be off by."""
    return max(checks, key=lambda check: check.error / check.allowed if check.allowed else check.error)
