"""Prints what a run changed: `python tools/before_and_after.py runs/NAME`."""

from __future__ import annotations

import sys
from pathlib import Path

from lockstep.run.metrics import read_metrics
from lockstep.run.model_card import before_and_after

for name, change in before_and_after(read_metrics(Path(sys.argv[1]) / "metrics.jsonl")):
    print(f"  {name:14}{change}")
