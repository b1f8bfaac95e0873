"""Run folders for the run viewer, in the format of a run but without a model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RECIPE = """method: {method}
run:
  name: {name}
  steps: {steps}
model:
  path: models/tiny
optim:
  lr: {lr}
"""


def write_run(
    folder: Path,
    steps: int,
    metrics: dict[str, Callable[[int], float]],
    samples: Iterable[dict[str, Any]] = (),
    *,
    planned: int | None = None,
    method: str = "grpo",
    lr: float = 1e-4,
) -> Path:
    """`steps` steps, from 1, of metrics that are functions of the step."""
    folder.mkdir(parents=True)
    text = RECIPE.format(method=method, name=folder.name, steps=planned or steps, lr=lr)
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    (folder / "env.json").write_text(json.dumps({"python": "3.12", "packages": {"torch": "2.11"}}), encoding="utf-8")
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            file.write(metric_line(step, {name: value(step) for name, value in metrics.items()}))
    with (folder / "samples.jsonl").open("w", encoding="utf-8") as file:
        for sample in samples:
            file.write(json.dumps(sample, ensure_ascii=False) + "\n")
    return folder


def metric_line(step: int, values: dict[str, float]) -> str:
    odd = {math.inf: "Infinity", -math.inf: "-Infinity"}
    data = {name: "NaN" if math.isnan(value) else odd.get(value, value) for name, value in values.items()}
    return json.dumps({"step": step, "data": data}) + "\n"


def sample(step: int, number: int = 0, **other: Any) -> dict[str, Any]:
    """A line of samples.jsonl, with the details of its three tokens."""
    return {
        "step": step,
        "kind": "train",
        "origin": f"rows.jsonl row {number}",
        "sample": number,
        "prompt": [{"role": "user", "content": f"What is {step} + {number}?"}],
        "response": f"It is {step + number}",
        "ground_truth": str(step + number),
        "score": 1.0,
        "parts": {"rule": 1.0, "format": 0.5},
        "advantage": 0.75,
        "prompt_tokens": 12,
        "tokens": 3,
        "stop": "token",
        "token_details": {
            "texts": ["It", " is", f" {step + number}"],
            "logprobs": [-0.01, -0.7, -6.0],
            "advantages": [-0.5, 0.0, 1.0],
        },
        **other,
    }
