"""What two runs are compared by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
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


def samples(run: Path) -> list[tuple[str, float]]:
    """The responses of an online run and their scores."""
    file = run / "samples.jsonl"
    told = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [(sample["response"], sample["score"]) for sample in told]


def difference(
    run: Path, one: Path, steps: int, parts: Sequence[str] = ("weights",), leaving: str | None = None
) -> str:
    """The first thing that is another in a run than in one of so many steps, in words; empty where nothing is. Metrics
    whose names begin with `leaving` are left out.

    In fp32: responses and their scores equal, metrics within 1e-4 (relative; 2e-5 absolute), weights within 1e-5.
    """
    if samples(run) != samples(one):
        return "other samples"
    told, wanted = facts(run), facts(one)
    if [step for step, _ in told] != [step for step, _ in wanted] or len(wanted) < steps:
        return "other steps"
    for (step, every), (_, theirs) in zip(told, wanted, strict=True):
        ours = {name: value for name, value in every.items() if leaving is None or not name.startswith(leaving)}
        if ours.keys() != theirs.keys():
            return f"other metrics: {sorted(ours.keys() ^ theirs.keys())}"
        for name, value in theirs.items():
            if ours[name] != pytest.approx(value, rel=1e-4, abs=2e-5):
                return f"{name} is {ours[name]} and not {value} in step {step}"
    for part in parts:
        if not close(stored(run, steps, part), stored(one, steps, part)):
            return f"other {part}"
    return ""
