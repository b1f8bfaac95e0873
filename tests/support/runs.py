"""What two runs are compared by."""

from __future__ import annotations

from pathlib import Path

import torch

from lockstep.run.metrics import read_metrics


def facts(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """The metrics but for the clocks."""
    return [
        (step, {name: value for name, value in metrics.items() if not name.startswith(("timing_s/", "perf/"))})
        for step, metrics in read_metrics(folder / "metrics.jsonl")
    ]


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all((a[name] - b[name]).abs().max() <= 1e-5 for name in a)
