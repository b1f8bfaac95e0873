"""Does an optimizer do what the recipe says? Single weights, followed through AdamW's formula in double precision.

A weight is judged by its own gradient and moments, so that a gradient that is off does not count against the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from lockstep.tape.format import StepRecord
from lockstep.tape.observer import sampled

# Rounding of a weight itself, in units of its last digit.
ULPS = 4 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Followed:
    """The worst parameter: how far its weights landed from where the formula puts them, as a share of the way."""

    parameter: str
    error: float
    expected: float
    actual: float
    off: tuple[str, ...]
    """Every parameter beyond the tolerance."""
    indices: tuple[int, ...]
    """Which of the worst parameter's weights are."""


def follow(
    record: StepRecord,
    learner: str,
    shapes: dict[str, list[int]],
    optim: dict[str, Any],
    lr: float,
    norm: float,
    allowed: float,
    spared: Collection[str] = (),
) -> Followed:
    """The first update of a step, by the keys of the recipe's `optim`. `spared` are the biases and norms of more than
    one dimension; tapes of earlier versions, which decayed them, name none."""
    prefix = f"{learner}/0/sample/"
    names = sorted({name.removeprefix(prefix).rsplit("/", 1)[0] for name in record.tensors if name.startswith(prefix)})
    clip = optim["clip"]
    factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
    worst, off = Followed("", 0.0, 0.0, 0.0, (), ()), []
    for name in names:
        kept = {
            key: record.tensors[f"{prefix}{name}/{key}"].double()
            for key in ("gradient", "before", "exp_avg", "exp_avg_sq", "after", "count")
            if f"{prefix}{name}/{key}" in record.tensors
        }
        if "after" not in kept or "gradient" not in kept:
            continue
        # Biases and norms are spared from decay, unless the recipe says otherwise.
        matrix = len(shapes[name]) >= 2 and name not in spared
        decay = optim["weight_decay"] if optim.get("decay_all") or matrix else 0.0
        decay = optim.get("decays", {}).get(name, decay)  # another framework's optimizer, with groups of its own
        expected = _stepped(kept, factor, lr, optim, decay)
        way = (expected - kept["before"]).abs()
        difference = (kept["after"] - expected).abs() - ULPS * kept["before"].abs()
        errors = difference.clamp(min=0) / way.clamp(min=1e-3 * float(way.max()) + 1e-30)
        error = float(errors.max())
        if not error <= allowed:
            off.append(name)
        if not error <= worst.error:
            index = int(errors.argmax())
            beyond = sampled(math.prod(shapes[name]))[~(errors <= allowed)].tolist()
            worst = Followed(name, error, float(expected[index]), float(kept["after"][index]), (), tuple(beyond))
    return replace(worst, off=tuple(off))


def _stepped(
    kept: dict[str, torch.Tensor], factor: float, lr: float, optim: dict[str, Any], decay: float
) -> torch.Tensor:
    """The weights after one step of AdamW (Loshchilov and Hutter 2019, decay apart from the gradient)."""
    first, second = optim["betas"]
    gradient, before = kept["gradient"] * factor, kept["before"]
    nothing = torch.zeros_like(before)
    count = float(kept["count"]) + 1
    mean = first * kept.get("exp_avg", nothing) + (1 - first) * gradient
    square = second * kept.get("exp_avg_sq", nothing) + (1 - second) * gradient.square()
    denominator = (square / (1 - second**count)).sqrt() + optim["eps"]
    return before * (1 - lr * decay) - lr * (mean / (1 - first**count)) / denominator
