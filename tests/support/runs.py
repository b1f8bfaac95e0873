"""What two runs are compared by."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from lockstep.run import checkpoint as checkpoints
from lockstep.run.metrics import read_metrics


def facts(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """The metrics but for the clocks."""
    return [
        (step, {name: value for name, value in metrics.items() if not name.startswith(("timing_s/", "perf/"))})
        for step, metrics in read_metrics(folder / "metrics.jsonl")
    ]


def stored(folder: Path, step: int, part: str = "weights") -> Mapping[str, torch.Tensor]:
    """A part of a checkpoint, whether one process wrote it or several."""
    found: Mapping[str, torch.Tensor] = getattr(
        checkpoints.read(checkpoints.folder_of(folder / "checkpoints", step)), part
    )
    return found


def close(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all((a[name] - b[name]).abs().max() <= 1e-5 for name in a)
