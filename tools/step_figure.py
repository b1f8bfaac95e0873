"""Prints a figure of docs/life-of-a-sample.md as SVG: the phases of real GRPO steps, to scale. `make docs` writes it.

The seconds are the `timing_s/*` metrics of bench/results/grpo_gsm8k_h200.json, which names its command. That run logged
only its total time besides, so a validation is drawn with the mean of the seconds outside of the steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from environment_figures import COLOURS, WIDTH, box, document, text

RUN = Path(__file__).parents[1] / "bench" / "results" / "grpo_gsm8k_h200.json"
PHASES = ("gen", "old_log_prob", "ref", "update_actor")
VALIDATION = "validation, start and end"
COLOURS |= {"gen": "#8fb8de", "old_log_prob": "#c9b8e8", "ref": "#f0b7b7", "update_actor": "#9fd3a0"}
COLOURS |= {"other": "#d9d9d9", VALIDATION: "#f3e27a"}
STEPS = range(248, 253)  # after step 250 comes a validation
LEFT, BAR, TICKS = 16, 34, (0.5, 1, 2, 5, 10, 20, 50, 100)

Parts = list[tuple[str, float]]


def phases_of(line: dict[str, float]) -> Parts:
    """The phases of a step in their order; `other` is the rest of its seconds."""
    known = [(name, line[f"timing_s/{name}"]) for name in PHASES]
    return [*known, ("other", line["timing_s/step"] - sum(seconds for _, seconds in known))]


def bar(parts: Parts, y: int) -> list[str]:
    """A bar with a rectangle per part, and an axis in seconds."""
    total = sum(seconds for _, seconds in parts)
    scale, at = (WIDTH - 2 * LEFT) / total, 0.0
    drawn = []
    for name, seconds in parts:
        drawn.append(box(LEFT + at * scale, y, seconds * scale, BAR, name))
        at += seconds
    tick = next(width for width in TICKS if total / width <= 12)
    for number in range(int(total / tick) + 1):
        x, anchor = LEFT + number * tick * scale, "middle" if number else "start"
        drawn.append(f"<path d='M{x:.1f} {y + BAR}v5' stroke='#555'/>")
        drawn.append(text(x, y + BAR + 18, f"{number * tick:g} s", colour="#555", anchor=anchor))
    return drawn


def figure() -> str:
    run = json.loads(RUN.read_text(encoding="utf-8"))
    lines = {line["step"]: line for line in run["steps"] if "timing_s/step" in line}
    validations = sum("val/accuracy" in line for line in run["steps"])
    outside = run["wall_seconds"] - sum(line["timing_s/step"] for line in lines.values())

    parts: Parts = []
    starts: dict[int, float] = {}
    for number in STEPS:
        starts[number] = sum(seconds for _, seconds in parts)
        parts += phases_of(lines[number])
        if "val/accuracy" in lines[number]:
            parts.append((VALIDATION, outside / validations))
    scale = (WIDTH - 2 * LEFT) / sum(seconds for _, seconds in parts)
    drawn = [text(LEFT, 24, f"Steps {STEPS[0]} to {STEPS[-1]}", weight="bold")]
    for number, at in starts.items():
        drawn += [
            text(LEFT + at * scale, 46, f"step {number}"),
            f"<path d='M{LEFT + at * scale:.1f} 50v44' stroke='#222'/>",
        ]
    drawn += bar(parts, 54)

    whole = {name: [dict(phases_of(line))[name] for line in lines.values()] for name in (*PHASES, "other")}
    drawn.append(text(LEFT, 140, f"The full run of {len(lines)} steps, its seconds added by phase", weight="bold"))
    drawn += bar([*((name, sum(seconds)) for name, seconds in whole.items()), (VALIDATION, outside)], 150)
    words = {name: f"{name} {median(seconds):.2f} s" for name, seconds in whole.items()}
    words[VALIDATION] = f"validation {outside / validations:.1f} s ({validations} times)"
    x = float(LEFT)
    for name, label in words.items():
        drawn += [box(x, 222, 12, 12, name), text(x + 17, 232, label)]
        x += 7.25 * len(label) + 32
    note = "Seconds in the legend: the median of all steps; for validations their mean, with start and end of the run."
    return document(266, [*drawn, text(LEFT, 254, note, colour="#555")], "The phases of GRPO steps, to scale")


if __name__ == "__main__":
    print(figure())
