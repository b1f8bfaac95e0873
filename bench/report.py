"""What several benchmarks print and record: the machine with its versions, medians and spreads, tables, the file."""

from __future__ import annotations

import json
import os
import platform
import re
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
    """The record as a JSON file, with the load that the machine ended with. A stopped program leaves the last whole
    one."""
    record["machine"]["load_after"] = round(os.getloadavg()[0], 1)
    part = Path(f"{out}.part")
    part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    part.replace(out)
    print(f"written to {out}")


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def spread(values: dict[str, float], form: str) -> str:
    return f"{values['median']:{form}} ({values['min']:{form}} to {values['max']:{form}})"


class Table:
    """A table of columns. `columns` maps the name of a column to the format of its cells, such as `>9.2e`."""

    def __init__(self, columns: dict[str, str]):
        self._columns = columns

    def header(self) -> str:
        widths = {name: re.match(r"[<>]\d+", form) for name, form in self._columns.items()}
        return " ".join(f"{name:{width[0] if width else ''}}" for name, width in widths.items())

    def line(self, *cells: object) -> str:
        return " ".join(f"{cell:{form}}" for cell, form in zip(cells, self._columns.values(), strict=True))


# The columns of `logprob_difference`.
DIFFERENCE = {"mean |d|": ">9.2e", "max |d|": ">9.2e", "k3": ">9.2e"}


def logprob_difference(trainer_K: torch.Tensor, engine_K: torch.Tensor) -> dict[str, float]:
    """Compares log-probs of engine and trainer: mean and maximum of the difference, and k3, an estimate of the KL."""
    log_ratio_K = (trainer_K - engine_K).double()
    return {
        "mean_diff": float(log_ratio_K.abs().mean()),
        "max_diff": float(log_ratio_K.abs().max()),
        "k3": float((log_ratio_K.exp() - 1 - log_ratio_K).mean()),
    }


def differ(ours: Sequence[float], theirs: Sequence[float], errors: float = 5.0) -> bool:
    """Whether two samples have means so far apart that chance does not explain it (in standard errors)."""
    apart = abs(statistics.fmean(ours) - statistics.fmean(theirs))
    variance = sum(statistics.variance(values) / len(values) for values in (ours, theirs))
    return apart > errors * variance**0.5
