"""The figures of docs/learning.md are drawn from the records, with axes that lead back to the recorded numbers."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))

figure: Any = import_module("figure")
learning: Any = import_module("learning")


@pytest.mark.parametrize(("record", "svg"), [("learning_cpu", "learning"), ("grpo_gsm8k_h200", "gsm8k")])
def test_the_figures_are_those_of_the_records(
    record: str, svg: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ROOT / "bench" / "results" / f"{record}.json"
    monkeypatch.setattr(sys, "argv", ["learning.py", "--figure", str(file), "--svg", str(tmp_path / "a.svg")])
    learning.main()
    command = f"python bench/learning.py --figure bench/results/{record}.json --svg docs/{svg}.svg"
    drawn = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert drawn == (ROOT / "docs" / f"{svg}.svg").read_text(encoding="utf-8"), command
    assert command in " ".join((ROOT / "docs" / "learning.md").read_text(encoding="utf-8").split())


def test_a_single_run_is_drawn_once_with_its_start() -> None:
    curve = [[0, 0.25], [10, 0.5]]
    record = {"methods": {"grpo": {"curves": [curve]}}, "budget": 10, "settings": {"seeds": "1"}}
    drawn = learning.learning_figure(record)
    assert drawn.count("<polyline") == 1
    assert "0.25 at the start" in drawn


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0.42, 0.935, ["0.4", "0.6", "0.8", "1.0"]),
        (1, 30, ["0", "10", "20", "30"]),
        (0, 16_992, ["0", "5,000", "10,000", "15,000", "20,000"]),
        (-0.011, 0.004, ["-0.015", "-0.010", "-0.005", "0.000", "0.005"]),
        (0.6931, 0.6931, ["0.64", "0.66", "0.68", "0.70", "0.72", "0.74"]),
    ],
)
def test_ticks_are_round_and_include_all_values(low: float, high: float, texts: list[str]) -> None:
    ticks = figure.ticks(low, high)
    assert figure.tick_texts(ticks) == texts
    assert ticks[0] <= low <= high <= ticks[-1]


def test_the_axes_lead_back_to_the_values() -> None:
    line = figure.Line([(0, 0.5), (3, 1.25), (10, 2.0)], "#000")
    drawn = figure.document([figure.Panel("a < b", "step", "loss", [line])], (400, 300))
    assert "a &lt; b" in drawn
    assert values_of(drawn) == [pytest.approx([0, 0.5], abs=0.02), pytest.approx([3, 1.25], abs=0.02), (10, 2.0)]


def values_of(drawn: str) -> list[tuple[float, float]]:
    """The points of the first curve, read off with the ticks of its axes."""
    texts = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="(middle|end)"[^>]*>([-\d.,]+)</text>', drawn)
    along = [(float(x), float(said.replace(",", ""))) for x, _, anchor, said in texts if anchor == "middle"]
    up = [(float(y) - 4, float(said.replace(",", ""))) for _, y, anchor, said in texts if anchor == "end"]
    (points,) = re.findall(r'<polyline points="([^"]+)"', drawn)

    def read(place: float, axis: list[tuple[float, float]]) -> float:
        (first, low), (last, high) = axis[0], axis[-1]
        return low + (place - first) / (last - first) * (high - low)

    pairs = [tuple(map(float, point.split(","))) for point in points.split()]
    return [(round(read(x, along), 2), round(read(y, up), 2)) for x, y in pairs]
