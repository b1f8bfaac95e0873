"""DeepSpeed's console: the progress report, the throughput timer and the wall clock breakdown. Its first step is 1."""

from __future__ import annotations

import re
from collections.abc import Iterable

from lockstep.parity.compare.logs.curves import LARGEST_STEP, Points
from lockstep.parity.compare.logs.text import NUMBER, number

_PROGRESS = re.compile(rf"\bstep=(\d{{1,18}}), skipped=(\d{{1,9}}), lr=\[?({NUMBER})[\],]", re.IGNORECASE)
_SPEED = re.compile(r"global_step=(\d{1,18}), RunningAvgSamplesPerSec=(.*)$")
_TIMES = re.compile(r"(?:^|\s)time \(ms\) \| (.+)$")
_OPTIMIZER = "time_ms/optimizer_"
_TIME = re.compile(rf"(\w+): ({NUMBER})", re.IGNORECASE)
_RATE = re.compile(rf"(\w+)=({NUMBER})(?:GB)?", re.IGNORECASE)


def points(lines: Iterable[tuple[str, str]]) -> Points:
    """Times have no step of their own: the optimizer's stand before their step's report, the others after it."""
    found, step = Points(), 0
    timed: set[str] = set()
    early: dict[str, float] = {}
    for _, line in lines:
        if "skipped=" in line and (report := _PROGRESS.search(line)) and int(report.group(1)) <= LARGEST_STEP:
            step, timed = int(report.group(1)), set()
            found.add(step, {"skipped": float(report.group(2)), "lr": float(report.group(3)), **early})
            early = {}
        elif "RunningAvgSamplesPerSec=" in line and (speed := _SPEED.search(line)):
            if int(speed.group(1)) <= LARGEST_STEP:
                found.add(int(speed.group(1)), _pairs(_RATE, "RunningAvgSamplesPerSec=" + speed.group(2)))
        elif "time (ms)" in line and (times := _TIMES.search(line)):
            values = {f"time_ms/{name}": value for name, value in _pairs(_TIME, times.group(1)).items()}
            early |= {name: value for name, value in values.items() if name.startswith(_OPTIMIZER)}
            if step:
                # Steps without a report follow, and their times are nobody's.
                new = {name for name in values if not name.startswith(_OPTIMIZER)} - timed
                found.add(step, {name: values[name] for name in values if name in new})
                timed |= new
    return found


def _pairs(pattern: re.Pattern[str], text: str) -> dict[str, float]:
    return {name: value for name, written in pattern.findall(text) if (value := number(written)) is not None}
