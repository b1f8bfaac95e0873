"""How often the verdict is wrong on curves of known truth, 1,000 pairs a cell: the table of docs/compare.md."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from lockstep.parity.compare.statistics import score
from parity_curves import Fault, biased, clean, collapsed, judged, loss, reward, runs, stopped

DOCS = Path(__file__).parents[2] / "docs" / "compare.md"
HEAD = "| steps | repeats | memory | wander | clean | bias 1 sd | last 5 % | stops half-way | clean: cannot tell |"
FAULTS: tuple[Fault, ...] = (biased, collapsed, stopped)
ROWS = [
    (steps, repeats, memory, wander)
    for steps in (50, 200, 2000)
    for repeats in (0, 1, 2, 3, 5)
    for memory, wander in ((0.5, 0.0), (0.8, 0.0), (0.5, 0.3))
]
SHORT = [(50, 2, 0.5, 0.0), (200, 0, 0.5, 0.0), (200, 1, 0.8, 0.0), (200, 3, 0.5, 0.3), (200, 5, 0.5, 0.0)]
Row = tuple[int, int, float, float]


def shares(row: Row, pairs: int, few: int) -> tuple[list[float], list[float]]:
    """Out of step, of clean pairs and of each fault; and what passed, of `few` pairs of each."""
    steps, repeats, memory, wander = row
    alarms, passed = [], []
    for number, fault in enumerate((clean, *FAULTS)):
        draw = np.random.default_rng([steps, repeats, int(10 * memory), int(10 * wander), number])
        halves = [runs(draw, pairs // 2, curve(steps), (repeats, 0), memory, wander, fault) for curve in (reward, loss)]
        alarms.append(float(np.mean([score(a, b)[0].found for a, b in halves])))
        verdicts = [
            judged(one, other, kind)[0].verdict
            for (a, b), kind in zip(halves, ("reward", "loss"), strict=True)
            for one, other in zip(a[: few // 2], b[: few // 2], strict=True)
        ]
        passed.append(float(np.mean([verdict in ("in step", "within noise") for verdict in verdicts])))
        if fault is clean:
            untold = float(np.mean([verdict == "cannot tell" for verdict in verdicts]))
    return alarms, [*passed, untold]


def held(row: Row, pairs: int, few: int, alarm: float, passes: float) -> list[float]:
    """The aims. Where a fault is found in less than 95 %, it is told as cannot tell, and does not pass."""
    alarms, passed = shares(row, pairs, few)
    assert alarms[0] <= alarm, row
    for name, found, through in zip(("bias", "collapse", "stop"), alarms[1:], passed[1:4], strict=True):
        assert through <= passes, (row, name, found, through)
    return [*alarms, passed[-1]]


@pytest.mark.parametrize("row", SHORT)
def test_a_part_of_the_table(row: Row) -> None:
    # 200 pairs of 5 % have more than 21 alarms, and 40 of 5 % more than 8 passes, once in a thousand times.
    held(row, 200, 40, alarm=21 / 200, passes=8 / 40)


@pytest.mark.slow
def test_the_whole_table(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [HEAD, "|" + "---|" * 9]
    for row in ROWS:
        values = held(row, 1000, 200, alarm=0.05, passes=0.08)  # 200 pairs of 5 % have more than 16 once in 40 times
        lines.append(f"| {' | '.join([f'{row[0]:,}', *map(str, row[1:]), *(f'{value:.3f}' for value in values)])} |")
    with capsys.disabled():
        print("", *lines, sep="\n")
    written = re.findall(r"^\| [\d,]+ \| \d \| 0\.\d \|.*$", DOCS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    ours = [[float(cell.replace(",", "")) for cell in line.strip("| ").split("|")] for line in lines[2:]]
    theirs = [[float(cell.replace(",", "")) for cell in line.strip("| ").split("|")] for line in written]
    assert np.array(theirs) == pytest.approx(np.array(ours), abs=0.01), "docs/compare.md has another table"
