"""What the benchmarks print and record alike: the machine with its versions, medians and spreads, the file."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lockstep.device.base import Device

PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets", "lockstep-rl")


def machine(device: Device) -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found | {
        "device": device.name,
        "chip": device.chip(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 1),
    }


def write_record(record: dict[str, Any], out: str) -> None:
    """The record as a JSON file, with the load that the machine ended with."""
    record["machine"]["load_after"] = round(os.getloadavg()[0], 1)
    Path(out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written to {out}")


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def spread(values: dict[str, float], form: str) -> str:
    return f"{values['median']:{form}} ({values['min']:{form}} to {values['max']:{form}})"


def differ(ours: Sequence[float], theirs: Sequence[float], errors: float = 5.0) -> bool:
    """Whether two samples have means so far apart that chance does not explain it (in standard errors)."""
    apart = abs(statistics.fmean(ours) - statistics.fmean(theirs))
    variance = sum(statistics.variance(values) / len(values) for values in (ours, theirs))
    return apart > errors * variance**0.5
